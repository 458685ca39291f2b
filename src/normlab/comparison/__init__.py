"""Comparisons of recipes: a learning rate tuned for each, several seeds, and statistics."""
