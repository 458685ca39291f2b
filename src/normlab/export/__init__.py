"""Trained models in other forms."""
