"""ApX Machine Learning 2025, course page on Pre-LN against Post-LN."""

from __future__ import annotations

from typing import Final

from normlab.papers.bases import CONVERGED
from normlab.papers.cells import declare
from normlab.papers.claim import at_least, at_most, mostly, negative, within

_SAME: Final = "our wrapper and the page's block compute the same; the margin is for rounding"

BLOCKS: Final = declare(
    "apx.blocks",
    "model_parts.wrapped_blocks",
    settings={"shape": (32, 10, 512)},
    claims=(
        at_most("post_difference", 1e-5, check=_SAME),
        at_most("pre_difference", 1e-5, check=_SAME),
        within("shape_kept", 1.0, 1.0, check=_SAME),
    ),
)

_ROWS: Final = {
    "deep_post": ("liu2020.warmup", "trains"),
    "higher_rates": ("liu2020.fig10", "pre_over_post"),
    "peak": ("liu2020.fig10", "post_over_pre"),
    "warmup": ("nguyen2019.table4", "no_warmup"),
}
"""The measure of each sentence: the artefact that has it, and its name there."""

CLAIMS: Final = declare(
    "apx.claims",
    "trained.answers",
    settings={"rows": _ROWS},
    claims=(
        at_most(
            "deep_post",
            0.5,
            convention="it is unstable if most of its runs fail",
            check="liu2020.warmup counts the same runs",
        ),
        mostly("higher_rates", check="liu2020.fig10 counts the same runs"),
        at_least("peak", 0.5, convention="it wins if it wins most cells", needs=CONVERGED),
        negative("warmup", needs=CONVERGED),
    ),
    rests_on=tuple(dict.fromkeys(id_ for id_, _ in _ROWS.values())),
)
