"""Configurations, runs and checkpoints of normlab as subjects of a diagnosis."""
