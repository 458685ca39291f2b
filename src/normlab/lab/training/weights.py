"""The weights of a run: their moving average, those in its folder, and those that another run begins with."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import torch
from torch import Tensor

from normlab.base.units import count, steps_named
from normlab.errors import UserError, nearest
from normlab.lab.config import Config
from normlab.lab.runs.folder import RunFolder, find_run
from normlab.lab.tasks.task import Prepared, Task
from normlab.lab.training.checkpoint import has_checkpoint, open_checkpoint
from normlab.lab.training.parallel import Parallel
from normlab.private_torch import copy_each, interpolate_each
from normlab.trace.tensors import bytes_of

EMA: Final = "ema"
"""The key of the moving average in an optimizer's state."""


class Ema:
    r""":math:`\theta' \leftarrow d\,\theta' + (1 - d)\,\theta` after every step, beginning with
    :math:`\theta' = \theta` after the first.

    d is ``train.ema_decay``; 0.999 remembers about the last thousand steps. The average is part of the
    optimizer's state, and is saved, loaded and sharded with it.

    Polyak and Juditsky 1992, who weight all steps equally; Popel and Bojar 2018 (arXiv 1804.00247) measure
    what averages do for a Transformer.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, decay: float) -> None:
        self._optimizer, self._decay = optimizer, decay
        if decay:
            optimizer.register_step_post_hook(self._follow)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Within this block, replace the model's weights by their averages, if there is a decay."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @torch.no_grad()
    def _follow(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Update the averages. A parameter enters with its first gradient, as in the optimizer's state."""
        weights, means = self._pairs()
        if weights:
            interpolate_each(means, weights, 1 - self._decay)
        for group in optimizer.param_groups:
            for p in group["params"]:
                if p.grad is not None and EMA not in optimizer.state[p]:
                    optimizer.state[p][EMA] = p.detach().clone()

    def _pairs(self) -> tuple[list[Tensor], list[Tensor]]:
        """Return the weights that have an average, and the averages."""
        weights: list[Tensor] = []
        means: list[Tensor] = []
        for p, state in self._optimizer.state.items():
            if EMA in state:
                weights.append(p.detach())
                means.append(state[EMA])
        return weights, means

    @torch.no_grad()
    def _exchange(self) -> None:
        weights, means = self._pairs()
        if weights:
            before = [w.clone() for w in weights]
            copy_each(weights, means)
            copy_each(means, before)


def kept_steps(folder: RunFolder) -> list[int]:
    """Return the steps whose weights were kept, in order."""
    if not folder.steps.is_dir():
        return []
    names = {path.name.removesuffix(".new") for path in folder.steps.iterdir()}
    return sorted(int(name) for name in names if name.isdecimal() and has_checkpoint(folder.steps / name))


def _tested_name(folder: RunFolder) -> str:
    """The name of the weights that a run is tested with: ``average`` if it has one, else ``best``."""
    return "average" if has_checkpoint(folder.average) else "best"


@dataclass(frozen=True)
class Weights:
    """A set of weights of a run."""

    name: str | int
    path: Path
    description: str
    """Which weights they are, in words: ``the best weights on dev, after step 1,200``."""
    step: int


def weights_of(folder: RunFolder, name: str | int = "") -> Weights:
    """Return the weights with that name, as ``checkpoint_of`` finds them. Raises what that raises."""
    path = checkpoint_of(folder, name)
    checkpoint = open_checkpoint(path)
    step = checkpoint.progress().step
    if path == folder.average:
        description = f"the average of the weights after {steps_named(checkpoint.averaged())}"
    elif path == folder.best:
        description = f"the best weights on dev, after step {step:,}"
    elif path != folder.last and folder.config().train.ema_decay:
        description = f"the moving average of the weights after step {step:,}"
    else:
        description = f"the weights after step {step:,}"
    return Weights(name or _tested_name(folder), path, description, step)


def checkpoint_of(folder: RunFolder, weights: str | int = "") -> Path:
    """Return the checkpoint ``best``, ``last``, ``average``, of a step, or ``_tested_name`` if empty.

    Raises FileNotFoundError, with what exists and how to get others, and UserError for an unknown name.
    """
    if isinstance(weights, int):
        steps = kept_steps(folder)
        if weights in steps:
            return folder.steps / str(weights)
        known = f"there are steps {', '.join(map(str, steps))}" if steps else "none were kept"
        raise FileNotFoundError(
            f"the run {folder.path} keeps no weights of step {weights}; {known}; train one with "
            "--keep-checkpoints log, all or 10,50, and in another --out: a run that is done is not done again"
        )
    name = weights or _tested_name(folder)
    paths = {"best": folder.best, "last": folder.last, "average": folder.average}
    if name not in paths:
        raise UserError(f"no weights are called {name!r}{nearest(name, paths)}; a step is a whole number")
    if has_checkpoint(paths[name]):
        return paths[name]
    if name == "average":
        raise FileNotFoundError(
            f"the run {folder.path} has no average; train one with --average-last 5, or leave --weights out"
        )
    raise FileNotFoundError(
        f"the run {folder.path} has no checkpoint {name!r} yet; train it on: normlab train --config "
        f"{folder.path / 'config.json'}"
    )


@dataclass(frozen=True)
class InitialWeights:
    """The names of the parameters that a run took from another run, and of those that differ."""

    run: str
    """The other run's id."""
    weights: str
    """Which of its weights: ``average`` or ``best``."""
    digest: str
    taken: tuple[str, ...]
    other_shape: tuple[str, ...]
    """In both runs, with different shapes. These, and those not in the other run, are initialised anew."""
    not_there: tuple[str, ...]
    """Not in the other run."""
    left_over: tuple[str, ...]
    """Only in the other run."""

    def sentence(self) -> str:
        missed = {
            "of another shape": self.other_shape,
            "not in that run": self.not_there,
            "not in this run": self.left_over,
        }
        sentence = f"starts from the {self.weights} weights of {self.run}"
        sentence += f": {count(len(self.taken), 'tensor')} taken"
        for words, names in missed.items():
            if names:
                sentence += f"; {words}: {', '.join(names)}"
        return sentence


def with_start(config: Config, root: Path) -> Config:
    """Add the digest of the weights that ``train.init_from`` names to a configuration; it enters the run id.
    An empty ``data.tokenizer`` becomes that run's.

    A digest that is already set is kept, for ``load_initial_weights`` to check. Raises FileNotFoundError for
    a run that does not exist or has no weights yet.
    """
    train = config.train
    if not train.init_from or train.init_digest:
        return config
    source = find_run(train.init_from, root)
    start = replace(train, init_from=str(source.path), init_digest=digest(_tested_weights(source)))
    tokenizer = config.data.tokenizer or str(source.tokenizer)
    return replace(config, train=start, data=replace(config.data, tokenizer=tokenizer))


def load_initial_weights(model: Parallel, task: Task[Any, Any, Any]) -> InitialWeights:
    """Load the weights of ``train.init_from`` that have the name and shape of one of the model's; return what
    was taken.

    Raises UserError if the tokenizers differ, if nothing matches or something that the task needs does not,
    and if the weights no longer have the digest ``train.init_digest``; FileNotFoundError if they are gone.
    """
    train = task.config.train
    shapes = model.shapes()
    folder = RunFolder(train.init_from)
    _require_same_tokenizer(folder, task.corpus)
    given = _tested_weights(folder)
    now = digest(given)
    if now != train.init_digest:
        raise UserError(
            f"the weights of {folder.path} have the digest {now}, and this run starts from "
            f"{train.init_digest}; bring those back, or start another run from what is there: "
            f"--init-from {folder.path}"
        )
    taken = {name: given[name] for name in shapes if name in given and shapes[name] == given[name].shape}
    if not taken:
        raise UserError(
            f"no tensor of {folder.path} has both the name and the shape of one of this model's, so nothing "
            f"would be taken; give the sizes of that run ({folder.path / 'config.json'}), or leave out "
            "--init-from"
        )
    about = InitialWeights(
        run=folder.path.resolve().name,
        weights=_tested_name(folder),
        digest=now,
        taken=tuple(taken),
        other_shape=tuple(name for name in shapes if name in given and name not in taken),
        not_there=tuple(name for name in shapes if name not in given),
        left_over=tuple(name for name in given if name not in shapes),
    )
    if task.new_parameters is not None:
        _require_exact(about, task, folder)
    model.load_weights(taken)
    return about


def _require_exact(about: InitialWeights, task: Task[Any, Any, Any], folder: RunFolder) -> None:
    """Raise UserError if shapes differ, or if parameters are new or left out that the task does not name."""
    new, dropped = task.new_parameters or (), task.dropped_parameters
    wrong = [f"{name} has another shape there" for name in about.other_shape]
    wrong += [f"{name} is not there" for name in about.not_there if not name.startswith(new)]
    wrong += [f"{name} is there alone" for name in about.left_over if not name.startswith(dropped)]
    if wrong:
        more = f", and {len(wrong) - 1} more" if len(wrong) > 1 else ""
        raise UserError(
            f"{folder.path} has another model than this {task.name}: {wrong[0]}{more}; give the recipe and "
            f"the sizes of that run ({folder.path / 'config.json'})"
        )


def _require_same_tokenizer(folder: RunFolder, corpus: Prepared) -> None:
    with TemporaryDirectory() as scratch:
        file = Path(scratch) / folder.tokenizer.name
        corpus.tokenizer.save(file)
        if file.read_bytes() != folder.tokenizer.read_bytes():
            raise UserError(
                f"{folder.path} was trained with another tokenizer, so its embeddings are of other pieces; "
                f"type --tokenizer {folder.tokenizer}, or leave out --init-from"
            )


def _tested_weights(folder: RunFolder) -> dict[str, Tensor]:
    return open_checkpoint(checkpoint_of(folder), run=folder.id()).weights()


def digest(weights: Mapping[str, Tensor]) -> str:
    """Return the first 16 hex digits of the SHA-256 of names, shapes, dtypes and contents, sorted by name."""
    sha = hashlib.sha256()
    for name in sorted(weights):
        tensor = weights[name]
        sha.update(f"{name} {list(tensor.shape)} {tensor.dtype}\0".encode())
        sha.update(bytes_of(tensor))
    return sha.hexdigest()[:16]
