"""Weights and optimiser state as safetensors: a checkpoint is a folder, replaced as a whole."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from normlab.spec.serialise import parsed
from normlab.store.files import named

_ANEW = "move the run's folder away to train it anew"
_BRING_BACK = "bring back the config.json and tokenizer.json that it was trained with"


def save_checkpoint(
    folder: Path, model: nn.Module, optimiser: torch.optim.Optimizer | None, state: dict[str, Any]
) -> None:
    """Write a checkpoint beside ``folder`` and put it in its place by renaming."""
    new, old = folder.with_name(folder.name + ".new"), folder.with_name(folder.name + ".old")
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir(parents=True)
    _save(_weights(model), new / "model.safetensors")
    if optimiser is not None:
        _save(_optimiser_tensors(model, optimiser), new / "optimiser.safetensors")
    with named(new / "state.json"):
        (new / "state.json").write_text(json.dumps(state), encoding="utf-8")
    for path in [*new.iterdir(), new]:
        _fsync(path)
    if folder.exists():
        shutil.rmtree(old, ignore_errors=True)
        folder.rename(old)
    new.rename(folder)
    _fsync(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


def load_checkpoint(
    folder: Path, model: nn.Module, optimiser: torch.optim.Optimizer | None = None
) -> dict[str, Any]:
    """Fill model and optimiser from a checkpoint; its state. Nothing that is read can execute code."""
    old = folder.with_name(folder.name + ".old")
    if not folder.exists() and old.exists():
        old.rename(folder)
    if not (folder / "state.json").exists():
        raise FileNotFoundError(f"no checkpoint in {folder}; train the run first: normlab train")
    stored = _load(folder / "model.safetensors")
    expected = _weights(model)
    if stored.keys() != expected.keys():
        different = sorted(stored.keys() ^ expected.keys())
        raise ValueError(
            f"the checkpoint {folder} belongs to another model: "
            f"{len(different)} tensors differ, first {different[0]}; {_BRING_BACK}"
        )
    for name, tensor in expected.items():
        if tensor.shape != stored[name].shape:
            raise ValueError(
                f"the checkpoint {folder} holds {name} of shape {list(stored[name].shape)}, "
                f"the model wants {list(tensor.shape)}; {_BRING_BACK}"
            )
    state = _state(folder / "state.json")
    if optimiser is not None:
        path = folder / "optimiser.safetensors"
        kept = _load(path)
        _check_optimiser(kept, expected, path)
        _load_optimiser(model, optimiser, kept)
    with torch.no_grad():
        for name, tensor in expected.items():
            tensor.copy_(stored[name])
    return state


def has_checkpoint(folder: Path) -> bool:
    """Whether there is something to resume from."""
    return (folder / "state.json").exists() or (
        folder.with_name(folder.name + ".old") / "state.json"
    ).exists()


def _load(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except FileNotFoundError:
        raise FileNotFoundError(f"the checkpoint has no {path}; resume from a run's folder `last`") from None
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged ({error}); {_ANEW}") from error


def _state(path: Path) -> dict[str, Any]:
    try:
        state = parsed(path.read_text(encoding="utf-8"))
        if not isinstance(state, dict):
            raise ValueError("it holds no object")
    except ValueError as error:
        raise ValueError(f"{path} is damaged ({error}); {_ANEW}") from error
    return state


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
            raise ValueError(f"{path} belongs to another model: {full_name} does not fit; {_ANEW}")
        parts.setdefault(name, set()).add(part)
    every = set().union(*parts.values())
    for name, found in parts.items():
        if lacks := every - found:
            raise ValueError(f"{path} is damaged ({name} lacks {min(lacks)}); {_ANEW}")


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
    for full_name, tensor in stored.items():
        name, key = full_name.rsplit("/", 1)
        target = by_name[name]
        optimiser.state[target][key] = tensor.to(target.device)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
