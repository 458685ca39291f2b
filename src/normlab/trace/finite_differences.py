"""Whether a gradient is the derivative of its loss: it is compared with central differences of the loss.

Each parameter moves a little along its own gradient, up and down. The loss must change by the norm of the
gradient times the distance moved, summed over the parameters. If it does not, halving the parameters that
move finds one whose gradient is wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import Final, NamedTuple

import torch
from torch import Tensor, nn

from normlab.trace.autograd import gradients_in
from normlab.trace.functions import OWN, FunctionCall
from normlab.trace.trace import Trace

STEPS: Final = (1e-5, 1e-6, 1e-7)
"""Relative changes of the weights that are tried for central differences, until two sizes agree."""
FLOOR: Final = 1e-7
"""Relative error of a central difference in float64 that two step sizes may fail to show."""


class _LossChange(NamedTuple):
    """How the loss moves along its gradient: as the gradient predicts, as measured, and the error of that."""

    expected: float
    measured: float
    error: float

    @property
    def disagrees(self) -> bool:
        return abs(self.expected - self.measured) > 10 * self.error + FLOOR * abs(self.expected)


class Along:
    """Compares a gradient in float64 with central differences of the loss along it.

    Each parameter moves by the same share of its own size, along its own gradient, so what is missing from
    any one of them shows. Rows of padding stay, since lookups drop their gradient by design, and so do
    parameters for which that is ``meant``.
    """

    def __init__(self, trace: Trace, meant: Callable[[str], bool] = lambda _: False) -> None:
        self.trace = trace.again(taps=()) if trace.taps else trace
        gradients = {n: g for n, g in trace.gradients.items() if g is not None and bool(g.any())}
        self.gradients = _without_padding(trace.model, {n: g for n, g in gradients.items() if not meant(n)})
        weights = trace.parameters
        self.weights = {n: weights[n] for n in self.gradients}
        self.scale = {
            n: float(self.weights[n].norm() / gradient.norm().clamp_min(1e-300))
            for n, gradient in self.gradients.items()
        }
        """The factor that makes each parameter's gradient as long as the parameter."""
        self.attached: tuple[float, ...] = ()
        """The gradients of numbers that are not part of the loss, such as an auxiliary loss that an autograd
        function attaches to something else."""

    def _loss(self, names: Sequence[str], h: float) -> float:
        """Return the loss with these parameters moved by the share ``h`` of their size."""
        weights = {n: self.weights[n] + h * self.scale[n] * self.gradients[n] for n in names}
        trace = self.trace.again(weights=weights) if names else self.trace
        if not self.attached:
            return float(trace.loss)
        numbers = map(float, _numbers_given_to(trace.functions(OWN)))
        attached = sum(gradient * x for gradient, x in zip(self.attached, numbers, strict=True))
        return float(trace.loss) + attached

    def compare(self, names: Sequence[str]) -> _LossChange:
        """Compare the gradient in these parameters with central differences, at the step size whose slope
        agrees best with that of half the size.
        """
        expected = sum(self.scale[n] * float(self.gradients[n].square().sum()) for n in names)
        start, best = self._loss((), 0.0), _LossChange(expected, 0.0, float("inf"))
        for h in STEPS:
            up, down, half_up, half_down = (self._loss(names, x) for x in (h, -h, h / 2, -h / 2))
            slope, half_slope = (up - down) / (2 * h), (half_up - half_down) / h
            # the second difference of a smooth loss is a multiple of h², so that four times the one at h / 2
            # equals the one at h; what is left shows a corner within reach, as that of a ReLU
            corner = (4 * (half_up + half_down - 2 * start) - (up + down - 2 * start)) / h
            error = abs(slope - half_slope) + abs(corner)
            if error < best.error:
                # both slopes are off by a multiple of h², the first by four times as much: here that cancels
                best = _LossChange(expected, (4 * half_slope - slope) / 3, error)
            if min(best.error / 10, abs(best.measured - expected)) <= FLOOR * abs(expected):
                break
        return best

    @cached_property
    def all(self) -> _LossChange:
        """The comparison in every parameter at once, counting what is attached if that explains it."""
        moved = self.compare(list(self.gradients))
        if not moved.disagrees:
            return moved
        self.attached = self._gradients_of_attached()
        if not self.attached:
            return moved
        with_attached = self.compare(list(self.gradients))
        if with_attached.disagrees:
            self.attached = ()
            return moved
        return with_attached

    def _gradients_of_attached(self) -> tuple[float, ...]:
        """Return the gradient of each number that an autograd function is given; none if backward reaches no
        such number.
        """
        with self.trace.with_graph(functions=(OWN,)) as passed:
            numbers = _numbers_given_to(passed.functions)
            with_graph = [x for x in numbers if x.requires_grad]
            if passed.loss is None or not with_graph:
                return ()
            gradients = gradients_in(passed.loss, with_graph, self.trace.model)
        reached = {id(x): float(g) for x, g in zip(with_graph, gradients, strict=True) if g is not None}
        return tuple(reached.get(id(x), 0.0) for x in numbers) if reached else ()

    def first_wrong(self, modules: Iterable[str]) -> str:
        """Return the last parameter, as modules finish, whose gradient is not the derivative: the first on
        the way back.
        """
        return self._one_wrong(modules, backwards=True)

    def last_wrong(self, modules: Iterable[str]) -> str:
        """Return the last one on the way back."""
        return self._one_wrong(modules, backwards=False)

    def _one_wrong(self, modules: Iterable[str], *, backwards: bool) -> str:
        done = {module: i for i, module in enumerate(modules)}
        order = sorted(self.gradients, key=lambda n: done.get(n.rpartition(".")[0], -1))
        order = order[::-1] if backwards else order
        while len(order) > 1:
            half = (len(order) + 1) // 2
            order = order[:half] if self.compare(order[:half]).disagrees else order[half:]
        return order[0]


def _without_padding(model: nn.Module, gradients: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return gradients with zeros for the rows of embeddings that stand for padding."""
    parameters = dict(model.named_parameters())
    tables = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    rows = {id(table.weight): table.padding_idx for table in tables if table.padding_idx is not None}
    without = dict(gradients)
    for name, gradient in gradients.items():
        row = rows.get(id(parameters[name]))
        if row is not None:
            without[name] = gradient.index_fill(0, torch.tensor(row, device=gradient.device), 0)
    return without


def _numbers_given_to(calls: Iterable[FunctionCall]) -> list[Tensor]:
    """Return the numbers that enter autograd functions."""
    inputs = [x for call in calls for x in call.args]
    return [x for x in inputs if isinstance(x, Tensor) and x.numel() == 1 and x.is_floating_point()]
