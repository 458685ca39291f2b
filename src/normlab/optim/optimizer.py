r"""Optimizers by name, built from a configuration.

In the equations g is the gradient after clipping, :math:`\eta` the learning rate of the step,
:math:`\lambda` ``optim.weight_decay``, :math:`\beta` ``optim.betas``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn

from normlab.base.optim_config import OptimConfig
from normlab.base.registry import Registry
from normlab.errors import UserError
from normlab.nn.kernels.wide_products import WideProducts
from normlab.optim.roles import Groups, parameter_groups
from normlab.optim.schedule import check_schedule

OPTIMIZERS: Registry[Callable[[Groups, Tensor, OptimConfig], torch.optim.Optimizer]] = Registry("optimizer")
"""Builders of optimizers from parameters, learning rate and configuration."""


@OPTIMIZERS.register("adam", "betas", "eps")
def adam(parameters: Groups, lr: Tensor, config: OptimConfig) -> torch.optim.Optimizer:
    r""":math:`x \leftarrow x - \eta\, \hat m / (\sqrt{\hat v} + \epsilon)` with moments of
    :math:`g + \lambda x`.

    :math:`m \leftarrow \beta_1 m + (1 - \beta_1) g`, :math:`v \leftarrow \beta_2 v + (1 - \beta_2) g^2`,
    and the hat is division by :math:`1 - \beta^n`. Each step is one fused kernel.

    Kingma and Ba 2015, Algorithm 1 (arXiv 1412.6980).
    """
    return torch.optim.Adam(parameters, lr, config.betas, config.eps, config.weight_decay, fused=True)


@OPTIMIZERS.register("adamw", "betas", "eps")
def adamw(parameters: Groups, lr: Tensor, config: OptimConfig) -> torch.optim.Optimizer:
    r""":math:`x \leftarrow x - \eta\left(\hat m / (\sqrt{\hat v} + \epsilon) + \lambda x\right)`.

    The moments are ``adam``'s without the decay. Each step is one fused kernel.

    Loshchilov and Hutter 2019, Algorithm 2 (arXiv 1711.05101); as everywhere in torch, :math:`\eta` includes
    the schedule's multiplier, and the decay is relative to it.
    """
    return torch.optim.AdamW(parameters, lr, config.betas, config.eps, config.weight_decay, fused=True)


@OPTIMIZERS.register("sgd")
def sgd(parameters: Groups, lr: Tensor, config: OptimConfig) -> torch.optim.Optimizer:
    r""":math:`u \leftarrow \mu u + g + \lambda x`, :math:`x \leftarrow x - \eta u`.

    :math:`\mu` is ``optim.momentum``; u is initially the first gradient. Each step is one fused kernel.

    Goyal et al. 2017, Equation 9 (arXiv 1706.02677).
    """
    return torch.optim.SGD(parameters, lr, config.momentum, weight_decay=config.weight_decay, fused=True)


@OPTIMIZERS.register("radam", "betas", "eps")
def radam(parameters: Groups, lr: Tensor, config: OptimConfig) -> torch.optim.Optimizer:
    r""":math:`x \leftarrow x - \eta\left(r_n\, \hat m / (\sqrt{\hat v} + \epsilon_n) + \lambda x\right)`,
    and no update while :math:`\rho_n \le 5`, which is the first 5 steps with a usual :math:`\beta_2`.

    The moments are ``adam``'s without the decay, :math:`\epsilon_n = \epsilon / \sqrt{1 - \beta_2^n}`,
    :math:`\rho_\infty = 2 / (1 - \beta_2) - 1`,
    :math:`\rho_n = \rho_\infty - 2 n \beta_2^n / (1 - \beta_2^n)` and :math:`r_n^2 =
    \frac{(\rho_n - 4)(\rho_n - 2) \rho_\infty}{(\rho_\infty - 4)(\rho_\infty - 2) \rho_n}`.

    Liu et al. 2020, Algorithm 2 (arXiv 1908.03265), with three choices from the authors' code: the threshold
    is 5 (the paper's is 4, one step earlier), the weight decay is decoupled from the moments, and there is no
    update below the threshold (the paper has that of ``radam_sgd``).

    Raises UserError if :math:`\beta_2 \le 2/3`, because :math:`\rho_n` then never exceeds 5.
    """
    beta2 = config.betas[1]
    longest = 2 / (1 - beta2) - 1
    if longest <= 5:
        raise UserError(
            f"radam makes no update with betas {config.betas}, because rho never exceeds 5; choose a second "
            "beta above 2/3, or radam_sgd"
        )
    held_steps = next(n for n in count() if longest - 2 * (n + 1) / (beta2 ** -(n + 1) - 1) > 5)
    optimizer = radam_sgd(parameters, lr, config)
    # At the rate 0 a step of torch's RAdam updates the moments and leaves the weights as they are.
    rates: list[Tensor] = []

    def steps_of(group: dict[str, Any]) -> Any:
        for p in group["params"]:
            state = optimizer.state.get(p)
            if state:
                return state["step"]
        return 0

    def hold(*_: object) -> None:
        for group in optimizer.param_groups:
            rates.append(group["lr"])
            group["lr"] = group["lr"] * (steps_of(group) >= held_steps)

    def release(*_: object) -> None:
        for group in reversed(optimizer.param_groups):
            group["lr"] = rates.pop()

    optimizer.register_step_pre_hook(hold)
    optimizer.register_step_post_hook(release)
    return optimizer


@OPTIMIZERS.register("radam_sgd", "betas", "eps")
def radam_sgd(parameters: Groups, lr: Tensor, config: OptimConfig) -> torch.optim.Optimizer:
    r""":math:`x \leftarrow x - \eta\left(r_n\, \hat m / (\sqrt{\hat v} + \epsilon_n) + \lambda x\right)`,
    and :math:`x - \eta\left(\hat m + \lambda x\right)` while :math:`\rho_n \le 5`.

    The symbols are those of ``radam``. Liu et al. 2020, Algorithm 2 (arXiv 1908.03265); this is the option
    ``degenerated_to_sgd`` of the authors' code, and what torch computes.
    """
    return torch.optim.RAdam(
        parameters,
        lr,
        config.betas,
        config.eps,
        config.weight_decay,
        decoupled_weight_decay=True,
        capturable=lr.is_cuda,  # otherwise every step would wait for the step counts
    )


class _MuonOfMatrices(torch.optim.Muon):
    """Muon on each matrix that a parameter packs; its state has the parameter's shape."""

    def _init_group(self, group: Any, params_with_grad: Any, grads: Any, muon_momentum_bufs: Any) -> bool:
        packed: tuple[list[Tensor], ...] = ([], [], [])
        is_complex = super()._init_group(group, *packed)
        rows = dict(zip(group["params"], group["rows"], strict=True))
        for parameter, grad, momentum in zip(*packed, strict=True):
            params_with_grad += parameter.split(rows[parameter])
            grads += grad.split(rows[parameter])
            muon_momentum_bufs += momentum.split(rows[parameter])
        return is_complex


def _muon(parameters: Groups, lr: Tensor, config: OptimConfig, adjust: str) -> torch.optim.Optimizer:
    """Build Muon for the groups of hidden matrices and AdamW for all others."""
    matrices, others = Groups(), Groups()
    for group in parameters:
        if group["role"] == "hidden" and all(p.dim() == 2 for p in group["params"]):
            # These two are Adam's: Muon has no betas, and its eps is another one.
            options = {name: value for name, value in group.items() if name not in ("betas", "eps")}
            matrices.append({**options, "lr": group["lr"].cpu(), "use_muon": True})
        else:
            others.append(group)
    optimizers: list[torch.optim.Optimizer] = []
    if matrices:
        rate: Any = lr.cpu()  # a number on the CPU, which no step has to wait for
        momentum = config.momentum or 0.95
        optimizers.append(_MuonOfMatrices(matrices, rate, config.weight_decay, momentum, adjust_lr_fn=adjust))
    if others:
        optimizers.append(adamw(others, lr, config))
    return CombinedOptimizer(optimizers)


@OPTIMIZERS.register("muon", "betas", "eps")
def muon(parameters: Groups, lr: Tensor, config: OptimConfig) -> torch.optim.Optimizer:
    r""":math:`x \leftarrow x - \eta\left(0.2 \sqrt{\max(r, c)}\, \mathrm{NS}(u) + \lambda x\right)` for each
    hidden matrix `[r, c]`, and ``adamw`` for all other parameters.

    :math:`b \leftarrow \mu b + (1 - \mu) g`, :math:`u = \mu b + (1 - \mu) g`; NS makes the singular values
    about 1 by 5 Newton-Schulz steps in bf16, and :math:`\mu` is ``optim.momentum`` (0 means 0.95, as
    published). Matrices that a parameter packs (queries, keys, values) are stepped one by one. The factor
    makes updates as large as Adam's, so one rate serves both. Torch's Muon computes the step; on a CPU its
    products are computed in fp32 and rounded.

    Liu et al. 2025, Section 2.2 (arXiv 2502.16982).
    """
    return _muon(parameters, lr, config, "match_rms_adamw")


@OPTIMIZERS.register("muon_original", "betas", "eps")
def muon_original(parameters: Groups, lr: Tensor, config: OptimConfig) -> torch.optim.Optimizer:
    r""":math:`x \leftarrow x - \eta\left(\sqrt{\max(1, r/c)}\, \mathrm{NS}(u) + \lambda x\right)` for each
    hidden matrix `[r, c]`, and ``adamw`` for all other parameters.

    ``muon`` with the factor of its first author, whose rate is 0.02, and 3e-4 for all others: the table
    ``jordan`` of ``optim.roles``. Jordan et al. 2024, as in Liu et al. 2025, Section 2.1 (arXiv 2502.16982).
    """
    return _muon(parameters, lr, config, "original")


class CombinedOptimizer(torch.optim.Optimizer):
    """Several optimizers as one, with the groups and states of all; a group's ``part`` is the number of the
    optimizer that steps it.
    """

    def __init__(self, parts: Sequence[torch.optim.Optimizer]) -> None:
        self.parts: list[torch.optim.Optimizer] = []
        for part in parts:
            self.parts += part.parts if isinstance(part, CombinedOptimizer) else [part]
        for number, part in enumerate(self.parts):
            for group in part.param_groups:
                group["part"] = number
        super().__init__([group for part in self.parts for group in part.param_groups], {})

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "parts": self.parts}

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # pyrefly: ignore[bad-override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for number, part in enumerate(self.parts):
            # Whoever loads a state replaces the groups and the state of this optimizer, not of its parts.
            part.param_groups = [group for group in self.param_groups if group["part"] == number]
            part.state = self.state
            # most CPUs multiply bf16 slowly
            with WideProducts() if isinstance(part, torch.optim.Muon) else nullcontext():
                part.step()
        return loss


def build_optimizer(model: nn.Module, config: OptimConfig) -> torch.optim.Optimizer:
    """Build the configured optimizer of a model's parameters, in groups by role (see ``roles.Groups``). Its
    rates are tensors on the device, 0 until ``set_rate`` sets them.

    Raises UserError for an unknown optimizer or table of roles, and for a schedule that is unknown or not
    fully configured.
    """
    check_schedule(config)
    lr = torch.zeros((), device=next((p.device for p in model.parameters()), None))
    groups = parameter_groups(model, config, lr)
    optimizers = [OPTIMIZERS[rule](of_rule, lr, config) for rule, of_rule in groups.items()]
    return optimizers[0] if len(optimizers) == 1 else CombinedOptimizer(optimizers)


def set_rate(optimizer: torch.optim.Optimizer, lr: float) -> torch.optim.Optimizer:
    """Set the learning rate of every group of an optimizer that was built here, and return it."""
    for group in optimizer.param_groups:
        group["lr"].fill_(lr * group["rate"])
    return optimizer


def keeps_tensors(config: OptimConfig) -> bool:
    """Whether the configured optimizer keeps tensors of a parameter from one step to the next."""
    parameter = nn.Parameter(torch.zeros(1, 1))
    optimizer = build_optimizer(nn.ParameterList([parameter]), config)
    parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    return any(isinstance(value, Tensor) for value in optimizer.state[parameter].values())
