"""Trainings: translation, BERT and what warm-up does (Xiong et al. 2020, Sections 3.2 and 4)."""

from __future__ import annotations

from typing import Final

from normlab.spec.artefact import Artefact

FIG2A: Final = Artefact(
    id="xiong2020.fig2a",
    paper="Xiong et al. 2020, Figure 2(a) (arXiv 2002.04745)",
    shows="Post-LN under Adam on IWSLT'14 De-En: dev loss and BLEU by epoch, 15 epochs, learning rates 5e-4 "
    "and 1e-3, warm-up of 1, 500 and 4000 steps.",
    published={
        "BLEU without warm-up, at best": 8.45,
        "BLEU warm-up 4000, about": 34,
        "BLEU warm-up 500, lr 5e-4": 31.16,
        "BLEU warm-up 500, lr 1e-3": 2.77,
    },
    asserts="Post-LN needs warm-up under Adam, and what it reaches depends on the warm-up's length.",
    discussion="Under RAdam with lr 5e-4 and no warm-up Post-LN trains in this paper (β₂ 0.98, dropout 0.1) "
    "and diverges in Figure 10 of Liu et al. 2020 (β₂ 0.99 and more, dropout 0.3).",
)

FIG2B: Final = Artefact(
    id="xiong2020.fig2b",
    paper="Xiong et al. 2020, Figure 2(b) (arXiv 2002.04745)",
    shows="Post-LN under SGD on IWSLT'14 De-En: learning rates 1e-3 and 5e-3, with warm-up of 4000 steps and "
    "without.",
    published={"BLEU without warm-up": "just above zero in 15 epochs", "BLEU with warm-up": "far below Adam"},
    asserts="Warm-up helps SGD, too.",
)

LOSS_VS_BLEU: Final = Artefact(
    id="xiong2020.loss_vs_bleu",
    paper="Xiong et al. 2020, footnote 2 of the ICLR submission (arXiv 2002.04745)",
    shows="That of two badly trained models the one with the better loss may have the worse BLEU.",
    published={"order": "a better loss, a worse BLEU"},
    asserts="Such a pair is among the runs of Figure 2.",
)

SIMPLIFIED: Final = Artefact(
    id="xiong2020.simplified",
    paper="Xiong et al. 2020, Section 3.3 of the ICLR submission (arXiv 2002.04745)",
    shows="The Transformer of the theory, with a single head and W_Q = W_K = 0 at the start, trained.",
    published={"order": "has the same need of warm-up"},
    asserts="As Figure 2(a), of the simplified model.",
)

FIG4AB: Final = Artefact(
    id="xiong2020.fig4ab",
    paper="Xiong et al. 2020, Figure 4(a) and (b) (arXiv 2002.04745)",
    shows="IWSLT'14 De-En: Post-LN with warm-up and Pre-LN without (lr 5e-4, a tenth from epoch 8), each "
    "with Adam and with RAdam.",
    published={
        "BLEU post and pre, about": 34,
        "dev loss post and pre, about": 4,
        "pre checkpoint as good as post's": 9,
        "post checkpoint as good as pre's": 15,
        "post RAdam without warm-up": "trains",
        "pre RAdam": "changes little",
    },
    asserts="Pre-LN without warm-up reaches what Post-LN reaches with it, and sooner; RAdam trains Post-LN "
    "without warm-up and changes Pre-LN little.",
    discussion="RAdam, Post-LN, no warm-up, lr 5e-4: Liu et al. 2020, Figure 10, has it diverge, with "
    "another β₂ and another dropout.",
)

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

FIG6: Final = Artefact(
    id="xiong2020.fig6",
    paper="Xiong et al. 2020, Appendix H, Figure 6 (arXiv 2002.04745)",
    shows="Post-LN on IWSLT'14 De-En without warm-up at a fixed learning rate of 1e-4, 27 epochs.",
    published={"dev loss after 27 epochs, about": 4.3},
    asserts="Its loss is between that of the large rate without warm-up and that of the best.",
)

CLIP: Final = Artefact(
    id="xiong2020.clip",
    paper="Xiong et al. 2020, Figure 7 of the ICLR submission (arXiv 2002.04745)",
    shows="Post-LN on IWSLT'14 De-En without warm-up, lr 1e-3, gradients clipped to a norm of 0.5.",
    published={"clip norm": 0.5, "gradient norm at initialisation, about": 5.0, "order": "as a fixed 1e-4"},
    asserts="It trains, about as well as with a fixed 1e-4.",
)

FOOTNOTE1: Final = Artefact(
    id="xiong2020.footnote1",
    paper="Xiong et al. 2020, footnote 1 (arXiv 2002.04745)",
    shows="Pre-LN on IWSLT'14 De-En, tuned: lr 7.5e-4, decay at step 8000, then inverse square root, dropout "
    "0.3, attention dropout 0.1, batches of 8192 tokens.",
    published={"test BLEU": 35.5},
    asserts="Its test BLEU is the published one.",
)
