"""What is patched in torch while a script is recorded, each with its reason, and put back afterwards."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial, wraps
from typing import Any, Final, TypeAlias, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ChainedScheduler, LRScheduler, ReduceLROnPlateau, SequentialLR

from normlab.private_torch import FUNCTIONAL_GRADIENT, VMAP, LoaderIterator, set_stance, stance
from normlab.setups.recorder import Recorder
from normlab.setups.recording import Event
from normlab.trace.patching import Clip, replace, replace_clipping

RecorderT = TypeVar("RecorderT", bound=Recorder)
Patch: TypeAlias = Callable[[Recorder, Any], Any]
"""``patch(recorder, original)``: what stands in place of the original while a script is recorded."""


@contextmanager
def recorded(recorder: RecorderT) -> Iterator[RecorderT]:
    """Record inside this block; what is patched for it is restored, whatever is raised. The recorder ends the
    script by ``EnoughSeen``.
    """
    with ExitStack() as stack:
        for owner, name, patch in PATCHES:
            replace(stack, owner, name, patch(recorder, vars(owner)[name]))
        replace_clipping(stack, partial(_noted_clip, recorder))
        stack.callback(_compile_again, recorder, stance())
        stack.callback(recorder.end)
        stack.enter_context(recorder)
        yield recorder


def _compile_again(recorder: Recorder, before: Any) -> None:
    if recorder.recording.compiled:
        set_stance(before)


def _module_call(recorder: Recorder, call: Any) -> Any:
    """The outermost calls of modules are what a flow is made of."""
    return lambda module, *args, **kwargs: recorder.call_module(call, module, *args, **kwargs)


def _backward(recorder: Recorder, backward: Any) -> Any:
    """A backward pass ends a micro-batch."""
    return lambda loss, *args, **kwargs: recorder.backward(backward, loss, *args, **kwargs)


def _gradient(recorder: Recorder, grad: Any) -> Any:
    """A gradient of parameters that is asked for ends a micro-batch as well."""

    @wraps(grad)
    def gradient(*args: Any, **kwargs: Any) -> Any:
        return recorder.gradient(grad, *args, **kwargs)

    return gradient


def _vectorized(recorder: Recorder, vmap: Any) -> Any:
    """What ``torch.func.vmap`` calls gets tensors of another kind, so it is one call."""
    return lambda function, *args, **kwargs: recorder.call_function(vmap, function, *args, **kwargs)


def _functional_gradient(recorder: Recorder, grad_and_value: Any) -> Any:
    """``torch.func.grad`` of parameters ends a micro-batch as well."""

    @wraps(grad_and_value)
    def gradient(function: Any, argnums: Any, has_aux: Any, args: Any, kwargs: Any) -> Any:
        return recorder.functional_gradient(grad_and_value, function, argnums, args, kwargs, has_aux=has_aux)

    return gradient


def _apply(recorder: Recorder, apply: Any) -> Any:
    """A function with a backward pass of its own is one call: its parts have another gradient."""

    def applied(kind: Any, *args: Any, **kwargs: Any) -> Any:
        return recorder.call_function(apply.__get__(None, kind), *args, **kwargs)

    return classmethod(applied)


def _fetch(recorder: Recorder, fetch: Any) -> Any:
    """What a loader does to make a batch is its own; the batch is where a flow begins."""

    @wraps(fetch)
    def fetched(batches: Any) -> Any:
        with recorder.paused():
            batch = fetch(batches)
        recorder.add_loaded(batch)
        return batch

    return fetched


def _noted_clip(recorder: Recorder, call: Clip) -> AbstractContextManager[None]:
    """Note a clip of gradients by their own norm. One by a norm that covers further gradients is found by
    what it leaves, like a clip by the script's own code.
    """
    with recorder.paused():
        if call.share < 1:
            return nullcontext()
        event = Event(
            "clip", call.parameters, largest_norm=float(call.largest_norm), norm_type=call.norm_type
        )
    return recorder.changing_gradients(event)


def _compile(recorder: Recorder, compile_: Any) -> Any:
    """Compiled code calls modules and functions that nobody sees; it is run as it was written."""

    @wraps(compile_)
    def compiled(*args: Any, **kwargs: Any) -> Any:
        result = compile_(*args, **kwargs)
        if not recorder.recording.compiled:
            recorder.recording.compiled = True
            torch.compiler.set_stance("force_eager")
        return result

    return compiled


def _scale(recorder: Recorder, scale: Any) -> Any:
    """The scale of a ``GradScaler`` belongs to the step, and not to the loss."""
    return lambda scaler, outputs: recorder.scale(scale, scaler, outputs)


def _unscale(recorder: Recorder, unscale: Any) -> Any:
    """Gradients are unscaled before or after they are clipped, which matters."""

    @wraps(unscale)
    def unscaled(scaler: Any, optimizer: Optimizer) -> None:
        if not scaler.is_enabled():
            return
        with recorder.changing_gradients(Event("unscale", optimizer)):
            unscale(scaler, optimizer)

    return unscaled


def _make_optimizer(recorder: Recorder, make: Any) -> Any:
    """An optimizer is known from its beginning, and its steps are left out."""

    @wraps(make)
    def made(optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
        make(optimizer, *args, **kwargs)
        recorder.add_optimizer(optimizer)

    return made


def _make_scheduler(recorder: Recorder, make: Any) -> Any:
    """A schedule is known from its beginning. It wraps the ``step`` of its optimizer, which must be the real
    one.
    """

    @wraps(make)
    def made(scheduler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        with recorder.stepping_freely(optimizer), recorder.scheduling():
            make(scheduler, optimizer, *args, **kwargs)
        recorder.add_scheduler(scheduler)

    return made


def _schedule(recorder: Recorder, step: Any) -> Any:
    """A schedule's steps are a part of the loop; those of the schedules that it is made of are its own."""

    @wraps(step)
    def stepped(scheduler: Any, *args: Any, **kwargs: Any) -> Any:
        is_known = any(scheduler is known for known in recorder.recording.schedulers)
        if is_known and not recorder.is_scheduling:
            recorder.note(Event("schedule", scheduler))
        with recorder.scheduling():
            return step(scheduler, *args, **kwargs)

    return stepped


PATCHES: Final[tuple[tuple[Any, str, Patch], ...]] = (
    (nn.Module, "__call__", _module_call),
    (Tensor, "backward", _backward),
    (torch.autograd, "backward", _backward),
    (torch.autograd, "grad", _gradient),
    (*VMAP, _vectorized),
    (*FUNCTIONAL_GRADIENT, _functional_gradient),
    (torch.autograd.Function, "apply", _apply),
    (LoaderIterator, "__next__", _fetch),
    (torch, "compile", _compile),
    (torch.amp.GradScaler, "scale", _scale),
    (torch.amp.GradScaler, "unscale_", _unscale),
    (Optimizer, "__init__", _make_optimizer),
    (LRScheduler, "__init__", _make_scheduler),
    (LRScheduler, "step", _schedule),
    # these two call no constructor of their base, and step by themselves
    (SequentialLR, "__init__", _make_scheduler),
    (SequentialLR, "step", _schedule),
    (ChainedScheduler, "__init__", _make_scheduler),
    (ChainedScheduler, "step", _schedule),
    (ReduceLROnPlateau, "__init__", _make_scheduler),
    (ReduceLROnPlateau, "step", _schedule),
)
"""What is patched, in order; and then what clips gradients by their norm."""
