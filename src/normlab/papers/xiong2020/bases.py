"""The trainings on IWSLT'14, on WMT'14 and of BERT at each scale, and the cells of those on IWSLT'14."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from normlab.papers.bases import (
    BASE,
    BERT,
    BERT_BASE,
    BERT_SHORT,
    DATES,
    IWSLT14_PART,
    LAPTOP,
    MULTI30K_DE,
    ON_GPU,
    SMALL,
)
from normlab.papers.cells import settings_of, with_laptop
from normlab.papers.trainings import ScaledTraining, changed

_DECODE: Final = replace(SMALL.decode, length_penalty=1.2)


@dataclass(frozen=True)
class Iwslt(ScaledTraining):
    """A training on IWSLT'14."""

    adam: float = 1.0
    """The factor on the paper's learning rates of Adam."""
    sgd: float = 1.0
    """The factor on the paper's learning rates of SGD."""
    warmups: tuple[int, int, int] = (0, 500, 4000)
    """Steps of warm-up for the paper's 1, 500 and 4000."""
    figure4: float = 5e-4
    """The learning rate of Figure 4."""
    epoch_8: int = 7 * 1100 + 1
    """The first step of the paper's eighth epoch."""
    tuned: int = 8000
    """The step from which the rate of footnote 1 falls."""


_PAPER: Final = replace(
    SMALL,
    optim=replace(SMALL.optim, schedule="inverse_sqrt", warmup_steps=4000),
    train=replace(SMALL.train, steps=15 * 1100, validate_every_steps=1100),
    decode=_DECODE,
)
"""15 epochs. 153,000 pairs of about 26 tokens a side are 4.0 million tokens a side: about 1,000 batches of
4096, and 1,100 with padding.
"""
IWSLT: Final = settings_of(
    "xiong2020.iwslt",
    laptop=Iwslt(LAPTOP, adam=2.0, sgd=100.0, warmups=(0, 8, 60), figure4=2e-3, epoch_8=107, tuned=107),
    gpu=Iwslt(replace(_PAPER, data=IWSLT14_PART, train=replace(_PAPER.train, precision="auto"))),
    paper=Iwslt(_PAPER),
)

EDGE: Final = with_laptop(
    IWSLT,
    "xiong2020.edge",
    {"train": DATES.train, "optim.schedule": "inverse_sqrt"},
    adam=4.0,
    sgd=40.0,
    warmups=(0, 40, 300),
    epoch_8=561,
    seeds=6,
)
"""The trainings in which Post-LN's edge falls where the paper's does (docs/pilots.md)."""


@dataclass(frozen=True)
class LargeTraining(ScaledTraining):
    """A training on WMT'14 En-De, or a pre-training of BERT."""

    rates: tuple[float, float]
    epoch_6: int = 5 * 1000 + 1
    """The first step of the paper's sixth epoch on WMT'14."""


_WMT: Final = replace(
    BASE,
    optim=replace(BASE.optim, schedule="inverse_sqrt", warmup_steps=4000),
    train=replace(BASE.train, steps=19 * 1000, grad_accum_steps=16, validate_every_steps=1000),
    decode=_DECODE,
)
"""19 epochs, as in the figure. 4.5 million pairs of about 29 tokens a side are 130 million tokens a side:
about 1,000 batches of 8192 on each of 16 GPUs.
"""
WMT: Final = settings_of(
    "xiong2020.wmt",
    laptop=LargeTraining(
        changed(DATES, {"optim.warmup_steps": 250, "train.validate_every_steps": 60}),
        rates=(1e-3, 2e-3),
        epoch_6=316,
        seeds=6,
        first_seed=4,
    ),
    gpu=LargeTraining(
        changed(_WMT, {**ON_GPU, "data": MULTI30K_DE, "train.steps": 9500, "optim.warmup_steps": 2000}),
        rates=(7e-4, 1.5e-3),
        epoch_6=2501,
    ),
    paper=LargeTraining(_WMT, rates=(7e-4, 1.5e-3)),
)
PRETRAINING: Final = settings_of(
    "xiong2020.pretraining",
    laptop=LargeTraining(BERT_SHORT, rates=(3e-3, 1e-3)),
    gpu=LargeTraining(
        changed(
            replace(BERT_BASE, data=replace(BERT.data, vocab_size=8000, block_len=128)),
            {**ON_GPU, "train.steps": 10_000, "train.max_tokens": 256 * 128, "optim.warmup_steps": 500},
        ),
        rates=(3e-4, 1e-4),
    ),
    paper=LargeTraining(BERT_BASE, rates=(3e-4, 1e-4)),
)
