"""What optimizers hold, what their first step does, and the published rules of that."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from normlab.trace.rehearsal import Rehearsal, sample


@dataclass(frozen=True)
class Held:
    """A parameter of a model in a group of an optimizer."""

    name: str
    parameter: Tensor
    group: Mapping[str, Any]
    optimizer: Optimizer

    @property
    def decay(self) -> float:
        return float(self.group.get("weight_decay") or 0)

    @property
    def rate(self) -> float:
        """The rate that a schedule multiplies."""
        return float(self.group.get("initial_lr", self.group["lr"]))

    @property
    def orthogonal(self) -> bool:
        """Whether Muon steps it, as its group says, or the class of an optimizer that has no other rule."""
        rules = {str(v).lower() for k, v in self.group.items() if k != "params"}
        mixed = "betas" in self.group or any("adam" in rule for rule in rules)
        return bool(self.group.get("use_muon", "muon" in type(self.optimizer).__name__.lower() and not mixed))


@dataclass(frozen=True)
class Moved(Held):
    """What the first step does to it, in a sample of its entries."""

    before: Tensor
    gradient: Tensor
    change: Tensor
    state: Mapping[str, Any]
    """The optimizer's, before the step."""

    @property
    def lost(self) -> tuple[int, int]:
        """Entries that have a gradient and do not move, and all that have one.

        None is lost where the rate is 0, or the optimizer keeps the weights in a wider type.
        """
        p, live = self.parameter, self.gradient != 0
        kept = [x for x in self.optimizer.state.get(p, {}).values() if isinstance(x, Tensor)]
        wider = [x for x in kept if x.shape == p.shape and x.dtype.itemsize > p.dtype.itemsize]
        if not self.group["lr"] or any(torch.equal(x.to(p), p) for x in wider):
            return 0, 0
        return int((live & (self.change == 0)).sum()), int(live.sum())

    @property
    def off(self) -> float:
        """How far the step is from the rule of its optimizer's class, as a share; 0 up to rounding."""
        if (rule := RULES.get(type(self.optimizer).__name__)) is None:
            return 0.0
        want = rule(self.before, self.gradient, self.group, self.state)
        apart, size = float((self.change - want).norm()), float(want.norm())
        rounding = 8 * torch.finfo(self.parameter.dtype).eps * (float(self.before.norm()) + size)
        return apart / max(size, 1e-300) if apart > rounding else 0.0

    @property
    def damped(self) -> bool:
        """Whether eps is above most of a gradient that Adam sees first."""
        first = type(self.optimizer).__name__ in RULES and "eps" in self.group and not self.state
        return first and float(self.gradient[self.gradient != 0].abs().median()) < float(self.group["eps"])


def held(model: nn.Module, optimizers: Iterable[Optimizer]) -> list[Held]:
    """The parameters of a model that optimizers hold, in their order."""
    names = {id(p): n for n, p in model.named_parameters()}
    groups = ((g, o) for o in optimizers for g in o.param_groups)
    return [Held(names[id(p)], p, g, o) for g, o in groups for p in g["params"] if id(p) in names]


def first_step(run: Rehearsal, batch: Any, rates: Sequence[float]) -> list[Moved]:
    """Let the optimizers act once, at these rates by group, and say what becomes of each parameter."""
    every = held(run.model, run.optimizers)
    before = [sample(h.parameter) for h in every]
    states = [_sampled(h.optimizer.state.get(h.parameter, {})) for h in every]
    gradients, moved = run.run(batch, rates=rates).gradients, list[Moved]()
    for h, x, state in zip(every, before, states, strict=True):
        g, change = gradients.get(h.name, torch.zeros_like(x)), sample(h.parameter) - x
        moved.append(Moved(**vars(h), before=x, gradient=g, change=change, state=state))
    return moved


def _sampled(state: Mapping[str, Any]) -> dict[str, Any]:
    return {k: sample(v) if isinstance(v, Tensor) else v for k, v in state.items()}


def _sgd(p: Tensor, g: Tensor, group: Mapping[str, Any], state: Mapping[str, Any]) -> Tensor:
    """SGD with momentum, as torch has it: the first step has no dampening."""
    g = g + float(group.get("weight_decay") or 0) * p
    momentum, buffer = float(group.get("momentum") or 0), state.get("momentum_buffer")
    if momentum:
        b = g if buffer is None else momentum * buffer.double() + (1 - float(group.get("dampening") or 0)) * g
        g = g + momentum * b if group.get("nesterov") else b
    return -float(group["lr"]) * g


def _adam(p: Tensor, g: Tensor, group: Mapping[str, Any], state: Mapping[str, Any]) -> Tensor:
    """Adam, Kingma and Ba 2015, algorithm 1 (1412.6980), with AMSGrad's maximum where that is asked."""
    decay, rate = float(group.get("weight_decay") or 0), float(group["lr"])
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
