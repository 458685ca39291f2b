"""ApX Machine Learning 2025, course page on Pre-LN against Post-LN."""

from __future__ import annotations

from typing import Final

from normlab.papers import own_studies as studies
from normlab.papers.artefact import Artefact, Paper
from normlab.papers.bases import CONVERGED
from normlab.papers.cells import printed
from normlab.papers.claim import ORDER, at_least, at_most, within

PAPER: Final = Paper(
    "apx",
    "Pre-LN and Post-LN, a page of a masterclass",
    "ApX Machine Learning 2025",
    "",
    "A page of a course: small PyTorch modules of both placements, and in prose that Post-LN may be unstable "
    "beyond 12 to 24 layers, that Pre-LN takes higher learning rates, that warm-up still helps it, and that "
    "Post-LN may be a little better where it trains.",
)
_SAME: Final = "our wrapper and the page's block compute the same; the margin is for rounding"

BLOCKS: Final = Artefact(
    id="apx.blocks",
    paper="ApX Machine Learning 2025, masterclass on Pre-LN and Post-LN",
    shows="A Post-LN and a Pre-LN wrapper around any sublayer module, as small PyTorch blocks.",
    published=printed("apx.blocks"),
    asserts="Placements of the same names wrap any module and give the outputs of the page's definitions.",
    study=studies.wrapped_blocks,
    settings={"shape": (32, 10, 512)},
    claims=(
        at_most(
            1e-5,
            "largest difference of outputs, post",
            "post_difference",
            published="the page's block",
            check=_SAME,
        ),
        at_most(
            1e-5,
            "largest difference of outputs, pre",
            "pre_difference",
            published="the page's block",
            check=_SAME,
        ),
        within(1.0, 1.0, "1 where the shape is kept", "shape_kept", published="[32, 10, 512]", check=_SAME),
    ),
)

_ROWS: Final = {
    "deep_post": ("liu2020.warmup", "trains"),
    "higher_rates": ("liu2020.fig10", "pre_over_post"),
    "peak": ("liu2020.fig10", "post_over_pre"),
    "warmup": ("nguyen2019.table4", "no_warmup"),
}
"""Each sentence's measure: the artefact that has it, and its name there."""

CLAIMS: Final = Artefact(
    id="apx.claims",
    paper="ApX Machine Learning 2025, masterclass on Pre-LN and Post-LN",
    shows="What the page says of both placements, in prose.",
    published=printed("apx.claims"),
    asserts="Each sentence, by what was measured for the artefacts of the papers.",
    discussion="The page has a Post-LN's activations grow layer by layer; by Lemma 2 of Xiong et al. 2020 "
    "they do not. It says that warm-up generally still helps a Pre-LN; Xiong et al. 2020 find it not needed.",
    study=studies.answers,
    settings={"rows": _ROWS},
    rests_on=tuple(dict.fromkeys(id_ for id_, _ in _ROWS.values())),
    claims=(
        at_most(
            0.5,
            "share of the runs of a Post-LN of 18 layers that train",
            "deep_post",
            published="unstable beyond 12 to 24 layers",
            convention="it is unstable if most of its runs fail",
        ),
        at_least(
            1.25,
            "largest rate up to which Pre-LN trains over that of Post-LN",
            "higher_rates",
            published="takes a higher learning rate",
            derived="an order is a step of the grid at least, and the smallest step is 5/4",
        ),
        at_least(
            0.5,
            "share of cells in which Post-LN beats Pre-LN, of those in which both train",
            "peak",
            published="Post-LN may win by a little",
            convention="it wins if it wins most cells",
            needs=CONVERGED,
        ),
        at_most(
            0.0,
            "BLEU of a Pre-LN without warm-up minus with it",
            "warmup",
            published="warm-up still generally helps",
            derived=ORDER,
        ),
    ),
    version=2,
    date="2026-11-25",
    reason="liu2020.fig10 has a second version, with rates at which Post-LN fails.",
)
