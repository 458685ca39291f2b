"""Whether a gradient is the derivative of its loss."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Final, NamedTuple

import torch
from torch import Tensor, nn

from normlab.trace.functions import OWN, FunctionCall
from normlab.trace.step import gradients_in
from normlab.trace.trace import Trace

STEPS: Final = (1e-5, 1e-6, 1e-7)
"""Relative changes of the weights whose differences are taken, until two of them agree."""
FLOOR: Final = 1e-7
"""Relative error of a central difference in float64 that two step sizes need not show."""


class Moved(NamedTuple):
    """How the loss moves along its gradient: as the gradient has it, as it does, and the error of that."""

    expected: float
    measured: float
    error: float

    @property
    def disagrees(self) -> bool:
        return abs(self.expected - self.measured) > 10 * self.error + FLOOR * abs(self.expected)


class Along:
    """Compares a gradient in float64 with central differences of the loss along it.

    Each parameter moves by the same share of its own size, along its own gradient, so that what is missing
    from any one of them shows. Rows of padding, at which lookups drop the gradient by design, stay.
    """

    def __init__(self, trace: Trace) -> None:
        self.trace = trace.again(taps=()) if trace.taps else trace
        own = dict(trace.model.named_parameters())
        tables = [m for m in trace.model.modules() if isinstance(m, nn.Embedding)]
        rows = {id(m.weight): m.padding_idx for m in tables if m.padding_idx is not None}
        found = {n: g for n, g in trace.gradients.items() if g is not None and bool(g.any())}
        for n, g in found.items():
            if id(own[n]) in rows:
                found[n] = g.index_fill(0, torch.tensor(rows[id(own[n])], device=g.device), 0)
        self.gradients, self.own = found, {n: own[n].detach() for n in found}
        self.scale = {n: float(self.own[n].norm() / g.norm().clamp_min(1e-300)) for n, g in found.items()}
        self.attached: tuple[float, ...] = ()
        """The gradients of numbers that are no part of the loss, as of an auxiliary loss that an autograd
        function attaches to something else."""

    def _loss(self, names: Sequence[str], h: float) -> float:
        weights = {n: self.own[n] + h * self.scale[n] * self.gradients[n] for n in names}
        trace = self.trace.again(weights=weights) if names else self.trace
        if not self.attached:
            return float(trace.loss)
        numbers = map(float, _numbers(trace.functions(OWN)))
        return float(trace.loss) + sum(c * x for c, x in zip(self.attached, numbers, strict=True))

    def compare(self, names: Sequence[str]) -> Moved:
        """Compare them in these parameters, at the two step sizes that agree best with each other."""
        expected = sum(self.scale[n] * float(self.gradients[n].square().sum()) for n in names)
        start, best = self._loss((), 0.0), Moved(expected, 0.0, float("inf"))
        for h in STEPS:
            up, down, near, below = (self._loss(names, x) for x in (h, -h, h / 2, -h / 2))
            a, b = (up - down) / (2 * h), (near - below) / h
            bend = (4 * (near + below - 2 * start) - (up + down - 2 * start)) / h
            error = abs(a - b) + abs(bend)
            if error < best.error:
                best = Moved(expected, (4 * b - a) / 3, error)
            if min(best.error / 10, abs(best.measured - expected)) <= FLOOR * abs(expected):
                break
        return best

    @cached_property
    def all(self) -> Moved:
        """The comparison in every parameter at once, with what is attached where that explains it."""
        moved = self.compare(list(self.gradients))
        if not moved.disagrees:
            return moved
        with self.trace.with_graph(functions=lambda name: name == OWN) as passed:
            loss, numbers = passed.loss, _numbers(passed.functions)
            live = [x for x in numbers if x.requires_grad]
            found = gradients_in(loss, live, self.trace.model) if loss is not None and live else []
        reached = {id(x): float(g) for x, g in zip(live, found, strict=True) if g is not None}
        self.attached = tuple(reached.get(id(x), 0.0) for x in numbers) if reached else ()
        attached = self.compare(list(self.gradients)) if reached else moved
        if attached.disagrees:
            self.attached = ()
        return moved if attached.disagrees else attached

    def first_wrong(self, modules: Iterable[str]) -> str:
        """The last parameter whose gradient is not the derivative, by the order in which modules are done."""
        done = {module: i for i, module in enumerate(modules)}
        names = sorted(self.gradients, key=lambda n: done.get(n.rpartition(".")[0], -1))
        while len(names) > 1:
            late = names[len(names) // 2 :]
            names = late if self.compare(late).disagrees else names[: len(names) // 2]
        return names[0]


def _numbers(calls: Iterable[FunctionCall]) -> list[Tensor]:
    """Numbers that enter autograd functions."""
    inputs = [x for call in calls for x in call.args]
    return [x for x in inputs if isinstance(x, Tensor) and x.numel() == 1 and x.is_floating_point()]
