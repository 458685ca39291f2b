"""BERT's pre-training on your own plain text, given by ``--train-text`` and so on."""

from __future__ import annotations

from dataclasses import replace

from normlab.spec.config import Config, DataConfig


def bert() -> Config:
    """A Pre-LN encoder of 4 layers of width 64, rows of 32 tokens, 500 vocabulary entries: minutes a run on
    one core.

    A small BERT stays at the frequencies of tokens until its attention finds the neighbours of a mask. Rotary
    positions show them from the start; with learned or sinusoidal ones it was not out of there after four
    minutes. How soon it is depends on the number of predictions and on the learning rate more than on the
    size of a step: hence short rows, small batches and a rate of 3e-3, while 6e-3 without a warm-up is too
    much. See docs/lab-book.md.
    """
    from normlab.papers.bases import BERT

    data = DataConfig(vocab_size=BERT.data.vocab_size, block_len=BERT.data.block_len)
    return replace(BERT, data=data, train=replace(BERT.train, precision="auto"))
