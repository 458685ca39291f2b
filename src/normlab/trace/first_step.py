"""What the first step of an optimizer does to each parameter, and what published rules say that it does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from normlab.trace.dry_run import sample
from normlab.trace.optimizers import Held, held
from normlab.trace.tensors import map_tensors

if TYPE_CHECKING:
    from normlab.trace.step_under_test import StepUnderTest


@dataclass(frozen=True)
class Moved(Held):
    """What the first step does to a parameter, in a sample of its entries."""

    before: Tensor
    gradient: Tensor
    change: Tensor
    state: Mapping[str, Any]
    """The optimizer's, before the step."""

    def lost(self, wide: Moved | None = None) -> tuple[int, int]:
        """Return how many entries have a gradient but do not move, and how many have one.

        None is lost if the rate is 0 or the optimizer keeps the weights in a wider type. Nor is an entry lost
        if a state keeps what it did not move: then both differ alike from the same step in a wider type.
        """
        p, live, kept = self.parameter, self.gradient != 0, self._kept
        wider = [x for x in kept.values() if x.dtype.itemsize > p.dtype.itemsize]
        if not self.group["lr"] or any(torch.equal(x.to(p), p) for x in wider):
            return 0, 0
        stuck = live & (self.change == 0)
        other = wide or self
        for name in kept.keys() & other._kept.keys() if wide else ():
            apart, left = sample(kept[name]) - sample(other._kept[name]), other.change - self.change
            stuck &= (apart - left).abs() >= torch.minimum(apart.abs(), left.abs())  # no nearer than nothing
        return int(stuck.sum()), int(live.sum())

    @property
    def _kept(self) -> dict[str, Tensor]:
        """Tensors of the parameter's shape in the optimizer's state, after the step."""
        state, shape = self.optimizer.state.get(self.parameter, {}), self.parameter.shape
        return {str(n): x for n, x in state.items() if isinstance(x, Tensor) and x.shape == shape}

    @property
    def off(self) -> float:
        """How far the step is from the rule of its optimizer's class, as a share of it; 0 up to rounding."""
        if (rule := RULES.get(type(self.optimizer).__name__)) is None:
            return 0.0
        want = rule(self.before, self.gradient, self.group, self.state)
        apart, size = float((self.change - want).norm()), float(want.norm())
        rounding = 8 * torch.finfo(self.parameter.dtype).eps * (float(self.before.norm()) + size)
        return apart / max(size, 1e-300) if apart > rounding else 0.0

    @property
    def damped(self) -> bool:
        """Whether eps exceeds most entries of the first gradient that Adam sees."""
        first = type(self.optimizer).__name__ in RULES and "eps" in self.group and not self.state
        return first and float(self.gradient[self.gradient != 0].abs().median()) < float(self.group["eps"])


def first_step(step: StepUnderTest, *, exact: bool = False) -> list[Moved]:
    """Let the optimizers act once, at the schedule's peak, and return what happens to each parameter."""
    run, rates = step.rehearsal(exact=exact, plain=True), step.rates.peaks
    every = held(run.model, run.optimizers)
    before = [sample(h.parameter) for h in every]
    states = [map_tensors(h.optimizer.state.get(h.parameter, {}), lambda _, x: sample(x)) for h in every]
    gradients, moved = run.run(step.stepped, rates=rates).gradients, list[Moved]()
    for h, x, state in zip(every, before, states, strict=True):
        g, y = gradients.get(h.name, torch.zeros_like(x)), sample(h.parameter)
        change = (y - x).masked_fill(y == x, 0)  # infinity may stay unmoved, as in a mask
        moved.append(Moved(**vars(h), before=x, gradient=g, change=change, state=state))
    return moved


def _sgd(p: Tensor, g: Tensor, group: Mapping[str, Any], state: Mapping[str, Any]) -> Tensor:
    """SGD with momentum, as in torch: the first step has no dampening."""
    g = g + float(group.get("weight_decay") or 0) * p
    momentum, buffer = float(group.get("momentum") or 0), state.get("momentum_buffer")
    if momentum:
        b = g if buffer is None else momentum * buffer.double() + (1 - float(group.get("dampening") or 0)) * g
        g = g + momentum * b if group.get("nesterov") else b
    return -float(group["lr"]) * g


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
"""The first step of a parameter, by the name that an optimizer's class declares."""
