"""The cells of the trainings on IWSLT'14, at the laptop scale."""

from __future__ import annotations

from typing import Final

from normlab.papers.bases import TO_THE_END

SMALLER: Final = (
    "Dates of the built-in corpus in place of IWSLT'14, width 64 in place of 512, 200 steps of 1,024 "
    "positions in place of 15 epochs. The depth is the paper's, 6+6. Learning rates are "
)
ADAM: Final = {
    f"lr {rate}, warm-up {paper}": {
        "recipe": recipe,
        "optim.lr": lr,
        "optim.warmup_steps": steps,
        **TO_THE_END,
    }
    for rate, lr in (("5e-4", 1e-3), ("1e-3", 2e-3))
    for paper, recipe, steps in ((1, "post", 0), (500, "post+warmup", 8), (4000, "post+warmup", 60))
}
"""Figure 2(a): by the names of the paper's settings the recipes of the laptop scale."""


def cells_of(warmup: str) -> tuple[str, ...]:
    """The cells of both learning rates."""
    return tuple(cell for cell in ADAM if cell.endswith(f", {warmup}"))


SGD: Final = {
    f"SGD lr {rate}, {name} warm-up": {
        "recipe": recipe,
        "optim.lr": lr,
        "optim.warmup_steps": 60,
        **TO_THE_END,
    }
    for rate, lr in (("1e-3", 0.1), ("5e-3", 0.5))
    for name, recipe in (("without", "post+sgd"), ("with", "post+sgd+warmup"))
}
STOPPED: Final = (
    "In the first version stuck runs were ended early, the first after 100 of 200 steps. Scripts that do not "
    "know the source found a run that leaves its plateau after that."
)
FIXED: Final = {"recipe": "post", "optim.lr": 2e-4, "optim.warmup_steps": 0}
"""A fixed tenth of the larger learning rate, Figure 6."""
