"""Fine-tuning from a run of ``bert`` (``--init-from RUN``) on pairs of sentences: your own, given by
``--train-pairs``, or MRPC and RTE, two of GLUE's tasks (Wang et al. 2019, arXiv 1804.07461).
"""

from __future__ import annotations

from dataclasses import replace

from normlab.spec.config import Config, DataConfig


def classification() -> Config:
    """Your own labelled pairs of sentences: 700 batches of 16."""
    return _tuned(DataConfig(tokenizer="", block_len=128), steps=700)


def mrpc() -> Config:
    """Paraphrase or not, 3,668 training pairs, dev 408 of these, the official test: 3 epochs of batches of
    16.
    """
    return _tuned("MRPC", steps=3 * 230)


def rte() -> Config:
    """Entailed or not, 2,241 training pairs and 249 of the same set as dev, GLUE's dev as the test: 3 epochs
    of batches of 16.
    """
    return _tuned("RTE", steps=3 * 141)


def _tuned(data: DataConfig | str, steps: int) -> Config:
    from normlab.papers.bases import GLUE, fine_tuning

    config = fine_tuning(GLUE[data] if isinstance(data, str) else data, steps=steps)
    return replace(config, train=replace(config.train, precision="auto"))
