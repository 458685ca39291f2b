"""Configurations by name, for ``normlab train --config NAME``; a paper is imported once one is asked for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Final

from normlab.base.registry import Registry
from normlab.lab.config import (
    Config,
    DataConfig,
    DecodeConfig,
    ModelConfig,
    OptimConfig,
    TrainConfig,
    parallel_files,
)

CONFIGS: Final[Registry[Callable[[], Config]]] = Registry("configuration")
"""Each name, with the function that makes its configuration."""


@CONFIGS.register()
def demo() -> Config:
    """6+6 layers of width 64: half a minute per run on one core, yet so deep that Post-LN needs warm-up."""
    return Config(
        model=ModelConfig(dim=64, ffn_dim=256, heads=4, encoder_layers=6, decoder_layers=6, dropout=0.0),
        data=DataConfig(builtin="dates-de-en", vocab_size=200),
        optim=OptimConfig(schedule="constant", warmup_steps=60),
        train=TrainConfig(
            steps=200, max_tokens=1024, precision="auto", validate_every_steps=100, dev_decode_sentences=200
        ),
        decode=DecodeConfig(beam=1),
    )


@CONFIGS.register()
def text() -> Config:
    """3+3 layers of width 256, for tens of thousands of short sentence pairs."""
    return Config(optim=OptimConfig(warmup_steps=400), train=TrainConfig(steps=4000, precision="auto"))


def _multi30k(entries: int) -> DataConfig:
    splits = ("train", "val", "test2016")
    return parallel_files(DataConfig(vocab_size=entries), "multi30k", splits=splits, source="de", target="en")


@CONFIGS.register()
def multi30k() -> Config:
    """3+3 layers of width 256, Pre-LN with FixNorm and ScaleNorm: less than half an hour on 2 cores."""
    return Config(
        recipe="pre+fixnorm+scalenorm+warmup",
        model=ModelConfig(
            encoder_placement="pre",
            decoder_placement="pre",
            norm="scalenorm",
            embedding="fixnorm",
            dropout=0.2,
        ),
        data=_multi30k(5000),
        optim=OptimConfig(lr=2e-3, warmup_steps=500),
        train=TrainConfig(steps=5500, precision="auto", validate_every_steps=500),
    )


@CONFIGS.register()
def multi30k_small() -> Config:
    """3+3 layers of width 128: a base for comparing recipes, minutes per run on one core."""
    return Config(
        model=ModelConfig(dim=128, ffn_dim=512, dropout=0.1),
        data=_multi30k(4000),
        optim=OptimConfig(schedule="linear", warmup_steps=400),
        train=TrainConfig(steps=4000, max_tokens=2048, precision="auto", validate_every_steps=500),
    )


@CONFIGS.register()
def gl_en() -> Config:
    """The last row of Table 3 as published: 4+4 layers of width 512, 8000 warm-up steps, dropout 0.4."""
    from normlab.papers.nguyen2019.bases import GL_EN

    return GL_EN


@CONFIGS.register()
def gl_en_small() -> Config:
    """Fifteen minutes per run on one core: 4+4 layers of width 256, small batches, dropout 0.1."""
    from normlab.papers.nguyen2019.bases import GL_EN_SMALL

    optim = replace(GL_EN_SMALL.optim, lr=1e-3)
    return replace(GL_EN_SMALL, optim=optim, train=replace(GL_EN_SMALL.train, precision="auto"))


@CONFIGS.register()
def language_model() -> Config:
    """A decoder of 4 layers of width 256, for a few hundred thousand words: AdamW that decays only matrices,
    betas (0.9, 0.95), no dropout.
    """
    return Config(
        recipe="pre+warmup",
        task="language_model",
        model=ModelConfig(
            encoder_layers=0, decoder_layers=4, encoder_placement="pre", decoder_placement="pre", dropout=0.0
        ),
        data=DataConfig(tokenizer="byte_bpe", block_len=128),
        optim=OptimConfig(
            optimiser="adamw",
            betas=(0.9, 0.95),
            eps=1e-8,
            weight_decay=0.1,
            weight_decay_on="matrices",
            warmup_steps=100,
            label_smoothing=0.0,
        ),
        train=TrainConfig(steps=1000, precision="auto", validate_every_steps=200),
    )


@CONFIGS.register()
def bert() -> Config:
    """A Pre-LN encoder of 4 layers of width 64, rows of 32 tokens, 500 vocabulary entries: minutes per run on
    one core.

    A small BERT only learns the frequencies of tokens until its attention finds the neighbours of a mask.
    Rotary positions show them from the start; with learned or sinusoidal ones the model was still stuck after
    four minutes. How soon it gets out depends on the number of predictions and on the learning rate more than
    on the size of a step: hence short rows, small batches and a rate of 3e-3, while 6e-3 without a warm-up is
    too much. See docs/lab-book/comparisons.md.
    """
    from normlab.papers.bases import BERT

    data = DataConfig(vocab_size=BERT.data.vocab_size, block_len=BERT.data.block_len)
    return replace(BERT, data=data, train=replace(BERT.train, precision="auto"))


@CONFIGS.register()
def classification() -> Config:
    """Your own labelled pairs of sentences: 700 batches of 16."""
    return _tuned(DataConfig(tokenizer="", block_len=128), steps=700)


@CONFIGS.register()
def mrpc() -> Config:
    """Paraphrase or not, 3,668 training pairs and 408 of the same set as dev, the official test: 3 epochs of
    batches of 16.
    """
    return _tuned("MRPC", steps=3 * 230)


@CONFIGS.register()
def rte() -> Config:
    """Entailed or not, 2,241 training pairs and 249 of the same set as dev, GLUE's dev as the test: 3 epochs
    of batches of 16.
    """
    return _tuned("RTE", steps=3 * 141)


def _tuned(data: DataConfig | str, steps: int) -> Config:
    from normlab.papers.bases import GLUE, fine_tuning

    config = fine_tuning(GLUE[data] if isinstance(data, str) else data, steps=steps)
    return replace(config, train=replace(config.train, precision="auto"))
