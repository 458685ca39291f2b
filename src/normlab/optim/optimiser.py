"""Optimisers by name, built from a configuration."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import nn

from normlab.nn.registry import Registry
from normlab.optim.schedule import SCHEDULES
from normlab.spec.config import OptimConfig


def adam(parameters: Iterable[nn.Parameter], config: OptimConfig) -> torch.optim.Optimizer:
    """Adam, one fused kernel a step. Kingma and Ba 2015, Algorithm 1 (arXiv 1412.6980)."""
    return torch.optim.Adam(
        parameters,
        lr=torch.tensor(0.0),
        betas=config.betas,
        eps=config.eps,
        weight_decay=config.weight_decay,
        fused=True,
    )


Optimiser = Callable[[Iterable[nn.Parameter], OptimConfig], torch.optim.Optimizer]

OPTIMISERS: Registry[Optimiser] = Registry("optimiser")
OPTIMISERS["adam"] = adam


def build_optimiser(parameters: Iterable[nn.Parameter], config: OptimConfig) -> torch.optim.Optimizer:
    """The configured optimiser with its learning rate as a tensor, 0 until the loop sets it.

    Raises ValueError for an unknown optimiser, and for an unknown schedule before any step is made.
    """
    SCHEDULES[config.schedule]
    return OPTIMISERS[config.optimiser](parameters, config)
