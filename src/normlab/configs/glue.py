"""Fine-tuning from a run of ``bert`` (``--init-from RUN``) on pairs of sentences: your own, given by
``--train-pairs``, or MRPC and RTE, two of GLUE's tasks (Wang et al. 2019, arXiv 1804.07461).
"""

from __future__ import annotations

from dataclasses import replace

from normlab.papers.bases import GLUE, fine_tuning
from normlab.spec.config import Config, DataConfig


def classification() -> Config:
    """Your own labelled pairs of sentences: 700 batches of 16."""
    return _any_device(fine_tuning(DataConfig(tokenizer="", block_len=128), steps=700))


def mrpc() -> Config:
    """Paraphrase or not, 3,668 training pairs, dev 408 of these, the official test: 3 epochs of batches of
    16.
    """
    return _any_device(fine_tuning(GLUE["MRPC"], steps=3 * 230))


def rte() -> Config:
    """Entailed or not, 2,241 training pairs and 249 of the same set as dev, GLUE's dev as the test: 3 epochs
    of batches of 16.
    """
    return _any_device(fine_tuning(GLUE["RTE"], steps=3 * 141))


def _any_device(config: Config) -> Config:
    return replace(config, train=replace(config.train, precision="auto"))
