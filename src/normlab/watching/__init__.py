"""``watch``: record trainings by Hugging Face's Trainer, Lightning, torchtitan, plain loops and our own
trainer.

It imports ``setups``, ``trace``, ``checks`` and ``diagnosis``; ``lab`` imports it for trainings of its own.
"""

from typing import Final

NOTES: Final = ("recovered", "flat", "idle")
"""Kinds of reports about things that did not end a training; only the page shows them."""
