"""Validations: scores on dev, the best weights, and the average of the last ones."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from normlab.runs.folder import RunFolder
from normlab.runs.manifest import recover
from normlab.training.checkpoint import has_checkpoint, save_checkpoint, weights_state
from normlab.training.phase import Phases
from normlab.training.progress import Clock
from normlab.training.rows import Rows
from normlab.training.trainer import Trainer
from normlab.training.weights import StepWeights


class Validation:
    """Scores the weights of a run on dev, and saves those that score best."""

    def __init__(self, trainer: Trainer, folder: RunFolder, rows: Rows, clock: Clock) -> None:
        self._trainer, self._folder, self._rows, self._clock = trainer, folder, rows, clock
        self._phases, self._ranks = Phases(folder), trainer.ranks

    def run(self) -> None:
        """Write a row of dev scores, and save the weights if they are the best so far."""
        progress = self._trainer.progress
        with self._trainer.ema.in_place():
            model = self._trainer.parallel.plain()
            scores = self._ranks.from_main(lambda: self._scores(model))
            progress.seconds = self._clock.seconds()
            self._rows.write({"kind": "dev", "step": progress.step, **scores, "seconds": progress.seconds})
            if self._trainer.validated(scores):
                self._save(self._folder.best, model, scores)

    def average(self, step_weights: StepWeights) -> None:
        """Save the average of the last weights with its dev scores, and delete what only it needed."""
        model = self._trainer.parallel.plain()
        self._ranks.from_main(lambda: self._average(model, step_weights))

    def _average(self, model: nn.Module, step_weights: StepWeights) -> None:
        recover(self._folder.average)
        if not has_checkpoint(self._folder.average):
            steps = step_weights.average(model, self._rows.validations())
            self._save(self._folder.average, model, self._scores(model), average={"steps": steps})
        step_weights.finish()

    def _scores(self, model: nn.Module) -> dict[str, float]:
        with self._phases.during(self._trainer.task, "validating"):
            return self._trainer.dev_scores(model)

    def _save(
        self, folder: Path, model: nn.Module, dev: Mapping[str, float], **parts: Mapping[str, Any]
    ) -> None:
        state = {**weights_state(model, self._trainer.progress.step), "dev": dict(dev), **parts}
        self._ranks.on_main(partial(save_checkpoint, run=self._folder.id()), folder, state)
