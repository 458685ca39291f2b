"""Tables of BLEU, Figure 10, and 18 layers (Liu et al. 2020, Sections 3.2 and 5, arXiv 2004.08249)."""

from __future__ import annotations

from typing import Final

from normlab.papers import studies
from normlab.papers.artefact import Drawing
from normlab.papers.bases import CONVERGED, CURVES, TO_THE_END
from normlab.papers.cells import declare, printed_values
from normlab.papers.claim import at_least, at_most, fails, negative, positive, within
from normlab.papers.liu2020.bases import DEEP, EDGE, EN_DE, EN_FR, IWSLT, PLACEMENTS, LiuTraining
from normlab.papers.measures import DevAt, Difference, Edge, EdgeRatio, PairsBetter, Score, ShareTrained
from normlab.papers.trainings import Cells, for_each_scale, unlike

_SMALL: Final = "IWSLT'14 6L-6L small"
_DEEP_DE: Final = "WMT'14 En-De 18L-18L"
"""Rows of Table 2 that are trained."""


def _table2(small: LiuTraining, deep: LiuTraining) -> Cells:
    to_deep = unlike(small.base, deep.base)
    six = {f"{name} {_SMALL}": small.recipe(placement) for name, placement in PLACEMENTS.items()}
    return six | {
        f"{name} {_DEEP_DE}": {**to_deep, **deep.recipe(placement, (18, 18))}
        for name, placement in DEEP.items()
    }


_TWO_ROWS: Final = "Of the seven rows two are trained, the first and that of 18 layers"
TABLE2: Final = declare(
    "liu2020.table2",
    studies.trainings,
    measures={
        "post_18": Difference("nll", f"Post {_DEEP_DE}", f"Pre {_DEEP_DE}"),
        "trains_18": Score("bleu", f"Admin {_DEEP_DE}"),
    },
    gpu={
        "admin_6": Difference("bleu", f"Admin {_SMALL}", f"Pre {_SMALL}"),
        "post_6": Difference("bleu", f"Post {_SMALL}", f"Pre {_SMALL}"),
        "admin_18": Difference("bleu", f"Admin {_DEEP_DE}", f"Pre {_DEEP_DE}"),
    },
    trainings=for_each_scale(
        _table2,
        IWSLT,
        EN_DE,
        laptop=f"{_TWO_ROWS}, the latter under Adam.",
        gpu=f" {_TWO_ROWS}; the latter on Multi30k En-De, as for liu2020.table1.",
        paper=f" {_TWO_ROWS}.",
    ),
    claims=(
        positive("BLEU of Admin minus that of Pre-LN, 6 layers", "admin_6", needs=CONVERGED),
        positive("BLEU of Post-LN minus that of Pre-LN, 6 layers", "post_6", needs=CONVERGED),
        positive("test NLL of Post-LN minus that of Pre-LN, 18 layers", "post_18"),
        positive("BLEU of Admin minus that of Pre-LN, 18 layers", "admin_18", needs=CONVERGED),
        at_least(10.0, convention="it trains if it translates: at least 10 BLEU")(
            "BLEU of Admin, 18 layers", "trains_18"
        ),
    ),
    drawings=CURVES,
)

_BETAS: Final = 0.99, 0.995, 0.999


def _grid(s: LiuTraining) -> Cells:
    return {
        f"lr {k}e-4 {name} β₂ {beta}": {
            "recipe": f"{placement}+radam+linear",
            "optim.lr": s.grid * k,
            "optim.betas": (0.9, beta),
            "optim.warmup_steps": 0,
            **TO_THE_END,
            **s.seldom,
        }
        for name, placement in PLACEMENTS.items()
        for beta in s.betas
        for k in range(1, 6)
    }


def _of(name: str, beta: float = 0.999) -> tuple[str, ...]:
    return tuple(f"lr {k}e-4 {name} β₂ {beta}" for k in range(1, 6))


def _both(a: str, b: str) -> tuple[tuple[str, str], ...]:
    """The same cells of two placements."""
    return tuple((x, y) for beta in _BETAS for x, y in zip(_of(a, beta), _of(b, beta), strict=True))


_RATES: Final = 1e-4, 2e-4, 3e-4, 4e-4, 5e-4

_ONE_SEED: Final = " The rates fall in a line, as in the authors' recipe; one seed a cell."
FIG10: Final = declare(
    "liu2020.fig10",
    studies.trainings,
    measures={
        "post": Edge(_of("Post"), _RATES),
        "pre": Edge(_of("Pre"), _RATES),
        "admin": Edge(_of("Admin"), _RATES),
        "pre_over_post": EdgeRatio(_of("Pre"), _of("Post"), _RATES),
        "admin_over_post": EdgeRatio(_of("Admin"), _of("Post"), _RATES),
    },
    gpu={
        "post_over_pre": PairsBetter("bleu", _both("Post", "Pre")),
        "admin_over_pre": PairsBetter("bleu", _both("Admin", "Pre")),
    },
    trainings=for_each_scale(_grid, EDGE, seeds=1, gpu=_ONE_SEED, paper=_ONE_SEED),
    claims=(
        within(
            1e-4,
            4e-4,
            convention="some rates of the grid train and some do not",
            check="the rates were scaled so that Post-LN's edge falls inside the grid",
        )("largest rate up to which Post-LN trains, β₂ 0.999", "post"),
        *(
            at_least(5e-4, derived="it trains in each cell of the column")(
                f"largest rate up to which {name} trains, β₂ 0.999", name.partition("-")[0].lower()
            )
            for name in ("Pre-LN", "Admin")
        ),
        *(
            at_least(1.25, derived="an order is a step of the grid at least, and the smallest step is 5/4")(
                f"largest rate up to which {name} trains over that of Post-LN, β₂ 0.999",
                f"{name.partition('-')[0].lower()}_over_post",
            )
            for name in ("Pre-LN", "Admin")
        ),
        at_least(0.5, convention="it wins if it wins most cells", needs=CONVERGED)(
            "share of cells in which Post-LN beats Pre-LN, of those in which both train", "post_over_pre"
        ),
        at_least(0.5, convention="it wins if it wins most cells", needs=CONVERGED)(
            "share of cells in which Admin beats Pre-LN, of those in which both train", "admin_over_pre"
        ),
    ),
    drawings=(
        Drawing("cells", "cell", "BLEU", "Test BLEU", "learning rate, placement and β₂", "BLEU", kind="bar"),
    ),
)

TABLE3: Final = declare(
    "liu2020.table3",
    studies.trainings,
    measures={
        "rezero": Difference("bleu", "ReZero+Post", "ReZero"),
        "rezero_post": Difference("bleu", ("Admin", "Post", "Pre"), "ReZero+Post"),
    },
    gpu={"admin_post": Difference("bleu", "Admin", "Post")},
    trainings=for_each_scale(
        lambda s: {
            name: s.recipe(placement)
            for name, placement in (*PLACEMENTS.items(), ("ReZero", "rezero"), ("ReZero+Post", "rezero_post"))
        },
        IWSLT,
        laptop="The peak rate is 2e-3 after 60 steps of warm-up, in place of 7e-4 after 6000.",
    ),
    claims=(
        positive("BLEU of ReZero with Post-LN minus that of ReZero", "rezero"),
        positive("BLEU of Admin, Post and Pre together minus that of ReZero with Post-LN", "rezero_post"),
        within(-1.0, 1.0, convention="as good: less than 1 BLEU either way", needs=CONVERGED)(
            "BLEU of Admin minus that of Post-LN", "admin_post"
        ),
    ),
    drawings=CURVES,
)

TABLE4: Final = declare(
    "liu2020.table4",
    studies.trainings,
    settings={
        "paper": {
            "admin_bleu": Score("bleu", "En-Fr Admin BLEU"),
            "pre_bleu": Score("bleu", "En-Fr Pre BLEU"),
        }
    },
    measures={"both_train": ShareTrained(("En-Fr Admin BLEU", "En-Fr Pre BLEU"))},
    gpu={"admin": Difference("bleu", "En-Fr Admin BLEU", "En-Fr Pre BLEU")},
    trainings=for_each_scale(
        lambda s: {
            name: {**s.recipe(placement, (60, 12)), **s.seldom}
            for name, placement in (("En-Fr Pre BLEU", "pre"), ("En-Fr Admin BLEU", "admin"))
        },
        EN_FR,
    ),
    claims=(
        positive("BLEU of Admin minus that of Pre-LN, 60 and 12 layers", "admin", needs=CONVERGED),
        at_least(0.5, convention="a model trains if most of its runs do")(
            "share of the runs of Admin and Pre-LN that train, 60 and 12 layers", "both_train"
        ),
        *(
            within(
                published - 0.5,
                published + 0.5,
                convention="the same: less than half a BLEU either way",
                needs="WMT'14 En-Fr and 16 GPUs, at the paper scale",
            )(f"test BLEU of {name} on WMT'14 En-Fr", f"{name.lower()}_bleu")
            for name in ("Pre", "Admin")
            for published in (float(printed_values("liu2020.table4")[f"En-Fr {name} BLEU"]),)
        ),
    ),
    drawings=CURVES,
)

_HYBRIDS: Final = "enc:post/dec:post", "enc:post/dec:pre", "enc:pre/dec:pre"

TABLE1: Final = declare(
    "liu2020.table1",
    studies.trainings,
    measures={
        "post_enc": ShareTrained(("enc:post/dec:post", "enc:post/dec:pre")),
        "pre": Score("bleu", "enc:pre/dec:pre"),
    },
    trainings=for_each_scale(lambda s: {name: s.recipe(name, (18, 18)) for name in _HYBRIDS}, EN_DE),
    claims=(
        at_most(0.5, convention="a model fails if most of its runs do")(
            "share of the runs with a Post-LN encoder that train, the hybrid's among them", "post_enc"
        ),
        at_least(10.0, convention="it converges if it translates: at least 10 BLEU")("BLEU of Pre-LN", "pre"),
    ),
    drawings=CURVES,
)

FIG1_9: Final = declare(
    "liu2020.fig1_9",
    studies.trainings,
    measures={
        "pre_faster": DevAt("nll", "6L Pre", "6L Post", 0.3),
        "post_18": Difference("nll", "18L Post", "18L Admin"),
    },
    gpu={
        "pre_worse": DevAt("nll", "6L Pre", "6L Post", 1.0),
        "admin_6": DevAt("nll", "6L Admin", "6L Pre", 1.0),
        "admin_18": DevAt("nll", "18L Admin", "18L Pre", 1.0),
    },
    trainings=for_each_scale(
        lambda s: {
            f"{layers}L {name}": s.recipe(placement, depth)
            for layers, depth, placements in ((6, None, PLACEMENTS), (18, (18, 18), DEEP))
            for name, placement in placements.items()
        },
        EN_DE,
    ),
    claims=(
        negative("dev NLL of Pre-LN minus that of Post-LN after 30% of the training, 6 layers", "pre_faster"),
        positive(
            "dev NLL of Pre-LN minus that of Post-LN at the end, 6 layers", "pre_worse", needs=CONVERGED
        ),
        negative("dev NLL of Admin minus that of Pre-LN at the end, 6 layers", "admin_6", needs=CONVERGED),
        positive("test NLL of Post-LN minus that of Admin, 18 layers", "post_18"),
        negative("dev NLL of Admin minus that of Pre-LN at the end, 18 layers", "admin_18", needs=CONVERGED),
    ),
    drawings=CURVES,
)

WARMUP: Final = declare(
    "liu2020.warmup",
    studies.trainings,
    measures={"trains": ShareTrained(tuple(f"warm-up {k}k" for k in (8, 16, 24, 32)))},
    trainings=for_each_scale(
        lambda s: {
            f"warm-up {k}k": {
                **s.recipe("enc:post/dec:post", (18, 18)),
                "optim.warmup_steps": s.warmup * k // 8,
                "train.steps": s.base.train.steps * 3 // 2,
                **s.seldom,
            }
            for k in (8, 16, 24, 32)
        },
        EN_DE,
        seeds=2,
        laptop=" Warm-ups of 60, 120, 180 and 240 steps stand for 8k to 32k, in 300 steps, not 200; "
        "two seeds, so that eight runs decide.",
        gpu=" Warm-ups of 2,000 to 8,000 steps stand for 8k to 32k, in 15,000 steps.",
        paper=" Half as many steps again, because of the longer warm-ups.",
    ),
    claims=(fails("share of the runs that train, all warm-ups together", "trains"),),
    drawings=CURVES,
)

_PRECISE: Final = " In fp16, as in the paper; with its dropouts of 0.1, and without."

_OTHERS: Final = {
    "rezero": ("ReZero", "rezero"),
    "fixup": ("FixUp", "fixup"),
    "looklinear": ("LookLinear+Post", "enc:post/dec:post+looklinear"),
}
SECTION5_3: Final = declare(
    "liu2020.section5_3",
    studies.trainings,
    measures={
        **{key: ShareTrained((f"{name}, dropout", name)) for key, (name, _) in _OTHERS.items()},
        "rezero_blame": Difference("nll", "ReZero, dropout", "ReZero"),
        "fixup_blame": Difference("nll", "FixUp, dropout", "FixUp"),
    },
    trainings=for_each_scale(
        lambda s: {
            f"{name}{words}": {**s.recipe(placement, (18, 18)), **s.seldom, **dropout, **s.half}
            for name, placement in _OTHERS.values()
            for words, dropout in (("", s.dry), (", dropout", s.dropout))
        },
        EN_DE,
        laptop=" In single precision only; with the paper's dropout of 0.1, and without.",
        gpu=_PRECISE,
        paper=_PRECISE,
    ),
    claims=(
        *(
            fails(f"share of the runs of {name} that train, with dropout and without", measure)
            for name, measure in (
                ("ReZero", "rezero"),
                ("FixUp without norms", "fixup"),
                ("LookLinear with Post-LN", "looklinear"),
            )
        ),
        *(
            positive(f"test NLL of {name} with dropout minus without", measure)
            for name, measure in (("ReZero", "rezero_blame"), ("FixUp", "fixup_blame"))
        ),
    ),
    drawings=CURVES,
)
