"""Tables of BLEU, Figure 10, 18 layers, and variants (Liu et al. 2020, Sections 3 and 5, Appendices C, D)."""

from __future__ import annotations

from typing import Final

from normlab.papers.bases import CONVERGED, TO_THE_END
from normlab.papers.cells import declare, printed_values
from normlab.papers.claim import at_least, at_most, fails, mostly, negative, positive, trains, within
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
from normlab.papers.measures import (
    DevAt,
    Difference,
    DifferenceSize,
    FoldDifference,
    PairsBetter,
    Score,
    ShareBetter,
    ShareGap,
    ShareTrained,
    ShareTrainedToTheEnd,
)
from normlab.papers.trainings import Cells, for_each_scale, unlike

_TRANSLATES: Final = "if it translates: at least 10 BLEU"
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


TABLE2: Final = declare(
    "liu2020.table2",
    measures={
        "post_18": ShareBetter("nll", f"Pre {_DEEP_DE}", f"Post {_DEEP_DE}"),
        "trains_18": Score("bleu", f"Admin {_DEEP_DE}"),
    },
    gpu={
        "admin_6": Difference("bleu", f"Admin {_SMALL}", f"Pre {_SMALL}"),
        "post_6": Difference("bleu", f"Post {_SMALL}", f"Pre {_SMALL}"),
        "admin_18": Difference("bleu", f"Admin {_DEEP_DE}", f"Pre {_DEEP_DE}"),
    },
    trainings=for_each_scale(_table2, IWSLT_DEEP, DEEP_EDGE),
    claims=(
        positive("admin_6"),
        positive("post_6"),
        mostly("post_18", check="the same six Post-LNs decide post of liu2020.table1, which counts"),
        positive("admin_18"),
        at_least("trains_18", 10.0, convention=f"it trains {_TRANSLATES}"),
    ),
)

_BETAS: Final = 0.99, 0.995, 0.999


def _cell(k: int, name: str, beta: float = 0.999) -> str:
    return f"lr {k}e-4 {name} β₂ {beta}"


def _both(a: str, b: str) -> tuple[tuple[str, str], ...]:
    return tuple((_cell(k, a, beta), _cell(k, b, beta)) for beta in _BETAS for k in range(1, 6))


_POST_FAILS: Final = "Post-LN fails if it has at most a quarter of the other's BLEU; the paper prints 0"
FIG10: Final = declare(
    "liu2020.fig10",
    measures={
        "post": ShareBetter("bleu", _cell(1, "Post"), _cell(5, "Post"), times=4),
        **{name.lower(): ShareTrainedToTheEnd((_cell(5, name),)) for name in ("Pre", "Admin")},
        **{
            f"{name.lower()}_over_post": ShareBetter("bleu", _cell(5, name), _cell(5, "Post"), times=4)
            for name in ("Pre", "Admin")
        },
    },
    gpu={f"{name.lower()}_over_pre": PairsBetter("bleu", _both(name, "Pre")) for name in ("Post", "Admin")},
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
    claims=(
        at_least(
            "post",
            0.5,
            convention=_POST_FAILS,
            check="the rates were scaled so that Post-LN's edge falls inside the grid",
        ),
        *(trains(name, part_of=name) for name in ("pre", "admin")),
        *(
            at_least(f"{name}_over_post", 0.5, convention=_POST_FAILS, part_of=name)
            for name in ("pre", "admin")
        ),
        *(
            at_least(f"{name}_over_pre", 0.5, convention="it wins if it wins most cells")
            for name in ("post", "admin")
        ),
    ),
)

TABLE3: Final = declare(
    "liu2020.table3",
    gpu={
        "rezero": Difference("bleu", "ReZero+Post", "ReZero"),
        "rezero_post": Difference("bleu", ("Admin", "Post", "Pre"), "ReZero+Post"),
        "admin_post": Difference("bleu", "Admin", "Post"),
    },
    trainings=for_each_scale(
        lambda s: {
            name: s.recipe(placement)
            for name, placement in (*PLACEMENTS.items(), ("ReZero", "rezero"), ("ReZero+Post", "rezero_post"))
        },
        IWSLT,
    ),
    claims=(
        positive("rezero"),
        positive("rezero_post"),
        within("admin_post", -1.0, 1.0, convention="as good: less than 1 BLEU either way"),
    ),
)

_ADMIN_FR, _PRE_FR = "En-Fr Admin BLEU", "En-Fr Pre BLEU"
"""Cells of Table 4."""
TABLE4: Final = declare(
    "liu2020.table4",
    settings={"paper": {"admin_bleu": Score("bleu", _ADMIN_FR), "pre_bleu": Score("bleu", _PRE_FR)}},
    gpu={
        "admin": Difference("bleu", _ADMIN_FR, _PRE_FR),
        "admin_trains": ShareTrained((_ADMIN_FR,)),
        "pre_trains": ShareTrained((_PRE_FR,)),
    },
    trainings=for_each_scale(
        lambda s: {
            name: {**s.recipe(placement, (60, 12)), **s.seldom}
            for name, placement in ((_PRE_FR, "pre"), (_ADMIN_FR, "admin"))
        },
        EN_FR,
    ),
    claims=(
        positive("admin"),
        trains("admin_trains"),
        trains("pre_trains"),
        *(
            within(
                measure,
                published - 0.5,
                published + 0.5,
                convention="the same: less than half a BLEU either way",
                needs="WMT'14 En-Fr and 16 GPUs, at the paper scale",
            )
            for measure, cell in (("pre_bleu", _PRE_FR), ("admin_bleu", _ADMIN_FR))
            for published in (float(printed_values("liu2020.table4")[cell]),)
        ),
    ),
)

_HYBRIDS: Final = "enc:post/dec:post", "enc:post/dec:pre", "enc:pre/dec:pre"

TABLE1: Final = declare(
    "liu2020.table1",
    measures={
        "post": ShareTrainedToTheEnd(_HYBRIDS[:1]),
        "hybrid": ShareTrainedToTheEnd(_HYBRIDS[1:2]),
        "pre": Score("bleu", _HYBRIDS[2]),
    },
    trainings=for_each_scale(lambda s: {name: s.recipe(name, (18, 18)) for name in _HYBRIDS}, DEEP_EDGE),
    claims=(
        fails("post", part_of="post_enc"),
        fails("hybrid", part_of="post_enc"),
        at_least("pre", 10.0, convention=f"it converges {_TRANSLATES}"),
    ),
)

FIG1_9: Final = declare(
    "liu2020.fig1_9",
    measures={"pre_faster": DevAt("nll", "6L Pre", "6L Post", 0.3)},
    gpu={
        "pre_worse": DevAt("nll", "6L Pre", "6L Post", 1.0),
        "admin_6": DevAt("nll", "6L Admin", "6L Pre", 1.0),
        "admin_18": DevAt("nll", "18L Admin", "18L Pre", 1.0),
    },
    trainings=for_each_scale(
        lambda s: {
            f"{layers}L {name}": s.recipe(placement, depth)
            for layers, depth, placements in (
                (6, None, {name: PLACEMENTS[name] for name in s.six}),
                (18, (18, 18), {name: DEEP[name] for name in s.eighteen}),
            )
            for name, placement in placements.items()
        },
        SHALLOW,
    ),
    claims=(negative("pre_faster"), positive("pre_worse"), negative("admin_6"), negative("admin_18")),
)

WARMUP: Final = declare(
    "liu2020.warmup",
    measures={"trains": ShareTrainedToTheEnd(("warm-up 32k",))},
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
    claims=(fails("trains"),),
)

_OTHERS: Final = {
    "rezero": ("ReZero", "rezero"),
    "fixup": ("FixUp", "fixup"),
    "looklinear": ("LookLinear+Post", "enc:post/dec:post+looklinear"),
}
_BLAMED: Final = {"rezero_blame": "ReZero", "fixup_blame": "FixUp"}
_HALF: Final = "a GPU, in half precision"


def _others(s: LiuTraining) -> Cells:
    return {
        f"{name}, dropout": {**s.recipe(placement, (18, 18)), **FP16} for name, placement in _OTHERS.values()
    }


def _without_dropout(s: LiuTraining) -> Cells:
    none = dict.fromkeys((*INSIDE, "model.dropout"), 0.0)
    return {name: {**_others(s)[f"{name}, dropout"], **none} for name in _BLAMED.values()}


SECTION5_3: Final = declare(
    "liu2020.section5_3",
    settings={"paper": {key: ShareGap((name,), (f"{name}, dropout",)) for key, name in _BLAMED.items()}},
    gpu={key: ShareTrainedToTheEnd((f"{name}, dropout",)) for key, (name, _) in _OTHERS.items()},
    trainings={
        **for_each_scale(_others, HALF),
        **for_each_scale(lambda s: {**_others(s), **_without_dropout(s)}, {"paper": EN_DE["paper"]}),
    },
    claims=(
        *(fails(name, needs=_HALF) for name in _OTHERS),
        *(positive(name, needs=f"{_HALF}, with dropout and without") for name in _BLAMED),
    ),
)

_ENORMOUS: Final = "enormous: at least 1 BLEU, some seven times the gap of Post-LN and Pre-LN"
DROPOUT: Final = declare(
    "liu2020.dropout",
    measures={"size": DifferenceSize("bleu", "both", "neither")},
    gpu={"effect": Difference("bleu", "both", "neither")},
    trainings=for_each_scale(
        lambda s: {"neither": {**s.recipe("post"), **s.bare}, "both": {**s.recipe("post"), **DROPPED}}, IWSLT
    ),
    claims=(
        at_least("size", 1.0, convention=_ENORMOUS),
        at_least("effect", 1.0, convention=_ENORMOUS, needs="IWSLT'14 and " + CONVERGED),
    ),
)

RESCALE_INIT: Final = declare(
    "liu2020.rescale_init",
    settings={"paper": {"half": Difference("nll", "rescaled", "ω")}},
    measures={"same": Difference("bleu", "rescaled", "ω")},
    trainings=for_each_scale(
        lambda s: {"ω": s.recipe("admin_free"), "rescaled": s.recipe("admin_rescaled")}, IWSLT
    ),
    claims=(
        within("same", -1.0, 1.0, convention="the same: less than 1 BLEU either way"),
        positive("half", needs=_HALF),
    ),
)

APPENDIX_C: Final = declare(
    "liu2020.appendixC",
    measures={"difference": FoldDifference("Admin")},
    trainings=for_each_scale(lambda s: {"Admin": s.recipe("admin")}, IWSLT),
    claims=(
        at_most(
            "difference",
            1e-5,
            convention="exact: to 1e-5 in float32",
            check="both forms are the same function, so only rounding can differ",
        ),
    ),
)

_PARAMETERS: Final = printed_values("liu2020.parameters")
"""Millions, by model."""
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
    claims=[
        within(name, -0.5, 0.5, check="counted, not measured: rounds to the millions in print")
        for name in _PARAMETERS
    ],
)
