"""Watch trainings elsewhere: Hugging Face's Trainer, Lightning, torchtitan and plain loops."""

from typing import Final

NOTES: Final = ("recovered", "flat", "idle")
"""Kinds of reports about things that did not end a training; only the page shows them."""
