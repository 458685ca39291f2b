"""Record what a script computes in its first steps, without a change to the script or to its weights.

Three things are watched while the script runs: functions of torch outside modules (a ``TorchFunctionMode``),
calls of modules that hold parameters (``nn.Module.__call__``; what happens inside them is theirs), and the
calls that make a step of gradients: backward passes, clipping, optimizers, schedulers. An optimizer's step is
noted and left out, so the script goes on with the weights that it has.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from types import FrameType, MethodType
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from normlab.setups.recording import (
    Event,
    MicroBatch,
    Number,
    RecordedCall,
    Recording,
    Reference,
    Surroundings,
    flattened,
)
from normlab.trace.tensors import tensors_in

LEAVES_TORCH: Final = (
    "item",
    "tolist",
    "numpy",
    "__array__",
    "__bool__",
    "__int__",
    "__float__",
    "__index__",
)
"""Methods by which the numbers of a tensor become values of Python, which no recording follows."""
NOT_COMPUTED: Final = ("backward", "register_hook", "requires_grad_", "retain_grad", "__repr__", "__format__")
"""Methods that compute no tensor that a loss could need."""


class EnoughSeen(BaseException):
    """Ends the script when enough steps were seen. Not an Exception: ``except Exception`` lets it pass."""


class Recorder(TorchFunctionMode):
    """Fills a ``Recording``. A tensor that a function writes to gets a new number."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.recording = Recording()
        self._steps = steps
        """How many steps of an optimizer are seen before the script is ended."""
        self._active = True
        self._scaled: dict[int, tuple[Tensor, Tensor, float]] = {}
        """What a ``GradScaler`` returned, by ``id``: itself, what was scaled, and by how much."""
        self._earlier_steps: list[tuple[Optimizer, Any]] = []
        """Optimizers whose steps are held back, each with the ``step`` that its instance had before, if any.
        """
        self._numbers = itertools.count()
        self._number_of: dict[int, Number] = {}
        self._calls: list[RecordedCall] = []
        self._tensors: dict[Number, Tensor] = {}
        self._before: dict[Number, Tensor] = {}
        self._inside = 0
        """How many recorded calls are running: what they call is theirs."""
        self._devices = ["cpu"] if torch.accelerator.current_accelerator() is None else ["cpu", "cuda"]

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Record nothing inside this block."""
        self._inside += 1
        try:
            yield
        finally:
            self._inside -= 1

    @property
    def is_paused(self) -> bool:
        """Whether something is running whose own calls are not recorded."""
        return self._inside > 0

    # ------------------------------------------------------------------------------------------- values

    def _number(self, tensor: Tensor) -> Number:
        """Return the number of a tensor as it is now; a tensor that is seen for the first time gets one."""
        known = self._number_of.get(id(tensor))
        return self._new_number(tensor) if known is None else known

    def _new_number(self, tensor: Tensor) -> Number:
        number = next(self._numbers)
        self._number_of[id(tensor)] = number
        self._tensors[number] = tensor  # a reference, too: no other tensor gets its id
        return number

    def _referring(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], Any]:
        leaves, form = flattened((args, kwargs))
        referring = [Reference(self._number(x)) if isinstance(x, Tensor) else x for x in leaves]
        return referring, form

    # ------------------------------------------------------------------------------------- functions

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if self._inside or name in NOT_COMPUTED:
            return func(*args, **kwargs)
        if name in LEAVES_TORCH and args and isinstance(args[0], Tensor):
            self._note_escape(name, args[0])
            return func(*args, **kwargs)
        target = args[0] if args and isinstance(args[0], Tensor) and writes_to_its_first(name) else None
        if target is not None:
            self._before.setdefault(self._number(target), target.detach().clone())
        arguments = self._referring(args, kwargs)
        drawing = torch.get_rng_state()
        surroundings = Surroundings.now(self._devices)
        with self.paused():
            result = func(*args, **kwargs)
        self._record(func, None, arguments, result, target, surroundings, drawing)
        return result

    def _record(
        self,
        function: Any,
        module: nn.Module | None,
        arguments: tuple[list[Any], Any],
        result: Any,
        target: Tensor | None,
        surroundings: Surroundings,
        drawing: Tensor,
    ) -> None:
        changes = None if target is None else self._number(target)
        results = [target] if target is not None else [tensor for _, tensor in tensors_in(result)]
        given = {id(leaf) for leaf in self._given(arguments)}
        if not results or (target is None and all(id(tensor) in given for tensor in results)):
            return  # nothing new, as from ``to`` where the tensor is already
        numbers = tuple(self._new_number(tensor) for tensor in results)
        drew = not torch.equal(drawing, torch.get_rng_state())
        self._calls.append(
            RecordedCall(
                function,
                module,
                arguments,
                numbers,
                changes,
                surroundings,
                drawing if drew else None,
                calling_line(),
            )
        )

    def _given(self, arguments: tuple[list[Any], Any]) -> Iterator[Tensor]:
        for leaf in arguments[0]:
            if isinstance(leaf, Reference):
                yield self._tensors[leaf.number]

    def _note_escape(self, name: str, tensor: Tensor) -> None:
        if id(tensor) in self._number_of:
            self.recording.escapes.append(f"{name}() in {calling_line()}")

    # --------------------------------------------------------------------------------------- modules

    def call_module(self, original: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Call a module; record it if it is an outermost one with parameters."""
        if self._inside or next(module.parameters(), None) is None:
            return original(module, *args, **kwargs)
        arguments = self._referring(args, kwargs)
        surroundings, drawing = Surroundings.now(self._devices), torch.get_rng_state()
        with self.paused():
            result = original(module, *args, **kwargs)
        self._record(None, module, arguments, result, None, surroundings, drawing)
        return result

    def apply_function(self, original: Callable[..., Any], kind: Any, *args: Any, **kwargs: Any) -> Any:
        """Apply an ``autograd.Function``, whose backward pass is its own, as one call."""
        if self._inside:
            return original(*args, **kwargs)
        arguments = self._referring(args, kwargs)
        surroundings, drawing = Surroundings.now(self._devices), torch.get_rng_state()
        with self.paused():
            result = original(*args, **kwargs)
        self._record(kind.apply, None, arguments, result, None, surroundings, drawing)
        return result

    # ---------------------------------------------------------------------------------- the loop's calls

    def backward(self, original: Callable[..., Any], loss: Any, *args: Any, **kwargs: Any) -> Any:
        """Run a backward pass, and keep what led to it as a micro-batch."""
        if self._inside or not isinstance(loss, Tensor):
            return original(loss, *args, **kwargs)
        held = {id(p): p for optimizer in self.recording.optimizers for p in parameters_of(optimizer)}
        before = {key: None if p.grad is None else p.grad.detach().clone() for key, p in held.items()}
        names, module_names = self._names()
        _, unscaled, scale = self._scaled.get(id(loss), (loss, loss, 1.0))
        micro_batch = MicroBatch(
            self._calls,
            self._number(unscaled),
            scale,
            names,
            dict(self._tensors),
            dict(self._before),
            module_names,
        )
        with self.paused():
            result = original(loss, *args, **kwargs)
        for key, p in held.items():
            if p.grad is not None:
                earlier = before[key]
                micro_batch.gradients[key] = p.grad.detach() - (0 if earlier is None else earlier)
        self.recording.micro_batches.append(micro_batch)
        self.recording.events.append(Event("backward", micro_batch))
        self._calls = []
        return result

    def scale(self, original: Callable[..., Any], scaler: Any, outputs: Any) -> Any:
        """Let a ``GradScaler`` scale a loss; the scale is the step's, not the loss's."""
        with self.paused():
            scaled = original(scaler, outputs)
        if isinstance(scaled, Tensor) and isinstance(outputs, Tensor):
            self._scaled[id(scaled)] = scaled, outputs, float(scaler.get_scale())
        return scaled

    def _names(self) -> tuple[dict[Number, str], dict[int, str]]:
        """Return what the running script calls its tensors and modules; innermost frames first."""
        tensors: dict[Number, str] = {}
        modules: dict[int, str] = {}
        frame: FrameType | None = sys._getframe(2)
        while frame is not None:
            is_own = not is_library(frame.f_code.co_filename)
            for name, value in frame.f_locals.items():
                # an object's modules too: a trainer's are its attributes, in a library's frames as well
                held = {name: value, **(vars(value) if hasattr(value, "__dict__") else {})}
                for attribute, module in held.items():
                    if isinstance(module, nn.Module) and attribute != "self":
                        modules.setdefault(id(module), attribute)
                for place, tensor in tensors_in(value) if is_own and not name.startswith("__") else ():
                    number = self._number_of.get(id(tensor))
                    if number is not None:
                        label = str(place[-1]) if place and isinstance(place[-1], str) else name
                        tensors.setdefault(number, label)
            frame = frame.f_back
        return tensors, modules

    def note(self, event: Event) -> None:
        """Add an event, while the script runs."""
        if self._active:
            self.recording.events.append(event)

    def add_scheduler(self, scheduler: Any) -> None:
        """Note a schedule; a subclass may call the constructor of its base."""
        if all(scheduler is not known for known in self.recording.schedulers):
            self.recording.schedulers.append(scheduler)

    # ------------------------------------------------------------------------------------- optimizers

    def add_optimizer(self, optimizer: Optimizer) -> None:
        """Note an optimizer, and hold its steps back."""
        if all(optimizer is not known for known in self.recording.optimizers):
            self.recording.optimizers.append(optimizer)
            self._hold_back(optimizer)

    def _hold_back(self, optimizer: Optimizer) -> None:
        """Let calls of the optimizer's ``step`` come here."""
        earlier, real = vars(optimizer).get("step"), optimizer.step

        def step(held: Optimizer, closure: Any = None, *args: Any, **kwargs: Any) -> Any:
            if not self._active:
                return real(*args, **kwargs) if closure is None else real(closure, *args, **kwargs)
            loss = None
            if callable(closure):  # computes the loss and its gradient, as Lightning has it
                with torch.enable_grad():
                    loss = closure()
            self._leave_out(held)
            return loss

        self._earlier_steps.append((optimizer, earlier))
        optimizer.step = MethodType(wraps(real)(step), optimizer)  # type: ignore[method-assign]

    @contextmanager
    def stepping_freely(self, optimizer: Any) -> Iterator[None]:
        """Put back the real ``step`` of an optimizer inside this block, if it is held back."""
        held = [pair for pair in self._earlier_steps if pair[0] is optimizer]
        for pair in held:
            self._put_back(*pair)
            self._earlier_steps.remove(pair)
        try:
            yield
        finally:
            if held:
                self._hold_back(optimizer)

    def end(self) -> None:
        """Put back the ``step`` of every optimizer, and note no more events."""
        self._active = False
        for optimizer, earlier in self._earlier_steps:
            self._put_back(optimizer, earlier)
        self._earlier_steps.clear()

    @staticmethod
    def _put_back(optimizer: Optimizer, earlier: Any) -> None:
        if earlier is None:
            del optimizer.step
        else:
            optimizer.step = earlier  # type: ignore[method-assign]

    def _leave_out(self, optimizer: Optimizer) -> None:
        """Note a step in place of making it; end the script when enough steps of one optimizer were seen."""
        events = self.recording.events
        if not self.recording.micro_batches:
            return  # before any backward pass, as some wrappers step once to set up their state
        self.note(Event("step", optimizer, rates=tuple(float(g["lr"]) for g in optimizer.param_groups)))
        optimizer._opt_called = True  # type: ignore[attr-defined]  # or its schedule would warn
        if sum(e.kind == "step" and e.subject is optimizer for e in events) >= self._steps:
            raise EnoughSeen


def parameters_of(optimizer: Optimizer) -> Iterator[Tensor]:
    """Yield the parameters of an optimizer."""
    for group in optimizer.param_groups:
        yield from group["params"]


def writes_to_its_first(name: str) -> bool:
    """Return whether a function of torch changes its first argument in place, by torch's rule for names."""
    if name in ("__setitem__", "__delitem__"):
        return True
    in_place_operator = (
        name.startswith("__i") and name.endswith("__") and name not in ("__index__", "__int__")
    )
    return in_place_operator or (name.endswith("_") and not name.endswith("__"))


_INSTALLED: Final = tuple(
    str(Path(p)) for p in {Path(torch.__file__).parent.parent, Path(__file__).parents[1]}
)


def is_library(file: str) -> bool:
    """Return whether a file belongs to an installed package or to normlab, and not to the user."""
    return file.startswith((*_INSTALLED, "<")) or "/lib/python3" in file


def calling_line() -> str:
    """Return the file and line of the user's code that is running: ``train.py:42``."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if not is_library(frame.f_code.co_filename):
            return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
        frame = frame.f_back
    return ""
