"""Leave a model, and everything random, as it was."""

from __future__ import annotations

import random
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from normlab.trace.setup import Setup
from normlab.trace.tensors import eager


@contextmanager
def same_random_state(seed: int | None = None) -> Iterator[None]:
    """Restore the generators of torch on every device, Python and numpy after this block; seed them first."""
    numpy = sys.modules.get("numpy")
    python, legacy = random.getstate(), numpy.random.get_state() if numpy else None
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    try:
        with torch.random.fork_rng(devices=devices):
            if seed is not None:
                torch.manual_seed(seed)
                random.seed(seed)
                if numpy:
                    numpy.random.seed(seed)
            yield
    finally:
        random.setstate(python)
        if numpy and legacy is not None:
            numpy.random.set_state(legacy)


@contextmanager
def same_globals() -> Iterator[None]:
    """Restore torch's default type and gradient mode after this block, in which warnings are silent."""
    dtype, grad = torch.get_default_dtype(), torch.is_grad_enabled()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.set_default_dtype(dtype)
        torch.set_grad_enabled(grad)


@contextmanager
def same_buffers(model: nn.Module) -> Iterator[None]:
    """Restore the buffers of a model after this block: running statistics, counters, power iterations."""
    own: list[tuple[nn.Module, str, Tensor | None, Tensor | None]] = [
        (module, name, buffer, None if buffer is None or buffer.is_meta else buffer.detach().clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
    ]
    try:
        yield
    finally:
        with torch.no_grad():
            for module, name, buffer, before in own:
                module._buffers[name] = buffer
                if buffer is not None and before is not None and not _same(buffer, before):
                    buffer.copy_(before)


def _same(x: Tensor, y: Tensor) -> bool:
    return torch.equal(x, y)  # NaN differs from itself, and is then written once more


@contextmanager
def same_modes(model: nn.Module) -> Iterator[None]:
    """Restore the training flag of every module after this block."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


@contextmanager
def without_gradients(model: nn.Module) -> Iterator[None]:
    """Hide the gradients that parameters hold inside this block, and put them back."""
    held: list[tuple[nn.Parameter, Any]] = [(p, p.grad) for p in model.parameters()]
    try:
        for p, _ in held:
            p.grad = None
        yield
    finally:
        for p, gradient in held:
            p.grad = gradient


@contextmanager
def undisturbed(model: nn.Module, *, training: bool = False, seed: int | None = 0) -> Iterator[None]:
    """Run passes of a model inside this block, in one mode and as ``eager`` runs it, from one random state;
    modes, buffers, random states and global switches are then as they were.
    """
    with same_globals(), same_modes(model), same_buffers(model), same_random_state(seed), eager():
        model.train(training)
        yield


@contextmanager
def untouched(setup: Setup) -> Iterator[None]:
    """Put everything of a setup back after this block, bit for bit: parameters, buffers, gradients, modes."""
    model = setup.model
    with same_modes(model), same_buffers(model):
        own = [(p, p.data, p._version, p.requires_grad, p.grad) for p in model.parameters()]
        try:
            yield
        finally:
            for p, data, _, trained, gradient in own:
                p.data = data
                p.requires_grad_(trained)
                p.grad = gradient
