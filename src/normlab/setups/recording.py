"""What a running script showed of its first step, as data.

Every value that the script computes has a number, and a tensor that is written to gets another one for its
new state. A ``RecordedCall`` reads the values of some numbers and gives those of others, so a list of
calls, in the order in which they ran, is a dataflow. A ``MicroBatch`` is the dataflow that ends in one
backward pass, and ``Event``s say what the loop did in between: passes, changes of gradients, steps of
optimizers and schedules.

``recorder`` fills a ``Recording`` in while the script runs, ``flow`` makes a loss function of a
micro-batch, and ``window`` a training step of all micro-batches before an optimizer's first step.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import dropwhile, takewhile
from math import isclose
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.backends import cuda
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.optim import Optimizer

from normlab.errors import UserError
from normlab.setups.arguments import LEFT, Arguments, Number, value_left_at, values_in
from normlab.setups.module_state import KeptValue, ModuleState
from normlab.setups.numbers import unfollowed
from normlab.setups.optimizers import ids_held_by, parameters_of
from normlab.trace.tensors import Place

KERNELS: Final[Mapping[SDPBackend, Callable[[], bool]]] = {
    SDPBackend.MATH: cuda.math_sdp_enabled,
    SDPBackend.FLASH_ATTENTION: cuda.flash_sdp_enabled,
    SDPBackend.EFFICIENT_ATTENTION: cuda.mem_efficient_sdp_enabled,
    SDPBackend.CUDNN_ATTENTION: cuda.cudnn_sdp_enabled,
}
"""The implementations of attention, each with torch's function that says whether it is allowed now."""


@dataclass(frozen=True)
class Surroundings:
    """The modes of torch in which a call ran."""

    gradients: bool
    inference: bool
    autocast: Mapping[str, torch.dtype]
    """The dtype of autocast by type of device, where it was on."""
    kernels: frozenset[SDPBackend]
    """The implementations of attention that were allowed."""

    @classmethod
    def now(cls, devices: Sequence[str]) -> Surroundings:
        """Return the modes that are set now."""
        autocast = {
            kind: torch.get_autocast_dtype(kind) for kind in devices if torch.is_autocast_enabled(kind)
        }
        return cls(torch.is_grad_enabled(), torch.is_inference_mode_enabled(), autocast, kernels_now())

    @contextmanager
    def entered(self, *, gradients: bool) -> Iterator[None]:
        """Set these modes inside this block, but leave gradients off where the caller wants none."""
        with ExitStack() as stack:
            if self.inference:
                stack.enter_context(torch.inference_mode())
            stack.enter_context(torch.set_grad_enabled(self.gradients and gradients))
            for kind, dtype in self.autocast.items():
                stack.enter_context(torch.autocast(kind, dtype=dtype))
            # The caller may have allowed some alone, as second derivatives need; those stay allowed.
            kernels = self.kernels & kernels_now() or self.kernels
            if kernels != kernels_now():
                stack.enter_context(sdpa_kernel([*kernels]))
            yield


def kernels_now() -> frozenset[SDPBackend]:
    """Return the implementations of attention that are allowed now."""
    return frozenset(kernel for kernel, is_allowed in KERNELS.items() if is_allowed())


@dataclass(frozen=True, eq=False)
class RecordedCall:
    """One call of a function of torch, or of an outermost module that has parameters."""

    function: Callable[..., Any] | None
    """The function; None for a call of a module."""
    module: nn.Module | None
    """The module; None for a call of a function."""
    arguments: Arguments
    results: tuple[Number, ...]
    """The tensors or Python numbers that it returned, in order; after them, the new states of the values that
    it wrote to.
    """
    places: tuple[Place, ...]
    """Where each value that it returned lies in what it returned. New states have no place."""
    writes: tuple[tuple[Number, Number], ...]
    """The values that it wrote to: the number of each before the call, and after it."""
    surroundings: Surroundings
    random_states: Sequence[tuple[Any, Any]]
    """The generators of random numbers that it drew from, each with its state before the call."""
    line: str
    """Where the script called it: ``train.py:42``."""

    @property
    def name(self) -> str:
        """What to call it in a sentence."""
        if self.module is not None:
            return type(self.module).__name__
        kind = getattr(self.function, "__self__", None)
        if isinstance(kind, type) and issubclass(kind, torch.autograd.Function):
            return kind.__name__
        return str(getattr(self.function, "__name__", self.function))

    @cached_property
    def reads(self) -> list[Number]:
        """The recorded values that it computes with."""
        return [*self.arguments.references, *self.overwritten]

    @property
    def overwritten(self) -> list[Number]:
        """The values that it wrote to, as they were before."""
        return [before for before, _ in self.writes]

    def outcome(
        self, values: Mapping[Number, Any], result: Any, ran: Callable[..., Any] | None
    ) -> dict[Number, Any]:
        """Return the values of ``results`` once the call has been made again.

        Args:
            values: Those that the call has read, by number.
            result: What it returned this time.
            ran: The function or module that was called, perhaps a module of another model. Such a model may
                return less, or more: what lies at places that were not recorded is left out.
        """
        returned = values_in(result)
        if isinstance(ran, nn.Module):
            for place in self.places:
                if place[:1] == (LEFT,) and (x := value_left_at(place, ran)) is not None:
                    returned[place] = x
        outcome: dict[Number, Any] = {}
        # new states of values that were written to have no place, so there are fewer places than results
        for number, place in zip(self.results, self.places, strict=False):
            if place in returned:
                outcome[number] = returned[place]
        for before, after in self.writes:
            outcome[after] = values[before]  # the same object, which the call has written to
        return outcome


@dataclass(frozen=True, eq=False)
class Escape:
    """Where a value left torch in a way that is not followed, such as ``int()``, ``if`` or ``numpy()``."""

    function: Callable[..., Any]
    arguments: Arguments
    read: Any
    """What it gave: a bool or a Python number; None if it is something else, such as an array."""
    line: str
    """Where the script called it."""
    number: Number
    """A number of its own, which no value has: values with a higher one were seen after it."""

    @property
    def name(self) -> str:
        """What to call it in a sentence."""
        is_condition = isinstance(self.read, bool)
        return "the condition" if is_condition else f"{self.function.__name__.strip('_')}()"


class BackwardPass(NamedTuple):
    """One backward pass."""

    loss: Number
    """The value from which it began."""
    reached: frozenset[int]
    """By ``id``, the parameters to which it gave a gradient."""


@dataclass(eq=False)
class MicroBatch:
    """What led to one backward pass, or to several through one forward pass."""

    calls: list[RecordedCall]
    loss: Number
    """The value from which the backward pass began, before a ``GradScaler`` scaled it."""
    scale: float
    """What a ``GradScaler`` multiplied it by; 1 without one."""
    names: dict[Number, str]
    """What the script called its tensors, as far as names were found."""
    tensors: dict[Number, Any]
    """Every value, as an object, or its outline if only a proof asks for it. The entries of a tensor may have
    been changed since: ``value`` returns it as it was.
    """
    copies: dict[Number, Tensor]
    """Copies of values that a later function may have written to, from before that."""
    escapes: list[Escape] = field(default_factory=list)
    """Where values of this micro-batch left torch, in order."""
    watched: frozenset[int] = frozenset()
    """By ``id``, the parameters whose gradients were looked at."""
    loaded: set[Number] = field(default_factory=set)
    """The tensors that a ``DataLoader`` returned."""
    made: set[Number] = field(default_factory=set)
    """The tensors that hold data and were made of no other tensor, but of a list or random numbers."""
    sized: set[Number] = field(default_factory=set)
    """The tensors that follow from their size alone, such as ``arange(n)``, and were made of no other."""
    module_names: dict[int, str] = field(default_factory=dict)
    """By ``id`` of a module, what the script called it."""
    gradients: dict[int, Tensor] = field(default_factory=dict)
    """By ``id`` of the parameter: what this backward pass added to its gradient."""
    module_state: ModuleState = field(default_factory=ModuleState)
    """What its modules held just before they were called."""
    passes: list[BackwardPass] = field(default_factory=list)
    """Each backward pass through what was computed here; there are several where several losses share it."""

    def value(self, number: Number) -> Any:
        """Return a value as it was when it was used."""
        return unfollowed(self.copies.get(number, self.tensors.get(number)))

    def without_gradients_of(self, parameters: Collection[int]) -> MicroBatch:
        """Return the micro-batch as if nobody had looked at the gradients of these parameters."""
        gradients = {key: x for key, x in self.gradients.items() if key not in parameters}
        return replace(self, gradients=gradients, watched=self.watched.difference(parameters))

    def without_passes_of(self, parameters: Set[int]) -> MicroBatch | None:
        """Return the micro-batch without the backward passes that reach nothing but these parameters.

        If one pass is left, its loss becomes the loss of the micro-batch. If several are, the micro-batch is
        returned as it is. If none is, None is returned.
        """
        if not self.passes:
            return self
        # of a pass that reached nothing it is not known what it trains, so it is left
        remaining = [each for each in self.passes if not each.reached or not each.reached <= parameters]
        if len(remaining) == 1:
            return replace(self, loss=remaining[0].loss, passes=remaining)
        return self if remaining else None

    def add_gradient(self, parameter: int, gradient: Tensor) -> None:
        """Add what one backward pass gave to the gradient of a parameter, which is given by ``id``."""
        earlier = self.gradients.get(parameter)
        self.gradients[parameter] = gradient if earlier is None else earlier + gradient


@dataclass(frozen=True)
class Event:
    """Something that the loop did besides computing a loss, in order."""

    kind: str
    """One of these:

    - ``backward``, ``clip``, ``unscale``, ``step`` and ``schedule``, by the functions of torch;
    - what a script does to gradients by hand: ``zero``, ``scale`` (multiplies all of them), ``assign`` (sets
      them to a multiple of what the backward passes gave), or ``edit`` if it is something else.
    """
    subject: Any = None
    """The optimizer or the scheduler; for ``clip`` and ``zero``, the parameters; for ``backward``, the
    micro-batch, or None if only its batch was kept; for ``scale``, ``assign`` and ``edit``, the line at which
    it was noticed, which comes after it.
    """
    factor: float | None = None
    """For ``scale`` and ``assign``: the factor."""
    norm: float | None = None
    """For ``scale`` and ``assign``: the norm of all gradients after it."""
    largest_norm: float | None = None
    """For ``clip``: the norm that it clips to."""
    norm_type: float = 2.0
    """For ``clip``: the p of the p-norm that it clips."""
    has_gradients: bool = True
    """For ``step``: whether any parameter of the optimizer has a gradient."""
    rates: tuple[float, ...] = ()
    """For ``step``: the rate of each group of the optimizer."""


class ChangedWeight(NamedTuple):
    """A weight that trains, and that a script changes by hand after a pass."""

    before: KeptValue
    """What it was before it was changed first."""
    line: str
    """Where that was."""
    is_within_step: bool
    """Whether that was before an optimizer's first step."""


@dataclass(eq=False)
class Recording:
    """What a script showed until it was ended. No optimizer has changed a weight until then.

    The *first step* is that of the first optimizer to step, and its *window* is the micro-batches before it.
    """

    micro_batches: list[MicroBatch] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    optimizers: list[Optimizer] = field(default_factory=list)
    made_with: dict[int, list[float]] = field(default_factory=dict)
    """By ``id`` of an optimizer, the rates of its groups when it was first seen."""
    schedulers: list[Any] = field(default_factory=list)
    gradients_at_step: dict[int, dict[int, Tensor]] = field(default_factory=dict)
    """By ``id`` of an optimizer, the gradients when it was first stepped, by ``id`` of the parameter."""
    unseen_step: str = ""
    """Where an optimizer was stepped with gradients that no backward pass gave, if that came first."""
    step_by_hand: str = ""
    """Where the script's own code was about to change a weight, if it had no optimizer."""
    steps_in_backward: bool = False
    """Whether optimizers are stepped by hooks, as each gradient arrives."""
    changed_weights: dict[int, ChangedWeight] = field(default_factory=dict)
    """By ``id``, the weights that train and that the script's own code has changed after a pass."""
    compiled: bool = False
    """Whether the script compiles something, which was run as it was written."""

    def put_back(self, window: Sequence[MicroBatch]) -> None:
        """Let modules hold what the first pass of a window found, and weights what they were before the
        script changed them.
        """
        weights = [weight.before for weight in self.changed_weights.values()]
        # later passes found these weights as they are now, which would be lost without a note
        now = [KeptValue.of(weight.table, weight.name) for weight in weights]
        for micro_batch in self.micro_batches:
            micro_batch.module_state.add(now)
        window[0].module_state.put_back()
        ModuleState(weights).put_back()

    # --------------------------------------------------------------------------- one of several optimizers

    @property
    def stepped(self) -> list[Optimizer]:
        """The optimizers that were stepped, each once, in the order of their first steps."""
        steps = {id(event.subject): event.subject for event in self.events if event.kind == "step"}
        return list(steps.values())

    def of_optimizer(self, number: int) -> Recording:
        """Return the part of the recording whose first step is that of one optimizer, such as a GAN's second.

        It has the passes since another optimizer stepped, without those that only lead to a later step of
        another one. ``number`` counts optimizers from 1, in the order of ``stepped``.

        Raises UserError if so many were not stepped.
        """
        if number == 1 or not self.stepped:
            return self._without_passes_of_others()
        if not 0 < number <= len(self.stepped):
            raise UserError(
                f"optimizer {number} was asked for, but the script steps {len(self.stepped)}; they are "
                "numbered from 1 in the order in which they are stepped first"
            )
        optimizer = self.stepped[number - 1]
        begin, after_step_of_another = 0, 0
        for place, event in enumerate(self.events):
            if event.kind == "backward":
                # not before: several optimizers may step after the same passes
                begin = after_step_of_another
            elif event.kind == "step" and event.subject is optimizer:
                break
            elif event.kind == "step":
                after_step_of_another = place + 1
        events = self.events[begin:]
        return replace(self, events=events, micro_batches=_passes_in(events))._without_passes_of_others()

    def _without_passes_of_others(self) -> Recording:
        """Return the recording without passes that only other optimizers than those of the first step need,
        as those of a probe that is stepped less often.
        """
        held_by_others = self.held_elsewhere
        if not held_by_others:
            return self
        stepped_first = self.optimizers_of_first_step
        events, window = list[Event](), list[Event]()
        for event in self.events:
            window.append(event)
            if event.kind == "step":
                is_of_first_step = any(event.subject is optimizer for optimizer in stepped_first)
                events += _without_passes_of(window, held_by_others) if is_of_first_step else window
                window = list[Event]()
        events += window
        return replace(self, events=events, micro_batches=_passes_in(events))

    @property
    def held_elsewhere(self) -> set[int]:
        """The parameters, by ``id``, that no optimizer of the first step holds, but others do."""
        return ids_held_by(self.optimizers) - ids_held_by(self.optimizers_of_first_step)

    # ------------------------------------------------------------------------------------------ the windows

    @property
    def events_of_first_step(self) -> list[Event]:
        """All events from the first backward pass up to the next one after the first step. What came before,
        such as steps of a schedule that bring it to where a run is resumed, is not part of a step.
        """
        events, has_stepped = list[Event](), False
        for event in dropwhile(lambda event: event.kind != "backward", self.events):
            if has_stepped and event.kind == "backward":
                break
            has_stepped |= event.kind == "step"
            events.append(event)
        return events

    @property
    def optimizers_of_first_step(self) -> list[Optimizer]:
        """The optimizers that step in the first step, in the order in which they do."""
        return [event.subject for event in self.events_of_first_step if event.kind == "step"]

    @property
    def first_window(self) -> list[MicroBatch]:
        """The micro-batches of the first step of an optimizer; none if no optimizer was stepped."""
        before_step = list(takewhile(lambda event: event.kind != "step", self.events))
        if len(before_step) == len(self.events):
            return []
        window = [event.subject for event in before_step if event.kind == "backward"]
        held_by_others = self.held_elsewhere
        if not held_by_others:
            return window
        # what this step only passes through, as a critic, is not what it trains
        return [each.without_gradients_of(held_by_others) for each in window]

    @property
    def windows(self) -> list[tuple[Optimizer, list[MicroBatch]]]:
        """The micro-batches of each step, as far as they are recorded, with the optimizer that is stepped."""
        windows, window = list[tuple[Optimizer, list[MicroBatch]]](), list[MicroBatch]()
        for event in self.events:
            if event.kind == "backward" and event.subject is not None:
                window.append(event.subject)
            elif event.kind == "step" and window:
                windows.append((event.subject, window))
                window = list[MicroBatch]()
        return windows

    def first_of_next_step(self, window: Sequence[MicroBatch]) -> MicroBatch | None:
        """Return the first micro-batch of a later step of the optimizer that steps first: the next one that
        has as many micro-batches as this ``window`` of the first step. None if none was seen.
        """
        windows = self.windows
        for optimizer, micro_batches in windows[1:]:
            if optimizer is windows[0][0] and len(micro_batches) == len(window):
                return micro_batches[0]
        return None

    def drop_discarded(self) -> None:
        """Drop the backward passes since the last step whose gradients no optimizer gets.

        Those are passes before a ``zero`` of all that they gave, if more passes follow it. That is what is
        left of a step that a ``GradScaler`` skips.
        """
        steps = [place for place, event in enumerate(self.events) if event.kind == "step"]
        begin = steps[-1] + 1 if steps else 0
        since = self.events[begin:]
        last_pass = max((place for place, event in enumerate(since) if event.kind == "backward"), default=0)
        zeroings = [place for place, event in enumerate(since[:last_pass]) if event.kind == "zero"]
        for place in reversed(zeroings):
            if any(event.kind in ("edit", "assign") for event in since[place:]):
                return  # what a script does by hand may use what was there before
            earlier = [event.subject for event in since[:place] if event.kind == "backward"]
            reached = {key for each in earlier for key, x in each.gradients.items() if x.any()}
            zeroed = {id(p) for p in since[place].subject}
            if earlier and reached <= zeroed:
                self.events[begin:] = since[place:]
                self.micro_batches = [each for each in self.micro_batches if each not in earlier]
                return

    # -------------------------------------------------------------------------------- what the next step says

    def scaling_of(self, event: Event) -> str:
        """Return what a ``scale`` or ``assign`` before the first step is, by its counterpart in the next one.

        Returns:
            "factor" if it multiplies gradients by the same number there, "clip" if it leaves the same norm,
            and "" if neither is so or there is no counterpart.
        """
        first_step = next(place for place, e in enumerate(self.events) if e.kind == "step")
        in_first_step = [e for e in self.events[:first_step] if e.kind == event.kind]
        in_later_steps = [e for e in self.events[first_step:] if e.kind == event.kind]
        place = next(place for place, e in enumerate(in_first_step) if e is event)
        if place >= len(in_later_steps):
            return ""
        counterpart = in_later_steps[place]
        if isclose(event.factor or 0.0, counterpart.factor or 0.0, rel_tol=1e-4):
            return "factor"
        if isclose(event.norm or 0.0, counterpart.norm or 0.0, rel_tol=1e-3):
            return "clip"
        return ""

    @property
    def never_zeroed(self) -> set[int]:
        """The parameters, by ``id``, to whose gradients the next step of the same optimizers adds, as nothing
        zeroes them or sets them anew after the first one. Empty if no next step was seen.
        """
        stepped_first = self.optimizers_of_first_step
        zeroed, has_passed = set[int](), False
        after_step = list(dropwhile(lambda event: event.kind != "step", self.events))[1:]
        for event in after_step:
            has_passed |= event.kind == "backward"
            if event.kind == "assign":
                return set()
            if event.kind == "zero":
                zeroed.update(id(p) for p in event.subject)
            if has_passed and event.kind == "step" and any(event.subject is o for o in stepped_first):
                return self._with_gradients(stepped_first) - zeroed
        return set()

    def _with_gradients(self, optimizers: Iterable[Optimizer]) -> set[int]:
        """Return the parameters of these optimizers, by ``id``, that had a gradient at their first step."""
        holders = {id(p): id(optimizer) for optimizer in optimizers for p in parameters_of(optimizer)}
        with_gradients = set[int]()
        for parameter, optimizer in holders.items():
            gradient = self.gradients_at_step[optimizer].get(parameter)
            if gradient is not None and gradient.any():
                with_gradients.add(parameter)
        return with_gradients


def _passes_in(events: Iterable[Event]) -> list[MicroBatch]:
    """Return the recorded passes of these events, without those of which only the batch was kept."""
    return [event.subject for event in events if event.kind == "backward" and event.subject is not None]


def _without_passes_of(window: Sequence[Event], parameters: Set[int]) -> Sequence[Event]:
    """Return the events before a step without the backward passes that reach these parameters alone, unless
    all do.
    """
    events = list[Event]()
    for event in window:
        if event.kind != "backward" or event.subject is None:
            events.append(event)
        elif (micro_batch := event.subject.without_passes_of(parameters)) is not None:
            events.append(replace(event, subject=micro_batch))
    return events if any(event.kind == "backward" for event in events) else window


def ancestors(calls: Sequence[RecordedCall], number: Number) -> list[RecordedCall]:
    """Return the calls on which a value depends, in their order."""
    needed, leading = {number}, list[RecordedCall]()
    for call in reversed(calls):
        if not needed.isdisjoint(call.results):
            leading.append(call)
            needed.update(call.reads)
    return leading[::-1]


def sources(calls: Sequence[RecordedCall], numbers: Iterable[Number]) -> set[Number]:
    """Return these values and all values that they are computed from."""
    needed = set(numbers)
    for call in reversed(calls):
        if not needed.isdisjoint(call.results):
            needed.update(call.reads)
    return needed


def model_calls(calls: Sequence[RecordedCall]) -> list[RecordedCall]:
    """Return the calls of modules, and all that depend on what these gave."""
    depending, of_model = set[Number](), list[RecordedCall]()
    for call in calls:
        if call.module is not None or not depending.isdisjoint(call.reads):
            depending.update(call.results)
            of_model.append(call)
    return of_model
