"""Twins of a model that its loss runs: a frozen reference, a teacher, or itself without gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from normlab.private_torch import forget_global_hook
from normlab.trace.autograd import Weights
from normlab.trace.facts import Unknown
from normlab.trace.tensors import map_tensors, tensors_in
from normlab.trace.trace import Trace


class Twin(NamedTuple):
    """A module that a loss runs beside a model, or beside a part of it, of which it is a copy.

    It has the class of its counterpart and parameters of the same names and shapes, none of which train; or
    each of its parameters is equal to one of the model's.
    """

    module: nn.Module
    path: str | None
    """Its path in the model; None if the model does not hold it."""
    weights: Weights
    """By path in the model: its values for the parameters of its counterpart."""
    is_self: bool = False
    """Whether it is the model itself, or a part of it, that also runs without gradients."""
    trains: bool = False
    """Whether its own parameters train, as those of its counterpart do."""


class ModuleCall(NamedTuple):
    """One call of a module."""

    module: nn.Module
    given: tuple[Tensor, ...]
    """The tensors that it was given."""
    output: Any
    has_gradients: bool
    """Whether gradients were enabled."""


class OutermostCalls:
    """Sees the outermost calls of a model, and of modules that hold no part of it.

    Args:
        model: The model.
        apart: Modules whose calls are seen by themselves, though they may lie in the model. A call of what
            holds one is not seen.
        see: Called with each call. What it returns, if anything, takes the place of an output.
    """

    def __init__(
        self, model: nn.Module, apart: Iterable[nn.Module], see: Callable[[ModuleCall], Any]
    ) -> None:
        self._of_model, self._apart = {id(m) for m in model.modules()}, {id(m) for m in apart}
        self._see = see
        self._running: nn.Module | None = None

    @property
    def are_running(self) -> bool:
        """Whether one of these calls is running."""
        return self._running is not None

    @contextmanager
    def seen(self) -> Iterator[None]:
        """See them inside this block."""
        with ExitStack() as stack:
            stack.callback(register_module_forward_pre_hook(self._enter).remove)
            hook = register_module_forward_hook(self._leave, with_kwargs=True, always_call=True)
            stack.callback(forget_global_hook, hook.id)
            stack.callback(hook.remove)
            yield

    def _enter(self, module: nn.Module, _: Any) -> None:
        if self._running is None and self._counts(module):
            self._running = module

    def _leave(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        if self._running is not module:
            return None
        self._running = None
        given = tuple(x for _, x in tensors_in((args, kwargs)))
        return self._see(ModuleCall(module, given, output, torch.is_grad_enabled()))

    def _counts(self, module: nn.Module) -> bool:
        if id(module) in self._apart:
            return True
        if next(module.parameters(), None) is None:
            return False
        inside = {id(m) for m in module.modules()}
        is_of_model = id(module) in self._of_model
        return inside.isdisjoint(self._apart) and (is_of_model or inside.isdisjoint(self._of_model))


class Twins(NamedTuple):
    """The twins that a loss runs, and the modules whose calls are compared."""

    twins: tuple[Twin, ...]
    apart: tuple[nn.Module, ...]
    """The twins inside of the model and their counterparts."""

    @property
    def weights(self) -> Weights:
        """The values with which the model is like all of them."""
        return {name: value for twin in self.twins for name, value in twin.weights.items()}


def find_twins(trace: Trace) -> Twins:
    """Return the twins of a model that its loss runs. Raises Unknown if there are none."""
    inside, apart = _inside(trace)
    twins = list(inside)
    paths = {id(m): path for path, m in trace.model.named_modules()}
    calls = [call for call in _calls(trace, apart) if call.module not in apart]
    for module in {id(call.module): call.module for call in calls}.values():
        if id(module) in paths:
            modes = {call.has_gradients for call in calls if call.module is module}
            if len(modes) == 2:
                twins.append(Twin(module, paths[id(module)], {}, is_self=True))
        elif (weights := _weights_for(module, trace)) is not None:
            twins.append(Twin(module, None, weights))
    if not twins:
        raise Unknown("the loss runs no frozen copy of the model beside it: no reference, no teacher")
    return Twins(tuple(_agreeing(twins)), tuple(apart))


def _calls(trace: Trace, apart: Iterable[nn.Module]) -> list[ModuleCall]:
    calls: list[ModuleCall] = []
    with OutermostCalls(trace.model, apart, calls.append).seen(), trace.with_graph():
        return calls


def with_earlier_self(trace: Trace) -> Trace:
    """Return a step in which what the model gives without gradients is a constant, whatever its weights."""
    constants: dict[int, Any] = {}
    order: list[int] = []

    def keep(call: ModuleCall) -> None:
        if not call.has_gradients:
            constants[len(order)] = map_tensors(call.output, lambda _, x: x.detach().clone())
        order.append(len(order))

    with OutermostCalls(trace.model, (), keep).seen(), trace.with_graph():
        pass

    def loss_of(model: nn.Module, batch: Any) -> Tensor:
        numbers = iter(order)
        calls = OutermostCalls(model, (), lambda _: constants.get(next(numbers, -1)))
        with calls.seen():
            return trace.loss_of(model, batch)

    return trace.again(loss_of=loss_of)


def _agreeing(twins: Iterable[Twin]) -> Iterator[Twin]:
    """Yield the twins whose weights the model can have at the same time, the first ones first."""
    weights: dict[str, Tensor] = {}
    for twin in twins:
        shared = weights.keys() & twin.weights.keys()
        if all(are_equal(weights[name], twin.weights[name]) for name in shared):
            weights.update(twin.weights)
            yield twin


def _inside(trace: Trace) -> tuple[list[Twin], list[nn.Module]]:
    """Return the twins inside of the model, and with them the modules that are compared.

    They are given what their counterparts are given, unlike blocks of one stack of which some are frozen.
    """
    pairs = _alike(trace)
    modules = {path: trace.model.get_submodule(path) for pair in pairs for path in pair}
    calls = _calls(trace, modules.values()) if pairs else []
    twins, apart = list[Twin](), list[nn.Module]()
    for path, path_of_twin in pairs:
        module, twin = modules[path], modules[path_of_twin]
        inputs = [call.given[0] for call in calls if call.module is module and call.given]
        inputs_of_twin = [call.given[0] for call in calls if call.module is twin and call.given]
        if any(are_equal(x, y) for x in inputs for y in inputs_of_twin):
            names = {id(p): name for name, p in trace.model.named_parameters()}
            values = _values(trace)
            weights = {names[id(p)]: values[id(q)] for p, q in _not_shared(module, twin)}
            twins.append(Twin(twin, path_of_twin, weights, trains=_trains(twin)))
            apart += [module, twin]
    return twins, apart


def _alike(trace: Trace) -> list[tuple[str, str]]:
    """Return pairs of a module that trains, and one like it that is frozen, or that was copied from it."""
    model, values = trace.model, _values(trace)
    groups: dict[Any, list[str]] = {}
    for path, module in model.named_modules():
        if path and next(module.parameters(), None) is not None:
            groups.setdefault(_signature(module), []).append(path)
    pairs: list[tuple[str, str]] = []
    # the largest first: what lies inside of two that are alike belongs to them
    for paths in sorted(groups.values(), key=lambda paths: min(path.count(".") for path in paths)):
        trained = [path for path in paths if _trains(model.get_submodule(path))]
        for path in paths:
            paired = [name for pair in pairs for name in pair]
            others = [other for other in trained if other != path]
            if not others or any(path == name or path.startswith(f"{name}.") for name in paired):
                continue
            is_frozen = path not in trained
            module, first = model.get_submodule(path), model.get_submodule(trained[0])
            if is_frozen or (module is not first and _is_copy(module, first, values)):
                pairs.append((trained[0], path))
    return pairs


def _signature(module: nn.Module) -> Any:
    """Return what two modules have in common if one may stand in for the other."""
    return type(module), tuple((name, p.shape) for name, p in module.named_parameters())


def _trains(module: nn.Module) -> bool:
    return any(p.requires_grad for p in module.parameters())


def _values(trace: Trace) -> Mapping[int, Tensor]:
    """Return the value of each parameter by its identity: one that is shared has several names."""
    values = trace.parameters
    return {id(p): values[name] for name, p in trace.model.named_parameters()}


def _not_shared(module: nn.Module, other: nn.Module) -> list[tuple[Tensor, Tensor]]:
    """Return the parameters that two modules that are alike do not share."""
    pairs = zip(module.parameters(), other.parameters(), strict=True)
    return [(p, q) for p, q in pairs if p is not q]


def _is_copy(module: nn.Module, other: nn.Module, values: Mapping[int, Tensor]) -> bool:
    """Return whether a module holds the drawn numbers of another in parameters of its own."""
    pairs = [(values[id(p)], values[id(q)]) for p, q in _not_shared(module, other)]
    is_drawn = any(p.numel() > 1 and bool((p != p.flatten()[0]).any()) for p, _ in pairs)
    return is_drawn and all(are_equal(p, q) for p, q in pairs)


def _weights_for(module: nn.Module, trace: Trace) -> Weights | None:
    """Return the values that a module beside the model has for the parameters of its counterpart.

    They are empty if it has no counterpart but each of its parameters equals one of the model's; None is
    returned if one does not.
    """
    values = {name: p.detach() for name, p in module.named_parameters()}
    for path, part in trace.model.named_modules():
        if _signature(part) == _signature(module) and _trains(part):
            return {f"{path}.{name}" if path else name: p for name, p in values.items()}
    of_model = list(trace.parameters.values())
    for p in values.values():
        if not any(are_equal(p, q) for q in of_model):
            return None
    return {}


def are_equal(x: Tensor, y: Tensor) -> bool:
    """Return whether two tensors on one device hold the same numbers, whatever their precisions."""
    return x.shape == y.shape and x.device == y.device and bool((x == y).all())
