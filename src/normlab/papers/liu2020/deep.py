"""Trainings of 18 layers (Liu et al. 2020, Sections 3.2, 5.2 and 5.3)."""

from __future__ import annotations

from typing import Final

from normlab.papers import own_studies as studies
from normlab.papers.artefact import Artefact
from normlab.papers.bases import CONVERGED, CURVES
from normlab.papers.cells import printed
from normlab.papers.claim import ORDER, at_least, at_most
from normlab.papers.liu2020.bases import EN_DE
from normlab.papers.measures import DevAt, Difference, Score, ShareTrained
from normlab.papers.scales import at_each

_HYBRIDS: Final = "enc:post/dec:post", "enc:post/dec:pre", "enc:pre/dec:pre"

TABLE1: Final = Artefact(
    id="liu2020.table1",
    paper="Liu et al. 2020, Table 1 (arXiv 2004.08249)",
    shows="Hybrids of 18 layers: which have vanishing gradients, and which train.",
    published=printed("liu2020.table1"),
    asserts="Vanishing gradients are not the cause: the hybrid has none, and diverges.",
    discussion="The paper strikes through what does not hold, which plain text loses: rows 2 and 3 do not "
    "vanish. The gradients themselves are those of liu2020.fig3.",
    study=studies.trainings,
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
            published="both diverge",
            convention="a model fails if most of its runs do",
        ),
        at_least(
            10.0,
            "BLEU of Pre-LN",
            "pre",
            published="converges",
            convention="it converges if it translates: at least 10 BLEU",
        ),
    ),
    drawings=CURVES,
    version=2,
    date="2026-11-23",
    reason="The first version tested besides whether Post-LN and the hybrid have a worse loss than Pre-LN. A "
    "model that trains can have that, too; the table says which models train.",
)

FIG1_9: Final = Artefact(
    id="liu2020.fig1_9",
    paper="Liu et al. 2020, Figures 1 and 9 (arXiv 2004.08249)",
    shows="Development perplexity through training, Post, Pre and Admin of 6 and of 18 layers.",
    published=printed("liu2020.fig1_9"),
    asserts="The curves are in these orders.",
    study=studies.trainings,
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
        at_most(
            0.0,
            "dev NLL of Pre-LN minus that of Post-LN after 30% of the training, 6 layers",
            "pre_faster",
            published="Pre faster than Post",
            derived=ORDER,
        ),
        at_least(
            0.0,
            "dev NLL of Pre-LN minus that of Post-LN at the end, 6 layers",
            "pre_worse",
            published="Pre worse at the end",
            derived=ORDER,
            needs=CONVERGED,
        ),
        at_most(
            0.0,
            "dev NLL of Admin minus that of Pre-LN at the end, 6 layers",
            "admin_6",
            published="Admin best at the end",
            derived=ORDER,
            needs=CONVERGED,
        ),
        at_least(
            0.0,
            "test NLL of Post-LN minus that of Admin, 18 layers",
            "post_18",
            published="Post diverges",
            derived=ORDER,
        ),
        at_most(
            0.0,
            "dev NLL of Admin minus that of Pre-LN at the end, 18 layers",
            "admin_18",
            published="Admin best at the end",
            derived=ORDER,
            needs=CONVERGED,
        ),
    ),
    drawings=CURVES,
    version=2,
    date="2026-11-22",
    reason="The first version took 200 steps for the end. A Post-LN of 6 layers goes on there from 7 BLEU to "
    "79 after 600 steps at half the rate, and a slower model is not a worse one.",
)

WARMUP: Final = Artefact(
    id="liu2020.warmup",
    paper="Liu et al. 2020, Section 5.2 (arXiv 2004.08249)",
    shows="A Post-LN of 18 layers with longer warm-up.",
    published=printed("liu2020.warmup"),
    asserts="Longer warm-up does not save it.",
    study=studies.trainings,
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
    claims=(
        at_most(
            0.5,
            "share of the runs that train, all warm-ups together",
            "trains",
            published="0 of 4",
            convention="it fails if most of its runs do",
        ),
    ),
    drawings=CURVES,
)

_PRECISE: Final = " In fp16, as in the paper; with its dropouts of 0.1, and without."

SECTION5_3: Final = Artefact(
    id="liu2020.section5_3",
    paper="Liu et al. 2020, Section 5.3 (arXiv 2004.08249)",
    shows="Other initialisations of 18 layers on WMT'14 En-De.",
    published=printed("liu2020.section5_3"),
    asserts="All three diverge; with and without dropout, in single and half precision, shows what is to "
    "blame.",
    discussion="The section's De-En means En-De.",
    study=studies.trainings,
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
            at_most(
                0.5,
                f"share of the runs of {name} that train, with dropout and without",
                measure,
                published="diverges",
                convention="it fails if most of its runs do",
            )
            for name, measure in (
                ("ReZero", "rezero"),
                ("FixUp without norms", "fixup"),
                ("LookLinear with Post-LN", "looklinear"),
            )
        ),
        *(
            at_least(
                0.0,
                f"test NLL of {name} with dropout minus without",
                measure,
                published="dropout is blamed",
                derived=ORDER,
            )
            for name, measure in (("ReZero", "rezero_blame"), ("FixUp", "fixup_blame"))
        ),
    ),
    drawings=CURVES,
    finding="In single precision ReZero and FixUp of 18 layers train in each of six runs, with a dropout of "
    "0.1 as without: to 16 to 48 and 69 to 90 BLEU in 200 steps. The paper's runs were in half precision, "
    "which it blames beside dropout; that half is for a GPU.",
)
