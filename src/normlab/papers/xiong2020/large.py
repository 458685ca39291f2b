"""Trainings at the paper's size: WMT'14, BERT, and a tuned Pre-LN (Xiong et al. 2020, Section 4)."""

from __future__ import annotations

from typing import Final

from normlab.papers import own_studies as studies
from normlab.papers.artefact import Artefact, Drawing
from normlab.papers.bases import CONVERGED, CURVES, TO_THE_END
from normlab.papers.cells import printed
from normlab.papers.claim import ORDER, RATIO, at_least, at_most, within
from normlab.papers.measures import DevAt, Difference, Score, ShareGap, StepsRatio
from normlab.papers.scales import Cells, at_each
from normlab.papers.xiong2020.bases import IWSLT, PRETRAINING, WMT, Bert, Iwslt, Wmt

_RATES: Final = "7e-4", "1.5e-3"
"""The paper's learning rates on WMT'14."""
_PRE, _POST = "pre, lr 3e-4", "post, lr 1e-4, warm-up"
"""The two curves of Figure 5(a)."""


def _pretrainings(s: Bert) -> Cells:
    """The pre-trainings of Figure 5, named by the paper's learning rates."""
    high, low = s.rates
    return {
        _PRE: {"recipe": "pre", "optim.lr": high},
        _POST: {"recipe": "post+warmup", "optim.lr": low},
        "post, lr 3e-4, warm-up": {"recipe": "post+warmup", "optim.lr": high, **TO_THE_END},
        "pre, lr 1e-4": {"recipe": "pre", "optim.lr": low, **TO_THE_END},
        "post, lr 1e-4": {"recipe": "post", "optim.lr": low, **TO_THE_END},
    }


def _at_epoch_6(s: Wmt) -> Cells:
    return {
        f"lr {rate} {name}": {"optim.lr": lr, **changes}
        for rate, lr in zip(_RATES, s.rates, strict=True)
        for name, changes in (
            (
                "Pre",
                {
                    "recipe": "pre+step_decay_inverse_sqrt",
                    "optim.decay_step": s.epoch_6,
                    "optim.decay_factor": 1.0,
                },
            ),
            ("Post, warm-up", {"recipe": "post+warmup+inverse_sqrt"}),
        )
    }


def _tuned(s: Iwslt) -> Cells:
    return {
        "Pre-LN": {"recipe": "pre+step_decay", "optim.lr": s.figure4, "optim.decay_step": s.epoch_8},
        "Pre-LN, tuned": {
            "recipe": "pre+step_decay_inverse_sqrt",
            "optim.lr": 1.5 * s.figure4,
            "optim.decay_step": s.tuned,
            "model.dropout": 0.3,
            "model.attention_dropout": 0.1,
            "train.max_tokens": 2 * s.base.train.max_tokens,
        },
    }


FIG4CD: Final = Artefact(
    id="xiong2020.fig4cd",
    paper="Xiong et al. 2020, Figure 4(c) and (d) (arXiv 2002.04745)",
    shows="WMT'14 En-De: learning rates 7e-4 and 1.5e-3, decay at epoch 6, then inverse square root.",
    published=printed("xiong2020.fig4cd"),
    asserts="Pre-LN without warm-up is ahead of Post-LN with it from the first checkpoint on.",
    discussion="By how much the rate falls at epoch 6 is not said; 0.1 and 1 are both possible readings, and "
    "here it is 1: Pre-LN's rate stays until the step and is an inverse square root from there.",
    study=studies.trainings,
    settings={
        "measures": {
            f"{when}_{rate}": DevAt("nll", f"lr {rate} Pre", f"lr {rate} Post, warm-up", share)
            for rate in _RATES
            for when, share in (("first", 0.15), ("last", 1.0))
        }
    },
    trainings=at_each(_at_epoch_6, WMT),
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
    published=printed("xiong2020.fig5a"),
    asserts="Pre-LN arrives first; Post-LN at the higher rate diverges. With Pre-LN at 1e-4 besides, what is "
    "the placement's and what is the learning rate's can be told apart.",
    discussion="The text gives the 500k updates to Post-LN; the figure, and what the paper concludes, give "
    "them to Pre-LN. Placement and learning rate differ together between the two curves.",
    study=studies.trainings,
    settings={
        "measures": {
            "sooner": StepsRatio(_PRE, _POST),
            "sooner_at_one_rate": StepsRatio("pre, lr 1e-4", _POST),
            "pre_more_often": ShareGap((_PRE,), ("post, lr 3e-4, warm-up",)),
            "worse_at_3e-4": Difference("nll", "post, lr 3e-4, warm-up", _POST),
            "needs_warmup": Difference("nll", "post, lr 1e-4", _POST),
        }
    },
    trainings=at_each(_pretrainings, PRETRAINING),
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
            0.0,
            "share of the runs at 3e-4 that train, of Pre-LN minus of Post-LN; six pairs at least decide it",
            "pre_more_often",
            published="Post-LN diverged",
            derived=ORDER,
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

_TUNED: Final = (
    " Fine-tuned from one pre-trained run each, its best checkpoint, over {}; the cell is chosen on a tenth "
    "of the training pairs; accuracy is that on MRPC's test and RTE's dev pairs. With 1,725 and 277 of "
    "them one model's accuracy is known to 1 and to 3 points. The six seeds are of fine-tuning: two "
    "checkpoints are compared, not two placements."
)

FIG5BC: Final = Artefact(
    id="xiong2020.fig5bc",
    paper="Xiong et al. 2020, Figure 5(b) and (c) (arXiv 2002.04745)",
    shows="Accuracy on MRPC and RTE of the checkpoints of both trainings, six seeds with 95% intervals, over "
    "batches of 16 and 32, rates 1e-5 to 1e-4 and 3 to 8 epochs.",
    published=printed("xiong2020.fig5bc"),
    asserts="Pre-LN's accuracy is ahead of Post-LN's at the same number of updates, outside the intervals.",
    discussion="At the laptop scale the number of updates is that of the whole pre-training.",
    study=studies.fine_tuning,
    settings={
        "tasks": ("MRPC", "RTE"),
        "batches": (16,),
        "lrs": (1e-4, 3e-4, 1e-3),
        "epochs": (2,),
        "measures": {
            "ahead_on_MRPC": Difference("accuracy", f"MRPC {_PRE}", f"MRPC {_POST}"),
            "ahead_on_RTE": Difference("accuracy", f"RTE {_PRE}", f"RTE {_POST}"),
        },
    },
    trainings=at_each(
        lambda s: {cell: _pretrainings(s)[cell] for cell in (_PRE, _POST)},
        PRETRAINING,
        seeds=1,
        of_studies={
            "gpu": {"lrs": (2e-5, 5e-5, 1e-4), "epochs": (3,)},
            "paper": {"batches": (16, 32), "lrs": (1e-5, 2e-5, 5e-5, 1e-4), "epochs": (3, 4, 5, 6, 7, 8)},
        },
        laptop=_TUNED.format("batches of 16, rates 1e-4, 3e-4 and 1e-3 and 2 epochs"),
        gpu=_TUNED.format("batches of 16, rates 2e-5, 5e-5 and 1e-4 and 3 epochs"),
        paper=_TUNED.format("the paper's ranges, of whose rates it names the ends alone"),
    ),
    claims=(
        at_least(
            0.0,
            "accuracy on MRPC of the Pre-LN's checkpoint minus that of the Post-LN's",
            "ahead_on_MRPC",
            published="Pre-LN converges faster",
            derived=ORDER,
        ),
        at_least(
            0.0,
            "accuracy on RTE of the Pre-LN's checkpoint minus that of the Post-LN's",
            "ahead_on_RTE",
            published="Pre-LN converges faster",
            derived=ORDER,
        ),
    ),
    drawings=(
        Drawing("curves", "step", "accuracy", "Dev accuracy in fine-tuning", "step", "%", colour="cell"),
    ),
)

_FACTOR: Final = " By how much the rate falls at step 8000 is not said; here it falls to a tenth."

FOOTNOTE1: Final = Artefact(
    id="xiong2020.footnote1",
    paper="Xiong et al. 2020, footnote 1 (arXiv 2002.04745)",
    shows="Pre-LN on IWSLT'14 De-En, tuned: lr 7.5e-4, decay at step 8000, then inverse square root, dropout "
    "0.3, attention dropout 0.1, batches of 8192 tokens.",
    published=printed("xiong2020.footnote1"),
    asserts="Its test BLEU is the published one, and above that of the untuned Pre-LN.",
    study=studies.trainings,
    settings={
        "measures": {"trains": Score("bleu", "Pre-LN, tuned")},
        "gpu": {"tuned": Difference("bleu", "Pre-LN, tuned", "Pre-LN")},
        "paper": {"test_bleu": Score("bleu", "Pre-LN, tuned")},
    },
    trainings=at_each(
        _tuned,
        IWSLT,
        laptop="2e-3 in place of 5e-4, and 1.5 times that, as in the paper. The batch of the tuned one is "
        "twice as large, as in the paper; dropouts are the paper's.",
        gpu=_FACTOR,
        paper=_FACTOR,
    ),
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
