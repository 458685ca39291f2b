"""ApX Machine Learning 2025, course page on Pre-LN against Post-LN."""

from __future__ import annotations

from typing import Final

from normlab.spec.artefact import Artefact
from normlab.spec.claim import at_most, within

_SAME: Final = "our wrapper and the page's block compute the same; the margin is for rounding"

BLOCKS: Final = Artefact(
    id="apx.blocks",
    paper="ApX Machine Learning 2025, masterclass on Pre-LN and Post-LN",
    shows="A Post-LN and a Pre-LN wrapper around any sublayer module, as small PyTorch blocks.",
    published={
        "post": "LayerNorm(x + Sublayer(x))",
        "pre": "x + Sublayer(LayerNorm(x))",
        "shape": "[32, 10, 512]",
    },
    asserts="Placements of the same names wrap any module and give the outputs of the page's definitions.",
    study="wrapped_blocks",
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

CLAIMS: Final = Artefact(
    id="apx.claims",
    paper="ApX Machine Learning 2025, masterclass on Pre-LN and Post-LN",
    shows="What the page says of both placements, in prose.",
    published={
        "Post-LN deeper than 12 to 24 layers": "unstable",
        "Pre-LN": "takes a higher learning rate",
        "peak performance": "Post-LN may win by a little",
        "warm-up": "still generally helps",
    },
    asserts="Each sentence, by what was measured for the artefacts of the papers.",
    discussion="The page has a Post-LN's activations grow layer by layer; by Lemma 2 of Xiong et al. 2020 "
    "they do not. It says that warm-up generally still helps a Pre-LN; Xiong et al. 2020 find it not needed.",
)
