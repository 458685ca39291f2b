"""The training to come, as it is declared."""

from __future__ import annotations

from typing import TypedDict


class Plan(TypedDict, total=False):
    """The training to come, where it is more than an optimiser and its learning rate."""

    warmup_steps: int
    """Steps over which the learning rate rises to its peak."""
