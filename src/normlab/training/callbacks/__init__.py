"""Observers of a run, which cannot change its numbers."""
