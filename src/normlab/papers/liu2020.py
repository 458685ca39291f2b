"""Liu et al. 2020, Understanding the Difficulty of Training Transformers (arXiv 2004.08249)."""

from __future__ import annotations

from normlab.spec.artefact import Artefact

PARAMETERS = Artefact(
    id="liu2020.parameters",
    paper="Liu et al. 2020, Appendix D (arXiv 2004.08249)",
    shows="Millions of parameters of each model; one matrix embeds source, target and output.",
    published={
        "IWSLT'14 De-En small": 37,
        "WMT'14 En-De 6L-6L": 63,
        "WMT'14 En-De 12L-12L": 107,
        "WMT'14 En-De 18L-18L": 151,
        "WMT'14 En-Fr 6L-6L": 67,
        "WMT'14 En-Fr 60L-12L": 262,
    },
    claim="Models of these sizes have as many, with about 10k, 37k and 44.5k types.",
)
