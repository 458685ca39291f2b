"""Trainings at the paper's size: WMT'14, BERT, and a tuned Pre-LN (Xiong et al. 2020, Section 4)."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from normlab.papers.bases import BERT, CONVERGED, CURVES, LAPTOP, TO_THE_END
from normlab.spec.artefact import Artefact, Drawing
from normlab.spec.claim import ORDER, RATIO, at_least, at_most, within
from normlab.spec.trainings import Trainings

_RATES: Final = {"7e-4": 1e-3, "1.5e-3": 2e-3}
"""The paper's learning rates, and those of the laptop scale."""
_AT_EPOCH_6: Final = {"optim.decay_step": 100, "optim.decay_factor": 1.0}
_PRE, _POST = "pre, lr 3e-4", "post, lr 1e-4, warm-up"
"""The two curves of Figure 5(a)."""
PRETRAINED: Final = Trainings(
    BERT,
    {
        _PRE: {"recipe": "pre", "optim.lr": 3e-3},
        _POST: {"recipe": "post+warmup", "optim.lr": 1e-3},
        "post, lr 3e-4, warm-up": {"recipe": "post+warmup", "optim.lr": 3e-3, **TO_THE_END},
        "pre, lr 1e-4": {"recipe": "pre", "optim.lr": 1e-3, **TO_THE_END},
        "post, lr 1e-4": {"recipe": "post", "optim.lr": 1e-3, **TO_THE_END},
    },
    differs="A million words of the Brown corpus in place of 3.4 billion, 4 layers of width 64 in place of "
    "12 of 768, 500 vocabulary entries, rows of 32 tokens, 8,000 steps of 16 rows in place of a million of "
    "256. Learning rates are ten times the paper's, in its ratio of 3; warm-up is 5% of the steps in place "
    "of 1%, positions are rotary in place of learned, β₂ is 0.98 in place of 0.999, there is no dropout. Dev "
    "loss is known every 400 steps, so that ratios of steps are resolved to about a tenth.",
)
"""The pre-trainings of Figure 5, named by the paper's learning rates."""

FIG4CD: Final = Artefact(
    id="xiong2020.fig4cd",
    paper="Xiong et al. 2020, Figure 4(c) and (d) (arXiv 2002.04745)",
    shows="WMT'14 En-De: learning rates 7e-4 and 1.5e-3, decay at epoch 6, then inverse square root.",
    published={"BLEU first pre checkpoint, near (ICLR)": 20, "BLEU first post checkpoint, below (ICLR)": 10},
    asserts="Pre-LN without warm-up is ahead of Post-LN with it from the first checkpoint on.",
    discussion="By how much the rate falls at epoch 6 is not said; 0.1 and 1 are both possible readings, and "
    "here it is 1: Pre-LN's rate stays until the step and is an inverse square root from there.",
    study="trainings",
    settings={
        "measures": {
            f"{when}_{rate}": ("dev_at", "nll", f"lr {rate} Pre", f"lr {rate} Post, warm-up", share)
            for rate in _RATES
            for when, share in (("first", 0.15), ("last", 1.0))
        }
    },
    trainings={
        "laptop": Trainings(
            LAPTOP,
            {
                f"lr {rate} {name}": {"optim.lr": lr, **changes}
                for rate, lr in _RATES.items()
                for name, changes in (
                    ("Pre", {"recipe": "pre+step_decay_inverse_sqrt", **_AT_EPOCH_6}),
                    ("Post, warm-up", {"recipe": "post+warmup+inverse_sqrt"}),
                )
            },
            differs="Dates of the built-in corpus in place of WMT'14 En-De, width 64 in place of 512, 200 "
            "steps of 1,024 positions. Learning rates are 1e-3 and 2e-3 in place of 7e-4 and 1.5e-3; warm-up "
            "lasts 60 steps in place of 4000. Loss is compared in place of BLEU, which is near 0 so early.",
        )
    },
    claims=tuple(
        at_most(
            0.0,
            f"dev NLL of Pre-LN minus that of Post-LN {words}, lr {rate}",
            f"{when}_{rate}",
            published=published,
            derived=ORDER,
        )
        for rate in _RATES
        for when, words, published in (
            ("first", "after 15% of the training", "near 20 against below 10 BLEU at the first checkpoint"),
            ("last", "at the end", "Pre-LN is ahead throughout"),
        )
    ),
    drawings=CURVES,
)

FIG5A: Final = Artefact(
    id="xiong2020.fig5a",
    paper="Xiong et al. 2020, Figure 5(a) (arXiv 2002.04745)",
    shows="BERT-base pre-training: Post-LN (warm-up of 10k steps, lr 1e-4), Pre-LN (no warm-up, from 3e-4 "
    "down in a line), and Post-LN at 3e-4.",
    published={
        "validation loss reached by both": 1.69,
        "updates of the faster": 500_000,
        "updates of the slower": 700_000,
        "faster by, about": "40%",
        "post at 3e-4": "diverges",
    },
    asserts="Pre-LN arrives first; Post-LN at the higher rate diverges. With Pre-LN at 1e-4 besides, what is "
    "the placement's and what is the learning rate's can be told apart.",
    discussion="The text gives the 500k updates to Post-LN; the figure, and what the paper concludes, give "
    "them to Pre-LN. Placement and learning rate differ together between the two curves.",
    study="trainings",
    settings={
        "measures": {
            "sooner": ("steps_ratio", _PRE, _POST),
            "sooner_at_one_rate": ("steps_ratio", "pre, lr 1e-4", _POST),
            "pre_more_often": ("share_gap", (_PRE,), ("post, lr 3e-4, warm-up",)),
            "worse_at_3e-4": ("difference", "nll", "post, lr 3e-4, warm-up", _POST),
            "needs_warmup": ("difference", "nll", "post, lr 1e-4", _POST),
        }
    },
    trainings={"laptop": PRETRAINED},
    claims=(
        at_most(
            1.0,
            "steps of Pre-LN at 3e-4 to the best dev loss of Post-LN at 1e-4, over those of Post-LN",
            "sooner",
            published="500k against 700k, 0.71",
            derived=RATIO,
        ),
        at_most(
            1.0,
            "the same of Pre-LN at 1e-4",
            "sooner_at_one_rate",
            published="faster at the same rate, of translation",
            derived=RATIO,
        ),
        at_least(
            0.5,
            "share of the runs at 3e-4 that train, of Pre-LN minus of Post-LN",
            "pre_more_often",
            published="Post-LN diverged",
            convention="a setting fails if most of its runs do",
        ),
        at_least(
            0.0,
            "test NLL of Post-LN at 3e-4 minus that at 1e-4",
            "worse_at_3e-4",
            published="diverged",
            derived=ORDER,
        ),
        at_least(
            0.0,
            "test NLL of Post-LN at 1e-4 without warm-up minus that with it",
            "needs_warmup",
            published="warm-up is essential for Post-LN",
            derived=ORDER,
        ),
    ),
    drawings=(
        Drawing(
            "curves",
            "step",
            "nll",
            "Dev loss through training",
            "step",
            "nats per masked token",
            colour="cell",
        ),
        Drawing(
            "curves", "step", "masked_accuracy", "Dev accuracy through training", "step", "%", colour="cell"
        ),
    ),
)

FIG5BC: Final = Artefact(
    id="xiong2020.fig5bc",
    paper="Xiong et al. 2020, Figure 5(b) and (c) (arXiv 2002.04745)",
    shows="Accuracy on MRPC and RTE of the checkpoints of both trainings, six seeds with 95% intervals, over "
    "batches of 16 and 32, rates 1e-5 to 1e-4 and 3 to 8 epochs.",
    published={"order": "Pre-LN converges faster"},
    asserts="Pre-LN's accuracy is ahead of Post-LN's at the same number of updates, outside the intervals.",
    discussion="At the laptop scale the number of updates is that of the whole pre-training.",
    study="fine_tuning",
    settings={
        "tasks": ("MRPC", "RTE"),
        "batches": (16,),
        "lrs": (1e-4, 3e-4, 1e-3),
        "epochs": (3,),
        "measures": {
            "ahead_on_MRPC": ("difference", "accuracy", f"MRPC {_PRE}", f"MRPC {_POST}"),
            "ahead_on_RTE": ("difference", "accuracy", f"RTE {_PRE}", f"RTE {_POST}"),
            "MRPC": ("score", "accuracy", f"MRPC {_PRE}"),
            "RTE": ("score", "accuracy", f"RTE {_PRE}"),
        },
    },
    trainings={
        "laptop": replace(
            PRETRAINED,
            cells={cell: PRETRAINED.cells[cell] for cell in (_PRE, _POST)},
            seeds=1,
            differs=f"{PRETRAINED.differs} Fine-tuned from one pre-trained run each, its best checkpoint, "
            "over batches of 16, rates 1e-4, 3e-4 and 1e-3 and 3 epochs; the cell is chosen on a tenth of "
            "the training pairs; accuracy is that on MRPC's test and RTE's dev pairs. With 1,725 and 277 of "
            "them one model's accuracy is known to 1 and to 3 points.",
        )
    },
    claims=(
        at_least(
            0.0,
            "accuracy on MRPC of Pre-LN minus that of Post-LN",
            "ahead_on_MRPC",
            published="Pre-LN converges faster",
            derived=ORDER,
        ),
        at_least(
            0.0,
            "accuracy on RTE of Pre-LN minus that of Post-LN",
            "ahead_on_RTE",
            published="Pre-LN converges faster",
            derived=ORDER,
        ),
        at_least(
            66.5,
            "accuracy of Pre-LN on MRPC, in %",
            "MRPC",
            derived="the commonest label is that of 1,147 of 1,725 test pairs",
        ),
        at_least(
            52.8,
            "accuracy of Pre-LN on RTE, in %",
            "RTE",
            derived="the commonest label is that of 146 of 277 test pairs",
        ),
    ),
    drawings=(
        Drawing("curves", "step", "accuracy", "Dev accuracy in fine-tuning", "step", "%", colour="cell"),
    ),
)

FOOTNOTE1: Final = Artefact(
    id="xiong2020.footnote1",
    paper="Xiong et al. 2020, footnote 1 (arXiv 2002.04745)",
    shows="Pre-LN on IWSLT'14 De-En, tuned: lr 7.5e-4, decay at step 8000, then inverse square root, dropout "
    "0.3, attention dropout 0.1, batches of 8192 tokens.",
    published={"test BLEU": 35.5},
    asserts="Its test BLEU is the published one, and above that of the untuned Pre-LN.",
    study="trainings",
    settings={
        "measures": {"trains": ("score", "bleu", "Pre-LN, tuned")},
        "gpu": {"tuned": ("difference", "bleu", "Pre-LN, tuned", "Pre-LN")},
        "paper": {"test_bleu": ("score", "bleu", "Pre-LN, tuned")},
    },
    trainings={
        "laptop": Trainings(
            LAPTOP,
            {
                "Pre-LN": {"recipe": "pre+step_decay", "optim.lr": 2e-3, "optim.decay_step": 107},
                "Pre-LN, tuned": {
                    "recipe": "pre+step_decay_inverse_sqrt",
                    "optim.lr": 3e-3,
                    "optim.decay_step": 107,
                    "model.dropout": 0.3,
                    "model.attention_dropout": 0.1,
                    "train.max_tokens": 2048,
                },
            },
            differs="Dates of the built-in corpus in place of IWSLT'14, width 64 in place of 512, 200 steps. "
            "The learning rate is 1.5 times that of Figure 4 and the batch twice as large, as in the paper; "
            "dropouts are the paper's.",
        )
    },
    claims=(
        at_least(
            10.0,
            "test BLEU of the tuned Pre-LN, without warm-up",
            "trains",
            published="35.5",
            convention="it trains if it translates: at least 10 BLEU",
        ),
        at_least(
            0.0,
            "test BLEU of the tuned Pre-LN minus that of Figure 4's",
            "tuned",
            published="35.5 against about 34",
            derived=ORDER,
            needs=CONVERGED,
        ),
        within(
            34.5,
            36.5,
            "test BLEU of the tuned Pre-LN on IWSLT'14 De-En",
            "test_bleu",
            published="35.5",
            convention="the same: less than 1 BLEU either way",
            needs="IWSLT'14 De-En and a GPU, at the paper scale",
        ),
    ),
    drawings=CURVES,
)
