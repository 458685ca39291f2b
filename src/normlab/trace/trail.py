"""What a test makes of a step, for whoever asks why a verdict is wrong: its passes and comparisons, in order.

Nothing is noted unless somebody listens; ``checks/tracing.py`` does.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import FrameType
from typing import TYPE_CHECKING, Any, Literal, Protocol

from normlab.errors import in_one_line

if TYPE_CHECKING:  # the command line knows the entries, and loads torch only when something runs
    from torch import Tensor


class WithLoss(Protocol):
    """The part of a ``Pass`` that is noted."""

    loss: Tensor | None


@dataclass(frozen=True)
class Change:
    """One thing in which a pass differs from the step that it was made from."""

    kind: Literal["batch", "weights", "mode", "dropout", "seed", "inputs", "loss", "graph"]
    place: str
    """An entry of the batch, a parameter or a module; empty for what is not in one place."""
    how: str


@dataclass(frozen=True)
class Setting:
    """What a pass runs on."""

    model: str
    """The shared step that it was made from, by name, or another copy."""
    changes: tuple[Change, ...] = ()


@dataclass(frozen=True, kw_only=True)
class PassMade:
    """One pass: what it ran on, and its loss or what it raised."""

    kind: str = field(default="pass", init=False)
    setting: Setting
    loss: float | None
    raised: str
    asked_by: str
    """The function that asked for it."""


@dataclass(frozen=True, kw_only=True)
class StepMade:
    """One run of the whole step, on copies."""

    kind: str = field(default="step", init=False)
    exact: bool
    """Whether it ran in float64."""
    updates: bool
    """Whether its optimizers acted."""
    scale: float
    """What the gradients were multiplied by."""
    seed: int
    raised: str
    asked_by: str


@dataclass(frozen=True, kw_only=True)
class RunsCompared:
    """The comparison of two passes in a part of what the loss is computed from."""

    kind: str = field(default="runs", init=False)
    first: Setting
    second: Setting
    numbers: tuple[int, int]
    """How many numbers the part holds, and how many there are in all."""
    size: float
    """The largest difference, relative to the largest entry."""
    limit: float
    module: str
    """Where the difference begins; empty if there is none, or it begins in no module."""
    asked_by: str


@dataclass(frozen=True, kw_only=True)
class TensorsCompared:
    """The comparison of two tensors. The function that asked for it knows the limit."""

    kind: str = field(default="tensors", init=False)
    shape: tuple[int, ...]
    size: float
    asked_by: str


Entry = PassMade | StepMade | RunsCompared | TensorsCompared


class Trail:
    """Notes what tests do, in order.

    ``setting_of`` says what a ``Trace`` runs on. It is called before its pass begins, which puts its weights
    into the model.
    """

    def __init__(self, setting_of: Callable[[Any], Setting]) -> None:
        self.setting_of = setting_of
        self.entries: list[Entry] = []


_current: ContextVar[Trail | None] = ContextVar("trail", default=None)


@contextmanager
def listening(trail: Trail) -> Iterator[None]:
    """Note in a trail what tests do inside this block."""
    token = _current.set(trail)
    try:
        yield
    finally:
        _current.reset(token)


def noted_pass(trace: Any, passed: WithLoss) -> AbstractContextManager[None]:
    """Return a block that runs a pass: it notes the loss, or what the pass raises."""
    trail = _current.get()
    return nullcontext() if trail is None else _noted_pass(trail, trail.setting_of(trace), passed)


@contextmanager
def _noted_pass(trail: Trail, setting: Setting, passed: WithLoss) -> Iterator[None]:
    def note(raised: str) -> None:
        loss = None
        with suppress(Exception):  # a tensor without numbers, as on the meta device
            loss = None if passed.loss is None else float(passed.loss)
        trail.entries.append(PassMade(setting=setting, loss=loss, raised=raised, asked_by=_asking()))

    with _at_the_end(note):
        yield


@contextmanager
def noted_step(*, exact: bool, updates: bool, scale: float, seed: int) -> Iterator[None]:
    """Inside this block a whole step runs: note it, and what it raises."""

    def note(raised: str) -> None:
        if (trail := _current.get()) is not None:
            ran = {"exact": exact, "updates": updates, "scale": scale, "seed": seed}
            trail.entries.append(StepMade(**ran, raised=raised, asked_by=_asking()))

    with _at_the_end(note):
        yield


@contextmanager
def _at_the_end(note: Callable[[str], None]) -> Iterator[None]:
    """Call a function when this block has ended, with what the block raised in words, if anything."""
    raised = ""
    try:
        yield
    except BaseException as error:
        raised = in_one_line(error)
        raise
    finally:
        note(raised)


def note_runs(
    first: Any, second: Any, *, numbers: tuple[int, int], size: float, limit: float, module: str
) -> None:
    """Note that two passes were compared in some of the numbers that the loss is computed from."""
    if (trail := _current.get()) is not None:
        trail.entries.append(
            RunsCompared(
                first=trail.setting_of(first),
                second=trail.setting_of(second),
                numbers=numbers,
                size=size,
                limit=limit,
                module=module,
                asked_by=_asking(),
            )
        )


def note_tensors(x: Tensor, size: float) -> None:
    """Note that a tensor was compared with another one."""
    if (trail := _current.get()) is not None:
        shape = tuple(x.shape) if not x.is_nested else (x.size(0),)
        trail.entries.append(TensorsCompared(shape=shape, size=size, asked_by=_asking()))


def _asking() -> str:
    """Return the function of a test that asked for what is noted: the nearest one outside this room, which
    torch or a library of Python's may have called.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if not module.startswith(("normlab.trace.", "torch.")) and module not in ("contextlib", "functools"):
            return f"{module}.{frame.f_code.co_qualname}".removeprefix("normlab.")
        frame = frame.f_back
    return ""
