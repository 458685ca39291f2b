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
from contextlib import ExitStack, contextmanager
from functools import wraps
from pathlib import Path
from types import FrameType, MethodType
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.overrides import TorchFunctionMode
from torch.utils.data import dataloader

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
        self.steps = steps
        """How many steps of an optimizer are seen before the script is ended."""
        self.active = True
        self._real_steps: list[tuple[Optimizer, Any]] = []
        """Optimizers, each with the ``step`` that its instance had before, if it had one."""
        self._numbers = itertools.count()
        self._number_of: dict[int, Number] = {}
        self._calls: list[RecordedCall] = []
        self._tensors: dict[Number, Tensor] = {}
        self._before: dict[Number, Tensor] = {}
        self._inside = 0
        """How many recorded calls are running: what they call is theirs."""
        self._devices = ["cpu"] if torch.accelerator.current_accelerator() is None else ["cpu", "cuda"]

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
        self._inside += 1
        try:
            result = func(*args, **kwargs)
        finally:
            self._inside -= 1
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
        self._inside += 1
        try:
            result = original(module, *args, **kwargs)
        finally:
            self._inside -= 1
        self._record(None, module, arguments, result, None, surroundings, drawing)
        return result

    def apply_function(self, original: Callable[..., Any], kind: Any, *args: Any, **kwargs: Any) -> Any:
        """Apply an ``autograd.Function``, whose backward pass is its own, as one call."""
        if self._inside:
            return original(*args, **kwargs)
        arguments = self._referring(args, kwargs)
        surroundings, drawing = Surroundings.now(self._devices), torch.get_rng_state()
        self._inside += 1
        try:
            result = original(*args, **kwargs)
        finally:
            self._inside -= 1
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
        micro_batch = MicroBatch(
            self._calls, self._number(loss), names, dict(self._tensors), dict(self._before), module_names
        )
        self._inside += 1
        try:
            result = original(loss, *args, **kwargs)
        finally:
            self._inside -= 1
        for key, p in held.items():
            if p.grad is not None:
                earlier = before[key]
                micro_batch.gradients[key] = p.grad.detach() - (0 if earlier is None else earlier)
        self.recording.micro_batches.append(micro_batch)
        self.recording.events.append(Event("backward", micro_batch))
        self._calls = []
        return result

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

    def hold_back(self, optimizer: Optimizer) -> None:
        """Let calls of the optimizer's ``step`` come here. A schedule wraps that method when it is made, so
        this is done again then, and the schedule's wrapper is what is put back.
        """
        earlier = vars(optimizer).get("step")
        real = optimizer.step

        def step(held: Optimizer, closure: Any = None, *args: Any, **kwargs: Any) -> Any:
            if not self.active:
                return real(*args, **kwargs) if closure is None else real(closure, *args, **kwargs)
            loss = None
            if callable(closure):  # computes the loss and its gradient, as Lightning has it
                with torch.enable_grad():
                    loss = closure()
            self.step(held)
            return loss

        self._real_steps.append((optimizer, earlier))
        optimizer.step = MethodType(wraps(real)(step), optimizer)  # type: ignore[method-assign]

    def let_go(self, optimizer: Optimizer | None = None) -> None:
        """Put back the ``step`` of an optimizer, or of all."""
        for known, earlier in reversed(self._real_steps):
            if optimizer is None or known is optimizer:
                if earlier is None:
                    del known.step
                else:
                    known.step = earlier  # type: ignore[method-assign]
        self._real_steps = [
            pair for pair in self._real_steps if optimizer is not None and pair[0] is not optimizer
        ]

    def step(self, optimizer: Optimizer) -> None:
        """Note a step, and leave it out; end the script when enough steps of one optimizer were seen."""
        events = self.recording.events
        if not self.recording.micro_batches:
            return  # before any backward pass, as some wrappers step once to set up their state
        events.append(Event("step", optimizer, rates=tuple(float(g["lr"]) for g in optimizer.param_groups)))
        optimizer._opt_called = True  # type: ignore[attr-defined]  # or its schedule would warn
        if sum(e.kind == "step" and e.subject is optimizer for e in events) >= self.steps:
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


@contextmanager
def recorded(*, steps: int = 2) -> Iterator[Recorder]:
    """Record inside this block; what is patched for it is restored, whatever is raised.

    The script is ended by ``EnoughSeen`` when an optimizer is stepped for the time that ``steps`` says: the
    second by default, since what a loop does after its first step, such as stepping a schedule, belongs to
    that step.
    """
    recorder = Recorder(steps)
    with ExitStack() as stack:

        def patch(owner: Any, name: str, replacement: Callable[..., Any]) -> None:
            stack.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, replacement)

        call, backward, autograd_backward = nn.Module.__call__, Tensor.backward, torch.autograd.backward
        fetch, clip = dataloader._BaseDataLoaderIter.__next__, clip_grad._clip_grads_with_norm_

        @wraps(fetch)
        def fetched(batches: Any) -> Any:
            # what a loader does to make a batch is its own; the batch is where the dataflow begins
            recorder._inside += 1
            try:
                return fetch(batches)
            finally:
                recorder._inside -= 1

        @wraps(clip)
        def clipped(parameters: Any, max_norm: float, *args: Any, **kwargs: Any) -> Any:
            held = [parameters] if isinstance(parameters, Tensor) else list(parameters)
            recorder.recording.events.append(Event("clip", held, float(max_norm)))
            return clip(held, max_norm, *args, **kwargs)

        compile_, apply = torch.compile, vars(torch.autograd.Function)["apply"]

        @wraps(compile_)
        def compiled(*args: Any, **kwargs: Any) -> Any:
            # compiled code would call modules and functions that nobody sees, and compiling takes minutes
            result = compile_(*args, **kwargs)
            if not recorder.recording.compiled:
                recorder.recording.compiled = True
                torch.compiler.set_stance("force_eager")
                stack.callback(torch.compiler.set_stance, "default")
            return result

        def applied(kind: Any, *args: Any, **kwargs: Any) -> Any:
            return recorder.apply_function(apply.__get__(None, kind), kind, *args, **kwargs)

        patch(torch, "compile", compiled)
        stack.callback(setattr, torch.autograd.Function, "apply", apply)
        torch.autograd.Function.apply = classmethod(applied)  # type: ignore[assignment,method-assign]
        patch(nn.Module, "__call__", lambda module, *a, **k: recorder.call_module(call, module, *a, **k))
        patch(Tensor, "backward", lambda loss, *a, **k: recorder.backward(backward, loss, *a, **k))
        patch(torch.autograd, "backward", lambda x, *a, **k: recorder.backward(autograd_backward, x, *a, **k))
        patch(dataloader._BaseDataLoaderIter, "__next__", fetched)
        patch(clip_grad, "_clip_grads_with_norm_", clipped)
        for kind in (LRScheduler, ReduceLROnPlateau):
            patch(kind, "step", _noted_schedule(kind.step, recorder))
        patch(Optimizer, "__init__", _noted_optimizer(Optimizer.__init__, recorder))
        for kind in (LRScheduler, ReduceLROnPlateau):
            patch(kind, "__init__", _noted_scheduler(kind.__init__, recorder))
        stack.callback(recorder.let_go)
        stack.callback(setattr, recorder, "active", False)
        stack.enter_context(recorder)
        yield recorder


def _noted_optimizer(make: Callable[..., None], recorder: Recorder) -> Callable[..., None]:
    @wraps(make)
    def made(optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
        make(optimizer, *args, **kwargs)
        if all(optimizer is not known for known in recorder.recording.optimizers):
            recorder.recording.optimizers.append(optimizer)
            recorder.hold_back(optimizer)

    return made


def _noted_schedule(step: Callable[..., Any], recorder: Recorder) -> Callable[..., Any]:
    @wraps(step)
    def stepped(scheduler: Any, *args: Any, **kwargs: Any) -> Any:
        if recorder.active and any(scheduler is known for known in recorder.recording.schedulers):
            recorder.recording.events.append(Event("schedule", scheduler))
        return step(scheduler, *args, **kwargs)

    return stepped


def _noted_scheduler(make: Callable[..., None], recorder: Recorder) -> Callable[..., None]:
    """Note a scheduler and its later steps. What it wraps is the optimizer's own ``step``."""

    @wraps(make)
    def made(scheduler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        held = any(optimizer is known for known, _ in recorder._real_steps)
        if held:
            recorder.let_go(optimizer)
        try:
            make(scheduler, optimizer, *args, **kwargs)
        finally:
            if held:
                recorder.hold_back(optimizer)
        if all(scheduler is not known for known in recorder.recording.schedulers):
            recorder.recording.schedulers.append(scheduler)

    return made
