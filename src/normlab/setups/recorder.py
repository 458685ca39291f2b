"""Record the first steps of a script: what it computes, and how its loop makes a step of the gradients.

``DataflowRecorder`` records what is computed. A ``Recorder`` divides that into micro-batches, and notes what
the loop does in between. ``patches`` makes functions of torch call it:

- A backward pass (``backward``, ``gradient``, ``functional_gradient``) ends a micro-batch, to which all calls
  since the previous pass belong.
- Clipping, unscaling and schedules are noted as events. What the script does to gradients by hand is found by
  comparing them with copies, whenever something else happens.
- An optimizer's step is noted and left out (``_step_or_end``), so the script goes on with the weights that it
  has. After enough steps the script is ended.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from normlab.private_torch import mark_as_stepped, tree_flatten, tree_unflatten
from normlab.setups.arguments import Arguments, Number, Reference
from normlab.setups.callers import calling_line
from normlab.setups.dataflow import DataflowRecorder
from normlab.setups.ending import Ending, EnoughSeen
from normlab.setups.gradients import GradientWatch
from normlab.setups.held_back import HeldBack
from normlab.setups.module_state import KeptValue, StateWatch, WeightPlaces, memory_of
from normlab.setups.optimizers import ids_held_by, parameters_of
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
    """Fills a ``Recording`` while a script runs.

    Args:
        steps: The script is ended when an optimizer is about to make its step of this number.
        optimizer: Which optimizer that is: 1 for any, else its number in the order in which they step first.
    """

    def __init__(self, steps: int, optimizer: int = 1) -> None:
        super().__init__()
        self.recording = Recording()
        self._steps = steps
        self._chosen = optimizer
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

    # --------------------------------------------------------- what a pass finds, and what the script changes

    def before_call(self, module: nn.Module) -> None:
        """Keep what a module holds beside the weights that train, so that the pass can be repeated."""
        if self._states.is_seen(module):
            return
        self._weights.add(module)
        # Of frozen weights, at most as many bytes are kept as gradients take: memory may not hold a large
        # frozen model twice.
        trained = [p for optimizer in self.recording.optimizers for p in parameters_of(optimizer)]
        self._states.before_call(module, most_bytes=sum(p.nbytes for p in trained))

    def before_write(self, tensors: Sequence[Tensor]) -> None:
        """Look at what the script's own code is about to write to."""
        self._keep_weights(tensors)
        self._end_before_step_by_hand(tensors)

    def _keep_weights(self, tensors: Sequence[Tensor]) -> None:
        """Keep the weights among these that train, for the passes that have found them as they are now."""
        states = [micro_batch.module_state for micro_batch in self.recording.micro_batches]
        if self._states.of_pass is not None:
            states.append(self._states.of_pass)
        if not states:
            return
        for parameter, place in self._weights.among(tensors).items():
            lacking = [state for state in states if not state.holds(*place)]
            if not lacking:
                continue
            kept = KeptValue.of(*place)
            for state in lacking:
                state.add([kept])
            change = ChangedWeight(kept, calling_line(), is_within_step=not self.recording.stepped)
            self.recording.changed_weights.setdefault(parameter, change)

    def _end_before_step_by_hand(self, tensors: Sequence[Tensor]) -> None:
        """End the script where its own code is about to step: where it writes to a weight that has a
        gradient, and no optimizer holds a weight of the model or has stepped copies of them.
        """
        if not self.recording.micro_batches or self.recording.stepped:
            return
        called = [call.module for call in self.recording.micro_batches[-1].calls if call.module is not None]
        weights = [p for module in called for p in module.parameters() if p.grad is not None]
        if not ids_held_by(self.recording.optimizers).isdisjoint(map(id, weights)):
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
            # The script has caught the end, and may never come to a step again: a GradScaler, for one,
            # refuses to step twice. So it is ended here.
            self._ending.raise_in_script()
        if self.is_paused or not isinstance(loss, Tensor):
            return original(loss, *args, **kwargs)
        with self.paused():
            self._note_changes_by_hand()
            micro_batch, number = self._end_micro_batch(loss)
            before = self._gradients.seen
            self._is_in_backward = True
            try:
                result = original(loss, *args, **kwargs)
            finally:
                self._is_in_backward = False
            if self.recording.steps_in_backward:
                micro_batch.watched = frozenset()  # whoever steps there may have dropped their gradients
            self._copy_gradients()
            self._add_pass(micro_batch, number, self._gradients.added(before))
        return result

    def gradient(
        self, original: Callable[..., Any], outputs: Any, inputs: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Run ``torch.autograd.grad``: a backward pass, if parameters are all that it is asked for."""
        wanted = [inputs] if isinstance(inputs, Tensor) else list(inputs)
        is_of_parameters = isinstance(outputs, Tensor) and all(isinstance(x, nn.Parameter) for x in wanted)
        is_part_of_a_loss = kwargs.get("create_graph")
        if self.is_paused or is_part_of_a_loss or not is_of_parameters:
            return original(outputs, inputs, *args, **kwargs)
        with self.paused():
            micro_batch, number = self._end_micro_batch(outputs)
            self._gradients.add(wanted)
            result = original(outputs, inputs, *args, **kwargs)
            gradients: dict[int, Tensor] = {}
            for parameter, gradient in zip(wanted, result, strict=True):
                if gradient is not None:
                    gradients[id(parameter)] = gradient.detach().clone()
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
        """Return the parameter that this is, or from which it was detached, so that they share memory."""
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
        """Note a backward pass, and the gradients that it gave, by ``id`` of the parameter."""
        for parameter, gradient in gradients.items():
            micro_batch.add_gradient(parameter, gradient)
        reached = frozenset(parameter for parameter, gradient in gradients.items() if gradient.any())
        micro_batch.passes.append(BackwardPass(loss, reached))

    # -------------------------------------------------------------------------------------- micro-batches

    def _end_micro_batch(self, loss: Tensor) -> tuple[MicroBatch, Number]:
        """Let the calls since the last pass lead to this loss, from which a backward pass is about to begin.

        Returns:
            The micro-batch that they belong to, which is an earlier one if they continue that; and the number
            of the loss, without the factor of a ``GradScaler``.
        """
        self.names.look(self.values.known)
        _, unscaled, scale = self._scaled.get(id(loss), (loss, loss, 1.0))
        for call in self._calls:
            if call.module is not None:
                self._gradients.add(p for p in call.module.parameters() if p.requires_grad)
        number = self.values.number(unscaled)
        micro_batch = self._continued_micro_batch(number, scale)
        if micro_batch is None:
            micro_batch = self._new_micro_batch(unscaled, number, scale)
        else:
            self._continue(micro_batch, unscaled, number)
        micro_batch.watched = frozenset(self._gradients.parameters)
        self.values.begin_micro_batch()
        self._lines_of_names.clear()
        self._calls, self._escapes = list[RecordedCall](), list[Escape]()
        return micro_batch, number

    def _new_micro_batch(self, loss: Tensor, number: Number, scale: float) -> MicroBatch:
        micro_batch = MicroBatch(
            calls=self._calls,
            loss=number,
            scale=scale,
            names=dict(self.names.of_tensors),
            tensors={**self.values.all(), number: loss.detach().requires_grad_()},
            copies=dict(self.values.copies),
            escapes=self._escapes,
            loaded=set(self.values.loaded),
            made=set(self.values.made),
            sized=set(self.values.sized),
            module_names=dict(self.names.of_modules),
            module_state=self._states.end_pass(),
        )
        self.recording.micro_batches.append(micro_batch)
        self.note(Event("backward", micro_batch))
        return micro_batch

    def _continued_micro_batch(self, loss: Number, scale: float) -> MicroBatch | None:
        """Return the micro-batch that the calls since the last pass continue; None if they begin a new one.

        They continue the one before if this loss is a second one of the same passes of the model, or is one
        of modules that the pass before does not train. Either way two backward passes have the gradient of
        the sum of their losses, so that one flow stands for both.
        """
        trained = self._trained_since_last_pass()
        earlier = self._latest_micro_batch(trained)
        if earlier is None or earlier.scale != scale:
            return None
        reached = {parameter for each in earlier.passes for parameter in each.reached}
        # where no gradient was seen to arrive, as on a rank that does not wait for others, nothing is known
        if trained and reached and trained.isdisjoint(reached):
            return earlier
        if scale != 1:
            return None
        # What the model gave, not any value of the earlier pass: a batch that was made before the first
        # backward pass is read by all micro-batches, and they are several nevertheless.
        of_model = {number for call in model_calls(earlier.calls) for number in call.results}
        return None if of_model.isdisjoint(sources(self._calls, [loss])) else earlier

    def _trained_since_last_pass(self) -> set[int]:
        """Return the parameters, by ``id``, of the modules that were called with gradients since the last
        backward pass.
        """
        trained = set[int]()
        for call in self._calls:
            if call.module is not None and call.surroundings.gradients:
                trained.update(id(p) for p in call.module.parameters() if p.requires_grad)
        return trained

    def _latest_micro_batch(self, trained: Set[int]) -> MicroBatch | None:
        """Return the micro-batch of the last backward pass, if nothing but a zeroing of gradients of
        ``trained`` parameters has come after it.
        """
        for event in reversed(self.recording.events):
            if event.kind == "backward":
                return event.subject
            if event.kind != "zero" or not {id(p) for p in event.subject} <= trained:
                return None
        return None

    def _continue(self, micro_batch: MicroBatch, loss: Tensor, number: Number) -> None:
        """Let a micro-batch go on: its loss becomes the sum of the one that it has and of this one."""
        sum_of_both = micro_batch.tensors[micro_batch.loss].detach() + loss.detach()
        total = self.values.add(sum_of_both.requires_grad_())
        addition = RecordedCall(
            function=torch.add,
            module=None,
            arguments=Arguments.of((Reference(micro_batch.loss), Reference(number)), {}),
            results=(total,),
            places=((),),
            writes=(),
            surroundings=Surroundings.now(self._devices),
            random_states=(),
            line=calling_line(),
        )
        micro_batch.calls += [*self._calls, addition]
        micro_batch.loss = total
        micro_batch.tensors.update(self.values.all())
        micro_batch.copies.update(self.values.copies)
        micro_batch.escapes += self._escapes
        # the names that it has already win
        micro_batch.names = self.names.of_tensors | micro_batch.names
        micro_batch.module_names = self.names.of_modules | micro_batch.module_names
        micro_batch.loaded |= self.values.loaded
        micro_batch.made |= self.values.made
        micro_batch.sized |= self.values.sized
        micro_batch.module_state.add_later(self._states.end_pass())

    def scale(self, original: Callable[..., Any], scaler: Any, outputs: Any) -> Any:
        """Let a ``GradScaler`` scale a loss, and remember what it scaled: the scale is the step's, not the
        loss's.
        """
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

    def _watch_gradients_of_optimizers(self) -> None:
        for optimizer in self.recording.optimizers:
            self._gradients.add(parameters_of(optimizer))

    def _copy_gradients(self) -> None:
        """Take gradients for what they are now: what has changed them is known."""
        self._watch_gradients_of_optimizers()
        self._gradients.look()

    def _note_changes_by_hand(self) -> None:
        """Note what the script has done to gradients since they were last looked at."""
        self._watch_gradients_of_optimizers()
        for event in self._gradients.changes(self.recording.events):
            self.note(event)

    @contextmanager
    def changing_gradients(self, event: Event) -> Iterator[None]:
        """Note an event that changes gradients inside this block."""
        with self.paused():
            self._note_changes_by_hand()
        self.note(event)
        yield
        with self.paused():
            self._copy_gradients()

    @contextmanager
    def scheduling(self) -> Iterator[None]:
        """Count steps of schedules inside this block as part of the schedule that makes them."""
        before, self.is_scheduling = self.is_scheduling, True
        try:
            yield
        finally:
            self.is_scheduling = before

    def add_scheduler(self, scheduler: Any) -> None:
        """Note a schedule, once: a subclass calls the constructor of its base, which comes here as well."""
        if all(scheduler is not known for known in self.recording.schedulers):
            self.recording.schedulers.append(scheduler)

    def add_optimizer(self, optimizer: Optimizer) -> None:
        """Note an optimizer, once, and hold its steps back."""
        if all(optimizer is not known for known in self.recording.optimizers):
            self.recording.optimizers.append(optimizer)
            self.recording.made_with[id(optimizer)] = [float(group["lr"]) for group in optimizer.param_groups]
            self._gradients.add_as_they_are(parameters_of(optimizer))
            self._held_back.add(optimizer)

    def stepping_freely(self, optimizer: Any) -> AbstractContextManager[None]:
        """Put back the real ``step`` of an optimizer inside this block, if it is held back."""
        return self._held_back.stepping_freely(optimizer)

    def end(self) -> None:
        """End recording: put back the ``step`` of every optimizer, and note no more events."""
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
        """Note a step in place of making it. Raises EnoughSeen when enough steps of one optimizer were
        seen.
        """
        if _skips(optimizer):
            return
        if self._is_in_backward:
            self.recording.steps_in_backward = True
        else:
            with self.paused():
                self._note_changes_by_hand()
        if not self.recording.micro_batches:
            if self._gradients.has_some:
                self.recording.unseen_step = calling_line()
                raise EnoughSeen
            return  # before any backward pass, as some wrappers step once to set up their state
        self._note_step(optimizer)
        if self._has_seen_enough(optimizer):
            raise EnoughSeen

    def _note_step(self, optimizer: Optimizer) -> None:
        if id(optimizer) not in self.recording.gradients_at_step:
            gradients = {key: x for key, x in self._gradients.seen.items() if x is not None}
            self.recording.gradients_at_step[id(optimizer)] = gradients
        rates = tuple(float(group["lr"]) for group in optimizer.param_groups)
        has_gradients = any(p.grad is not None for p in parameters_of(optimizer))
        self.recording.drop_discarded()
        self.note(Event("step", optimizer, has_gradients=has_gradients, rates=rates))
        mark_as_stepped(optimizer)

    def _has_seen_enough(self, stepped: Optimizer) -> bool:
        """Return whether the optimizer whose steps are counted has made enough of them."""
        optimizers = self.recording.stepped
        if len(optimizers) < self._chosen:
            return False  # the chosen one has not stepped yet
        counted = stepped if self._chosen == 1 else optimizers[self._chosen - 1]
        steps = [e for e in self.recording.events if e.kind == "step" and e.subject is counted]
        return len(steps) >= self._steps


def _differentiated(args: tuple[Any, ...], argnums: int | tuple[int, ...]) -> Any:
    """Return the arguments that ``torch.func`` differentiates a function with respect to."""
    return args[argnums] if isinstance(argnums, int) else tuple(args[i] for i in argnums)


def _with_differentiated(
    args: tuple[Any, ...], argnums: int | tuple[int, ...], others: Any
) -> tuple[Any, ...]:
    """Return the arguments with others in place of the differentiated ones."""
    replaced = list(args)
    if isinstance(argnums, int):
        replaced[argnums] = others
    else:
        for i, other in zip(argnums, others, strict=True):
            replaced[i] = other
    return tuple(replaced)


def _skips(optimizer: Optimizer) -> bool:
    """Return whether this is a step that a ``GradScaler`` skips because a gradient is not finite.

    A fused optimizer's ``step`` is called all the same, and told so by ``found_inf``; that of any other
    optimizer is not called.
    """
    found_inf = getattr(optimizer, "found_inf", None)
    return isinstance(found_inf, Tensor) and bool(found_inf.any())
