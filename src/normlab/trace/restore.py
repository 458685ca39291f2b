"""Blocks after which a model, everything attached to it, and all random states are as they were."""

from __future__ import annotations

import random
import sys
import types
import warnings
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from functools import partial
from typing import Any, Final

import numpy
import torch
from torch import nn
from torch.nn.parameter import is_lazy

from normlab.errors import UserError
from normlab.setups.setup import Setup
from normlab.trace.kept import MAPPINGS, OBJECTS, Kept
from normlab.trace.modules import eager, unwrap


@contextmanager
def same_random_state(seed: int | None = None) -> Iterator[None]:
    """Seed the generators of torch on every device, Python and numpy; restore them after this block."""
    accelerators = _accelerators()
    with ExitStack() as stack:
        stack.callback(torch.set_rng_state, torch.get_rng_state())
        for device, *at in accelerators:
            stack.callback(device.set_rng_state, device.get_rng_state(*at), *at)
        stack.callback(random.setstate, random.getstate())
        stack.callback(numpy.random.set_state, numpy.random.get_state())  # noqa: NPY002
        if seed is not None:
            torch.default_generator.manual_seed(seed)  # torch.manual_seed would seed devices that start later
            for device, *at in accelerators:
                with device.device(*at) if at else nullcontext():
                    device.manual_seed(seed)
            random.seed(seed)
            numpy.random.seed(seed)  # noqa: NPY002
        yield


def _accelerators() -> list[tuple[Any, ...]]:
    """Return the module of torch and the number of every initialized device; MPS has no number."""
    kind = torch.accelerator.current_accelerator(check_available=True)
    if kind is None:
        return []
    module = torch.get_device_module(kind)
    if kind.type == "mps":
        return [(module,)]
    begun = getattr(module, "is_initialized", lambda: True)()
    return [(module, i) for i in range(module.device_count())] if begun else []


@contextmanager
def same_globals() -> Iterator[None]:
    """Restore torch's default dtype and gradient mode after this block, in which warnings are silent."""
    with ExitStack() as stack, warnings.catch_warnings():
        stack.callback(torch.set_default_dtype, torch.get_default_dtype())
        stack.callback(torch.set_grad_enabled, torch.is_grad_enabled())
        warnings.simplefilter("ignore")
        yield


@contextmanager
def same(*objects: Any, parameters: bool) -> Iterator[None]:
    """After this block, put back what these objects hold; with ``parameters``, also those bits."""
    kept = Kept(*(part for value in objects for part in _kept_parts(value)), parameters=parameters)
    try:
        yield
    finally:
        kept.restore()


def _kept_parts(value: Any) -> list[Any]:
    """Return what is kept of an object: only the buffers of a model that ``torch.distributed`` shards and
    reassembles as it runs.
    """
    if not isinstance(value, nn.Module):
        return [value]
    model = unwrap(value)
    fsdp = sys.modules.get(
        "torch.distributed.fsdp"
    )  # without it nothing is sharded, and importing it is slow
    kinds = (fsdp.FSDPModule, fsdp.FullyShardedDataParallel) if fsdp else ()
    sharded = any(isinstance(module, kinds) for module in model.modules())
    return [module._buffers for module in model.modules()] if sharded else [model]


@contextmanager
def in_mode(model: nn.Module, *, training: bool) -> Iterator[None]:
    """Put a model in one mode inside this block, then restore the mode of every module."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        try:
            if any(before is not training for _, before in modes):
                model.train(training)
        except RecursionError:  # a module that holds one that holds it
            for module, _ in modes:
                module.training = training
        yield
    finally:
        for module, before in modes:
            if module.training is not before:
                module.training = before


@contextmanager
def undisturbed(
    model: nn.Module, *others: Any, training: bool = False, seed: int | None = 0
) -> Iterator[None]:
    """Run passes of a model inside this block, in one mode and as ``eager`` runs it, from one random state.

    Modes, attributes, buffers, hooks, random states and global switches are restored afterwards, as is what
    ``others``, such as batches, hold. Parameters are not: ``restored`` copies them.
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
"""How many batches of a list are copied; a pass looks after its own."""
_RESTORED: ContextVar[tuple[nn.Module, ...]] = ContextVar("_RESTORED", default=())
"""The models that blocks of ``restored`` look after at this moment."""


@contextmanager
def restored(setup: Setup) -> Iterator[None]:
    """Restore everything in a setup after this block, bit for bit, whatever is raised inside it: parameters,
    buffers, gradients, attributes, modes, hooks, the optimizer's and the scheduler's state, the batch, other
    models that its functions use, and the random states of torch, Python and numpy.

    Inside such a block on the same model, it does nothing. Raises UserError for parameters without numbers.
    """
    model, outer = unwrap(setup.model), _RESTORED.get()
    if any(model is other for other in outer):
        yield
        return
    refuse_hollow(model)
    functions = (setup.loss, setup.step, setup.make, setup.optimizer, setup.scheduler)
    reached: list[Any] = []
    for function in functions:
        if callable(function):
            reached += _held_by(function)
    batches = setup.batches[:SEVERAL] if isinstance(setup.batches, list) else setup.batches
    objects = [model, setup.optimizer, setup.scheduler, batches, *reached]
    before = _RESTORED.set((*outer, model))
    try:
        with same_globals(), same_random_state(), same(*objects, parameters=True):
            yield
    finally:
        _RESTORED.reset(before)


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


def _held_by(function: Any) -> list[Any]:
    """Return the modules, optimizers, schedulers and containers that a user's function can reach by name."""
    values: list[Any] = [function, *getattr(function, "__dict__", {}).values()]
    while isinstance(function, partial):
        values += [*function.args, *function.keywords.values()]
        function = function.func
    values.append(getattr(function, "__self__", None))
    function = getattr(function, "__func__", function)
    if not isinstance(function, types.FunctionType):
        function = type(function).__call__
    if isinstance(function, types.FunctionType):
        values += [cell.cell_contents for cell in function.__closure__ or () if cell != types.CellType()]
        values += [function.__globals__.get(name) for name in function.__code__.co_names]
        values += [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    return [value for value in values if isinstance(value, (*OBJECTS, *MAPPINGS, list, set, deque))]
