"""Restore a model, everything attached to it, and all random states, bit for bit."""

from __future__ import annotations

import random
import sys
import types
import warnings
from collections import OrderedDict, UserDict, deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import is_dataclass
from functools import partial
from operator import is_
from typing import Any, Final

import numpy
import torch
from torch import Tensor, UntypedStorage, nn
from torch.amp import GradScaler
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from normlab.errors import UserError
from normlab.setups.setup import Setup
from normlab.trace.tensors import eager, tensors_in, unwrap


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
    """Restore torch's default dtype and gradient mode after this block, in which warnings are silent.

    A surrounding inference mode is off in the block: what is made in it can have no gradient, ever.
    """
    with ExitStack() as stack, warnings.catch_warnings():
        stack.callback(torch.set_default_dtype, torch.get_default_dtype())
        stack.callback(torch.set_grad_enabled, torch.is_grad_enabled())
        if torch.is_inference_mode_enabled():
            stack.enter_context(torch.inference_mode(mode=False))
        warnings.simplefilter("ignore")
        yield


@contextmanager
def same(*objects: Any, parameters: bool) -> Iterator[None]:
    """After this block, put back what these objects hold; with ``parameters``, also those bits."""
    kept = _Kept(*(own for one in objects for own in _own(one)), parameters=parameters)
    try:
        yield
    finally:
        kept.restore()


def _own(value: Any) -> list[Any]:
    """Return what is kept of an object: only the buffers of a model that ``torch.distributed`` shards and
    reassembles as it runs.
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
_UNTOUCHED: ContextVar[tuple[nn.Module, ...]] = ContextVar("_UNTOUCHED", default=())


@contextmanager
def restored(setup: Setup) -> Iterator[None]:
    """Restore everything in a setup after this block, bit for bit, whatever is raised inside it: parameters,
    buffers, gradients, attributes, modes, hooks, the optimizer's and the scheduler's state, the batch, other
    models that its functions use, and the random states of torch, Python and numpy. Gradients are enabled
    inside it.

    Inside such a block on the same model, it does nothing. Raises UserError for parameters without numbers,
    and for tensors that were made in inference mode.
    """
    model, inside = unwrap(setup.model), _UNTOUCHED.get()
    if any(model is one for one in inside):
        yield
        return
    refuse_hollow(model)
    functions = (setup.loss, setup.step, setup.make, setup.optimizer, setup.scheduler)
    reached = [one for function in functions if callable(function) for one in _held_by(function)]
    batches = setup.batches[:SEVERAL] if isinstance(setup.batches, list) else setup.batches
    refuse_inference(model, batches)
    objects = [model, setup.optimizer, setup.scheduler, batches, *reached]
    before = _UNTOUCHED.set((*inside, model))
    try:
        with (
            same_globals(),
            torch.enable_grad(),  # an instrument may be called where a script evaluates
            same_random_state(),
            same(*objects, parameters=True),
        ):
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


def refuse_inference(model: nn.Module, batches: Any) -> None:
    """Raise UserError for parameters, or a batch, that were made in torch's inference mode."""
    frozen = [path for path, p in model.named_parameters() if not is_lazy(p) and p.is_inference()]
    if frozen:
        raise UserError(
            f"{len(frozen)} parameters of {type(model).__name__} were made in torch.inference_mode(), first "
            f"{frozen[0]}, so no backward pass can go through them: build the model outside of it"
        )
    if given := [place for place, x in tensors_in(batches) if x.is_inference()]:
        where = ".".join(map(str, given[0]))
        raise UserError(
            f"the batch{f' at {where}' if where else ''} was made in torch.inference_mode(), so no backward "
            "pass can use it: draw it outside of it"
        )


PLAIN: Final = frozenset(
    {
        *(bool, int, float, complex, str, bytes, type(None), type, torch.dtype, torch.device, torch.Size),
        *(types.FunctionType, types.MethodType, types.ModuleType, types.BuiltinFunctionType),
    }
)
"""Types of values whose contents are not searched."""
FILLED: Final = frozenset({dict, OrderedDict, list, set})
MAPPINGS: Final = (dict, UserDict)
OBJECTS: Final = (nn.Module, Optimizer, LRScheduler, GradScaler)
"""Types of objects whose attributes are kept, besides those of dataclasses."""
HOOKS: Final = ("_backward_hooks", "_post_accumulate_grad_hooks")


class _Kept:
    """What objects hold: attributes, containers, tensors and random number generators.

    Objects stay the same objects: attributes and entries are put back, and tensors get the storage, the bits,
    the gradient and the hooks that they had. An attribute that is an object of some other class is searched
    only if it is a dataclass: others may lead anywhere. ``parameters`` says whether the bits of parameters
    are copied, to the CPU's memory.
    """

    def __init__(self, *roots: Any, parameters: bool) -> None:
        self._parameters = parameters
        self._known: dict[int, Any] = {}
        self._undo: list[Callable[[], None]] = []
        self._empty: list[Any] = []
        self._storages: dict[Any, tuple[UntypedStorage, UntypedStorage, list[Tensor]]] = {}
        waiting = list(roots)
        for root in roots:
            waiting += [vars(root)] if hasattr(root, "__dict__") else []
        while waiting:
            value = waiting.pop()
            if id(value) in self._known:
                continue
            self._known[id(value)] = value
            for inner in self._keep(value):
                if (kind := type(inner)) in PLAIN:
                    continue
                empty = kind in FILLED and not inner  # like most of what a module holds
                (self._empty if empty else waiting).append(inner)

    def restore(self) -> None:
        """Put everything back."""
        for undo in reversed(self._undo):
            undo()
        for container in self._empty:
            if container:
                container.clear()
        for storage, before, views in self._storages.values():
            if storage.nbytes() != before.nbytes():
                storage.resize_(before.nbytes())
            if not _bytes(storage, before.device).equal(_bytes(before, before.device)):
                storage.copy_(before)
                torch.autograd.graph.increment_version([x for x in views if not x.is_inference()])

    def _keep(self, value: Any) -> list[Any]:
        """Remember a value; return the values that it leads to."""
        if isinstance(value, Tensor):
            return self._keep_tensor(value)
        if isinstance(value, OBJECTS):
            return [vars(value)]
        if isinstance(value, (*MAPPINGS, list, set, tuple, deque)):
            return self._keep_container(value)
        if is_dataclass(value) and not isinstance(value, type):
            return [vars(value)] if hasattr(value, "__dict__") else []
        for kind, get, put in STATEFUL:
            if isinstance(value, kind):
                self._undo.append(partial(put, value, get(value)))
        return []

    def _keep_container(self, value: Any) -> list[Any]:
        if isinstance(value, tuple):
            return list(value)
        if isinstance(value, MAPPINGS):
            items = dict(value)
            self._undo.append(partial(_put_back, value, items))
            return [*items.values()] if {*map(type, items)} <= {str} else [*items, *items.values()]
        entries = list(value)
        self._undo.append(partial(_refill, value, entries))
        return entries

    def _keep_tensor(self, x: Tensor) -> list[Any]:
        if is_lazy(x):
            return [vars(x)]
        inner = list(_inside(x))
        is_leaf, gradient = x.is_leaf, x.grad if x.is_leaf else None
        data, trained, place = x if inner else x.data, x.requires_grad, _place(x)
        hooks = {name: getattr(x, name) for name in HOOKS}

        def undo() -> None:
            if _place(x) != place:
                x.data = data
            if is_leaf and not x.is_leaf:
                x.detach_()
            if is_leaf and x.requires_grad is not trained:
                x.requires_grad_(trained)
            if is_leaf and x.grad is not gradient:
                x.grad = gradient
            for name, own in hooks.items():
                if own is None and (added := getattr(x, name)):
                    added.clear()

        self._undo.append(undo)
        if not inner and (self._parameters or not isinstance(x, nn.Parameter)):
            self._keep_bits(x)
        return [*inner, *hooks.values(), *([gradient] if self._parameters else []), vars(x)]

    def _keep_bits(self, x: Tensor) -> None:
        for storage in _storages(x):
            key = storage.device, storage.data_ptr()
            if key not in self._storages:
                away = self._parameters and storage.device.type != "cpu"
                self._storages[key] = storage, storage.cpu() if away else storage.clone(), []
            self._storages[key][2].append(x)


def _inside(x: Tensor) -> Iterator[Tensor]:
    """Yield the tensors that a wrapper around tensors holds (sharded, quantised, jagged)."""
    if is_traceable_wrapper_subclass(x):
        held = (getattr(x, name) for name in x.__tensor_flatten__()[0])
        yield from (inner for inner in held if isinstance(inner, Tensor))
    elif x.layout is torch.sparse_coo:
        yield from (x._indices(), x._values())


def _storages(x: Tensor) -> list[UntypedStorage]:
    """Return the storage of a tensor that has its own, rather than one in tensors that it holds."""
    if x.is_meta or x.layout is not torch.strided or is_traceable_wrapper_subclass(x):
        return []
    storage = x.untyped_storage()
    return [storage] if storage.nbytes() else []


def _bytes(storage: UntypedStorage, device: torch.device) -> Tensor:
    here = storage if storage.device == device else storage.cpu()
    return torch.empty(0, dtype=torch.uint8, device=device).set_(here)


def _place(x: Tensor) -> Any:
    """Return where a tensor's numbers lie and in which view; None if it has no storage of its own."""
    for storage in _storages(x):
        start = storage.data_ptr()
        return start if x.is_nested else (start, x.size(), x.stride(), x.storage_offset(), x.dtype)
    return None


def _put_back(mapping: Any, before: dict[Any, Any]) -> None:
    """Put back the entries of a mapping, one by one, so it never lacks those that stay."""
    same_keys = len(mapping) == len(before) and all(map(is_, mapping, before))
    if same_keys and all(map(is_, mapping.values(), before.values())):
        return
    for key in [key for key in mapping if key not in before]:
        del mapping[key]
    for key, value in before.items():
        if key not in mapping or mapping[key] is not value:
            mapping[key] = value
    if list(mapping) != list(before):
        for key, value in before.items():
            del mapping[key]
            mapping[key] = value


def _refill(value: Any, before: list[Any]) -> None:
    """Put back the entries of another container, if they are not the same objects."""
    if len(before) != len(value) or not all(a is b for a, b in zip(before, value, strict=True)):
        value.clear()
        (value.update if isinstance(value, set) else value.extend)(before)


def _set_bits(generator: numpy.random.Generator, state: Any) -> None:
    generator.bit_generator.state = state


def _fill(array: numpy.ndarray, before: numpy.ndarray) -> None:
    if array.tobytes() != before.tobytes():
        array[...] = before


STATEFUL: Final[tuple[tuple[type, Callable[[Any], Any], Callable[[Any, Any], Any]], ...]] = (
    (torch.Generator, torch.Generator.get_state, torch.Generator.set_state),
    (random.Random, lambda own: own.getstate(), lambda own, state: own.setstate(state)),
    (numpy.random.RandomState, numpy.random.RandomState.get_state, numpy.random.RandomState.set_state),
    (numpy.random.Generator, lambda generator: generator.bit_generator.state, _set_bits),
    (numpy.ndarray, numpy.ndarray.copy, _fill),
)
"""Types of objects that have a state, with how to read it and how to put it back."""


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
