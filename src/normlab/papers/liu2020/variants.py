"""Dropout, rescaled weights, plain forms and sizes (Liu et al. 2020, Section 5.1, Appendices C and D)."""

from __future__ import annotations

from typing import Final

from normlab.papers import studies
from normlab.papers.bases import CONVERGED, CURVES
from normlab.papers.cells import declare, printed_values
from normlab.papers.claim import at_least, at_most, positive, within
from normlab.papers.liu2020.bases import IWSLT
from normlab.papers.measures import Difference, DifferenceSize, FoldDifference
from normlab.papers.trainings import for_each_scale

DROPOUT: Final = declare(
    "liu2020.dropout",
    studies.trainings,
    measures={"size": DifferenceSize("bleu", "both", "neither")},
    gpu={"effect": Difference("bleu", "both", "neither")},
    trainings=for_each_scale(
        lambda s: {
            "neither": {**s.recipe("post"), **s.bare},
            "both": {**s.recipe("post"), "model.attention_dropout": 0.1, "model.ffn_dropout": 0.1},
        },
        IWSLT,
        laptop="Dropouts are the 0.1 of the authors' recipe.",
    ),
    claims=(
        at_least(1.0, convention="enormous: at least 1 BLEU, some seven times the gap of Post-LN and Pre-LN")(
            "difference in BLEU with attention and activation dropout and without, either way", "size"
        ),
        at_least(
            1.0,
            convention="enormous: at least 1 BLEU, some seven times the gap of Post-LN and Pre-LN",
            needs="IWSLT'14 and " + CONVERGED,
        )("BLEU with attention and activation dropout minus BLEU without", "effect"),
    ),
    drawings=CURVES,
)

RESCALE_INIT: Final = declare(
    "liu2020.rescale_init",
    studies.trainings,
    settings={"paper": {"half": Difference("nll", "rescaled", "ω")}},
    measures={"same": Difference("bleu", "rescaled", "ω")},
    trainings=for_each_scale(
        lambda s: {"ω": s.recipe("admin_free"), "rescaled": s.recipe("admin_rescaled")},
        IWSLT,
        laptop="In single precision only.",
    ),
    claims=(
        within(-1.0, 1.0, convention="the same: less than 1 BLEU either way")(
            "BLEU with rescaled initial weights minus BLEU with ω", "same"
        ),
        positive(
            "test NLL in half precision, with rescaled initial weights minus with ω",
            "half",
            needs="a GPU, in half precision",
        ),
    ),
    drawings=CURVES,
)

APPENDIX_C: Final = declare(
    "liu2020.appendixC",
    studies.trainings,
    measures={"difference": FoldDifference("Admin")},
    trainings=for_each_scale(lambda s: {"Admin": s.recipe("admin")}, IWSLT),
    claims=(
        at_most(1e-5, convention="exact: to 1e-5 in float32")(
            "largest difference of logits over the largest logit, of trained Admins and their plain forms",
            "difference",
        ),
    ),
)

_PARAMETERS: Final = printed_values("liu2020.parameters")
"""Millions, by model."""

PARAMETERS: Final = declare(
    "liu2020.parameters",
    studies.parameter_counts,
    settings={
        "models": {
            "IWSLT'14 De-En small": ("small", 6, 6, 10_000),
            **{f"WMT'14 En-De {n}L-{n}L": ("base", n, n, 37_000) for n in (6, 12, 18)},
            "WMT'14 En-Fr 6L-6L": ("base", 6, 6, 44_500),
            "WMT'14 En-Fr 60L-12L": ("base", 60, 12, 44_500),
        },
        "published": _PARAMETERS,
    },
    claims=tuple(
        within(-0.5, 0.5, derived="rounds to the millions that are printed")(
            f"millions more than published, {name}", name
        )
        for name in _PARAMETERS
    ),
)
