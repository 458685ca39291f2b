"""Whether a gradient is the derivative of its loss."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Final, NamedTuple

from torch import Tensor, nn

from normlab.trace.functions import OWN
from normlab.trace.trace import Trace
from normlab.trace.untouched import without_gradients

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
        self.gradients: dict[str, Tensor] = {}
        for name, g in trace.gradients.items():
            if g is not None and bool(g.any()):
                if id(own[name]) in rows:
                    g = g.clone()
                    g[rows[id(own[name])]] = 0
                self.gradients[name] = g
        self.own = {n: own[n].detach() for n in self.gradients}
        self.attached: tuple[float, ...] = ()
        """The gradients of numbers that are no part of the loss, as of an auxiliary loss that an autograd
        function attaches to something else."""

    @cached_property
    def scale(self) -> dict[str, float]:
        return {n: float(self.own[n].norm() / g.norm().clamp_min(1e-300)) for n, g in self.gradients.items()}

    def _loss(self, names: Sequence[str], h: float) -> float:
        weights = {n: self.own[n] + h * self.scale[n] * self.gradients[n] for n in names}
        trace = self.trace.again(weights=weights) if names else self.trace
        if not self.attached:
            return float(trace.loss)
        numbers = [float(x) for x in _numbers(trace.functions(OWN))]
        return float(trace.loss) + sum(c * x for c, x in zip(self.attached, numbers, strict=True))

    def compare(self, names: Sequence[str]) -> Moved:
        """Compare them in these parameters, at the two step sizes that agree best with each other."""
        expected = sum(self.scale[n] * float(self.gradients[n].square().sum()) for n in names)
        start, best = self._loss((), 0.0), Moved(expected, 0.0, float("inf"))
        for h in STEPS:
            (a, bend_a), (b, bend_b) = (self._difference(names, x, start) for x in (h, h / 2))
            error = abs(a - b) + abs(2 * bend_b - bend_a)
            if error < best.error:
                best = Moved(expected, (4 * b - a) / 3, error)
            if min(best.error / 10, abs(best.measured - expected)) <= FLOOR * abs(expected):
                break
        return best

    def _difference(self, names: Sequence[str], h: float, start: float) -> tuple[float, float]:
        up, down = self._loss(names, h), self._loss(names, -h)
        return (up - down) / (2 * h), (up + down - 2 * start) / h

    @cached_property
    def all(self) -> Moved:
        """The comparison in every parameter at once, with what is attached where that explains it."""
        moved = self.compare(list(self.gradients))
        if moved.disagrees and (numbers := self._attached()):
            self.attached = numbers
            attached = self.compare(list(self.gradients))
            if not attached.disagrees:
                return attached
            self.attached = ()
        return moved

    def _attached(self) -> tuple[float, ...]:
        own = self.trace.with_graph(functions=lambda name: name == OWN)
        with without_gradients(self.trace.model), own as passed:
            found = arriving(passed.loss, _numbers(passed.functions))
        return tuple(0.0 if g is None else float(g) for g in found)

    def first_wrong(self, names: Sequence[str]) -> str:
        """The last of these parameters, in the order of the pass, whose gradient is not the derivative."""
        while len(names) > 1:
            late = names[len(names) // 2 :]
            names = late if self.compare(late).disagrees else names[: len(names) // 2]
        return names[0]


def _numbers(calls: Sequence[object]) -> list[Tensor]:
    """Numbers that enter autograd functions."""
    inputs = [x for call in calls for x in call.args]  # type: ignore[attr-defined]
    return [x for x in inputs if isinstance(x, Tensor) and x.numel() == 1 and x.is_floating_point()]


def arriving(loss: Tensor | None, tensors: Sequence[Tensor]) -> list[Tensor | None]:
    """The gradients that a backward pass brings to tensors, None where it does not reach them."""
    found: dict[int, Tensor] = {}
    for i, x in enumerate(tensors):
        if x.requires_grad:
            x.register_hook(lambda g, i=i: found.__setitem__(i, g.detach()))
    if loss is not None and tensors:
        loss.backward()
    return [found.get(i) for i in range(len(tensors))]
