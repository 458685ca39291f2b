"""Weights and optimiser state as safetensors: a checkpoint is a sealed folder, replaced as a whole."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from normlab.store.sealed import STATE, SealError, move, replaced, settle, standing, unsealed

_BRING_BACK = "bring back the config.json and tokenizer.json that it was trained with"
_MODEL, _OPTIMISER, _EXTRA = "model.safetensors", "optimiser.safetensors", "extra.safetensors"


def save_checkpoint(
    folder: Path,
    model: nn.Module,
    optimiser: torch.optim.Optimizer | None,
    state: dict[str, Any],
    *,
    run: str = "",
    extra: Mapping[str, Tensor] | None = None,
    previous: Path | None = None,
) -> None:
    """Write a checkpoint and put it in its place. Whenever the process is killed, a whole one is left.

    ``run`` is the id of the run that it is of, ``extra`` any more tensors, for ``load_extra``. The checkpoint
    that it replaces is kept as ``previous``.
    """
    with replaced(folder, state, run=run, keep=previous) as new:
        _save(_weights(model), new / _MODEL)
        if optimiser is not None:
            _save(_optimiser_tensors(model, optimiser), new / _OPTIMISER)
        if extra:
            _save(dict(extra), new / _EXTRA)


def load_checkpoint(
    folder: Path, model: nn.Module, optimiser: torch.optim.Optimizer | None = None, *, run: str = ""
) -> dict[str, Any]:
    """Fill model and optimiser from a checkpoint; its state. Nothing that is read can execute code.

    Raises ``SealError``, which names the file and what is wrong with it, before anything is
    filled: where a file is cut off, edited or missing, or of another model, or where the checkpoint is of
    another run than ``run``.
    """
    folder = standing(folder)
    if not folder.exists():
        raise FileNotFoundError(f"no checkpoint in {folder}; train the run first: normlab train")
    state = unsealed(folder, run=run)
    stored, expected = _load(folder / _MODEL), _weights(model)
    _check_weights(stored, expected, folder)
    if optimiser is not None:
        path = folder / _OPTIMISER
        kept = _load(path)
        _check_optimiser(kept, expected, path)
        _load_optimiser(model, optimiser, kept)
    with torch.no_grad():
        for name, tensor in expected.items():
            tensor.copy_(stored[name])
    return state


def load_weights(folder: Path, *, run: str) -> dict[str, Tensor]:
    """A checkpoint's weights by name, without a model to put them in. Raises as ``load_checkpoint``."""
    folder = standing(folder)
    unsealed(folder, run=run)
    return _load(folder / _MODEL)


def load_extra(folder: Path) -> dict[str, Tensor]:
    """The further tensors of a checkpoint; ``load_checkpoint`` has looked whether they are whole."""
    path = standing(folder) / _EXTRA
    return _load(path) if path.exists() else {}


def has_checkpoint(folder: Path) -> bool:
    """Whether there is something to load."""
    return (standing(folder) / STATE).exists()


def resume(last: Path, previous: Path, load: Callable[[Path], int]) -> str:
    """Call ``load``, which gives the step, with the last checkpoint, or with the one before it where the last
    one is refused; a sentence about that, if any. Where there is no checkpoint nothing is called.

    What was refused is kept as ``last.refused``, and the other takes its place. Raises SealError where there
    is no other, and one that names both where the other is refused, too.
    """
    settle(last, keep=previous)
    if not last.exists() and not previous.exists():
        return ""
    try:
        if not last.exists():
            raise SealError(last, f"{last} is missing")
        load(last)
    except SealError as error:
        refused = error
    else:
        return ""
    if not previous.exists():
        raise refused
    try:
        step = load(previous)
    except SealError as error:
        raise SealError(last, f"{refused.why}, and {error.why}", refused.todo) from error
    kept = ""
    if last.exists():
        aside = last.with_name(f"{last.name}.refused")
        move(last, aside)
        kept = f"; it is kept as {aside}"
    move(previous, last)
    return f"{refused.why}{kept}; the run goes on from step {step}, the checkpoint before it"


def _load(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except FileNotFoundError:
        raise SealError(path.parent, f"{path} is missing") from None
    except SafetensorError as error:
        raise SealError(path.parent, f"{path} is damaged ({error})") from error


def _check_weights(stored: dict[str, Tensor], expected: dict[str, Tensor], folder: Path) -> None:
    if stored.keys() != expected.keys():
        different = sorted(stored.keys() ^ expected.keys())
        why = f"{len(different)} tensors differ, first {different[0]}"
        raise SealError(folder, f"the checkpoint {folder} belongs to another model: {why}", _BRING_BACK)
    for name, tensor in expected.items():
        if tensor.shape != stored[name].shape:
            raise SealError(
                folder,
                f"the checkpoint {folder} holds {name} of shape {list(stored[name].shape)}, "
                f"the model wants {list(tensor.shape)}",
                _BRING_BACK,
            )


def _save(tensors: dict[str, Tensor], path: Path) -> None:
    """``save_file``, whose errors of the system name none of its kinds."""
    try:
        save_file(tensors, path)
    except SafetensorError as error:
        code = re.search(r"\(os error (\d+)\)", str(error))
        if code is None:
            raise
        raise OSError(int(code[1]), os.strerror(int(code[1])), str(path)) from error


def _check_optimiser(kept: dict[str, Tensor], weights: dict[str, Tensor], path: Path) -> None:
    """Each parameter's state has the parameter's shape or is one number, and all have the same parts."""
    parts: dict[str, set[str]] = {}
    for full_name, tensor in kept.items():
        name, _, part = full_name.rpartition("/")
        if name not in weights or (tensor.numel() != 1 and tensor.shape != weights[name].shape):
            raise SealError(path.parent, f"{path} belongs to another model: {full_name} does not fit")
        parts.setdefault(name, set()).add(part)
    every = set().union(*parts.values())
    for name, found in parts.items():
        if lacks := every - found:
            raise SealError(path.parent, f"{path} is damaged ({name} lacks {min(lacks)})")


def _weights(model: nn.Module) -> dict[str, Tensor]:
    """Parameters by their first name: a parameter that two sublayers share is stored once."""
    return {name: p.detach() for name, p in model.named_parameters()}


def _optimiser_tensors(model: nn.Module, optimiser: torch.optim.Optimizer) -> dict[str, Tensor]:
    return {
        f"{name}/{key}": value
        for name, p in model.named_parameters()
        for key, value in optimiser.state[p].items()
        if isinstance(value, Tensor)
    }


def _load_optimiser(model: nn.Module, optimiser: torch.optim.Optimizer, stored: dict[str, Tensor]) -> None:
    by_name = dict(model.named_parameters())
    optimiser.state.clear()
    for full_name, tensor in stored.items():
        name, key = full_name.rsplit("/", 1)
        target = by_name[name]
        optimiser.state[target][key] = tensor.to(target.device)
