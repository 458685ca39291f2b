"""Tables of BLEU, and Figure 10 (Liu et al. 2020, Section 5, arXiv 2004.08249)."""

from __future__ import annotations

from typing import Final

from normlab.papers import studies
from normlab.papers.artefact import Drawing
from normlab.papers.bases import CONVERGED, CURVES, TO_THE_END
from normlab.papers.cells import declared, printed
from normlab.papers.claim import at_least, positive, within
from normlab.papers.liu2020.bases import EDGE, EN_DE, EN_FR, IWSLT, Training
from normlab.papers.measures import Difference, Edge, EdgeRatio, PairsBetter, Score, ShareTrained
from normlab.papers.scales import Cells, at_each
from normlab.papers.trainings import unlike

_SMALL: Final = "IWSLT'14 6L-6L small"
_DEEP_DE: Final = "WMT'14 En-De 18L-18L"
"""Rows of Table 2 that are trained."""


def _table2(small: Training, deep: Training) -> Cells:
    to_deep = unlike(small.base, deep.base)
    return {
        f"{name} {_SMALL}": small.recipe(placement)
        for name, placement in (("Post", "post"), ("Pre", "pre"), ("Admin", "admin"))
    } | {
        f"{name} {_DEEP_DE}": {**to_deep, **deep.recipe(placement, (18, 18))}
        for name, placement in (("Post", "enc:post/dec:post"), ("Pre", "enc:pre/dec:pre"), ("Admin", "admin"))
    }


_TWO_ROWS: Final = "Of the seven rows two are trained, the first and that of 18 layers"
TABLE2: Final = declared(
    "liu2020.table2",
    studies.trainings,
    settings={
        "measures": {
            "post_18": Difference("nll", f"Post {_DEEP_DE}", f"Pre {_DEEP_DE}"),
            "trains_18": Score("bleu", f"Admin {_DEEP_DE}"),
        },
        "gpu": {
            "admin_6": Difference("bleu", f"Admin {_SMALL}", f"Pre {_SMALL}"),
            "post_6": Difference("bleu", f"Post {_SMALL}", f"Pre {_SMALL}"),
            "admin_18": Difference("bleu", f"Admin {_DEEP_DE}", f"Pre {_DEEP_DE}"),
        },
    },
    trainings=at_each(
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
        at_least(
            10.0,
            "BLEU of Admin, 18 layers",
            "trains_18",
            convention="it trains if it translates: at least 10 BLEU",
        ),
    ),
    drawings=CURVES,
)

_PLACEMENTS: Final = {"Post": "post", "Pre": "pre", "Admin": "admin"}
_BETAS: Final = 0.99, 0.995, 0.999


def _grid(s: Training) -> Cells:
    return {
        f"lr {k}e-4 {name} β₂ {beta}": {
            "recipe": f"{placement}+radam+linear",
            "optim.lr": s.grid * k,
            "optim.betas": (0.9, beta),
            "optim.warmup_steps": 0,
            **TO_THE_END,
            **s.seldom,
        }
        for name, placement in _PLACEMENTS.items()
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
FIG10: Final = declared(
    "liu2020.fig10",
    studies.trainings,
    settings={
        "measures": {
            "post": Edge(_of("Post"), _RATES),
            "pre": Edge(_of("Pre"), _RATES),
            "admin": Edge(_of("Admin"), _RATES),
            "pre_over_post": EdgeRatio(_of("Pre"), _of("Post"), _RATES),
            "admin_over_post": EdgeRatio(_of("Admin"), _of("Post"), _RATES),
        },
        "gpu": {
            "post_over_pre": PairsBetter("bleu", _both("Post", "Pre")),
            "admin_over_pre": PairsBetter("bleu", _both("Admin", "Pre")),
        },
    },
    trainings=at_each(_grid, EDGE, seeds=1, gpu=_ONE_SEED, paper=_ONE_SEED),
    claims=(
        within(
            1e-4,
            4e-4,
            "largest rate up to which Post-LN trains, β₂ 0.999",
            "post",
            convention="some rates of the grid train and some do not",
            check="the rates were scaled so that Post-LN's edge falls inside the grid",
        ),
        *(
            at_least(
                5e-4,
                f"largest rate up to which {name} trains, β₂ 0.999",
                name.partition("-")[0].lower(),
                derived="it trains in each cell of the column",
            )
            for name in ("Pre-LN", "Admin")
        ),
        *(
            at_least(
                1.25,
                f"largest rate up to which {name} trains over that of Post-LN, β₂ 0.999",
                f"{name.partition('-')[0].lower()}_over_post",
                derived="an order is a step of the grid at least, and the smallest step is 5/4",
            )
            for name in ("Pre-LN", "Admin")
        ),
        at_least(
            0.5,
            "share of cells in which Post-LN beats Pre-LN, of those in which both train",
            "post_over_pre",
            convention="it wins if it wins most cells",
            needs=CONVERGED,
        ),
        at_least(
            0.5,
            "share of cells in which Admin beats Pre-LN, of those in which both train",
            "admin_over_pre",
            convention="it wins if it wins most cells",
            needs=CONVERGED,
        ),
    ),
    drawings=(
        Drawing("cells", "cell", "BLEU", "Test BLEU", "learning rate, placement and β₂", "BLEU", kind="bar"),
    ),
)

TABLE3: Final = declared(
    "liu2020.table3",
    studies.trainings,
    settings={
        "measures": {
            "rezero": Difference("bleu", "ReZero+Post", "ReZero"),
            "rezero_post": Difference("bleu", ("Admin", "Post", "Pre"), "ReZero+Post"),
        },
        "gpu": {"admin_post": Difference("bleu", "Admin", "Post")},
    },
    trainings=at_each(
        lambda s: {
            name: s.recipe(placement)
            for name, placement in (
                *_PLACEMENTS.items(),
                ("ReZero", "rezero"),
                ("ReZero+Post", "rezero_post"),
            )
        },
        IWSLT,
        laptop="The peak rate is 2e-3 after 60 steps of warm-up, in place of 7e-4 after 6000.",
    ),
    claims=(
        positive("BLEU of ReZero with Post-LN minus that of ReZero", "rezero"),
        positive("BLEU of Admin, Post and Pre together minus that of ReZero with Post-LN", "rezero_post"),
        within(
            -1.0,
            1.0,
            "BLEU of Admin minus that of Post-LN",
            "admin_post",
            convention="as good: less than 1 BLEU either way",
            needs=CONVERGED,
        ),
    ),
    drawings=CURVES,
)

TABLE4: Final = declared(
    "liu2020.table4",
    studies.trainings,
    settings={
        "measures": {"both_train": ShareTrained(("En-Fr Admin BLEU", "En-Fr Pre BLEU"))},
        "gpu": {"admin": Difference("bleu", "En-Fr Admin BLEU", "En-Fr Pre BLEU")},
        "paper": {
            "admin_bleu": Score("bleu", "En-Fr Admin BLEU"),
            "pre_bleu": Score("bleu", "En-Fr Pre BLEU"),
        },
    },
    trainings=at_each(
        lambda s: {
            name: {**s.recipe(placement, (60, 12)), **s.seldom}
            for name, placement in (("En-Fr Pre BLEU", "pre"), ("En-Fr Admin BLEU", "admin"))
        },
        EN_FR,
    ),
    claims=(
        positive("BLEU of Admin minus that of Pre-LN, 60 and 12 layers", "admin", needs=CONVERGED),
        at_least(
            0.5,
            "share of the runs of Admin and Pre-LN that train, 60 and 12 layers",
            "both_train",
            convention="a model trains if most of its runs do",
        ),
        *(
            within(
                published - 0.5,
                published + 0.5,
                f"test BLEU of {name} on WMT'14 En-Fr",
                f"{name.lower()}_bleu",
                convention="the same: less than half a BLEU either way",
                needs="WMT'14 En-Fr and 16 GPUs, at the paper scale",
            )
            for name in ("Pre", "Admin")
            for published in (float(printed("liu2020.table4")[f"En-Fr {name} BLEU"]),)
        ),
    ),
    drawings=CURVES,
)
