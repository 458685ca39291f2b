"""Your own plain text, given by ``--train-text`` and so on."""

from __future__ import annotations

from normlab.spec.config import Config, DataConfig, ModelConfig, OptimConfig, TrainConfig


def language_model() -> Config:
    """A decoder of 4 layers of width 256, for a few hundred thousand words."""
    return Config(
        recipe="pre+warmup",
        task="language_model",
        model=ModelConfig(
            encoder_layers=0, decoder_layers=4, encoder_placement="pre", decoder_placement="pre"
        ),
        data=DataConfig(block_len=128),
        optim=OptimConfig(warmup_steps=100, label_smoothing=0.0),
        train=TrainConfig(steps=1000, precision="auto", validate_every_steps=200),
    )
