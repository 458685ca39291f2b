"""Parts of a run that score its weights and keep them: validations, and weights after some of the steps."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from normlab.lab.runs.manifest import recover
from normlab.lab.training.checkpoint import has_checkpoint, load_checkpoint, save_checkpoint, weights_state
from normlab.lab.training.parts import RunContext, RunPart
from normlab.lab.training.progress import Phases
from normlab.lab.training.recording import MetricRows
from normlab.lab.training.weights import kept_steps
from normlab.private_torch import add_each, copy_each, divide_each


class KeptWeights(RunPart):
    """``runs/<id>/steps/<n>/``: the weights after step n, as a validation there scores them.

    Those of ``machine.keep_checkpoints`` stay; those that only the average needs are deleted when it no
    longer needs them. Weights that already exist are not written again.
    """

    def __init__(self, run: RunContext, rows: MetricRows) -> None:
        self._run, self._rows, self._folder = run, rows, run.folder
        self._policy, self._average_last = run.config.machine.keep_checkpoints, run.config.train.average_last

    def keep(self, *, last: bool = False) -> None:
        """Save the weights if they are wanted; ``last`` at the end of the run."""
        step = self._run.progress.step
        if not self._wanted(step, last=last):
            return
        with self._run.trainer.ema.in_place():
            self._run.ranks.on_main(self._save, self._run.trainer.parallel.plain(), step)

    def _wanted(self, step: int, *, last: bool) -> bool:
        if self._stays(step):
            return True
        if self._rows.validated and (self._policy == "all" or self._average_last):
            return True
        return last and self._policy == "log"

    def before_checkpoint(self, *, interrupted: bool) -> None:
        """Delete weights that a run resumed from the previous or a later checkpoint cannot need again."""
        self._run.ranks.on_main(self._prune)

    def average(self, model: nn.Module) -> list[int]:
        r"""Give the model :math:`\bar\theta = \frac{1}{k} \sum_{i=1}^{k} \theta_{n_i}`, the mean of the
        weights at its last k validations, and return the steps of these.

        k is ``train.average_last``, or as many as there were. Vaswani et al. 2017, Section 6.1 (arXiv
        1706.03762), who take the last 5 or 20 checkpoints.
        """
        steps = list(dict.fromkeys(self._rows.validations()))[-self._average_last :]
        weights = [p.detach() for p in model.parameters()]
        total = [torch.zeros_like(w) for w in weights]
        for step in steps:
            load_checkpoint(self._folder.steps / str(step), model, run=self._folder.id())
            add_each(total, weights)
        divide_each(total, float(len(steps)))
        copy_each(weights, total)
        return steps

    def finish(self) -> None:
        """Delete what only the average needed; the log keeps the last weights, too."""
        steps = kept_steps(self._folder)
        self._delete(steps[:-1] if self._policy == "log" else steps)

    def _save(self, model: nn.Module, step: int) -> None:
        path = self._folder.steps / str(step)
        recover(path)
        if not path.exists():
            save_checkpoint(path, weights_state(model, step), run=self._folder.id())

    def _prune(self) -> None:
        if not self._average_last:
            return
        saved = self._run.saved
        validated = [step for step in self._rows.validations() if step <= saved]
        needed = validated[-self._average_last :]
        steps = [step for step in kept_steps(self._folder) if step <= saved]
        self._delete([step for step in steps if step not in needed])

    def _stays(self, step: int) -> bool:
        """Whether the weights of a step are named by the policy: listed, or of a power of two."""
        if self._policy == "log":
            return step & (step - 1) == 0  # also 0
        return str(step) in self._policy.split(",")

    def _delete(self, steps: Sequence[int]) -> None:
        for step in steps:
            if self._policy != "all" and not self._stays(step):
                recover(self._folder.steps / str(step))
                shutil.rmtree(self._folder.steps / str(step))


class Validation(RunPart):
    """The scores of the weights on dev, and the weights that score best."""

    def __init__(self, run: RunContext, rows: MetricRows, weights: KeptWeights) -> None:
        self._run, self._rows, self._weights = run, rows, weights
        self._phases = Phases(run.folder)

    def run(self) -> None:
        """Write a row of dev scores, and save the weights if they are the best so far."""
        run, progress = self._run, self._run.progress
        with run.trainer.ema.in_place():
            model = run.trainer.parallel.plain()
            scores = run.ranks.from_main(lambda: self._scores(model))
            progress.seconds = run.clock.seconds()
            row = {"kind": "dev", "step": progress.step, **scores, "seconds": progress.seconds}
            self._rows.write(row)
            if run.trainer.note_scores(scores):
                self._save(run.folder.best, model, scores)
            for part in run.parts:
                part.on_validation(dict(row))

    def average(self) -> None:
        """Save the average of the last weights with its dev scores, and delete what only it needed."""
        model = self._run.trainer.parallel.plain()
        self._run.ranks.from_main(lambda: self._average(model))

    def _average(self, model: nn.Module) -> None:
        folder = self._run.folder.average
        recover(folder)
        if not has_checkpoint(folder):
            steps = self._weights.average(model)
            self._save(folder, model, self._scores(model), average={"steps": steps})
        self._weights.finish()

    def _scores(self, model: nn.Module) -> dict[str, float]:
        with self._phases.during(self._run.trainer.task, "validating"):
            return self._run.trainer.dev_scores(model)

    def _save(
        self, folder: Path, model: nn.Module, dev: Mapping[str, float], **parts: Mapping[str, Any]
    ) -> None:
        state = {**weights_state(model, self._run.progress.step), "dev": dict(dev), **parts}
        save = partial(save_checkpoint, run=self._run.folder.id())
        self._run.ranks.on_main(save, folder, state)
