"""Recipes compared: a learning rate tuned for each, seeds, and statistics."""
