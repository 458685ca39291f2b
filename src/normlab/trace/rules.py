"""The published rules of optimizers: what one step adds to a parameter."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor


def _sgd(p: Tensor, g: Tensor, group: Mapping[str, Any], state: Mapping[str, Any]) -> Tensor:
    """SGD with momentum, as torch has it: the first step has no dampening."""
    g = (-g if group.get("maximize") else g) + float(group.get("weight_decay") or 0) * p
    momentum, buffer = float(group.get("momentum") or 0), state.get("momentum_buffer")
    if momentum:
        b = g if buffer is None else momentum * buffer.double() + (1 - float(group.get("dampening") or 0)) * g
        g = g + momentum * b if group.get("nesterov") else b
    return -float(group["lr"]) * g


def _adam(p: Tensor, g: Tensor, group: Mapping[str, Any], state: Mapping[str, Any]) -> Tensor:
    """Adam, Kingma and Ba 2015, algorithm 1 (1412.6980), with AMSGrad's maximum where that is asked."""
    decay, rate = float(group.get("weight_decay") or 0), float(group["lr"])
    g = -g if group.get("maximize") else g
    decoupled = bool(group.get("decoupled_weight_decay"))
    g = g if decoupled else g + decay * p
    (b1, b2), t = map(float, group["betas"]), float(state.get("step", 0)) + 1
    m = b1 * _old(state, "exp_avg", g) + (1 - b1) * g
    v = b2 * _old(state, "exp_avg_sq", g) + (1 - b2) * g * g
    if group.get("amsgrad"):
        v = torch.maximum(v, _old(state, "max_exp_avg_sq", g))
    step = rate * (m / (1 - b1**t)) / ((v / (1 - b2**t)).sqrt() + float(group["eps"]))
    return -step - (rate * decay * p if decoupled else 0)


def _adamw(p: Tensor, g: Tensor, group: Mapping[str, Any], state: Mapping[str, Any]) -> Tensor:
    """AdamW, Loshchilov and Hutter 2019, algorithm 2 (1711.05101)."""
    return _adam(p, g, {**group, "decoupled_weight_decay": True}, state)


def _old(state: Mapping[str, Any], key: str, g: Tensor) -> Tensor:
    return state[key].double() if isinstance(state.get(key), Tensor) else torch.zeros_like(g)


RULES: Final = {"SGD": _sgd, "Adam": _adam, "AdamW": _adamw}
"""The first step of a parameter, by the name that an optimizer's class declares."""
