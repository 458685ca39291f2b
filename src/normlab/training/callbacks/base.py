"""What follows a run while it goes: its log, and TensorBoard where that is asked for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

from normlab.training.callbacks.tensorboard import Board
from normlab.training.record import Record

if TYPE_CHECKING:
    from normlab.training.trainer import Loop

Row = Mapping[str, Any]


class Callback(Protocol):
    """Sees every row as it is written."""

    def metrics(self, row: Row) -> None:
        """One row of ``metrics.jsonl``."""
        ...

    def probes(self, rows: Sequence[Row]) -> None:
        """Rows of ``probes.jsonl``."""
        ...

    def saved(self) -> None:
        """The run has written a checkpoint."""
        ...


@contextmanager
def followed(loop: Loop) -> Iterator[Record]:
    """Within this block the run is followed, from the step on at which it stands; gives its log."""
    folder, step = loop.folder, loop.progress.step
    record = Record(folder)
    if not loop.ranks.main:
        yield record
        return
    record.start(loop.config, loop.model, loop.device, step=step)
    boards = [Board(folder.tensorboard, step)] if loop.config.machine.tensorboard else []
    loop.callbacks.extend([record, *boards])
    try:
        yield record
    finally:
        loop.callbacks.clear()
        for board in boards:
            board.close()
