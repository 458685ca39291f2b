"""ApX Machine Learning 2025, course page on Pre-LN against Post-LN."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from normlab.papers import studies
from normlab.papers.bases import CONVERGED
from normlab.papers.cells import declare
from normlab.papers.claim import at_least, at_most, negative, within

_SAME: Final = "our wrapper and the page's block compute the same; the margin is for rounding"

BLOCKS: Final = declare(
    "apx.blocks",
    studies.wrapped_blocks,
    settings={"shape": (32, 10, 512)},
    claims=(
        at_most(1e-5, check=_SAME)("largest difference of outputs, post", "post_difference"),
        at_most(1e-5, check=_SAME)("largest difference of outputs, pre", "pre_difference"),
        within(1.0, 1.0, check=_SAME)("1 where the shape is kept", "shape_kept"),
    ),
)

_ROWS: Final = {
    "deep_post": ("liu2020.warmup", "trains"),
    "higher_rates": ("liu2020.fig10", "pre_over_post"),
    "peak": ("liu2020.fig10", "post_over_pre"),
    "warmup": ("nguyen2019.table4", "no_warmup"),
}
"""Each sentence's measure: the artefact that has it, and its name there."""

CLAIMS: Final = replace(
    declare(
        "apx.claims",
        studies.answers,
        settings={"rows": _ROWS},
        claims=(
            at_most(0.5, convention="it is unstable if most of its runs fail")(
                "share of the runs of a Post-LN of 18 layers that train", "deep_post"
            ),
            at_least(1.25, derived="an order is a step of the grid at least, and the smallest step is 5/4")(
                "largest rate up to which Pre-LN trains over that of Post-LN", "higher_rates"
            ),
            at_least(0.5, convention="it wins if it wins most cells", needs=CONVERGED)(
                "share of cells in which Post-LN beats Pre-LN, of those in which both train", "peak"
            ),
            negative("BLEU of a Pre-LN without warm-up minus with it", "warmup"),
        ),
    ),
    rests_on=tuple(dict.fromkeys(id_ for id_, _ in _ROWS.values())),
)
