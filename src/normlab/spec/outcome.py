"""How a run ended, in one word with its evidence."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Outcome:
    """How a run ended: ``normlab.training.outcome`` decides it, everything else reads it."""

    state: str
    """``trained``, ``stuck`` (at the unigram entropy) or ``diverged`` (not finite, or above its start)."""
    step: int
    """The step that decided."""
    evidence: str
    """The numbers behind it, in a sentence without a full stop."""
