"""Dropout, rescaled weights, plain forms and sizes (Liu et al. 2020, Section 5.1, Appendices C and D)."""

from __future__ import annotations

from typing import Final

from normlab.papers import studies
from normlab.papers.bases import CONVERGED, CURVES
from normlab.papers.cells import declared, printed
from normlab.papers.claim import at_least, at_most, positive, within
from normlab.papers.liu2020.bases import IWSLT
from normlab.papers.measures import Difference, DifferenceSize, FoldDifference
from normlab.papers.scales import at_each

DROPOUT: Final = declared(
    "liu2020.dropout",
    studies.trainings,
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
            convention="enormous: at least 1 BLEU, some seven times the gap of Post-LN and Pre-LN",
        ),
        at_least(
            1.0,
            "BLEU with attention and activation dropout minus BLEU without",
            "effect",
            convention="enormous: at least 1 BLEU, some seven times the gap of Post-LN and Pre-LN",
            needs="IWSLT'14 and " + CONVERGED,
        ),
    ),
    drawings=CURVES,
)

RESCALE_INIT: Final = declared(
    "liu2020.rescale_init",
    studies.trainings,
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
            convention="the same: less than 1 BLEU either way",
        ),
        positive(
            "test NLL in half precision, with rescaled initial weights minus with ω",
            "half",
            needs="a GPU, in half precision",
        ),
    ),
    drawings=CURVES,
)

APPENDIX_C: Final = declared(
    "liu2020.appendixC",
    studies.trainings,
    settings={"measures": {"difference": FoldDifference("Admin")}},
    trainings=at_each(lambda s: {"Admin": s.recipe("admin")}, IWSLT),
    claims=(
        at_most(
            1e-5,
            "largest difference of logits over the largest logit, of trained Admins and their plain forms",
            "difference",
            convention="exact: to 1e-5 in float32",
        ),
    ),
)

_PARAMETERS: Final = printed("liu2020.parameters")
"""Millions, by model."""

PARAMETERS: Final = declared(
    "liu2020.parameters",
    studies.parameter_counts,
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
            derived="rounds to the millions that are printed",
        )
        for name, count in _PARAMETERS.items()
    ),
)
