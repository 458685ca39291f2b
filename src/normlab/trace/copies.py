"""Copies of a model, its optimizers and its scheduler that are bound to each other."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from types import CellType, FunctionType
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from normlab.errors import UserError
from normlab.setups.setup import Setup, shown
from normlab.trace.facts import Unknown
from normlab.trace.modules import unwrap
from normlab.trace.optimizers import parameters_of
from normlab.trace.tensors import tensors_in


def copied(
    setup: Setup, *, hollow: bool = False, memo: dict[int, Any] | None = None
) -> tuple[nn.Module, list[Optimizer], Any]:
    """Copy a model, its optimizers and its scheduler, bound to each other; ``memo`` is that of ``deepcopy``.

    If ``hollow``, the optimizers hold the user's own parameters and states: they must never be stepped.
    Raises Unknown without an optimizer.
    """
    if setup.optimizer is None:
        raise Unknown("no optimizer was handed over: pass optimizer=")
    model, optimizers = unwrap(setup.model), setup.optimizers
    # what has no step() is a function that makes the scheduler of the optimizers
    scheduler = setup.scheduler if hasattr(setup.scheduler, "step") else None
    memo = {} if memo is None else memo
    if all(isinstance(optimizer, Optimizer) for optimizer in optimizers):
        if hollow:
            # deepcopy takes what it finds in the memo for copied, so these stay the user's own objects
            memo |= {id(x): x for x in [model, *parameters_of(optimizers), *_tensors_of_states(optimizers)]}
        # the memo of the first copy lets the others refer to the copied parameters
        model = copy.deepcopy(model, memo)
        copy_of = copy.deepcopy if hollow else twin_of
        optimizers = [copy_of(optimizer, memo) for optimizer in optimizers]
        scheduler = copy.deepcopy(scheduler, memo)
    else:
        model, scheduler = copy.deepcopy((model, scheduler), memo)
        made = made_by("optimizer(model)", setup.optimizer, model, "param_groups")
        optimizers = list(made) if isinstance(made, (list, tuple)) else [made]
    if setup.scheduler is not None and scheduler is None:
        one_or_several = optimizers if len(optimizers) > 1 else optimizers[0]
        scheduler = made_by("scheduler(optimizer)", setup.scheduler, one_or_several, "step")
    if not hollow:
        nn.Module.zero_grad(model)  # also if the class has its own method by this name
    return model, optimizers, scheduler


def _tensors_of_states(optimizers: Iterable[Optimizer]) -> Iterator[Tensor]:
    for optimizer in optimizers:
        for state in optimizer.state.values():
            yield from (x for _, x in tensors_in(state))


def rebound(function: Any, memo: dict[int, Any]) -> Any:
    """Return a function that reaches the copies wherever its closure or module reached what was copied."""
    if not isinstance(function, FunctionType) or id(function) in memo:
        return memo.get(id(function), function)

    def copy_of(value: Any) -> Any:
        if isinstance(value, FunctionType):
            return rebound(value, memo)
        was_copied = id(value) in memo or any(id(x) in memo for _, x in tensors_in(value))
        return copy.deepcopy(value, memo) if was_copied else value

    # the same code with its own closure and its own names of the module: the user's are never written to
    cells = tuple(CellType() for _ in function.__closure__ or ())
    module = dict(function.__globals__)
    twin = FunctionType(function.__code__, module, function.__name__, function.__defaults__, cells)
    twin.__kwdefaults__ = function.__kwdefaults__
    memo[id(function)] = twin  # before its closure is filled, which may hold the function itself
    for cell, new_cell in zip(function.__closure__ or (), cells, strict=True):
        with suppress(ValueError):  # nothing is in it yet
            new_cell.cell_contents = copy_of(cell.cell_contents)
    for name in function.__code__.co_names:
        if name in module and not isinstance(module[name], FunctionType):
            module[name] = copy_of(module[name])
    return twin


def made_by(who: str, function: Callable[[Any], Any], of: Any, has: str) -> Any:
    """Return what a user's function returns: an object with this attribute, or a list of such objects.

    Raises UserError if the function raises or returns anything else.
    """
    try:
        made = function(of)
    except Exception as error:
        raise UserError(f"{who} raised {type(error).__name__}: {error}") from error
    several = made if isinstance(made, (list, tuple)) and made else [made]
    if not all(hasattr(each, has) for each in several):
        raise UserError(f"{who} returned {shown(made)}, which has no {has}")
    return made


def twin_of(optimizer: Optimizer, memo: dict[int, Any]) -> Optimizer:
    """Copy an optimizer without its hooks; ``memo``, as that of ``deepcopy``, holds what takes the place of
    its parameters. torch alone would copy only three attributes.
    """
    twin = copy.deepcopy(optimizer, memo)
    others = {name: value for name, value in vars(optimizer).items() if name not in vars(twin)}
    others.pop("step", None)  # a schedule binds the object's own
    vars(twin).update(copy.deepcopy(others, memo))
    return twin
