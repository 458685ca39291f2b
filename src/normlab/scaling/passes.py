"""What one pass of a model shows, throughout in its order, or only at its ends."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

from torch import Tensor

from normlab.trace.facts.stacks import stream_of
from normlab.trace.facts.targets import SCORED, FunctionInput
from normlab.trace.functions import FunctionCall, ParameterReading
from normlab.trace.tensors import Side, at, tensors_in

if TYPE_CHECKING:
    from normlab.scaling.measured import WatchedModel


class EnoughError(Exception):
    """Ends a pass when the rest of it is not needed."""


class Ends:
    """The streams that enter the stacks, and the logits, of one pass."""

    def __init__(self, subject: WatchedModel) -> None:
        self.subject = subject
        self.entering: dict[str, Tensor] = {}
        self._scored: list[Tensor] = []
        self._tapped: Tensor | None = None

    def module(self, path: str, side: Side, values: Any) -> None:
        x, where = stream_of(t for _, t in tensors_in(values)), self.subject.logits
        if side == "input":
            if path in self.subject.blocks and x is not None and path not in self.entering:
                self.entering[path] = x.detach().clone()
        elif x is not None and getattr(where, "module", None) == path:
            with suppress(Exception):  # another call of the module may return something else
                self._tapped = at(values, where.place).detach().clone()

    def call(self, call: FunctionCall) -> None:
        if call.name in SCORED:
            self._scored.append(call.argument(0, "input").detach().clone())

    @property
    def scored(self) -> Tensor | None:
        """The logits."""
        where = self.subject.logits
        if isinstance(where, FunctionInput):
            return where.joined([self._scored[i] for i in where.calls])
        return self._tapped

    @property
    def entered(self) -> list[Tensor]:
        """The streams as they enter the first block of each stack."""
        return [self.entering[path] for path in self.subject.entries if path in self.entering]


class WholePass(Ends):
    """What one pass shows, in its order."""

    def __init__(self, subject: WatchedModel) -> None:
        super().__init__(subject)
        self.time = 0
        self._running: list[str] = []
        self.shown: list[tuple[str, str, Tensor, int]] = []
        """Outputs of modules and scores of attention, each with its module and its time."""
        self.readings: list[tuple[ParameterReading, str, int]] = []

    def module(self, path: str, side: Side, values: Any) -> None:
        subject, known = self.subject, path in self.entering
        x = stream_of(t for _, t in tensors_in(values))
        super().module(path, side, values)
        if side == "input":
            self._running.append(path)
            if not known and path in self.entering and path in subject.entries:
                self._show("entry", path, self.entering[path])
            return
        while self._running and self._running.pop() != path:
            pass
        if x is not None:
            self._show("stream" if path in subject.blocks else "activation", path, x)

    def call(self, call: FunctionCall) -> None:
        super().call(call)
        own = self._running[-1] if self._running else ""
        if call.name not in SCORED and (own in self.subject.scores or call.name != "softmax"):
            self._show("scores", own, _scores_of(call))

    def _show(self, kind: str, path: str, x: Tensor) -> None:
        self.time += 1
        self.shown.append((kind, path, x.detach().clone(), self.time))

    def read(self, reading: ParameterReading) -> None:
        self.time += 1
        self.readings.append((reading, self._running[-1] if self._running else "", self.time))


def _scores_of(call: FunctionCall) -> Tensor:
    """The scores before the softmax, with 0 for masked ones."""
    if call.name == "softmax":
        x = call.argument(0, "input").detach()
        return x.masked_fill(call.result == 0, 0.0)
    return call.products().detach()
