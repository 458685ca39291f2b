"""Leave a model, and everything random, as it was."""

from __future__ import annotations

import gc
import random
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, Final

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from normlab.errors import UserError
from normlab.trace.kept import Kept, held_by
from normlab.trace.setup import Setup
from normlab.trace.tensors import eager, unwrap


@contextmanager
def same_random_state(seed: int | None = None) -> Iterator[None]:
    """Restore the generators of torch on every device, Python and numpy after this block; seed them first."""
    numpy = sys.modules.get("numpy")
    python, legacy = random.getstate(), numpy.random.get_state() if numpy else None
    cpu, devices = torch.get_rng_state(), _accelerators()
    states = [(device, device.get_rng_state(*at)) for device, *at in devices]
    try:
        if seed is not None:
            torch.default_generator.manual_seed(seed)  # torch.manual_seed would seed devices that begin later
            for device, *at in devices:
                with device.device(*at) if at else nullcontext():
                    device.manual_seed(seed)
            random.seed(seed)
            if numpy:
                numpy.random.seed(seed)
        yield
    finally:
        torch.set_rng_state(cpu)
        for (device, state), (_, *at) in zip(states, devices, strict=True):
            device.set_rng_state(state, *at)
        random.setstate(python)
        if numpy and legacy is not None:
            numpy.random.set_state(legacy)


def _accelerators() -> list[tuple[Any, ...]]:
    """Return the module of torch and the number of every device that has begun to draw; MPS has no number."""
    kind = torch.accelerator.current_accelerator(check_available=True)
    if kind is None:
        return []
    module = torch.get_device_module(kind)
    if kind.type == "mps":
        return [(module,)]
    begun = getattr(module, "is_initialized", lambda: True)()
    return [(module, i) for i in range(module.device_count())] if begun else []


@contextmanager
def unscanned() -> Iterator[None]:
    """Collect garbage inside this block among its own objects alone: to scan all others takes long."""
    if gc.get_freeze_count():
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


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
def same(*objects: Any, parameters: bool) -> Iterator[None]:
    """Put back what these objects hold after this block, see ``Kept``; ``parameters`` with their bits."""
    kept = Kept(*(own for one in objects for own in _own(one)), parameters=parameters)
    try:
        yield
    finally:
        kept.restore()


def _own(value: Any) -> list[Any]:
    """Return what is kept of an object: of a model that ``torch.distributed`` shards and puts together again
    as it runs, the buffers alone.
    """
    if not isinstance(value, nn.Module):
        return [value]
    model, fsdp = unwrap(value), sys.modules.get("torch.distributed.fsdp")
    kinds = (fsdp.FSDPModule, fsdp.FullyShardedDataParallel) if fsdp else ()
    if not any(isinstance(module, kinds) for module in model.modules()):
        return [model]
    return [module._buffers for module in model.modules()]


@contextmanager
def in_mode(model: nn.Module, *, training: bool) -> Iterator[None]:
    """Put a model in one mode inside this block, and restore that of every module after it."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        try:
            model.train(training)
        except RecursionError:  # a module that holds one that holds it
            for module, _ in modes:
                module.training = training
        yield
    finally:
        for module, before in modes:
            module.training = before


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
def undisturbed(
    model: nn.Module, *others: Any, training: bool = False, seed: int | None = 0
) -> Iterator[None]:
    """Run passes of a model inside this block, in one mode and as ``eager`` runs it, from one random state.

    Modes, attributes, buffers, hooks, random states and global switches are then as they were, and so is what
    ``others`` hold, as batches. Parameters are not: ``untouched`` copies them.
    """
    with (
        same_globals(),
        same(model, *others, parameters=False),
        in_mode(model, training=training),
        same_random_state(seed),
        eager(),
    ):
        yield


SEVERAL: Final = 8
"""Batches of a list that are copied; a pass looks after its own."""
_UNTOUCHED: ContextVar[tuple[nn.Module, ...]] = ContextVar("_UNTOUCHED", default=())


@contextmanager
def untouched(setup: Setup) -> Iterator[None]:
    """Put everything of a setup back after this block, bit for bit, whatever is raised inside it: parameters,
    buffers, gradients, attributes, modes, hooks, the optimizer's and the scheduler's state, the batch, other
    models that its functions use, and the random states of torch, Python and numpy.

    Inside such a block on the same model, it does nothing. Raises UserError for parameters without numbers.
    """
    model, inside = unwrap(setup.model), _UNTOUCHED.get()
    if any(model is one for one in inside):
        yield
        return
    refuse_hollow(model)
    functions = (setup.loss, setup.step, setup.make, setup.optimizer, setup.scheduler)
    reached = [one for function in functions if callable(function) for one in held_by(function)]
    batches = setup.batches[:SEVERAL] if isinstance(setup.batches, list) else setup.batches
    objects = [model, setup.optimizer, setup.scheduler, batches, *reached]
    before = _UNTOUCHED.set((*inside, model))
    try:
        with same_globals(), same_random_state(), same(*objects, parameters=True):
            yield
    finally:
        _UNTOUCHED.reset(before)


def refuse_hollow(model: nn.Module) -> None:
    """Raise UserError for parameters that hold no numbers yet."""
    name = type(model).__name__
    if lazy := [path for path, p in model.named_parameters() if is_lazy(p)]:
        raise UserError(
            f"{len(lazy)} parameters of {name} have no shape before the first pass, first {lazy[0]}; call "
            "the model on the batch once, then make the optimizer"
        )
    if hollow := [path for path, p in model.named_parameters() if p.is_meta]:
        raise UserError(
            f"{len(hollow)} parameters of {name} are on the device meta and hold no numbers, first "
            f'{hollow[0]}; build the model outside of torch.device("meta"), or give it weights: '
            'model.to_empty(device="cpu"), then model.load_state_dict(…)'
        )
