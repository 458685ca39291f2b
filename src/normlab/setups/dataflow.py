"""Record what a script computes, without a change to the script or to its weights.

Two things are watched while the script runs: functions of torch outside modules (a ``TorchFunctionMode``),
and calls of modules that hold parameters (``nn.Module.__call__``; what happens inside them is theirs).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from normlab.setups.arguments import Arguments, flattened, values_in, values_left_on
from normlab.setups.callers import Names, calling_line
from normlab.setups.numbers import followed, is_followed, unfollowed
from normlab.setups.recording import Escape, RecordedCall, Surroundings
from normlab.setups.torch_functions import (
    changes_entries,
    holds_no_data,
    holds_values,
    is_number,
    is_special,
    reads_entries,
    says_nothing,
    writes_to,
)
from normlab.setups.values import Values, is_value, times_written
from normlab.trace.kept import is_in_state, state_of
from normlab.trace.reach import generators_in, shared_generators, torch_generators
from normlab.trace.tensors import Place, tensors_in


@dataclass(frozen=True)
class _Begun:
    """What is known of a call when it begins."""

    function: Callable[..., Any] | None
    module: nn.Module | None
    arguments: Arguments
    surroundings: Surroundings
    drawing: Sequence[tuple[Any, Any]]
    """The generators of random numbers that it may draw from, each with its state."""
    tensors: Sequence[tuple[Tensor, int | None]]
    """The tensors among its arguments, each with how often it had been written to."""
    announced: Sequence[Tensor] = ()
    """Those that its name says it writes to."""

    def written(self) -> list[Tensor]:
        """Return the tensors that it has written to. A parameter is itself, whatever is written to it."""
        seen = [x for x, times in self.tensors if times != times_written(x)]
        written = {id(x): x for x in [*self.announced, *seen] if not isinstance(x, nn.Parameter)}
        return list(written.values())

    def drawn(self) -> list[tuple[Any, Any]]:
        """Return the generators that it has drawn from, each with its state before."""
        return [(generator, state) for generator, state in self.drawing if not is_in_state(generator, state)]


class DataflowRecorder(TorchFunctionMode):
    """Keeps the calls that a script makes, in order, and where values leave what is followed."""

    def __init__(self) -> None:
        super().__init__()
        self.values = Values()
        self.names = Names()
        self._calls: list[RecordedCall] = []
        self._escapes: list[Escape] = []
        self._active = True
        self._lines_of_names: set[str] = set()
        """Lines of the pass that is under way at which names were looked for."""
        self._generators: dict[int, list[Any]] = {}
        """By ``id`` of a module: the generators of random numbers that it holds."""
        self._reads_entries: dict[Any, bool] = {}
        """Whether functions need the entries of their tensors, as far as that was asked."""
        self._thread = threading.get_ident()
        self._inside_of_thread = threading.local()
        accelerator = torch.accelerator.current_accelerator()
        self._devices = ["cpu"] if accelerator is None else ["cpu", accelerator.type]

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Record nothing inside this block."""
        calls = self._inside_of_thread
        calls.count = getattr(calls, "count", 0) + 1
        try:
            yield
        finally:
            calls.count -= 1

    @property
    def is_paused(self) -> bool:
        """Whether what runs is not recorded: inside of a recorded call, in another thread, after the end."""
        is_other = threading.get_ident() != self._thread
        return is_other or not self._active or getattr(self._inside_of_thread, "count", 0) > 0

    def add_loaded(self, batch: Any) -> None:
        """Note what a ``DataLoader`` returns: the batch begins there."""
        if not self.is_paused:
            with self.paused():
                self.values.add_loaded(batch)

    # ------------------------------------------------------------------------------------- functions

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.is_paused:
            return func(*args, **kwargs)
        with self.paused():
            if func is Tensor.__iter__:  # the entries that it gives are values
                return iter(self._compute(Tensor.unbind, args, kwargs))
            if holds_values([args, kwargs]):
                return self._compute(func, args, kwargs)
            return self._make(func, args, kwargs)

    def _make(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a function of no values. A tensor that it makes is data, unless its size says all."""
        begun = self._begin(function, None, (), {}, torch_generators())
        result = function(*args, **kwargs)
        if isinstance(result, Tensor):
            holds_data = begun.drawn() or not holds_no_data(result, args, kwargs)
            of_its_kind = self.values.made_of_none if holds_data else self.values.sized
            of_its_kind.add(self.values.number(result))
        return result

    def _compute(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a function of recorded values, and record it."""
        name = getattr(function, "__name__", "")
        announced = writes_to(name, args, kwargs)
        if announced and changes_entries(function):
            self.before_write(announced)
        parameter = args[0] if args and isinstance(args[0], nn.Parameter) else None
        if announced and all(x is parameter for x in announced):
            return function(*args, **kwargs)
        self.values.keep(announced)
        # functions of torch draw from its generators alone
        given = [leaf for leaf in (*args, *kwargs.values()) if isinstance(leaf, torch.Generator)]
        begun = self._begin(function, None, args, kwargs, [*torch_generators(), *given], announced)
        result = function(*args, **kwargs)
        if parameter is not None and next(tensors_in(result), None) is None:
            return result  # its sizes are the model's
        if not is_special(name):
            result = self._followed(result)
        self._record(begun, result)
        self._note_escape(begun, result)
        return result

    def _followed(self, result: Any) -> Any:
        """Return numbers that were read from a tensor as ones whose operations are recorded."""
        if isinstance(result, torch.Size):
            return torch.Size([followed(size, self) for size in result])
        if type(result) in (list, tuple):
            return type(result)(self._followed(item) for item in result)
        return followed(result, self)

    def convert(self, kind: type, number: Any) -> Any:
        """Return a followed number as a plain one. A float is known again by its identity, as no other float
        is the same object; an int or a truth is not.
        """
        result = kind(unfollowed(number))
        if self.is_paused:
            return result
        with self.paused():
            begun = self._begin(kind, None, (number,), {})
            self._record(begun, result)
            self._note_escape(begun, result)
        return result

    def compute(self, operation: Callable[..., Any], *numbers: Any) -> Any:
        """Return the result of an operation on numbers that were read out of tensors, and record it."""
        result = operation(*map(unfollowed, numbers))
        if self.is_paused:
            return result
        with self.paused():
            begun = self._begin(operation, None, numbers, {})
            result = self._followed(result)
            self._record(begun, result)
            self._note_escape(begun, result)
        return result

    # ----------------------------------------------------------------------------------------- modules

    def call_module(self, original: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Call a module; record it if it is an outermost one with parameters.

        One that is handed a module only passes on to what is done with that, as where a trainer takes a loss
        through a wrapper: it may do something else when it is called again.
        """
        is_handed_a_module = any(isinstance(x, nn.Module) for x in (*args, *kwargs.values()))
        if self.is_paused or is_handed_a_module or next(module.parameters(), None) is None:
            return original(module, *args, **kwargs)
        with self.paused():
            line = calling_line()
            if line not in self._lines_of_names:  # a repeated line calls its tensors the same
                self._lines_of_names.add(line)
                # a loop may give a name to its next batch before the backward pass
                self.names.look(self.values.known)
            if id(module) not in self._generators:
                self._generators[id(module)] = generators_in(module)
            generators = [*shared_generators(), *self._generators[id(module)]]
            self.before_call(module)
            begun = self._begin(None, module, args, kwargs, generators)
            result = original(module, *args, **kwargs)
            left = values_left_on(module)
            self._record(begun, result, {p: x for p, x in left.items() if self.values.known(x) is None})
        return result

    def before_write(self, tensors: Sequence[Tensor]) -> None:
        """What else is to be done before a function changes the entries of tensors."""

    def before_call(self, module: nn.Module) -> None:
        """What else is to be kept before a module is called."""

    def call_function(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a function as one call, whatever it calls: an ``autograd.Function`` has its own gradient."""
        if self.is_paused:
            return original(*args, **kwargs)
        with self.paused():
            begun = self._begin(original, None, args, kwargs, shared_generators())
            result = original(*args, **kwargs)
            self._record(begun, result)
        return result

    # ------------------------------------------------------------------------------------ the record

    def _begin(
        self,
        function: Callable[..., Any] | None,
        module: nn.Module | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        generators: Iterable[Any] = (),
        announced: Sequence[Tensor] = (),
    ) -> _Begun:
        arguments = self.values.referring(args, kwargs)
        tensors = [x for x in self.values.given(arguments) if isinstance(x, Tensor)]
        return _Begun(
            function,
            module,
            arguments,
            Surroundings.now(self._devices),
            [(generator, state_of(generator)) for generator in generators],
            [(x, times_written(x)) for x in tensors],
            announced,
        )

    def _record(self, begun: _Begun, result: Any, left: Mapping[Place, Tensor] | None = None) -> None:
        """Keep a call, if it made a value, in what it returned or left elsewhere, or wrote to one."""
        written = begun.written()
        before = [self.values.number_of(x) for x in written]  # which writing has not changed
        returned = {place: x for place, x in values_in(result).items() if self._may_come_back(x)}
        for place, x in (left or {}).items():
            if all(x is not y for y in returned.values()):
                returned[place] = x
        given = {id(value) for value in [*written, *self.values.given(begun.arguments)]}
        if not written and all(id(value) in given for value in returned.values()):
            return  # nothing new, as from ``to`` where the tensor is already
        returned = {place: x for place, x in returned.items() if all(x is not y for y in written)}
        numbers = [self.values.add(value, computed=True) for value in returned.values()]
        after = [self.values.add(x) for x in written]
        self._calls.append(
            RecordedCall(
                begun.function,
                begun.module,
                begun.arguments,
                (*numbers, *after),
                tuple(returned),
                tuple(zip(before, after, strict=True)),
                begun.surroundings,
                begun.drawn(),
                calling_line(),
            )
        )

    @staticmethod
    def _may_come_back(value: Any) -> bool:
        """Return whether a value is known again when it is an argument. A plain float is, by its identity."""
        return is_value(value) or isinstance(value, float)

    def _note_escape(self, begun: _Begun, result: Any) -> None:
        """Note what a call gave that is not followed, if that was computed of entries or of sizes."""
        function = begun.function
        leaves = [leaf for leaf in flattened(result)[0] if not is_value(leaf) and not says_nothing(leaf)]
        if function is None or not leaves:
            return
        if not all(map(is_number, leaves)) and not self._needs_entries(function, begun.arguments):
            return
        read = unfollowed(result) if isinstance(result, (bool, int, float)) else None
        self._escapes.append(Escape(function, begun.arguments, read, calling_line(), self.values.take()))

    def _needs_entries(self, function: Callable[..., Any], arguments: Arguments) -> bool:
        """Return whether a function needs the entries of its tensors; a number is one."""
        if any(map(is_followed, self.values.given(arguments))):
            return True
        if function not in self._reads_entries:
            args, kwargs = arguments.with_values(self.values.objects(arguments.references))
            self._reads_entries[function] = reads_entries(function, args, kwargs)
        return self._reads_entries[function]
