"""Callbacks see a run through events. They cannot change its numbers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, final

from torch import nn

Row = dict[str, Any]


@dataclass(frozen=True)
class Event:
    """Something that happened in a run, after ``step`` steps."""

    step: int
    snapshot: Callable[[], nn.Module]
    """Copies the model; ``model`` calls it."""
    rows: tuple[Row, ...] = ()
    """New rows of ``metrics.jsonl``."""
    probes: tuple[Row, ...] = ()
    """New rows of ``probes.jsonl``."""
    began: bool = False
    """The run begins, or goes on, from this step."""
    validated: bool = False
    """The rows are the scores of a validation."""
    saved: bool = False
    """A checkpoint was saved: the run will not go back behind this step."""
    ended: bool = False
    """The run is done, its scores on the test text included."""

    @cached_property
    def model(self) -> nn.Module:
        """A copy of the model with its weights now: writing to it changes nothing of the run.

        Raises RuntimeError in a run with ``--shard``, where no process has the whole model.
        """
        return self.snapshot()


class Callback(ABC):
    """Sees a run while it goes, in its main process alone."""

    @abstractmethod
    def on_event(self, event: Event) -> None:
        """Take notice of an event. An error that it raises ends the run."""

    def close(self) -> None:  # noqa: B027 - most hold nothing open
        """Let go of what is open; called once, however the run ends."""


@final
class RowCallback(Callback):
    """Calls a function with every row of metrics."""

    def __init__(self, on_row: Callable[[Row], None]) -> None:
        self._on_row = on_row

    def on_event(self, event: Event) -> None:
        for row in event.rows:
            self._on_row(row)


class Callbacks:
    """The callbacks of a run, which are all told the same."""

    def __init__(self, callbacks: Sequence[Callback], snapshot: Callable[[], nn.Module]) -> None:
        self._callbacks, self._snapshot = tuple(callbacks), snapshot

    def tell(self, step: int, *, rows: Sequence[Row] = (), probes: Sequence[Row] = (), **what: bool) -> None:
        """Give each callback an event of its own; ``what`` happened is named as the fields of ``Event``."""
        for callback in self._callbacks:
            copies = {"rows": tuple(map(dict, rows)), "probes": tuple(map(dict, probes))}
            callback.on_event(Event(step, self._snapshot, **copies, **what))

    def close(self) -> None:
        """Close every callback."""
        for callback in self._callbacks:
            callback.close()
