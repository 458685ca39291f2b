"""Trainings at the paper's size: WMT'14, BERT, and a tuned Pre-LN (Xiong et al. 2020, Section 4)."""

from __future__ import annotations

from typing import Final

from normlab.spec.artefact import Artefact

FIG4CD: Final = Artefact(
    id="xiong2020.fig4cd",
    paper="Xiong et al. 2020, Figure 4(c) and (d) (arXiv 2002.04745)",
    shows="WMT'14 En-De: learning rates 7e-4 and 1.5e-3, decay at epoch 6, then inverse square root.",
    published={"BLEU first pre checkpoint, near (ICLR)": 20, "BLEU first post checkpoint, below (ICLR)": 10},
    asserts="Pre-LN without warm-up is ahead of Post-LN with it from the first checkpoint on.",
    discussion="By how much the rate falls at epoch 6 is not said; 0.1 and 1 are both possible readings.",
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
)

FIG5BC: Final = Artefact(
    id="xiong2020.fig5bc",
    paper="Xiong et al. 2020, Figure 5(b) and (c) (arXiv 2002.04745)",
    shows="Accuracy on MRPC and RTE of the checkpoints of both trainings, six seeds with 95% intervals, over "
    "batches of 16 and 32, rates 1e-5 to 1e-4 and 3 to 8 epochs.",
    published={"order": "Pre-LN converges faster"},
    asserts="Pre-LN's accuracy is ahead of Post-LN's at the same number of updates, outside the intervals.",
)

FOOTNOTE1: Final = Artefact(
    id="xiong2020.footnote1",
    paper="Xiong et al. 2020, footnote 1 (arXiv 2002.04745)",
    shows="Pre-LN on IWSLT'14 De-En, tuned: lr 7.5e-4, decay at step 8000, then inverse square root, dropout "
    "0.3, attention dropout 0.1, batches of 8192 tokens.",
    published={"test BLEU": 35.5},
    asserts="Its test BLEU is the published one.",
)
