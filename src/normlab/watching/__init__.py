"""A watch over trainings elsewhere: Hugging Face's Trainer, Lightning, torchtitan and plain loops."""

from typing import Final

NOTES: Final = ("recovered", "flat", "idle")
"""Kinds of reports about what ended no training, which are for the page alone."""
