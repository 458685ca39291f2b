r"""Optimisers by name, built from a configuration.

In the equations g is the gradient after clipping, :math:`\eta` the learning rate of the step,
:math:`\lambda` ``optim.weight_decay``, :math:`\beta` ``optim.betas``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn

from normlab.config.config import OptimConfig
from normlab.errors import UserError
from normlab.nn.registry import Registry
from normlab.optim.schedule import check_schedule

Groups = list[dict[str, Any]]
"""Parameters by group, each with the options that differ from the configuration's."""
Optimiser = Callable[[Groups, Tensor, OptimConfig], torch.optim.Optimizer]

OPTIMISERS: Registry[Optimiser] = Registry("optimiser")
"""Builders of optimisers from parameters, learning rate and configuration."""


@OPTIMISERS.register("adam")
def adam(parameters: Groups, lr: Tensor, config: OptimConfig) -> torch.optim.Optimizer:
    r""":math:`x \leftarrow x - \eta\, \hat m / (\sqrt{\hat v} + \epsilon)` with moments of
    :math:`g + \lambda x`.

    :math:`m \leftarrow \beta_1 m + (1 - \beta_1) g`, :math:`v \leftarrow \beta_2 v + (1 - \beta_2) g^2`,
    and a hat divides by :math:`1 - \beta^n`. Each step is one fused kernel.

    Kingma and Ba 2015, Algorithm 1 (arXiv 1412.6980).
    """
    return torch.optim.Adam(parameters, lr, config.betas, config.eps, config.weight_decay, fused=True)


@OPTIMISERS.register("adamw")
def adamw(parameters: Groups, lr: Tensor, config: OptimConfig) -> torch.optim.Optimizer:
    r""":math:`x \leftarrow x - \eta\left(\hat m / (\sqrt{\hat v} + \epsilon) + \lambda x\right)`.

    The moments are ``adam``'s without the decay. Each step is one fused kernel.

    Loshchilov and Hutter 2019, Algorithm 2 (arXiv 1711.05101), whose schedule multiplier is in
    :math:`\eta`, to which the decay is relative, as everywhere in torch.
    """
    return torch.optim.AdamW(parameters, lr, config.betas, config.eps, config.weight_decay, fused=True)


@OPTIMISERS.register("sgd")
def sgd(parameters: Groups, lr: Tensor, config: OptimConfig) -> torch.optim.Optimizer:
    r""":math:`u \leftarrow \mu u + g + \lambda x`, :math:`x \leftarrow x - \eta u`.

    :math:`\mu` is ``optim.momentum``; u is initially the first gradient. Each step is one fused kernel.

    Goyal et al. 2017, Equation 9 (arXiv 1706.02677).
    """
    return torch.optim.SGD(parameters, lr, config.momentum, weight_decay=config.weight_decay, fused=True)


@OPTIMISERS.register("radam")
def radam(parameters: Groups, lr: Tensor, config: OptimConfig) -> torch.optim.Optimizer:
    r""":math:`x \leftarrow x - \eta\left(r_n\, \hat m / (\sqrt{\hat v} + \epsilon_n) + \lambda x\right)`,
    and no update while :math:`\rho_n \le 5`, as in the first 5 steps with a usual :math:`\beta_2`.

    The moments are ``adam``'s without the decay, :math:`\epsilon_n = \epsilon / \sqrt{1 - \beta_2^n}`,
    :math:`\rho_\infty = 2 / (1 - \beta_2) - 1`,
    :math:`\rho_n = \rho_\infty - 2 n \beta_2^n / (1 - \beta_2^n)` and :math:`r_n^2 =
    \frac{(\rho_n - 4)(\rho_n - 2) \rho_\infty}{(\rho_\infty - 4)(\rho_\infty - 2) \rho_n}`.

    Liu et al. 2020, Algorithm 2 (arXiv 1908.03265), with three choices of its authors' code: the threshold is
    5 (in the paper 4, one step earlier), the weight decay is decoupled from the moments, and there is no
    update below the threshold (in the paper that of ``radam_sgd``).

    Raises UserError if :math:`\beta_2 \le 2/3`, for then :math:`\rho_n` never exceeds 5.
    """
    beta2 = config.betas[1]
    longest = 2 / (1 - beta2) - 1
    if longest <= 5:
        raise UserError(
            f"radam makes no update with betas {config.betas}, because rho never exceeds 5; choose a second "
            "beta above 2/3, or radam_sgd"
        )
    held_steps = next(n for n in count() if longest - 2 * (n + 1) / (beta2 ** -(n + 1) - 1) > 5)
    optimiser = radam_sgd(parameters, lr, config)
    rates: list[Tensor] = []

    def hold(*_: object) -> None:
        for group in optimiser.param_groups:
            steps = next((s["step"] for p in group["params"] if (s := optimiser.state.get(p))), 0)
            rates.append(group["lr"])
            group["lr"] = group["lr"] * (steps >= held_steps)

    def release(*_: object) -> None:
        for group in reversed(optimiser.param_groups):
            group["lr"] = rates.pop()

    optimiser.register_step_pre_hook(hold)
    optimiser.register_step_post_hook(release)
    return optimiser


@OPTIMISERS.register("radam_sgd")
def radam_sgd(parameters: Groups, lr: Tensor, config: OptimConfig) -> torch.optim.Optimizer:
    r""":math:`x \leftarrow x - \eta\left(r_n\, \hat m / (\sqrt{\hat v} + \epsilon_n) + \lambda x\right)`,
    and :math:`x - \eta\left(\hat m + \lambda x\right)` while :math:`\rho_n \le 5`.

    The symbols are those of ``radam``. Liu et al. 2020, Algorithm 2 (arXiv 1908.03265); the option
    ``degenerated_to_sgd`` of its authors' code, and what torch computes.
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
    decaying = [p for p in given if p.dim() > 1 or config.weight_decay_on == "all"]
    groups: Groups = [{"params": decaying}]
    if len(decaying) < len(given):
        groups.append({"params": [p for p in given if p.dim() < 2], "weight_decay": 0.0})
    return build(groups, torch.zeros((), device=given[0].device), config)


def keeps_tensors(config: OptimConfig) -> bool:
    """Whether the configured optimiser keeps tensors of a parameter from one step to the next."""
    parameter = nn.Parameter(torch.zeros(1, 1))
    optimiser = build_optimiser([parameter], config)
    parameter.grad = torch.zeros_like(parameter)
    optimiser.step()
    return any(isinstance(value, Tensor) for value in optimiser.state[parameter].values())
