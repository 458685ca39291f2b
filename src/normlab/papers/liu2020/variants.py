"""Dropout, rescaled weights, plain forms and sizes (Liu et al. 2020, Section 5.1, Appendices C and D)."""

from __future__ import annotations

from typing import Final

from normlab.papers import own_studies as studies
from normlab.papers.artefact import Artefact
from normlab.papers.bases import CONVERGED, CURVES
from normlab.papers.cells import printed
from normlab.papers.claim import ORDER, at_least, at_most, within
from normlab.papers.liu2020.bases import IWSLT
from normlab.papers.measures import Difference, DifferenceSize, FoldDifference
from normlab.papers.scales import at_each

DROPOUT: Final = Artefact(
    id="liu2020.dropout",
    paper="Liu et al. 2020, Section 5.1 (arXiv 2004.08249)",
    shows="Attention and activation dropout on IWSLT'14 De-En.",
    published=printed("liu2020.dropout"),
    asserts="Both matter on IWSLT'14: what BLEU gains or loses without them.",
    discussion="Which way they work is not said; that they help a text as small as IWSLT'14 is likely meant. "
    "Dates are too regular a text to be overfitted in 200 steps, so that dropout can only slow the learning "
    "here: what is measured at this scale is whether it matters at all.",
    study=studies.trainings,
    settings={
        "measures": {"size": DifferenceSize("bleu", "both", "neither")},
        "gpu": {"effect": Difference("bleu", "both", "neither")},
    },
    trainings=at_each(
        lambda s: {
            "neither": {**s.recipe("post"), **s.bare},
            "both": {**s.recipe("post"), "model.attention_dropout": 0.1, "model.ffn_dropout": 0.1},
        },
        IWSLT,
        laptop="Dropouts are the 0.1 of the authors' recipe.",
    ),
    claims=(
        at_least(
            1.0,
            "difference in BLEU with attention and activation dropout and without, either way",
            "size",
            published="an enormous impact",
            convention="enormous: at least 1 BLEU, some seven times the gap of Post-LN and Pre-LN",
        ),
        at_least(
            1.0,
            "BLEU with attention and activation dropout minus BLEU without",
            "effect",
            published="an enormous impact",
            convention="enormous: at least 1 BLEU, some seven times the gap of Post-LN and Pre-LN",
            needs="IWSLT'14 and " + CONVERGED,
        ),
    ),
    drawings=CURVES,
)

RESCALE_INIT: Final = Artefact(
    id="liu2020.rescale_init",
    paper="Liu et al. 2020, Appendix C (arXiv 2004.08249)",
    shows="Rescaled initial weights in place of ω, IWSLT'14 De-En.",
    published=printed("liu2020.rescale_init"),
    asserts="BLEU is about the same, and half precision is less stable.",
    discussion="Both begin with the ω of the authors' later package, which needs no data.",
    study=studies.trainings,
    settings={
        "measures": {"same": Difference("bleu", "rescaled", "ω")},
        "paper": {"half": Difference("nll", "rescaled", "ω")},
    },
    trainings=at_each(
        lambda s: {"ω": s.recipe("admin_free"), "rescaled": s.recipe("admin_rescaled")},
        IWSLT,
        laptop="In single precision only.",
    ),
    claims=(
        within(
            -1.0,
            1.0,
            "BLEU with rescaled initial weights minus BLEU with ω",
            "same",
            published="roughly the same",
            convention="the same: less than 1 BLEU either way",
        ),
        at_least(
            0.0,
            "test NLL in half precision, with rescaled initial weights minus with ω",
            "half",
            published="not very stable in half precision",
            derived=ORDER,
            needs="a GPU, in half precision",
        ),
    ),
    drawings=CURVES,
)

APPENDIX_C: Final = Artefact(
    id="liu2020.appendixC",
    paper="Liu et al. 2020, Appendix C (arXiv 2004.08249)",
    shows="A trained Admin written as a plain Post-LN.",
    published=printed("liu2020.appendixC"),
    asserts="The logits of both differ by rounding only.",
    discussion="The first ω comes before any norm: it folds into the embedding of tokens and of positions, "
    "which have to be untied for that.",
    study=studies.trainings,
    settings={"measures": {"difference": FoldDifference("Admin")}},
    trainings=at_each(lambda s: {"Admin": s.recipe("admin")}, IWSLT),
    claims=(
        at_most(
            1e-5,
            "largest difference of logits over the largest logit, of trained Admins and their plain forms",
            "difference",
            published="exact",
            convention="exact: to 1e-5 in float32",
        ),
    ),
)

_PARAMETERS: Final = printed("liu2020.parameters")
"""Millions, by model."""

PARAMETERS: Final = Artefact(
    id="liu2020.parameters",
    paper="Liu et al. 2020, Appendix D (arXiv 2004.08249)",
    shows="Millions of parameters of each model; one matrix embeds source, target and output.",
    published=_PARAMETERS,
    asserts="Models of these sizes have as many, with about 10k, 37k and 44.5k vocabulary entries.",
    study=studies.parameter_counts,
    settings={
        "models": {
            "IWSLT'14 De-En small": ("small", 6, 6, 10_000),
            "WMT'14 En-De 6L-6L": ("base", 6, 6, 37_000),
            "WMT'14 En-De 12L-12L": ("base", 12, 12, 37_000),
            "WMT'14 En-De 18L-18L": ("base", 18, 18, 37_000),
            "WMT'14 En-Fr 6L-6L": ("base", 6, 6, 44_500),
            "WMT'14 En-Fr 60L-12L": ("base", 60, 12, 44_500),
        },
        "published": _PARAMETERS,
    },
    claims=tuple(
        within(
            -0.5,
            0.5,
            f"millions more than published, {name}",
            name,
            published=f"{count}",
            derived="rounds to the millions that are printed",
        )
        for name, count in _PARAMETERS.items()
    ),
)
