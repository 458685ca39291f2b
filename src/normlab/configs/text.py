"""Parallel text of one's own, given by ``--train-src`` and so on."""

from __future__ import annotations

from normlab.spec.config import Config, OptimConfig, TrainConfig


def text() -> Config:
    """3+3 layers of width 256, for some tens of thousands of short pairs."""
    return Config(
        optim=OptimConfig(warmup_steps=400),
        train=TrainConfig(steps=4000, precision="auto"),
    )
