"""The trainings on IWSLT'14, on WMT'14 and of BERT at each scale, and the cells of those on IWSLT'14."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from normlab.papers.bases import BASE, BERT, BERT_BASE, BERT_SHORT, DATES, GUESS, LAPTOP, SMALL, TO_THE_END
from normlab.papers.texts import IWSLT14_PART, MULTI30K_DE
from normlab.papers.trainings import Cells, Scale, Setting

_DECODE: Final = replace(SMALL.decode, length_penalty=1.2)


@dataclass(frozen=True)
class Iwslt(Setting):
    """A training on IWSLT'14."""

    adam: float = 1.0
    """What is multiplied with the paper's learning rates of Adam."""
    sgd: float = 1.0
    warmups: tuple[int, int, int] = (0, 500, 4000)
    """Steps of warm-up for the paper's 1, 500 and 4000."""
    fixed: str = "post+constant"
    """The recipe of a rate that stays."""
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
"""15 epochs. 153,000 pairs of some 26 tokens a side are 4.0 million tokens a side, some 1,000 batches of 4096
and 1,100 with padding.
"""
_OPEN: Final = (
    "Where the paper is silent, batches of 4096 tokens have so many on each side, an epoch has 1,100 of them,"
    " and warm-up of 1 leaves an inverse square root from the first step on. The best checkpoint on dev is "
    "tested, and BLEU is sacreBLEU's."
)
IWSLT: Final[Mapping[Scale, Iwslt]] = {
    "laptop": Iwslt(
        LAPTOP,
        "Dates of the built-in corpus in place of IWSLT'14, width 64 in place of 512, 200 steps of 1,024 "
        "positions in place of 15 epochs. The depth is the paper's, 6+6. Learning rates are ",
        adam=2.0,
        sgd=100.0,
        warmups=(0, 8, 60),
        fixed="post",
        figure4=2e-3,
        epoch_8=107,
        tuned=107,
    ),
    "gpu": Iwslt(
        replace(_PAPER, data=IWSLT14_PART, train=replace(_PAPER.train, precision="auto")),
        "A tenth of the paper's text, 14,947 pairs of IWSLT'14, as often as makes up the paper's steps, and "
        f"half precision where the hardware has bf16. All else is the paper's. {_OPEN} {GUESS.format(10)}",
    ),
    "paper": Iwslt(_PAPER, f"The paper's settings. {_OPEN}"),
}

EDGE: Final[Mapping[Scale, Iwslt]] = {
    **IWSLT,
    "laptop": replace(
        IWSLT["laptop"],
        base=replace(DATES, optim=replace(DATES.optim, schedule="inverse_sqrt")),
        differs="Dates of the built-in corpus in place of IWSLT'14, width 64 in place of 512, 1,200 steps of "
        "1,024 positions in place of 15 epochs, six seeds. Depth and schedule are the paper's. Pilot runs "
        "found the edge between training and failing at four times the paper's rates, so that each rate "
        "stands for a quarter of it, 2e-3 for 5e-4 and 4e-3 for 1e-3; and warm-ups of 0, 40 and 300 steps "
        "are as large a part of the training as 1, 500 and 4000.",
        adam=4.0,
        warmups=(0, 40, 300),
        fixed="post+constant",
        seeds=6,
    ),
}
"""The trainings in which Post-LN's edge falls where the paper's does (docs/pilots.md)."""

RATES: Final = "5e-4", "1e-3"
"""The paper's learning rates of Adam."""


def adam(s: Iwslt) -> Cells:
    """Figure 2(a)."""
    return {
        f"lr {rate}, warm-up {paper}": {
            "recipe": "post+warmup" if steps else "post",
            "optim.lr": s.adam * float(rate),
            "optim.warmup_steps": steps,
            **TO_THE_END,
        }
        for rate in RATES
        for paper, steps in zip((1, 500, 4000), s.warmups, strict=True)
    }


def cells_of(warmup: str) -> tuple[str, ...]:
    """The cells of both learning rates."""
    return tuple(f"lr {rate}, {warmup}" for rate in RATES)


def sgd(s: Iwslt) -> Cells:
    """Figure 2(b)."""
    return {
        f"SGD lr {rate}, {name} warm-up": {
            "recipe": recipe,
            "optim.lr": s.sgd * float(rate),
            "optim.warmup_steps": s.warmups[-1],
            **TO_THE_END,
        }
        for rate in ("1e-3", "5e-3")
        for name, recipe in (("without", "post+sgd"), ("with", "post+sgd+warmup"))
    }


def some(s: Iwslt, *names: str) -> Cells:
    """Cells of Figure 2(a) by name."""
    found = adam(s)
    return {name: found[name] for name in names}


def small_rate(s: Iwslt) -> Cells:
    """A fixed tenth of the larger learning rate, Figure 6."""
    return {"fixed lr 1e-4": {"recipe": s.fixed, "optim.lr": s.adam * 1e-4, "optim.warmup_steps": 0}}


@dataclass(frozen=True)
class XiongWmt(Setting):
    """A training on WMT'14 En-De."""

    rates: tuple[float, float] = (7e-4, 1.5e-3)
    epoch_6: int = 5 * 1000 + 1
    """The first step of the paper's sixth epoch."""


_WMT: Final = replace(
    BASE,
    optim=replace(BASE.optim, schedule="inverse_sqrt", warmup_steps=4000),
    train=replace(BASE.train, steps=19 * 1000, grad_accum_steps=16, validate_every_steps=1000),
    decode=_DECODE,
)
"""19 epochs, as in the figure. 4.5 million pairs of some 29 tokens a side are 130 million tokens a side, some
1,000 batches of 8192 on each of 16 GPUs.
"""
WMT: Final[Mapping[Scale, XiongWmt]] = {
    "laptop": XiongWmt(
        LAPTOP,
        "Dates of the built-in corpus in place of WMT'14 En-De, width 64 in place of 512, 200 "
        "steps of 1,024 positions. Learning rates are 1e-3 and 2e-3 in place of 7e-4 and 1.5e-3; warm-up "
        "lasts 60 steps in place of 4000. Loss is compared in place of BLEU, which is near 0 so early.",
        rates=(1e-3, 2e-3),
        epoch_6=100,
    ),
    "gpu": XiongWmt(
        replace(
            _WMT,
            data=MULTI30K_DE,
            optim=replace(_WMT.optim, warmup_steps=2000),
            train=replace(
                _WMT.train, steps=9500, grad_accum_steps=1, precision="auto", validate_every_steps=500
            ),
        ),
        "Multi30k En-De, 29,000 pairs, in place of 4.5 million of WMT'14, a vocabulary of 10,000, half of "
        "the paper's steps and of its warm-up, the batch of one of its 16 GPUs, half precision where the "
        f"hardware has bf16. Architecture and learning rates are the paper's. {GUESS.format(10)}",
        epoch_6=2501,
    ),
    "paper": XiongWmt(
        _WMT,
        "The paper's settings; the batches of 16 GPUs are summed up on one. Where the paper is silent, an "
        "epoch has 1,000 batches, the best checkpoint on dev is tested, dropout is 0.1, and BLEU is "
        "sacreBLEU's of plain text. The BPE is learnt here on Moses tokens.",
    ),
}


@dataclass(frozen=True)
class Bert(Setting):
    """A pre-training of BERT."""

    rates: tuple[float, float] = (3e-4, 1e-4)


PRETRAINING: Final[Mapping[Scale, Bert]] = {
    "laptop": Bert(
        BERT_SHORT,
        "A million words of the Brown corpus in place of 3.4 billion, 4 layers of width 64 in place of "
        "12 of 768, 500 vocabulary entries, rows of 32 tokens, 6,000 steps of 16 rows in place of a million "
        "of 256. Learning rates are ten times the paper's, in its ratio of 3; warm-up is 5% of the steps in "
        "place of 1%, positions are rotary in place of learned, β₂ is 0.98 in place of 0.999, there is no "
        "dropout. Dev loss is known every 300 steps, so that ratios of steps are resolved to about a tenth.",
        rates=(3e-3, 1e-3),
    ),
    "gpu": Bert(
        replace(
            BERT_BASE,
            data=replace(BERT.data, vocab_size=8000, block_len=128),
            optim=replace(BERT_BASE.optim, warmup_steps=500),
            train=replace(
                BERT_BASE.train,
                steps=10_000,
                max_tokens=256 * 128,
                grad_accum_steps=1,
                precision="auto",
                validate_every_steps=500,
            ),
        ),
        "A million words of the Brown corpus in place of 3.4 billion, 8,000 vocabulary entries, rows of 128 "
        "tokens in place of 512, 10,000 steps in place of a million, warm-up over 5% of them in place of 1%, "
        "half precision where the hardware has bf16. BERT-base, its dropout and optimiser, 256 rows a step "
        f"and the learning rates are the paper's. {GUESS.format('20 to 30')}",
    ),
    "paper": Bert(
        BERT_BASE,
        "The paper's settings on one device. Where the paper is silent, the settings are those of BERT-base "
        "(Devlin et al. 2019), but every step has rows of 512 tokens; the BPE, whose size the paper does not "
        "say, has 30,522 entries, as many as BERT's. BooksCorpus is a copy, for the original is gone. "
        "The text is lower-cased and not in Moses tokens, and sentences end where a full stop does.",
    ),
}
