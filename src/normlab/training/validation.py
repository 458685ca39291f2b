"""Validations of a run: scores on dev, the best weights, the weights that are kept, and their average."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from normlab.runs.manifest import recover
from normlab.training.checkpoint import has_checkpoint, load_checkpoint, save_checkpoint, weights_state
from normlab.training.parts import RunPart
from normlab.training.progress import Phases
from normlab.training.weights import kept_steps, step_folder

if TYPE_CHECKING:
    from normlab.training.run import Run


class Validation(RunPart):
    """The scores of the weights on dev, and the weights that score best."""

    def __init__(self, run: Run) -> None:
        self._run, self._phases = run, Phases(run.folder)

    def run(self) -> None:
        """Write a row of dev scores, and save the weights if they are the best so far."""
        run, p = self._run, self._run.progress
        with run.trainer.ema.in_place():
            model = run.trainer.parallel.plain()
            scores = run.ranks.from_main(lambda: self._scores(model))
            p.seconds = run.clock.seconds()
            row = {"kind": "dev", "step": p.step, **scores, "seconds": p.seconds}
            run.rows.write(row)
            if run.trainer.note_scores(scores):
                self._save(run.folder.best, model, scores)
            for part in run.parts:
                part.on_validation(dict(row))

    def average(self) -> None:
        """Save the average of the last weights with its dev scores, and delete what only it needed."""
        model = self._run.trainer.parallel.plain()
        self._run.ranks.from_main(lambda: self._average(model))

    def _average(self, model: nn.Module) -> None:
        average, weights = self._run.folder.average, self._run.weights
        recover(average)
        if not has_checkpoint(average):
            steps = weights.average(model)
            self._save(average, model, self._scores(model), average={"steps": steps})
        weights.finish()

    def _scores(self, model: nn.Module) -> dict[str, float]:
        with self._phases.during(self._run.trainer.task, "validating"):
            return self._run.trainer.dev_scores(model)

    def _save(
        self, folder: Path, model: nn.Module, dev: Mapping[str, float], **parts: Mapping[str, Any]
    ) -> None:
        state = {**weights_state(model, self._run.progress.step), "dev": dict(dev), **parts}
        self._run.ranks.on_main(partial(save_checkpoint, run=self._run.folder.id()), folder, state)


class KeptWeights(RunPart):
    """``runs/<id>/steps/<n>/``: the weights after step n, as a validation there scores them.

    Those of ``machine.keep_checkpoints`` stay; those that only the average needs are deleted when it no
    longer needs them. Weights that are there already are not written again.
    """

    def __init__(self, run: Run) -> None:
        self._run, self._folder = run, run.folder
        self._policy, self._average_last = run.config.machine.keep_checkpoints, run.config.train.average_last

    def keep(self, *, last: bool = False) -> None:
        """Save the weights if they are wanted; ``last`` at the end of the run."""
        step, every = self._run.progress.step, self._policy == "all" or bool(self._average_last)
        if not (
            self._stays(step) or (self._run.rows.validated and every) or (last and self._policy == "log")
        ):
            return
        with self._run.trainer.ema.in_place():
            self._run.ranks.on_main(self._save, self._run.trainer.parallel.plain(), step)

    def before_checkpoint(self, *, interrupted: bool) -> None:
        """Delete weights that no resumption from the checkpoint before or a later one can need again."""
        self._run.ranks.on_main(self._prune)

    def average(self, model: nn.Module) -> list[int]:
        r"""Give the model :math:`\bar\theta = \frac{1}{k} \sum_{i=1}^{k} \theta_{n_i}`, the mean of the
        weights at its last k validations, and return the steps of these.

        k is ``train.average_last``, or as many as there were. Vaswani et al. 2017, Section 6.1 (arXiv
        1706.03762), who take the last 5 or 20 checkpoints.
        """
        steps = list(dict.fromkeys(self._run.rows.validations()))[-self._average_last :]
        weights = [p.detach() for p in model.parameters()]
        total = [torch.zeros_like(w) for w in weights]
        for step in steps:
            load_checkpoint(step_folder(self._folder, step), model, run=self._folder.id())
            torch._foreach_add_(total, weights)
        torch._foreach_div_(total, float(len(steps)))
        torch._foreach_copy_(weights, total)
        return steps

    def finish(self) -> None:
        steps = kept_steps(self._folder)
        self._delete(steps[:-1] if self._policy == "log" else steps)

    def _save(self, model: nn.Module, step: int) -> None:
        path = step_folder(self._folder, step)
        recover(path)
        if not path.exists():
            save_checkpoint(path, weights_state(model, step), run=self._folder.id())

    def _prune(self) -> None:
        if self._average_last:
            saved = self._run.saved
            needed = [step for step in self._run.rows.validations() if step <= saved][-self._average_last :]
            self._delete(s for s in kept_steps(self._folder) if s <= saved and s not in needed)

    def _stays(self, step: int) -> bool:
        return str(step) in self._policy.split(",") or (self._policy == "log" and step & (step - 1) == 0)

    def _delete(self, steps: Iterable[int]) -> None:
        for step in list(steps):
            if self._policy != "all" and not self._stays(step):
                recover(step_folder(self._folder, step))
                shutil.rmtree(step_folder(self._folder, step))
