"""Record what a script computes, without a change to the script or to its weights.

Three kinds of calls are recorded while the script runs: of functions of torch outside modules (torch hands
them to ``__torch_function__``, as this is a ``TorchFunctionMode``), of the outermost modules that hold
parameters (``patches`` has ``nn.Module.__call__`` come to ``call_module``), and of an ``autograd.Function``
or a function that ``torch.func.vmap`` made (``patches`` has them come to ``call_function``). While one is
running nothing else is recorded: what happens inside of a call is a part of it.

A function may also take a value out of torch, as ``item()``, ``int()``, ``if`` and ``numpy()`` do. Numbers
go on being followed (``numbers``); everything else is noted as an ``Escape``.
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
class _BegunCall:
    """What is known of a call when it begins."""

    function: Callable[..., Any] | None
    module: nn.Module | None
    arguments: Arguments
    surroundings: Surroundings
    generators: Sequence[tuple[Any, Any]]
    """The generators of random numbers that it may draw from, each with its state."""
    tensors: Sequence[tuple[Tensor, int | None]]
    """The tensors among its arguments, each with how often it had been written to."""
    announced: Sequence[Tensor] = ()
    """The tensors that it writes to by its name, as ``add_`` does."""

    def written(self) -> list[Tensor]:
        """Return the tensors that it has written to, once it has ended. A parameter is none of them: it keeps
        its number, whatever is written to it.
        """
        changed = [x for x, times in self.tensors if times != times_written(x)]
        written = {id(x): x for x in [*self.announced, *changed] if not isinstance(x, nn.Parameter)}
        return list(written.values())

    def drawn(self) -> list[tuple[Any, Any]]:
        """Return the generators that it has drawn from, once it has ended, each with its state before."""
        return [(each, state) for each, state in self.generators if not is_in_state(each, state)]


class DataflowRecorder(TorchFunctionMode):
    """Keeps the calls that a script makes, in order, and where values leave what is followed."""

    def __init__(self) -> None:
        super().__init__()
        self.values = Values()
        self.names = Names()
        self._calls: list[RecordedCall] = []
        self._escapes: list[Escape] = []
        self._active = True
        """Whether the recording goes on."""
        self._lines_of_names: set[str] = set()
        """Lines of the pass that is under way at which names were looked for."""
        self._generators: dict[int, list[Any]] = {}
        """By ``id`` of a module: the generators of random numbers that it holds."""
        self._reads_entries: dict[Any, bool] = {}
        """Whether functions need the entries of their tensors, as far as that was asked."""
        self._thread = threading.get_ident()
        """The thread of the script's own code: loaders may have others."""
        self._pauses = threading.local()
        """In each thread: how many blocks are open, as ``count``, in which nothing is recorded."""
        accelerator = torch.accelerator.current_accelerator()
        self._devices = ["cpu"] if accelerator is None else ["cpu", accelerator.type]

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Record nothing inside this block."""
        pauses = self._pauses
        pauses.count = getattr(pauses, "count", 0) + 1
        try:
            yield
        finally:
            pauses.count -= 1

    @property
    def is_paused(self) -> bool:
        """Whether what runs is not recorded: inside of a recorded call, in another thread, after the end."""
        is_other_thread = threading.get_ident() != self._thread
        return is_other_thread or not self._active or getattr(self._pauses, "count", 0) > 0

    def add_loaded(self, batch: Any) -> None:
        """Note what a ``DataLoader`` returns: the batch begins there."""
        if not self.is_paused:
            with self.paused():
                self.values.add_loaded(batch)

    # ------------------------------------------------------------------------------------- functions

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call a function of torch, and record it. Torch calls this in place of the function."""
        kwargs = kwargs or {}
        if self.is_paused:
            return func(*args, **kwargs)
        with self.paused():
            if func is Tensor.__iter__:  # it unbinds the tensor unseen, and its entries are values
                return iter(self._compute(Tensor.unbind, args, kwargs))
            if holds_values([args, kwargs]):
                return self._compute(func, args, kwargs)
            return self._make(func, args, kwargs)

    def _make(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a function that is given no value, as ``torch.tensor`` and ``torch.randn``.

        It is not recorded as a call. A tensor that it makes is data, unless it follows from its size.
        """
        begun = self._begin(function, (), {}, torch_generators())
        result = function(*args, **kwargs)
        if isinstance(result, Tensor):
            holds_data = begun.drawn() or not holds_no_data(result, args, kwargs)
            tensors_like_it = self.values.made if holds_data else self.values.sized
            tensors_like_it.add(self.values.number(result))
        return result

    def _compute(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a function of recorded values, and record it."""
        name = getattr(function, "__name__", "")
        announced = writes_to(name, args, kwargs)
        if announced and changes_entries(function):
            self.before_write(announced)
        parameter = args[0] if args and isinstance(args[0], nn.Parameter) else None
        if announced and all(x is parameter for x in announced):
            return function(*args, **kwargs)  # a parameter is itself, whatever is written to it
        self.values.keep(announced)
        # functions of torch draw from its generators alone, or from one that they are given
        passed = [argument for argument in (*args, *kwargs.values()) if isinstance(argument, torch.Generator)]
        begun = self._begin(function, args, kwargs, [*torch_generators(), *passed], announced)
        result = function(*args, **kwargs)
        if parameter is not None and next(tensors_in(result), None) is None:
            return result  # such as its size, which is the model's and says nothing of the batch
        if not is_special(name):  # Python insists on plain numbers from those
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
        """Return a followed number as a plain ``kind``, and record that.

        A plain float is recognized by its identity, as no other float is the same object. An int or a bool
        is not, so it escapes.
        """
        result = kind(unfollowed(number))
        if self.is_paused:
            return result
        with self.paused():
            begun = self._begin(kind, (number,), {})
            self._record(begun, result)
            self._note_escape(begun, result)
        return result

    def compute(self, operation: Callable[..., Any], *numbers: Any) -> Any:
        """Return the result of an operation on numbers that were read out of tensors, and record it."""
        result = operation(*map(unfollowed, numbers))
        if self.is_paused:
            return result
        with self.paused():
            begun = self._begin(operation, numbers, {})
            result = self._followed(result)
            self._record(begun, result)
            self._note_escape(begun, result)
        return result

    # ----------------------------------------------------------------------------------------- modules

    def call_module(self, original: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Call a module; record it if it is an outermost one with parameters.

        A module that is handed another one is not recorded itself; what is called inside of it is. It is a
        function of the script that happens to be a module, such as a trainer's wrapper that takes the loss of
        the module that it is handed, and it may do something else when it is called again.
        """
        is_handed_a_module = any(isinstance(x, nn.Module) for x in (*args, *kwargs.values()))
        if self.is_paused or is_handed_a_module or next(module.parameters(), None) is None:
            return original(module, *args, **kwargs)
        with self.paused():
            self._look_for_names()
            if id(module) not in self._generators:
                self._generators[id(module)] = generators_in(module)
            generators = [*shared_generators(), *self._generators[id(module)]]
            self.before_call(module)
            begun = self._begin(module, args, kwargs, generators)
            result = original(module, *args, **kwargs)
            # what was there before the call may have been left by an earlier one
            left = {place: x for place, x in values_left_on(module).items() if self.values.known(x) is None}
            self._record(begun, result, left)
        return result

    def _look_for_names(self) -> None:
        """Look for what the script calls its values now: a loop may give a name to its next batch before the
        backward pass. That takes a while, and a line that runs again calls its values the same.
        """
        line = calling_line()
        if line not in self._lines_of_names:
            self._lines_of_names.add(line)
            self.names.look(self.values.known)

    def before_write(self, tensors: Sequence[Tensor]) -> None:
        """Called before a function of the script's own code changes the entries of tensors."""

    def before_call(self, module: nn.Module) -> None:
        """Called before a module whose call is recorded."""

    def call_function(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a function and record it as one call, whatever it calls. An ``autograd.Function``, for one,
        defines its own gradient, which is not that of its parts.
        """
        if self.is_paused:
            return original(*args, **kwargs)
        with self.paused():
            begun = self._begin(original, args, kwargs, shared_generators())
            result = original(*args, **kwargs)
            self._record(begun, result)
        return result

    # ------------------------------------------------------------------------------------ the record

    def _begin(
        self,
        called: Callable[..., Any] | nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        generators: Iterable[Any] = (),
        announced: Sequence[Tensor] = (),
    ) -> _BegunCall:
        """Note all that must be known of a call before it runs.

        Args:
            called: The function, or the module.
            args: Its arguments.
            kwargs: Its keywords.
            generators: The generators of random numbers that it may draw from.
            announced: The tensors that it writes to by its name.
        """
        arguments = self.values.referring(args, kwargs)
        tensors = [x for x in self.values.given(arguments) if isinstance(x, Tensor)]
        is_module = isinstance(called, nn.Module)
        return _BegunCall(
            function=None if is_module else called,
            module=called if is_module else None,
            arguments=arguments,
            surroundings=Surroundings.now(self._devices),
            generators=[(generator, state_of(generator)) for generator in generators],
            tensors=[(x, times_written(x)) for x in tensors],
            announced=announced,
        )

    def _record(self, begun: _BegunCall, result: Any, left: Mapping[Place, Tensor] | None = None) -> None:
        """Keep a call that has ended, if it made a value or wrote to one.

        Args:
            begun: What was known of it when it began.
            result: What it returned.
            left: The values that a module has left as attributes of its own, by their places.
        """
        written = begun.written()
        before = [self.values.number_of(x) for x in written]  # their numbers are still those of before
        returned = {place: x for place, x in values_in(result).items() if self._may_come_back(x)}
        for place, x in (left or {}).items():
            if all(x is not other for other in returned.values()):
                returned[place] = x
        arguments = {id(value) for value in [*written, *self.values.given(begun.arguments)]}
        if not written and all(id(value) in arguments for value in returned.values()):
            return  # nothing new, as from ``to`` where the tensor is already
        returned = {place: x for place, x in returned.items() if all(x is not other for other in written)}
        numbers = [self.values.add(value, computed=True) for value in returned.values()]
        after = [self.values.add(x) for x in written]
        self._calls.append(
            RecordedCall(
                function=begun.function,
                module=begun.module,
                arguments=begun.arguments,
                results=(*numbers, *after),
                places=tuple(returned),
                writes=tuple(zip(before, after, strict=True)),
                surroundings=begun.surroundings,
                random_states=begun.drawn(),
                line=calling_line(),
            )
        )

    @staticmethod
    def _may_come_back(value: Any) -> bool:
        """Return whether a value is recognized when it is an argument. A plain float is, by its identity."""
        return is_value(value) or isinstance(value, float)

    def _note_escape(self, begun: _BegunCall, result: Any) -> None:
        """Note what a call gave that is not followed, if it is numbers or was computed from entries."""
        function = begun.function
        not_followed = [x for x in flattened(result)[0] if not is_value(x) and not says_nothing(x)]
        if function is None or not not_followed:
            return
        # numbers may be sizes, which another batch may change as well; a bool, such as ``is_cuda``, may be
        # the same for every batch
        if not all(map(is_number, not_followed)) and not self._needs_entries(function, begun.arguments):
            return
        read = unfollowed(result) if isinstance(result, (bool, int, float)) else None
        number = self.values.next_number()
        self._escapes.append(Escape(function, begun.arguments, read, calling_line(), number))

    def _needs_entries(self, function: Callable[..., Any], arguments: Arguments) -> bool:
        """Return whether a function needs the entries of its tensors, or is given a number that was read out
        of one, which is an entry itself.
        """
        if any(map(is_followed, self.values.given(arguments))):
            return True
        if function not in self._reads_entries:
            args, kwargs = arguments.with_values(self.values.objects(arguments.references))
            self._reads_entries[function] = reads_entries(function, args, kwargs)
        return self._reads_entries[function]
