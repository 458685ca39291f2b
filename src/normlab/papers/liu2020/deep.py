"""Trainings of 18 layers (Liu et al. 2020, Sections 3.2, 5.2 and 5.3)."""

from __future__ import annotations

from typing import Final

from normlab.papers import studies
from normlab.papers.bases import CONVERGED, CURVES
from normlab.papers.cells import declared
from normlab.papers.claim import at_least, at_most, fails, negative, positive
from normlab.papers.liu2020.bases import EN_DE
from normlab.papers.measures import DevAt, Difference, Score, ShareTrained
from normlab.papers.scales import at_each

_HYBRIDS: Final = "enc:post/dec:post", "enc:post/dec:pre", "enc:pre/dec:pre"

TABLE1: Final = declared(
    "liu2020.table1",
    studies.trainings,
    settings={
        "measures": {
            "post_enc": ShareTrained(("enc:post/dec:post", "enc:post/dec:pre")),
            "pre": Score("bleu", "enc:pre/dec:pre"),
        }
    },
    trainings=at_each(lambda s: {name: s.recipe(name, (18, 18)) for name in _HYBRIDS}, EN_DE),
    claims=(
        at_most(
            0.5,
            "share of the runs with a Post-LN encoder that train, the hybrid's among them",
            "post_enc",
            convention="a model fails if most of its runs do",
        ),
        at_least(10.0, "BLEU of Pre-LN", "pre", convention="it converges if it translates: at least 10 BLEU"),
    ),
    drawings=CURVES,
)

FIG1_9: Final = declared(
    "liu2020.fig1_9",
    studies.trainings,
    settings={
        "measures": {
            "pre_faster": DevAt("nll", "6L Pre", "6L Post", 0.3),
            "post_18": Difference("nll", "18L Post", "18L Admin"),
        },
        "gpu": {
            "pre_worse": DevAt("nll", "6L Pre", "6L Post", 1.0),
            "admin_6": DevAt("nll", "6L Admin", "6L Pre", 1.0),
            "admin_18": DevAt("nll", "18L Admin", "18L Pre", 1.0),
        },
    },
    trainings=at_each(
        lambda s: {
            f"{layers}L {name}": s.recipe(placement, depth)
            for layers, depth in ((6, None), (18, (18, 18)))
            for name, placement in (
                ("Post", "post" if layers == 6 else "enc:post/dec:post"),
                ("Pre", "pre" if layers == 6 else "enc:pre/dec:pre"),
                ("Admin", "admin"),
            )
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

WARMUP: Final = declared(
    "liu2020.warmup",
    studies.trainings,
    settings={"measures": {"trains": ShareTrained(tuple(f"warm-up {k}k" for k in (8, 16, 24, 32)))}},
    trainings=at_each(
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

SECTION5_3: Final = declared(
    "liu2020.section5_3",
    studies.trainings,
    settings={
        "measures": {
            "rezero": ShareTrained(("ReZero, dropout", "ReZero")),
            "fixup": ShareTrained(("FixUp, dropout", "FixUp")),
            "looklinear": ShareTrained(("LookLinear+Post, dropout", "LookLinear+Post")),
            "rezero_blame": Difference("nll", "ReZero, dropout", "ReZero"),
            "fixup_blame": Difference("nll", "FixUp, dropout", "FixUp"),
        }
    },
    trainings=at_each(
        lambda s: {
            f"{name}{words}": {**s.recipe(placement, (18, 18)), **s.seldom, **dropout, **s.half}
            for name, placement in (
                ("ReZero", "rezero"),
                ("FixUp", "fixup"),
                ("LookLinear+Post", "enc:post/dec:post+looklinear"),
            )
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
