"""Record the first steps of a script: what it computes, and the calls that make a step of gradients.

Backward passes, clipping, optimizers and schedules are watched besides the dataflow. An optimizer's step is
noted and left out, so the script goes on with the weights that it has.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import dropwhile
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from normlab.private_torch import mark_as_stepped, tree_flatten, tree_unflatten
from normlab.setups.arguments import Arguments, Number, Reference
from normlab.setups.callers import calling_line
from normlab.setups.dataflow import DataflowRecorder
from normlab.setups.ending import Ending, EnoughSeen
from normlab.setups.gradients import GradientWatch, parameters_of
from normlab.setups.held_back import HeldBack
from normlab.setups.module_state import KeptValue, StateWatch, WeightPlaces, memory_of
from normlab.setups.recording import (
    BackwardPass,
    ChangedWeight,
    Escape,
    Event,
    MicroBatch,
    RecordedCall,
    Recording,
    Surroundings,
    model_calls,
    sources,
)


class Recorder(DataflowRecorder):
    """Fills a ``Recording``."""

    def __init__(self, steps: int, optimizer: int = 1) -> None:
        super().__init__()
        self._chosen = optimizer
        """The steps of which optimizer are counted, in the order of their first ones."""
        self.recording = Recording()
        self._steps = steps
        """How many steps of an optimizer are seen before the script is ended."""
        self._scaled: dict[int, tuple[Tensor, Tensor, float]] = {}
        """What a ``GradScaler`` returned, by ``id``: itself, what was scaled, and by how much."""
        self._gradients = GradientWatch()
        self._states = StateWatch()
        self._weights = WeightPlaces()
        self._held_back = HeldBack(self._step_or_end)
        self._ending = Ending()
        self._is_in_backward = False
        self._is_in_functional = False
        """Whether a function runs whose gradient ``torch.func`` is asked for."""
        self.is_scheduling = False
        """Whether a schedule is being made or stepped."""

    def before_call(self, module: nn.Module) -> None:
        """Keep what a module holds beside the weights that train, and of its frozen weights no more bytes
        than the optimizers hold: so much is kept of the gradients, too.
        """
        if self._states.is_seen(module):
            return
        self._weights.add(module)
        trained = [p for optimizer in self.recording.optimizers for p in parameters_of(optimizer)]
        self._states.before_call(module, sum(p.nbytes for p in trained))

    def before_write(self, tensors: Sequence[Tensor]) -> None:
        """Look at what the script's own code is about to write to."""
        self._keep_weights(tensors)
        self._end_before_step_by_hand(tensors)

    def _keep_weights(self, tensors: Sequence[Tensor]) -> None:
        """Keep the weights among these that train, for the passes that have found them as they are now."""
        passes = [each.found for each in self.recording.micro_batches]
        if self._states.of_pass is not None:
            passes.append(self._states.of_pass)
        if not passes:
            return
        for key, place in self._weights.among(tensors).items():
            new_to = [state for state in passes if not state.holds(*place)]
            if not new_to:
                continue
            kept = KeptValue.of(*place)
            for state in new_to:
                state.add([kept])
            change = ChangedWeight(kept, calling_line(), not self.recording.stepped)
            self.recording.changed_weights.setdefault(key, change)

    def _end_before_step_by_hand(self, tensors: Sequence[Tensor]) -> None:
        """End the script where its own code is about to step: where it writes to a weight that has a
        gradient, and no optimizer holds a weight of the model or has stepped copies of them.
        """
        if not self.recording.micro_batches or self.recording.stepped:
            return
        held = {id(p) for optimizer in self.recording.optimizers for p in parameters_of(optimizer)}
        called = [call.module for call in self.recording.micro_batches[-1].calls if call.module is not None]
        weights = [p for module in called for p in module.parameters() if p.grad is not None]
        if any(id(p) in held for p in weights):
            return
        # by their memory: what is written to may be ``p.data``, another tensor of the same numbers
        places = {p.untyped_storage().data_ptr() for p in weights}
        if any(x.untyped_storage().data_ptr() in places for x in tensors):
            self.recording.step_by_hand = calling_line()
            self._active = False
            self._ending.raise_in_script()

    # ------------------------------------------------------------------------------------ backward passes

    def backward(self, original: Callable[..., Any], loss: Any, *args: Any, **kwargs: Any) -> Any:
        """Run a backward pass, and keep what led to it as a micro-batch."""
        if self._ending.has_begun and threading.get_ident() == self._thread:
            # the script has caught it, and may never come to a step again, as a scaler refuses another one
            self._ending.raise_in_script()
        if self.is_paused or not isinstance(loss, Tensor):
            return original(loss, *args, **kwargs)
        with self.paused():
            self._look_at_gradients()
            micro_batch, number = self._end_micro_batch(loss)
            before = self._gradients.seen
            self._is_in_backward = True
            try:
                result = original(loss, *args, **kwargs)
            finally:
                self._is_in_backward = False
            if self.recording.steps_in_backward:
                micro_batch.watched = frozenset()  # their gradients may be gone
            self._copy_gradients()
            self._add_pass(micro_batch, number, self._gradients.added(before))
        return result

    def gradient(
        self, original: Callable[..., Any], outputs: Any, inputs: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Run ``torch.autograd.grad``: a backward pass, if parameters are all that it is asked for."""
        wanted = [inputs] if isinstance(inputs, Tensor) else list(inputs)
        of_parameters = all(isinstance(x, nn.Parameter) for x in wanted)
        if (
            self.is_paused
            or kwargs.get("create_graph")
            or not of_parameters
            or not isinstance(outputs, Tensor)
        ):
            return original(outputs, inputs, *args, **kwargs)
        with self.paused():
            micro_batch, number = self._end_micro_batch(outputs)
            self._gradients.add(wanted)
            result = original(outputs, inputs, *args, **kwargs)
            given = zip(wanted, result, strict=True)
            gradients = {id(p): gradient.detach().clone() for p, gradient in given if gradient is not None}
            self._add_pass(micro_batch, number, gradients)
        return result

    def functional_gradient(
        self,
        original: Callable[..., Any],
        function: Callable[..., Any],
        argnums: int | tuple[int, ...],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        has_aux: bool,
    ) -> tuple[Any, Any]:
        """Run ``torch.func.grad_and_value``: a backward pass, if weights are all that it is asked for.

        The function is then called on the weights themselves, and its loss is differentiated as any other:
        inside of ``torch.func``, tensors would be of a kind that cannot be recorded.
        """
        wanted, form = tree_flatten(_differentiated(args, argnums))
        is_outermost = not self.is_paused and not self._is_in_functional
        weights = [self._weight_of(x) for x in wanted] if is_outermost else []
        if not weights or any(p is None for p in weights):
            return original(function, argnums, has_aux, args, kwargs)
        # what shares its numbers with a weight, but was detached from it, gets the gradient in its place
        inputs = [x if x.requires_grad else x.detach().requires_grad_() for x in wanted]
        args = _with_differentiated(args, argnums, tree_unflatten(inputs, form))
        self._is_in_functional = True
        try:
            with torch.enable_grad():
                output = function(*args, **kwargs)
        finally:
            self._is_in_functional = False
        loss, aux = output if has_aux else (output, None)
        with self.paused():
            micro_batch, number = self._end_micro_batch(loss)
            self._gradients.add(p for p in weights if p is not None)
            # with a graph and zeros, as ``torch.func`` does it
            found = torch.autograd.grad(
                loss, inputs, create_graph=True, allow_unused=True, materialize_grads=True
            )
            gradients = {
                id(p): gradient.detach().clone()
                for p, gradient in zip(weights, found, strict=True)
                if p is not None and p.requires_grad
            }
            self._add_pass(micro_batch, number, gradients)
        gradient = tree_unflatten(list(found), form)
        return (gradient, (loss, aux)) if has_aux else (gradient, loss)

    def _weight_of(self, x: Any) -> Tensor | None:
        """Return the parameter that this is, or whose numbers it shares as it was detached from it."""
        if isinstance(x, nn.Parameter):
            return x
        if not isinstance(x, Tensor) or (memory := memory_of(x)) is None:
            return None
        for optimizer in self.recording.optimizers:
            for p in parameters_of(optimizer):
                if p.shape == x.shape and memory_of(p) == memory:
                    return p
        return None

    @staticmethod
    def _add_pass(micro_batch: MicroBatch, loss: Number, gradients: Mapping[int, Tensor]) -> None:
        """Note a backward pass, and what it gave."""
        for key, gradient in gradients.items():
            micro_batch.add_gradient(key, gradient)
        reached = frozenset(key for key, gradient in gradients.items() if gradient.any())
        micro_batch.passes.append(BackwardPass(loss, reached))

    def _end_micro_batch(self, loss: Tensor) -> tuple[MicroBatch, Number]:
        """Return the micro-batch whose backward pass begins from this loss, and the value that this is."""
        self.names.look(self.values.known)
        _, unscaled, scale = self._scaled.get(id(loss), (loss, loss, 1.0))
        for call in self._calls:
            if call.module is not None:
                self._gradients.add(p for p in call.module.parameters() if p.requires_grad)
        number = self.values.number(unscaled)
        micro_batch = self._continued(number, scale)
        if micro_batch is None:
            micro_batch = self._new_micro_batch(unscaled, number, scale)
        else:
            self._continue(micro_batch, unscaled, number)
        self.values.begin_micro_batch()
        self._lines_of_names.clear()
        micro_batch.watched = frozenset(self._gradients.parameters)
        self._calls, self._escapes = list[RecordedCall](), list[Escape]()
        return micro_batch, number

    def _new_micro_batch(self, loss: Tensor, number: Number, scale: float) -> MicroBatch:
        micro_batch = MicroBatch(
            calls=self._calls,
            loss=number,
            scale=scale,
            names=dict(self.names.of_tensors),
            tensors={**self.values.all(), number: loss.detach().requires_grad_()},
            before=dict(self.values.before),
            escapes=self._escapes,
            loaded=set(self.values.loaded),
            made=set(self.values.made_of_none),
            sized=set(self.values.sized),
            module_names=dict(self.names.of_modules),
            found=self._states.end_pass(),
        )
        self.recording.micro_batches.append(micro_batch)
        self.note(Event("backward", micro_batch))
        return micro_batch

    def _continued(self, loss: Number, scale: float) -> MicroBatch | None:
        """Return the micro-batch before, if this loss is a second one of the same passes of the model, or one
        of modules that the pass before does not train. Either way two backward passes have the gradient of
        the sum of their losses.
        """
        own = {
            id(p)
            for call in self._calls
            if call.module is not None and call.surroundings.gradients
            for p in call.module.parameters()
            if p.requires_grad
        }
        # what another loss trains may be zeroed in between
        others = dropwhile(lambda e: e.kind == "zero" and own >= {id(p) for p in e.subject}, self._latest)
        event = next(others, None)
        if event is None or event.kind != "backward":
            return None
        earlier: MicroBatch = event.subject
        if earlier.scale != scale:
            return None
        reached = {key for each in earlier.passes for key in each.reached}
        # where no gradient was seen to arrive, as on a rank that does not wait for others, nothing is known
        if own and reached and own.isdisjoint(reached):
            return earlier
        made = {number for call in earlier.calls for number in call.results}
        if scale != 1 or made.isdisjoint(sources(self._calls, [loss])):
            return None
        # a batch that was made before the first backward pass is read by all micro-batches, which are several
        of_model = {n for call in model_calls(earlier.calls) for n in call.results}
        return None if of_model.isdisjoint(sources(self._calls, [loss])) else earlier

    @property
    def _latest(self) -> Iterator[Event]:
        """What the loop did, the last first."""
        return reversed(self.recording.events)

    def _continue(self, micro_batch: MicroBatch, loss: Tensor, number: Number) -> None:
        """Let a micro-batch go on: its loss is the sum of the one before and of this one."""
        sum_of_both = micro_batch.tensors[micro_batch.loss].detach() + loss.detach()
        total = self.values.add(sum_of_both.requires_grad_())
        together = RecordedCall(
            torch.add,
            None,
            Arguments.of((Reference(micro_batch.loss), Reference(number)), {}),
            (total,),
            ((),),
            (),
            Surroundings.now(self._devices),
            (),
            calling_line(),
        )
        micro_batch.calls += [*self._calls, together]
        micro_batch.loss = total
        micro_batch.tensors.update(self.values.all())
        micro_batch.before.update(self.values.before)
        micro_batch.escapes += self._escapes
        micro_batch.names = self.names.of_tensors | micro_batch.names
        micro_batch.module_names = self.names.of_modules | micro_batch.module_names
        micro_batch.loaded |= self.values.loaded
        micro_batch.made |= set(self.values.made_of_none)
        micro_batch.sized |= set(self.values.sized)
        micro_batch.found.add_later(self._states.end_pass())

    def scale(self, original: Callable[..., Any], scaler: Any, outputs: Any) -> Any:
        """Let a ``GradScaler`` scale a loss; the scale is the step's, not the loss's."""
        with self.paused():
            scaled = original(scaler, outputs)
        if isinstance(scaled, Tensor) and isinstance(outputs, Tensor):
            self._scaled[id(scaled)] = scaled, outputs, float(scaler.get_scale())
        return scaled

    # -------------------------------------------------------------------------------------- the loop

    def note(self, event: Event) -> None:
        """Add an event, while the script runs."""
        if self._active:
            self.recording.events.append(event)

    def _copy_gradients(self) -> None:
        for optimizer in self.recording.optimizers:
            self._gradients.add(parameters_of(optimizer))
        self._gradients.look()

    def _look_at_gradients(self) -> None:
        """Note what was done to gradients since they were last looked at."""
        for optimizer in self.recording.optimizers:
            self._gradients.add(parameters_of(optimizer))
        for event in self._gradients.changes(self.recording.events):
            self.note(event)

    @contextmanager
    def changing_gradients(self, event: Event) -> Iterator[None]:
        """Note an event that changes gradients inside this block."""
        with self.paused():
            self._look_at_gradients()
        self.note(event)
        yield
        with self.paused():
            self._copy_gradients()

    @contextmanager
    def scheduling(self) -> Iterator[None]:
        """Take steps of schedules inside this block for those of the one that runs it."""
        before, self.is_scheduling = self.is_scheduling, True
        try:
            yield
        finally:
            self.is_scheduling = before

    def add_scheduler(self, scheduler: Any) -> None:
        """Note a schedule; a subclass may call the constructor of its base."""
        if all(scheduler is not known for known in self.recording.schedulers):
            self.recording.schedulers.append(scheduler)

    def add_optimizer(self, optimizer: Optimizer) -> None:
        """Note an optimizer, and hold its steps back."""
        if all(optimizer is not known for known in self.recording.optimizers):
            self.recording.optimizers.append(optimizer)
            self.recording.made_with[id(optimizer)] = [float(group["lr"]) for group in optimizer.param_groups]
            self._gradients.add_as_they_are(parameters_of(optimizer))
            self._held_back.add(optimizer)

    def stepping_freely(self, optimizer: Any) -> AbstractContextManager[None]:
        """Put back the real ``step`` of an optimizer inside this block, if it is held back."""
        return self._held_back.stepping_freely(optimizer)

    def end(self) -> None:
        """Put back the ``step`` of every optimizer, and note no more events."""
        self._active = False
        self._ending.stop()
        self._held_back.release()

    def _step_or_end(self, optimizer: Optimizer) -> None:
        """Note a step in place of making it; end the script when enough were seen, whatever it catches."""
        if self._active:
            try:
                self._leave_out(optimizer)
                return
            except EnoughSeen:
                self._active = False
        self._ending.raise_in_script()

    def _leave_out(self, optimizer: Optimizer) -> None:
        """Note a step in place of making it; end the script when enough steps of one optimizer were seen."""
        events = self.recording.events
        if _skips(optimizer):
            return
        if self._is_in_backward:
            self.recording.steps_in_backward = True
        else:
            with self.paused():
                self._look_at_gradients()
        if not self.recording.micro_batches:
            if self._gradients.has_some:
                self.recording.unseen_step = calling_line()
                raise EnoughSeen
            return  # before any backward pass, as some wrappers step once to set up their state
        if id(optimizer) not in self.recording.gradients_at_step:
            seen = {key: x for key, x in self._gradients.seen.items() if x is not None}
            self.recording.gradients_at_step[id(optimizer)] = seen
        rates = tuple(float(group["lr"]) for group in optimizer.param_groups)
        has_gradients = any(p.grad is not None for p in parameters_of(optimizer))
        self.recording.drop_discarded()
        self.note(Event("step", optimizer, has_gradients=has_gradients, rates=rates))
        mark_as_stepped(optimizer)
        if len(self.recording.stepped) < self._chosen:
            return  # the chosen one has not stepped yet
        counted = optimizer if self._chosen == 1 else self.recording.stepped[self._chosen - 1]
        if sum(e.kind == "step" and e.subject is counted for e in events) >= self._steps:
            raise EnoughSeen


def _differentiated(args: tuple[Any, ...], argnums: int | tuple[int, ...]) -> Any:
    """Return the arguments that ``torch.func`` differentiates a function with respect to."""
    return args[argnums] if isinstance(argnums, int) else tuple(args[i] for i in argnums)


def _with_differentiated(
    args: tuple[Any, ...], argnums: int | tuple[int, ...], others: Any
) -> tuple[Any, ...]:
    """Return the arguments with others in place of those."""
    replaced = list(args)
    if isinstance(argnums, int):
        replaced[argnums] = others
    else:
        for i, other in zip(argnums, others, strict=True):
            replaced[i] = other
    return tuple(replaced)


def _skips(optimizer: Optimizer) -> bool:
    """Return whether a fused optimizer makes no step, as a ``GradScaler`` has found a gradient not finite; of
    the others it calls no step then.
    """
    found = getattr(optimizer, "found_inf", None)
    return isinstance(found, Tensor) and bool(found.any())
