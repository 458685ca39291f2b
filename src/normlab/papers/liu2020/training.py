"""Tables of BLEU, Figure 10, 18 layers, and variants (Liu et al. 2020, Sections 3 and 5, Appendices C, D)."""

from __future__ import annotations

from typing import Final

from normlab.papers.bases import TO_THE_END
from normlab.papers.cells import declare, printed_values
from normlab.papers.liu2020.bases import (
    DEEP,
    DEEP_EDGE,
    DROPPED,
    EDGE,
    EN_DE,
    EN_FR,
    FP16,
    HALF,
    INSIDE,
    IWSLT,
    IWSLT_DEEP,
    LONGEST_WARMUP,
    PLACEMENTS,
    SHALLOW,
    LiuTraining,
)
from normlab.papers.measures import FoldDifference
from normlab.papers.trainings import Cells, for_each_scale, unlike

_SMALL: Final = "IWSLT'14 6L-6L small"
_DEEP_DE: Final = "WMT'14 En-De 18L-18L"
"""Rows of Table 2 that are trained."""


def _table2(small: LiuTraining, deep: LiuTraining) -> Cells:
    to_deep = unlike(small.base, deep.base)
    six = {f"{name} {_SMALL}": small.recipe(PLACEMENTS[name]) for name in small.six}
    return six | {
        f"{name} {_DEEP_DE}": {**to_deep, **deep.recipe(placement, (18, 18))}
        for name, placement in DEEP.items()
    }


TABLE2: Final = declare("liu2020.table2", trainings=for_each_scale(_table2, IWSLT_DEEP, DEEP_EDGE))


def _cell(k: int, name: str, beta: float) -> str:
    return f"lr {k}e-4 {name} β₂ {beta}"


FIG10: Final = declare(
    "liu2020.fig10",
    trainings=for_each_scale(
        lambda s: {
            _cell(k, name, beta): {
                "recipe": f"{placement}+radam+linear",
                "optim.lr": s.grid * k,
                "optim.betas": (0.9, beta),
                "optim.warmup_steps": 0,
                **TO_THE_END,
                **s.seldom,
            }
            for name, placement in PLACEMENTS.items()
            for beta in s.betas
            for k in s.multiples
        },
        EDGE,
        seeds=1,
    ),
)

TABLE3: Final = declare(
    "liu2020.table3",
    trainings=for_each_scale(
        lambda s: {
            name: s.recipe(placement)
            for name, placement in (*PLACEMENTS.items(), ("ReZero", "rezero"), ("ReZero+Post", "rezero_post"))
        },
        IWSLT,
    ),
)

_ADMIN_FR, _PRE_FR = "En-Fr Admin BLEU", "En-Fr Pre BLEU"
"""Cells of Table 4."""
TABLE4: Final = declare(
    "liu2020.table4",
    trainings=for_each_scale(
        lambda s: {
            name: {**s.recipe(placement, (60, 12)), **s.seldom}
            for name, placement in ((_PRE_FR, "pre"), (_ADMIN_FR, "admin"))
        },
        EN_FR,
    ),
)

_HYBRIDS: Final = "enc:post/dec:post", "enc:post/dec:pre", "enc:pre/dec:pre"

TABLE1: Final = declare(
    "liu2020.table1",
    trainings=for_each_scale(lambda s: {name: s.recipe(name, (18, 18)) for name in _HYBRIDS}, DEEP_EDGE),
)


def _both_depths(s: LiuTraining) -> Cells:
    """Figures 1 and 9; the base has 6 layers."""
    six = {f"6L {name}": s.recipe(PLACEMENTS[name]) for name in s.six}
    return six | {f"18L {name}": s.recipe(DEEP[name], (18, 18)) for name in s.eighteen}


FIG1_9: Final = declare("liu2020.fig1_9", trainings=for_each_scale(_both_depths, SHALLOW))

WARMUP: Final = declare(
    "liu2020.warmup",
    trainings=for_each_scale(
        lambda s: {
            f"warm-up {k}k": {
                **s.recipe("enc:post/dec:post", (18, 18)),
                "optim.warmup_steps": s.warmup * k // 8,
                "train.steps": s.base.train.steps * 3 // 2,
                **s.seldom,
            }
            for k in s.warmups
        },
        LONGEST_WARMUP,
        seeds=6,
    ),
)

_OTHERS: Final = {"ReZero": "rezero", "FixUp": "fixup", "LookLinear+Post": "enc:post/dec:post+looklinear"}
_BLAMED: Final = "ReZero", "FixUp"
"""Those whose divergence the paper puts down to half precision and dropout."""


def _others(s: LiuTraining) -> Cells:
    return {
        f"{name}, dropout": {**s.recipe(placement, (18, 18)), **FP16} for name, placement in _OTHERS.items()
    }


def _without_dropout(s: LiuTraining) -> Cells:
    none = dict.fromkeys((*INSIDE, "model.dropout"), 0.0)
    return {name: {**_others(s)[f"{name}, dropout"], **none} for name in _BLAMED}


SECTION5_3: Final = declare(
    "liu2020.section5_3",
    trainings={
        **for_each_scale(_others, HALF),
        **for_each_scale(lambda s: {**_others(s), **_without_dropout(s)}, {"paper": EN_DE["paper"]}),
    },
)

DROPOUT: Final = declare(
    "liu2020.dropout",
    trainings=for_each_scale(
        lambda s: {"neither": {**s.recipe("post"), **s.bare}, "both": {**s.recipe("post"), **DROPPED}}, IWSLT
    ),
)

RESCALE_INIT: Final = declare(
    "liu2020.rescale_init",
    trainings=for_each_scale(
        lambda s: {"ω": s.recipe("admin_free"), "rescaled": s.recipe("admin_rescaled")}, IWSLT
    ),
)

APPENDIX_C: Final = declare(
    "liu2020.appendixC",
    measures={"difference": FoldDifference("Admin")},
    trainings=for_each_scale(lambda s: {"Admin": s.recipe("admin")}, IWSLT),
)

_PARAMETERS: Final = printed_values("liu2020.parameters")
"""The published numbers of parameters in millions, by model."""
PARAMETERS: Final = declare(
    "liu2020.parameters",
    "model_parts.parameter_counts",
    settings={
        "models": {
            "IWSLT'14 De-En small": ("small", 6, 6, 10_000),
            **{f"WMT'14 En-De {n}L-{n}L": ("base", n, n, 37_000) for n in (6, 12, 18)},
            "WMT'14 En-Fr 6L-6L": ("base", 6, 6, 44_500),
            "WMT'14 En-Fr 60L-12L": ("base", 60, 12, 44_500),
        },
        "published": _PARAMETERS,
    },
)
