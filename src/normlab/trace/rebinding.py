"""Functions made again for copies, so that they lead to copies wherever they led to what was copied.

``copy.deepcopy`` copies modules and tensors, but no functions. Where a module holds a function that leads
back to the model, such as a ``forward`` that was wrapped on the instance, its copy would run the original's
modules.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any, Final

from torch import nn

from normlab.trace.reach import deep_copy

CONTAINERS: Final = (dict, list, set, deque)
"""Kinds of containers that ``copy.deepcopy`` copies, and whose copies can be filled anew."""
FIXED: Final = (FunctionType, MethodType, partial, tuple, frozenset)
"""Kinds of objects that get what they hold when they are made: to hold something else, one is made again."""


def lead_to_copies(memo: dict[int, Any]) -> None:
    """Replace the functions that copies hold, if they lead to what was copied.

    Args:
        memo: that of the ``copy.deepcopy`` that made the copies; what is copied for the sake of these
            functions is added to it.
    """
    _Rebinding(memo).rebind_copies()


def step_for_copies(step: Any, memo: dict[int, Any]) -> Any:
    """Return a user's step that reaches the copies wherever the given one reached what was copied.

    Its globals are its own: what it counts there is not counted in the user's file.

    Args:
        step: a function or a partial. Any other object that can be called is returned as it is: it is handed
            the model.
        memo: as that of ``lead_to_copies``.
    """
    return _Rebinding(memo).step_for_copies(step)


class _Rebinding:
    """Makes functions, and what they hold, again for copies, each once.

    Followed are what is called (functions, methods, partials, objects that can be called, such as those that
    wrap a function) and containers. Any other object is shared unless it was copied already: it may lead
    anywhere, as a trainer leads to its data.
    """

    def __init__(self, memo: dict[int, Any]) -> None:
        self._memo = memo
        """By the identity of what was copied: its copy. An object that all share is its own copy."""
        self._copies = dict[int, Any]()
        """By identity: what was made here or by ``copy.deepcopy``."""
        self._globals_for_copies = dict[int, dict[str, Any]]()
        """By the identity of a file's globals: those of its functions that were made again."""

    # -------------------------------------------------------------------------------------- all copies

    def rebind_copies(self) -> None:
        """Replace what every copy holds; those that are made on the way have their turn, too."""
        done = set[int]()
        while True:
            self._note_copies()
            waiting = [made for number, made in self._copies.items() if number not in done]
            if not waiting:
                return
            for made in waiting:
                done.add(id(made))
                self._rebind_in(made)

    def step_for_copies(self, step: Any) -> Any:
        """Make a step again, and lead what is copied on the way to copies, too."""
        if id(step) in self._memo or not isinstance(step, (FunctionType, partial)):
            return self._memo.get(id(step), step)
        self._note_copies()
        if isinstance(step, FunctionType):
            made = self._function(step, has_own_globals=True)
        else:
            made = self._for_copies(step)
        self.rebind_copies()
        return made

    def _note_copies(self) -> None:
        """Take note of the copies that are in the memo by now."""
        for number, value in self._memo.items():
            is_shared = number == id(value)
            keeps_originals_alive = number == id(self._memo)  # so ``copy.deepcopy`` uses this entry
            if not (is_shared or keeps_originals_alive):
                self._copies[id(value)] = value

    def _rebind_in(self, holder: Any) -> None:
        """Replace what a copy holds: the entries of a container, or the attributes of an object."""
        target: Any = holder
        held: list[tuple[Any, Any]]
        if isinstance(holder, dict):
            held = list(holder.items())
        elif isinstance(holder, (list, deque)):
            held = list(enumerate(holder))
        elif isinstance(holder, FIXED) or not hasattr(holder, "__dict__"):
            return
        else:
            target = vars(holder)  # not by setattr, which a module uses to register or to refuse
            held = list(target.items())
        for place, value in held:
            if isinstance(value, CONTAINERS):
                continue  # it is a copy, too, and has a turn of its own
            new = self._for_copies(value)
            if new is not value:
                target[place] = new

    # --------------------------------------------------------------------------------------- one value

    def _for_copies(self, value: Any) -> Any:
        """Return what takes the place of a value in copies: itself, unless it leads to what was copied."""
        if id(value) in self._memo:
            return self._memo[id(value)]
        # a copied tuple may still hold a function of the original, and cannot be filled anew
        has_own_turn = id(value) in self._copies and not isinstance(value, FIXED)
        if has_own_turn or not self._leads_to_copied(value):
            return value
        return self._made_again(value)

    def _each(self, values: Iterable[Any]) -> list[Any]:
        return [self._for_copies(value) for value in values]

    def _by_name(self, values: Mapping[str, Any]) -> dict[str, Any]:
        return {name: self._for_copies(value) for name, value in values.items()}

    def _leads_to_copied(self, value: Any) -> bool:
        """Return whether something that has a copy can be reached from a value."""
        waiting, seen = [value], set[int]()
        while waiting:
            inner = waiting.pop()
            has_copy = self._memo.get(id(inner), inner) is not inner
            if has_copy:
                return True
            if id(inner) not in seen:
                seen.add(id(inner))
                waiting.extend(_held_by(inner))
        return False

    # --------------------------------------------------------------------------------------- made again

    def _made_again(self, value: Any) -> Any:
        if isinstance(value, FunctionType):
            return self._function(value)
        if isinstance(value, MethodType):
            return MethodType(self._for_copies(value.__func__), self._for_copies(value.__self__))
        if isinstance(value, partial):
            new = partial(
                self._for_copies(value.func), *self._each(value.args), **self._by_name(value.keywords)
            )
            vars(new).update(self._by_name(vars(value)))
            return new
        if isinstance(value, (tuple, frozenset)):
            entries = self._each(value)
            is_named = hasattr(value, "_fields")  # a named tuple takes its entries one by one
            return type(value)(*entries) if is_named else type(value)(entries)
        if isinstance(value, nn.Module):
            new = deep_copy(value, self._memo)
            self._note_copies()
            return new
        return self._copied_and_filled(value)

    def _copied_and_filled(self, value: Any) -> Any:
        """Copy a container, or an object that can be called, and fill the copy."""
        try:
            new = copy.copy(value)
        except Exception:  # an object of the user's may refuse
            return value
        if new is value:  # as what ``functools.cache`` returns, which has no copy
            return value
        # before it is filled, for it may hold itself
        self._memo[id(value)] = self._copies[id(new)] = new
        if isinstance(value, dict):
            for key, held in value.items():
                new[key] = self._for_copies(held)
        elif isinstance(value, (list, deque)):
            for i, held in enumerate(value):
                new[i] = self._for_copies(held)
        elif isinstance(value, set):
            new.clear()
            new.update(self._each(value))
        else:
            for name, held in vars(value).items():
                vars(new)[name] = self._for_copies(held)
        return new

    def _function(self, function: FunctionType, *, has_own_globals: bool = False) -> FunctionType:
        """Return a function with the same code, whose closure, defaults and globals lead to copies.

        It shares the globals of its file if none that it names leads to copies, unless it must have its own.
        """
        named = _named_globals(function)
        needs_globals = has_own_globals or self._leads_to_copied(tuple(named.values()))
        new_globals = self._globals_of(function) if needs_globals else function.__globals__
        cells = function.__closure__ or ()
        new_cells = tuple(CellType() for _ in cells)
        new = FunctionType(
            function.__code__, new_globals, function.__name__, function.__defaults__, new_cells
        )
        # before anything is filled: cells, defaults and globals may hold the function itself
        self._memo[id(function)] = self._copies[id(new)] = new
        for cell, new_cell in zip(cells, new_cells, strict=True):
            with suppress(ValueError):  # nothing is in it yet
                new_cell.cell_contents = self._for_copies(cell.cell_contents)
        new.__defaults__ = self._for_copies(function.__defaults__)
        if function.__kwdefaults__:
            new.__kwdefaults__ = self._by_name(function.__kwdefaults__)
        new.__qualname__, new.__doc__ = function.__qualname__, function.__doc__
        new.__module__, new.__annotations__ = function.__module__, function.__annotations__
        vars(new).update(self._by_name(vars(function)))
        if needs_globals:
            new_globals.update(self._by_name(named))
        return new

    def _globals_of(self, function: FunctionType) -> dict[str, Any]:
        """Return the globals of a file's functions that are made again, which these share: what one of them
        sets, the others see.
        """
        new_globals = self._globals_for_copies.setdefault(id(function.__globals__), {})
        for name, value in function.__globals__.items():
            new_globals.setdefault(name, value)
        return new_globals


def _held_by(value: Any) -> Iterator[Any]:
    """Yield what is followed from a value."""
    if isinstance(value, FunctionType):
        for cell in value.__closure__ or ():
            with suppress(ValueError):  # nothing is in it yet
                yield cell.cell_contents
        yield from value.__defaults__ or ()
        yield from (value.__kwdefaults__ or {}).values()
        yield from vars(value).values()
        yield from _named_globals(value).values()
    elif isinstance(value, MethodType):
        yield from (value.__func__, value.__self__)
    elif isinstance(value, partial):
        yield from (value.func, *value.args, *value.keywords.values(), *vars(value).values())
    elif isinstance(value, dict):
        yield from value.values()
    elif isinstance(value, (tuple, frozenset, list, set, deque)):
        yield from value
    elif isinstance(value, nn.Module):
        yield from (*value.modules(), *value.parameters(), *value.buffers())
    elif callable(value) and not isinstance(value, type) and hasattr(value, "__dict__"):
        yield from vars(value).values()


def _named_globals(function: FunctionType) -> dict[str, Any]:
    """Return the globals that a function's code names, without the functions of other files."""
    file_globals, named = function.__globals__, dict[str, Any]()
    for name in _names_in(function.__code__):
        if name not in file_globals:
            continue  # an attribute, or a builtin
        value = file_globals[name]
        is_of_other_file = isinstance(value, FunctionType) and value.__globals__ is not file_globals
        if not is_of_other_file:
            named[name] = value
    return named


def _names_in(code: CodeType) -> Iterator[str]:
    """Yield the names of globals and attributes in a function's code, and in that of those it defines."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in(constant)
