"""Your own parallel text, given by ``--train-src`` and so on."""

from __future__ import annotations

from normlab.spec.config import Config, OptimConfig, TrainConfig


def text() -> Config:
    """3+3 layers of width 256, for tens of thousands of short sentence pairs."""
    return Config(optim=OptimConfig(warmup_steps=400), train=TrainConfig(steps=4000, precision="auto"))
