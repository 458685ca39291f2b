"""Checkpoints: the state of a run's parts in a folder with a manifest, replaced as a whole.

A state is a dict of the parts' ``state_dict()``s. A part's tensors are in ``<part>.safetensors``, its plain
values in the manifest. Nothing that is read can execute code.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Size, Tensor, nn

from normlab.base.io import from_plain
from normlab.base.units import count
from normlab.errors import UserError
from normlab.lab.runs.manifest import STATE, CheckpointError, commit, committed, move, read_state, recover
from normlab.lab.training.parallel import SingleProcess
from normlab.lab.training.progress import RunProgress
from normlab.trace.tensors import saved_buffers

FORMAT: Final = 2
"""The format of checkpoints that this version writes and reads."""
_FORMAT: Final = "format"
_OPTIMIZER: Final = "optimizer"
State = Mapping[str, Mapping[str, Any]]


def save_checkpoint(folder: Path, state: State, *, run: str = "", previous: Path | None = None) -> None:
    """Write a checkpoint and move it into place. If the process is killed at any time, a whole one is left.

    ``run`` is the id of the run that it belongs to. The checkpoint that it replaces is kept as ``previous``.
    """
    manifest: dict[str, Any] = {_FORMAT: FORMAT}
    tensors: dict[str, dict[str, Tensor]] = {}
    for part, content in state.items():
        tensors[part] = {key: value for key, value in content.items() if isinstance(value, Tensor)}
        values = {key: value for key, value in content.items() if not isinstance(value, Tensor)}
        if values:
            manifest[part] = values
    with commit(folder, manifest, run=run, keep=previous) as new:
        for part, content in tensors.items():
            if content or part == _OPTIMIZER:  # plain gradient descent keeps none
                _save(content, new / f"{part}.safetensors")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose files are all unchanged since they were written."""

    folder: Path
    values: Mapping[str, Any]
    """The plain values of each part."""

    def state(self, shapes: Mapping[str, Size]) -> dict[str, dict[str, Any]]:
        """The state of every part. Raises CheckpointError unless the weights have these shapes."""
        names = {part for part in self.values if isinstance(self.values[part], dict)}
        names |= {path.stem for path in self.folder.glob("*.safetensors")}
        parts = {name: self._part(name) for name in names - {"model", _OPTIMIZER}}
        path = self.folder / f"{_OPTIMIZER}.safetensors"
        optimizer = _load(path)
        _check_optimizer(optimizer, shapes, path)
        return {"model": self.model(shapes), _OPTIMIZER: optimizer, **parts}

    def model(self, shapes: Mapping[str, Size]) -> dict[str, Tensor]:
        """The weights. Raises CheckpointError unless they have these names and shapes."""
        weights = self.weights()
        _check_weights(weights, shapes, self.folder)
        return weights

    def weights(self) -> dict[str, Tensor]:
        return _load(self.folder / "model.safetensors")

    def progress(self) -> RunProgress:
        """The progress of the run when the weights were made, at least its step. Raises CheckpointError."""
        progress = RunProgress()
        with self.loading():
            progress.load_state_dict(self._part("progress"))
        return progress

    def averaged(self) -> tuple[int, ...]:
        """The steps whose weights were averaged. Raises CheckpointError."""
        steps = self._part("average").get("steps", [])
        with self.loading():
            return from_plain(tuple[int, ...], steps, "average.steps")

    @contextmanager
    def loading(self) -> Generator[None]:
        """Turn the UserError of a part that refuses its state into a CheckpointError that names the file."""
        try:
            yield
        except CheckpointError:
            raise
        except UserError as error:
            raise CheckpointError(self.folder, f"{self.folder / STATE}: {error}") from error

    def _part(self, name: str) -> dict[str, Any]:
        path, values = self.folder / f"{name}.safetensors", self.values.get(name, {})
        if not isinstance(values, dict):
            wrong = f"{self.folder / STATE}: {name} is not an object but {values!r}"
            raise CheckpointError(self.folder, wrong)
        tensors = _load(path) if path.exists() else {}
        return {**values, **tensors}


def open_checkpoint(folder: Path, *, run: str = "") -> Checkpoint:
    """Open a checkpoint and check its files and, with ``run``, that it belongs to the run with this id.

    Raises FileNotFoundError if there is none. Raises CheckpointError, which names the file and the fault,
    if a file is cut off, edited or missing, and if the checkpoint has another format.
    """
    folder = committed(folder)
    if not folder.exists():
        raise FileNotFoundError(f"no checkpoint in {folder}; train the run first: normlab train")
    manifest = read_state(folder, run=run)
    version = manifest.pop(_FORMAT, 1)
    if version != FORMAT:
        why = f"{folder / STATE} has checkpoint format {version}, and this version of normlab reads {FORMAT}"
        raise CheckpointError(folder, why)
    return Checkpoint(folder, manifest)


def load_checkpoint(
    folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer | None = None, *, run: str = ""
) -> Checkpoint:
    """Load the weights of a checkpoint into a model, and the optimizer's tensors into an optimizer.

    Raises what ``open_checkpoint`` raises, and CheckpointError if the checkpoint belongs to another model; in
    that case nothing is loaded.
    """
    checkpoint = open_checkpoint(folder, run=run)
    target = SingleProcess(model)
    if optimizer is None:
        target.load_weights(checkpoint.model(target.shapes()))
    else:
        target.load_state_dict(checkpoint.state(target.shapes()), optimizer)
    return checkpoint


def weights_state(model: nn.Module, step: int) -> dict[str, dict[str, Any]]:
    """Return a state of weights alone. A parameter that two sublayers share is stored once."""
    weights = {name: p.detach() for name, p in model.named_parameters()} | saved_buffers(model)
    return {"model": weights, "progress": {"step": step}}


def has_checkpoint(folder: Path) -> bool:
    """Whether there is a checkpoint to load."""
    return (committed(folder) / STATE).exists()


def resume(last: Path, previous: Path, load: Callable[[Path], int]) -> str:
    """Call ``load``, which returns the step, with the last checkpoint, or with the one before it if the last
    one is refused; return a sentence about the refusal, if any. Without a checkpoint nothing is called.

    The refused one is kept as ``last.refused``, and the other takes its place. Raises CheckpointError if
    there is no other; if the other is refused too, the error names both.
    """
    recover(last, keep=previous)
    if not last.exists() and not previous.exists():
        return ""
    try:
        if not last.exists():
            raise CheckpointError(last, f"{last} is missing")
        load(last)
    except CheckpointError as error:
        refused = error
    else:
        return ""
    if not previous.exists():
        raise refused
    try:
        step = load(previous)
    except CheckpointError as error:
        raise CheckpointError(last, f"{refused.why}, and {error.why}", refused.todo) from error
    kept_as = ""
    if last.exists():
        aside = last.with_name(f"{last.name}.refused")
        move(last, aside)
        kept_as = f"; it is kept as {aside}"
    move(previous, last)
    return f"{refused.why}{kept_as}; the run goes on from step {step}, the checkpoint before it"


def _load(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except FileNotFoundError:
        raise CheckpointError(path.parent, f"{path} is missing") from None
    except SafetensorError as error:
        raise CheckpointError(path.parent, f"{path} is damaged ({error})") from error


def _save(tensors: dict[str, Tensor], path: Path) -> None:
    """Save tensors; an error of the operating system is raised as OSError."""
    try:
        save_file(tensors, path)
    except SafetensorError as error:
        code = re.search(r"\(os error (\d+)\)", str(error))
        if code is None:
            raise
        raise OSError(int(code[1]), os.strerror(int(code[1])), str(path)) from error


def _check_weights(stored: Mapping[str, Tensor], shapes: Mapping[str, Size], folder: Path) -> None:
    why = _weights_misfit(stored, shapes)
    if why:
        todo = "bring back the config.json and tokenizer.json that it was trained with"
        raise CheckpointError(folder, f"the checkpoint {folder} {why}", todo)


def _weights_misfit(stored: Mapping[str, Tensor], shapes: Mapping[str, Size]) -> str:
    """Return why weights do not fit a model with these shapes; empty if they do."""
    different = sorted(stored.keys() ^ shapes.keys())
    if different:
        many = count(len(different), "tensor")
        return f"belongs to another model, which differs in {many}, first {different[0]}"
    for name, shape in shapes.items():
        if stored[name].shape != shape:
            return f"holds {name} of shape {list(stored[name].shape)}, the model wants {list(shape)}"
    for name in shapes:
        tensor = stored[name]
        if tensor.dim() and not tensor.is_floating_point():  # a count of steps is an integer
            return f"holds {name} as {tensor.dtype}, the model wants floating-point numbers"
    return ""


def _check_optimizer(stored: Mapping[str, Tensor], shapes: Mapping[str, Size], path: Path) -> None:
    """Check that each parameter's tensors have its shape or one entry, and that no parameter has only some of
    another's keys; parameters stepped by different rules have different keys.
    """
    keys_of: dict[str, set[str]] = {}
    for full_name, tensor in stored.items():
        name, _, key = full_name.rpartition("/")
        if name not in shapes or (tensor.numel() != 1 and tensor.shape != shapes[name]):
            raise CheckpointError(path.parent, f"{path} belongs to another model: {full_name} does not fit")
        keys_of.setdefault(name, set()).add(key)
    all_keys = set(map(frozenset, keys_of.values()))
    for name, keys in keys_of.items():
        lacking: set[str] = set()
        for more_keys in all_keys:
            if keys < more_keys:
                lacking |= more_keys - keys
        if lacking:
            raise CheckpointError(path.parent, f"{path} is damaged ({name} lacks {min(lacking)})")
