"""Comparisons of recipes: tune a learning rate for each, train several seeds, and do the statistics."""
