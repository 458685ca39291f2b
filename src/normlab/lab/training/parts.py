"""The interface of a run's parts: what it does besides its steps, and what its parts share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, final

from normlab.lab.runs.folder import Row, RunFolder
from normlab.lab.training.progress import TrainingClock
from normlab.lab.training.trainer import Trainer
from normlab.watching.meter import StepRecord


class RunContext:
    """A run in progress, as its parts and a caller's observers see it."""

    def __init__(self, trainer: Trainer, folder: RunFolder) -> None:
        self.trainer, self.folder = trainer, folder
        self.config, self.ranks, self.progress = trainer.config, trainer.ranks, trainer.progress
        self.clock = TrainingClock()
        self.saved = 0
        """The step of the last checkpoint; the run will not go back before it."""
        self.parts: tuple[RunPart, ...] = ()


class RunPart:
    """Something that a run does besides its steps, or an observer that a caller gives. An error that it
    raises ends the run.

    Observers live only in the main process and cannot change the run's numbers: they get copies of the rows,
    and ``run.trainer.snapshot()`` returns a copy of the model.
    """

    key: ClassVar[str] = ""
    """The name of its state in a checkpoint, if it has any."""

    def on_start(self, run: RunContext) -> None:
        """The run begins, or continues, at ``run.progress.step``."""

    def on_step(self, record: StepRecord) -> None:
        """A step is done."""

    def on_row(self, row: Row) -> None:
        """A row about the steps since the last row was written."""

    def on_probes(self, rows: list[Row]) -> None:
        """Measurements of modules were written."""

    def on_validation(self, row: Row) -> None:
        """The weights were scored on dev."""

    def before_checkpoint(self, *, interrupted: bool) -> None:
        """A checkpoint is about to be saved."""

    def on_checkpoint(self, step: int) -> None:
        """A checkpoint was saved: the run will not go back before this step."""

    def on_end(self) -> None:
        """The run is done, and scored on its test text."""

    def close(self) -> None:
        """Release what is open; called once, however the run ends."""

    def state_dict(self) -> Mapping[str, Any]:
        """Return what the part needs to continue."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from ``state_dict()``, or from nothing. Raises UserError for anything else."""


@final
class OnRow(RunPart):
    """Calls a function with every row of metrics."""

    def __init__(self, function: Callable[[Row], None]) -> None:
        self._function = function

    def on_row(self, row: Row) -> None:
        self._function(row)

    on_validation = on_row
