"""Averages of a run's weights, and the weights that are kept in its folder."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from normlab.config.config import Config
from normlab.config.units import steps_named
from normlab.errors import UserError, nearest
from normlab.runs.folder import RunFolder
from normlab.runs.manifest import recover
from normlab.training.checkpoint import (
    has_checkpoint,
    load_checkpoint,
    open_checkpoint,
    save_checkpoint,
    weights_state,
)

EMA: Final = "ema"
"""The key of the moving average in an optimiser's state."""


class Ema:
    r""":math:`\theta' \leftarrow d\,\theta' + (1 - d)\,\theta` after every step, beginning with
    :math:`\theta' = \theta` after the first.

    d is ``train.ema_decay``; 0.999 remembers about the last thousand steps. The average is part of the
    optimiser's state, and is saved, loaded and sharded with it.

    Polyak and Juditsky 1992, who weigh all steps alike; Popel and Bojar 2018 (arXiv 1804.00247) measure what
    averages do for a Transformer.
    """

    def __init__(self, optimiser: torch.optim.Optimizer, decay: float) -> None:
        self._optimiser, self._decay = optimiser, decay
        if decay:
            optimiser.register_step_post_hook(self._follow)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Put the averages in the place of the model's weights within this block, if there is a decay."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @torch.no_grad()
    def _follow(self, optimiser: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Update the averages. A parameter enters with its first gradient, as in the optimiser's state."""
        weights, means = self._pairs()
        if weights:
            torch._foreach_lerp_(means, weights, 1 - self._decay)
        for group in optimiser.param_groups:
            for p in group["params"]:
                if p.grad is not None and EMA not in optimiser.state[p]:
                    optimiser.state[p][EMA] = p.detach().clone()

    def _pairs(self) -> tuple[list[Tensor], list[Tensor]]:
        held = [(p.detach(), state[EMA]) for p, state in self._optimiser.state.items() if EMA in state]
        return [w for w, _ in held], [mean for _, mean in held]

    @torch.no_grad()
    def _exchange(self) -> None:
        weights, means = self._pairs()
        if weights:
            before = [w.clone() for w in weights]
            torch._foreach_copy_(weights, means)
            torch._foreach_copy_(means, before)


class StepWeights:
    """``runs/<id>/steps/<n>/``: the weights after step n, as a validation there scores them.

    Those of ``machine.keep_checkpoints`` stay; those that only the average needs are deleted when it no
    longer needs them. Weights that are there already are not written again.
    """

    def __init__(self, folder: RunFolder, config: Config) -> None:
        self._folder, self._policy = folder, config.machine.keep_checkpoints
        self._average_last = config.train.average_last

    def wants(self, step: int, *, validated: bool = False, last: bool = False) -> bool:
        """Whether the weights after a step should be kept."""
        if validated and (self._policy == "all" or self._average_last):
            return True
        return self._stays(step) or (last and self._policy == "log")

    def save(self, model: nn.Module, step: int) -> None:
        """Keep the model's weights, unless they are there."""
        path = step_folder(self._folder, step)
        recover(path)
        if not path.exists():
            save_checkpoint(path, weights_state(model, step), run=self._folder.id())

    def prune(self, saved: int, validated: Sequence[int]) -> None:
        """Delete weights that no resumption from step ``saved`` or later can need again."""
        needed = [step for step in validated if step <= saved][-self._average_last :]
        if self._average_last:
            self._delete(step for step in kept_steps(self._folder) if step <= saved and step not in needed)

    def average(self, model: nn.Module, validated: Sequence[int]) -> list[int]:
        r"""Give the model :math:`\bar\theta = \frac{1}{k} \sum_{i=1}^{k} \theta_{n_i}`, the mean of the
        weights at its last k validations, and return the steps of these.

        k is ``train.average_last``, or as many as there were. Vaswani et al. 2017, Section 6.1 (arXiv
        1706.03762), who take the last 5 or 20 checkpoints.
        """
        steps = list(dict.fromkeys(validated))[-self._average_last :]
        weights = [p.detach() for p in model.parameters()]
        total = [torch.zeros_like(w) for w in weights]
        for step in steps:
            load_checkpoint(step_folder(self._folder, step), model, run=self._folder.id())
            torch._foreach_add_(total, weights)
        torch._foreach_div_(total, float(len(steps)))
        torch._foreach_copy_(weights, total)
        return steps

    def finish(self) -> None:
        """Delete the weights that only the average needed."""
        if self._average_last and self._policy != "all":
            last = max(kept_steps(self._folder), default=0)
            self._delete(s for s in kept_steps(self._folder) if not (self._policy == "log" and s == last))

    def _stays(self, step: int) -> bool:
        return str(step) in self._policy.split(",") or (self._policy == "log" and step & (step - 1) == 0)

    def _delete(self, steps: Iterator[int]) -> None:
        for step in list(steps):
            if self._policy != "all" and not self._stays(step):
                recover(step_folder(self._folder, step))
                shutil.rmtree(step_folder(self._folder, step))


def step_folder(folder: RunFolder, step: int) -> Path:
    """The folder of the weights after a step."""
    return folder.steps / str(step)


def kept_steps(folder: RunFolder) -> list[int]:
    """The steps whose weights are there, in order."""
    there = folder.steps.iterdir() if folder.steps.is_dir() else ()
    names = {path.name.removesuffix(".new") for path in there}
    return sorted(int(name) for name in names if name.isdecimal() and has_checkpoint(folder.steps / name))


def tested(folder: RunFolder) -> str:
    """The name of the weights that a run is tested with: ``average`` where it has one, else ``best``."""
    return "average" if has_checkpoint(folder.average) else "best"


@dataclass(frozen=True)
class Weights:
    """Some weights of a run."""

    name: str | int
    path: Path
    description: str
    """``the best weights on dev, after step 1,200``."""
    step: int


def weights_of(folder: RunFolder, name: str | int = "") -> Weights:
    """The weights of that name, as ``checkpoint_of`` finds them, and which they are. Raises as that does."""
    path = checkpoint_of(folder, name)
    checkpoint = open_checkpoint(path)
    step = checkpoint.progress().step
    description = f"the weights after step {step:,}"
    if path != folder.last and folder.config().train.ema_decay:
        description = f"the moving average of the weights after step {step:,}"
    if path == folder.average:
        description = f"the average of the weights after {steps_named(checkpoint.averaged())}"
    elif path == folder.best:
        description = f"the best weights on dev, after step {step:,}"
    return Weights(name or tested(folder), path, description, step)


def checkpoint_of(folder: RunFolder, weights: str | int = "") -> Path:
    """The checkpoint of that name: ``best``, ``last``, ``average``, a step, or ``tested`` if empty.

    Raises FileNotFoundError that lists the weights that are there and says what to type for others, and
    UserError for another name.
    """
    if isinstance(weights, int):
        path, steps = step_folder(folder, weights), kept_steps(folder)
        if weights in steps:
            return path
        there = f"there are steps {', '.join(map(str, steps))}" if steps else "none were kept"
        raise FileNotFoundError(
            f"the run {folder.path} keeps no weights of step {weights}; {there}; train one with "
            "--keep-checkpoints log, all or 10,50, and in another --out: a run that is done is not done again"
        )
    name = weights or tested(folder)
    found: Mapping[str, Path] = {"best": folder.best, "last": folder.last, "average": folder.average}
    if name not in found:
        raise UserError(f"no weights are called {name!r}{nearest(name, found)}; a step is a whole number")
    if has_checkpoint(found[name]):
        return found[name]
    if name == "average":
        raise FileNotFoundError(
            f"the run {folder.path} has no average; train one with --average-last 5, or leave --weights out"
        )
    raise FileNotFoundError(
        f"the run {folder.path} has no checkpoint {name!r} yet; train it on: normlab train --config "
        f"{folder.path / 'config.json'}"
    )
