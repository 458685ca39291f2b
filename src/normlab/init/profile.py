"""Data-dependent starts: one forward pass, in process; no second run, no files, no globals."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from normlab.nn import Context, Stack


@torch.no_grad()
def profile_(model: nn.Module, forward: Callable[[], Any]) -> dict[str, float]:
    r"""Start every placement that asks for it from the variances that one forward pass shows.

    A sublayer i gets :math:`\mathrm{Var}[x_0] + \sum_{1 \le j < i} \mathrm{Var}[f_j(x_{j-1})]` of its own
    stack: the paper's profile (Liu et al. 2020, Section 4, arXiv 2004.08249) with the embeddings' term.
    Variances are over all elements of real positions, without dropout. ``forward`` runs the model once.
    Returns the variance handed to each sublayer by its path; empty, and the model untouched, where nothing
    asks for a profile.
    """
    stacks = {n: m for n, m in model.named_modules() if isinstance(m, Stack) and _profiled(m)}
    if not stacks:
        return {}
    start: dict[str, Tensor] = {}
    branch: dict[str, list[Tensor]] = {name: [] for name in stacks}
    hooks = []
    for name, stack in stacks.items():
        hooks.append(stack.register_forward_pre_hook(partial(_record_start, start, name)))
        for sublayer in stack:
            hooks.append(sublayer.f.register_forward_hook(partial(_record_branch, branch[name])))
    was_training = model.training
    model.eval()
    try:
        forward()
    finally:
        model.train(was_training)
        for hook in hooks:
            hook.remove()
    given: dict[str, float] = {}
    for name, stack in stacks.items():
        variance = start[name]
        for i, sublayer in enumerate(stack):
            if sublayer.place.profiled:
                sublayer.place.start_(variance)
                given[f"{name}.sublayers.{i}"] = float(variance)
            variance = variance + branch[name][i]
    return given


def _profiled(stack: Stack) -> bool:
    return any(sublayer.place.profiled for sublayer in stack)


def _variance(x: Tensor, context: Context) -> Tensor:
    """Variance over the elements of real positions, x `[B, T, D]`."""
    return (x if context.real is None else x[context.real]).float().var(correction=0)


def _record_start(start: dict[str, Tensor], name: str, stack: nn.Module, args: tuple[Any, ...]) -> None:
    start[name] = _variance(*args)


def _record_branch(seen: list[Tensor], f: nn.Module, args: tuple[Any, ...], y: Tensor) -> None:
    seen.append(_variance(y, args[1]))
