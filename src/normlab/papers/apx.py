"""ApX Machine Learning 2025, course page on Pre-LN against Post-LN."""

from __future__ import annotations

from normlab.spec.artefact import Artefact

BLOCKS = Artefact(
    id="apx.blocks",
    paper="ApX Machine Learning 2025, masterclass on Pre-LN and Post-LN",
    shows="A Post-LN and a Pre-LN wrapper around any sublayer module, as small PyTorch blocks.",
    published={
        "post": "LayerNorm(x + Sublayer(x))",
        "pre": "x + Sublayer(LayerNorm(x))",
        "shape": "[32, 10, 512]",
    },
    claim="Placements of the same names wrap any module and give the outputs of the page's definitions.",
)
