"""What optimizers hold: their groups, and the model's parameters in them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from normlab.trace.facts import Unknown

if TYPE_CHECKING:
    from normlab.trace.step_under_test import StepUnderTest


def groups_of(optimizers: Iterable[Optimizer]) -> list[dict[str, Any]]:
    """Return every group of the optimizers, in order."""
    return [group for optimizer in optimizers for group in optimizer.param_groups]


def parameters_of(optimizers: Iterable[Optimizer]) -> list[Tensor]:
    """Return every parameter that the optimizers hold, in order."""
    return [p for group in groups_of(optimizers) for p in group["params"]]


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
        """Whether Muon steps it, by its group or by the class of an optimizer that has no other rule."""
        rules = {str(v).lower() for k, v in self.group.items() if k != "params"}
        mixed = "betas" in self.group or any("adam" in rule for rule in rules)
        return bool(self.group.get("use_muon", "muon" in type(self.optimizer).__name__.lower() and not mixed))


def held(model: nn.Module, optimizers: Iterable[Optimizer]) -> list[Held]:
    """Return a model's parameters that optimizers hold, in their order. Raises Unknown if there are none."""
    names = {id(p): n for n, p in model.named_parameters()}
    groups = ((g, o) for o in optimizers for g in o.param_groups)
    every = [Held(names[id(p)], p, g, o) for g, o in groups for p in g["params"] if id(p) in names]
    if not every:
        raise Unknown("the optimizer holds no parameter of the model, to which the loss gives its gradients")
    return every


def masters_of(step: StepUnderTest) -> dict[int, str]:
    """Return the parameters that are rounded copies of masters, which optimizers hold in a wider type, and
    that the user's step changes when those change; by the place of their masters.
    """
    run, pairs = step.rehearsal(), dict[int, tuple[str, Tensor]]()
    every = parameters_of(run.optimizers)
    left = {n: p for n, p in run.model.named_parameters() if all(p is not q for q in every)}
    for i, q in enumerate(every):
        if id(q) in run.names:
            continue
        same = (n for n, p in left.items() if p.shape == q.shape and torch.equal(q.to(p), p))
        if (name := next(same, None)) is not None:
            pairs[i] = name, left.pop(name)
    # equal numbers may be chance: only a step that copies the changed master to it shows that it is one
    before = {i: p.detach().clone() for i, (_, p) in pairs.items()}
    for i in pairs:
        every[i].data = every[i].data * 2 + 1
    with suppress(Exception):  # none where it cannot be run
        run.run(step.stepped, rates=step.rates.peaks)
    return {i: n for i, (n, p) in pairs.items() if not p.equal(before[i])}
