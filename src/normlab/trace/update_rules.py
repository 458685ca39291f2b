"""The next update of a parameter by published rules, in closed form, from the optimizer's state so far."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor


def _sgd(p: Tensor, g: Tensor, group: Mapping[str, Any], state: Mapping[str, Any]) -> Tensor:
    """SGD with momentum, as in torch: the first step has no dampening."""
    g = g + float(group.get("weight_decay") or 0) * p
    rate, momentum = float(group["lr"]), float(group.get("momentum") or 0)
    if not momentum:
        return -rate * g
    b, buffer = g, state.get("momentum_buffer")
    if buffer is not None:
        b = momentum * buffer.double() + (1 - float(group.get("dampening") or 0)) * g
    return -rate * (g + momentum * b if group.get("nesterov") else b)


def _adam(
    p: Tensor, g: Tensor, group: Mapping[str, Any], state: Mapping[str, Any], *, decoupled: bool = False
) -> Tensor:
    """Adam, Kingma and Ba 2015, algorithm 1 (1412.6980), with AMSGrad's maximum if asked for; ``decoupled``
    is AdamW, Loshchilov and Hutter 2019, algorithm 2 (1711.05101).
    """
    decay, rate = float(group.get("weight_decay") or 0), float(group["lr"])
    decoupled |= bool(group.get("decoupled_weight_decay"))
    g = g if decoupled else g + decay * p
    (b1, b2), t = map(float, group["betas"]), float(state.get("step", 0)) + 1
    m = b1 * _old(state, "exp_avg", g) + (1 - b1) * g
    v = b2 * _old(state, "exp_avg_sq", g) + (1 - b2) * g * g
    if group.get("amsgrad"):
        v = torch.maximum(v, _old(state, "max_exp_avg_sq", g))
    step = rate * (m / (1 - b1**t)) / ((v / (1 - b2**t)).sqrt() + float(group["eps"]))
    return -step - (rate * decay * p if decoupled else 0)


def _old(state: Mapping[str, Any], key: str, g: Tensor) -> Tensor:
    return state[key].double() if isinstance(state.get(key), Tensor) else torch.zeros_like(g)


RULES: Final = {"SGD": _sgd, "Adam": _adam, "AdamW": partial(_adam, decoupled=True)}
"""The rule that gives a parameter's next update, by the name of the optimizer's class."""
