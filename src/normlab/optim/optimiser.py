r"""Optimisers by name, built from a configuration.

In the equations g is the gradient after clipping, :math:`\eta` the learning rate of the step,
:math:`\lambda` ``optim.weight_decay``, :math:`\beta` ``optim.betas``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from normlab.nn.registry import Registry
from normlab.optim.schedule import check_schedule
from normlab.spec.config import OptimConfig

Optimiser = Callable[[list[nn.Parameter], Tensor, OptimConfig], torch.optim.Optimizer]

OPTIMISERS: Registry[Optimiser] = Registry("optimiser")
"""Builders of optimisers from parameters, learning rate and configuration."""


@OPTIMISERS.register("adam")
def adam(parameters: list[nn.Parameter], lr: Tensor, config: OptimConfig) -> torch.optim.Optimizer:
    r""":math:`x \leftarrow x - \eta\, \hat m / (\sqrt{\hat v} + \epsilon)` with moments of
    :math:`g + \lambda x`.

    :math:`m \leftarrow \beta_1 m + (1 - \beta_1) g`, :math:`v \leftarrow \beta_2 v + (1 - \beta_2) g^2`,
    and a hat divides by :math:`1 - \beta^n`. Each step is one fused kernel.

    Kingma and Ba 2015, Algorithm 1 (arXiv 1412.6980).
    """
    return torch.optim.Adam(parameters, lr, config.betas, config.eps, config.weight_decay, fused=True)


@OPTIMISERS.register("adamw")
def adamw(parameters: list[nn.Parameter], lr: Tensor, config: OptimConfig) -> torch.optim.Optimizer:
    r""":math:`x \leftarrow x - \eta\left(\hat m / (\sqrt{\hat v} + \epsilon) + \lambda x\right)`.

    The moments are ``adam``'s without the decay. Each step is one fused kernel.

    Loshchilov and Hutter 2019, Algorithm 2 (arXiv 1711.05101), whose schedule multiplier is in
    :math:`\eta`, to which the decay is relative, as everywhere in torch.
    """
    return torch.optim.AdamW(parameters, lr, config.betas, config.eps, config.weight_decay, fused=True)


@OPTIMISERS.register("sgd")
def sgd(parameters: list[nn.Parameter], lr: Tensor, config: OptimConfig) -> torch.optim.Optimizer:
    r""":math:`u \leftarrow \mu u + g + \lambda x`, :math:`x \leftarrow x - \eta u`.

    :math:`\mu` is ``optim.momentum``; u is initially the first gradient. Each step is one fused kernel.

    Goyal et al. 2017, Equation 9 (arXiv 1706.02677).
    """
    return torch.optim.SGD(parameters, lr, config.momentum, weight_decay=config.weight_decay, fused=True)


@OPTIMISERS.register("radam")
def radam(parameters: list[nn.Parameter], lr: Tensor, config: OptimConfig) -> torch.optim.Optimizer:
    r""":math:`x \leftarrow x - \eta\left(r_n\, \hat m / (\sqrt{\hat v} + \epsilon_n) + \lambda x\right)`,
    and :math:`x - \eta\left(\hat m + \lambda x\right)` while :math:`\rho_n \le 5`.

    The moments are ``adam``'s without the decay, :math:`\epsilon_n = \epsilon / \sqrt{1 - \beta_2^n}`,
    :math:`\rho_\infty = 2 / (1 - \beta_2) - 1`,
    :math:`\rho_n = \rho_\infty - 2 n \beta_2^n / (1 - \beta_2^n)` and :math:`r_n^2 =
    \frac{(\rho_n - 4)(\rho_n - 2) \rho_\infty}{(\rho_\infty - 4)(\rho_\infty - 2) \rho_n}`.

    Liu et al. 2020, Algorithm 2 (arXiv 1908.03265), with two choices of its authors' code: the threshold is
    5 (in the paper 4, one step earlier), and the weight decay is decoupled from the moments.
    """
    return torch.optim.RAdam(
        parameters,
        lr,
        config.betas,
        config.eps,
        config.weight_decay,
        decoupled_weight_decay=True,
        capturable=lr.is_cuda,  # otherwise every step waits for the step counts
    )


def build_optimiser(parameters: Iterable[nn.Parameter], config: OptimConfig) -> torch.optim.Optimizer:
    """Build the configured optimiser; its rate is a tensor on the device, 0 until the trainer sets it.

    Raises UserError for an unknown optimiser, and for a schedule that is unknown or not fully configured.
    """
    check_schedule(config)
    build = OPTIMISERS[config.optimiser]
    given = list(parameters)
    return build(given, torch.zeros((), device=given[0].device), config)
