"""The laptop scale of the paper's trainings: its optimiser and schedules on a small task."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from normlab.papers.bases import LAPTOP
from normlab.spec.trainings import Trainings

BASE: Final = replace(
    LAPTOP,
    optim=replace(
        LAPTOP.optim,
        lr=2e-3,
        betas=(0.9, 0.999),
        eps=1e-8,
        max_grad_norm=1.0,
        schedule="inverse_sqrt",
        warmup_steps=30,
    ),
)
SMALLER: Final = (
    "Dates of the built-in corpus in place of TED talks, width 64 in place of 512, 200 steps of 1,024 "
    "positions in place of up to 200 epochs, no dropout. Depth, optimiser, clipping, schedules and label "
    "smoothing are the paper's; warm-up lasts 30 steps in place of 8000, and the peak rate is 2e-3."
)
MODELS: Final[Mapping[str, Mapping[str, Any]]] = {
    "Post+LN": {"recipe": "post+smallinit+warmup"},
    "Pre+LN": {"recipe": "pre+smallinit+warmup"},
    "Pre+FixNorm+LN": {"recipe": "pre+fixnorm+smallinit+warmup"},
    "Pre+FixNorm+ScaleNorm": {"recipe": "pre+fixnorm+scalenorm+smallinit+warmup"},
}
"""The rows of Table 3."""
NO_WARMUP: Final = {"optim.lr": 2e-3 * (3e-4 / (512 * 8000) ** -0.5), "optim.warmup_steps": 0}
"""NoWarmup: its rate is to the peak of InvSqrtDecay as the paper's 3e-4 is to 4.9e-4."""
DOUBLE: Final = {"optim.lr": 2 * BASE.optim.lr}


def laptop(cells: Mapping[str, Mapping[str, Any]], *, seeds: int = 3, differs: str = SMALLER) -> Trainings:
    """Cells on the paper's base at the laptop scale."""
    return Trainings(BASE, cells, seeds, differs)
