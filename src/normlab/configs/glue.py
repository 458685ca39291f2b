"""Fine-tuning from a run of ``bert`` (``--init-from RUN``) on pairs of sentences: your own, given by
``--train-pairs``, or MRPC and RTE, two of GLUE's tasks (Wang et al. 2019, arXiv 1804.07461).
"""

from __future__ import annotations

from dataclasses import replace

from normlab.spec.config import Config, DataConfig

from .bert import bert


def classification() -> Config:
    """Your own labelled pairs of sentences: 700 batches of 16."""
    return _fine_tuning(DataConfig(), steps=700)


def mrpc() -> Config:
    """Paraphrase or not, 3,668 training pairs, dev 408 of these, the official test: 3 epochs of batches of
    16.
    """
    columns = "#1 String,#2 String,Quality"
    return _fine_tuning(
        DataConfig(
            train_pairs=f"$NORMLAB_DATA/glue.mrpc/msr_paraphrase_train.txt#{columns}",
            test_pairs=f"$NORMLAB_DATA/glue.mrpc/msr_paraphrase_test.txt#{columns}",
        ),
        steps=3 * 230,
    )


def rte() -> Config:
    """Entailed or not, 2,241 training pairs and 249 of the same set as dev, GLUE's dev as the test: 3 epochs
    of batches of 16.
    """
    columns = "sentence1,sentence2,label"
    return _fine_tuning(
        DataConfig(
            train_pairs=f"$NORMLAB_DATA/glue.rte/train.tsv#{columns}",
            test_pairs=f"$NORMLAB_DATA/glue.rte/dev.tsv#{columns}",
        ),
        steps=3 * 141,
    )


def _fine_tuning(data: DataConfig, *, steps: int) -> Config:
    """Devlin et al. 2019, Appendix A.3 (arXiv 1810.04805): the optimiser of the pre-training, a warm-up over
    a tenth of the steps.
    """
    base = bert()
    return replace(
        base,
        recipe="pre+warmup",
        task="classification",
        model=replace(base.model, dropout=0.1),
        data=replace(data, tokenizer="", block_len=base.data.block_len),
        optim=replace(base.optim, lr=1e-4, warmup_steps=steps // 10),
        train=replace(base.train, steps=steps, validate_every_steps=steps // 3, stop_early=False),
    )
