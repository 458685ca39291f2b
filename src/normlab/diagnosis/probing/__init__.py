"""Measure signals of modules, without changing their numbers."""
