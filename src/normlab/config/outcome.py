"""How a run ended, in a word or a few with the evidence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

IGNORES_SOURCE: Final = "ignores its source"

MOSTLY: Final = 0.5
"""A share of the outputs; that one and the same output has more is a failure."""


@dataclass(frozen=True)
class Outcome:
    """How a run ended: ``normlab.training.outcome`` decides it, everything else reads it."""

    state: str
    """``trained``, ``stuck`` (at the unigram entropy), ``diverged`` (not finite, or above its start) or
    ``ignores its source`` (the outputs hardly depend on the inputs).
    """
    step: int
    """The step at which it was clear."""
    evidence: str
    """The numbers behind it, in a sentence without a full stop."""
