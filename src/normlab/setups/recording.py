"""What a running script showed of its first step, as data: a dataflow from tensors to the loss.

``recorder`` fills it in while the script runs, ``flow`` makes a loss function of it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
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
from normlab.trace.tensors import Place

KERNELS: Final[Mapping[SDPBackend, Callable[[], bool]]] = {
    SDPBackend.MATH: cuda.math_sdp_enabled,
    SDPBackend.FLASH_ATTENTION: cuda.flash_sdp_enabled,
    SDPBackend.EFFICIENT_ATTENTION: cuda.mem_efficient_sdp_enabled,
    SDPBackend.CUDNN_ATTENTION: cuda.cudnn_sdp_enabled,
}
"""What may compute attention, each with a function that says whether it may now."""


@dataclass(frozen=True)
class Surroundings:
    """The modes of torch in which a call ran."""

    gradients: bool
    inference: bool
    autocast: Mapping[str, torch.dtype]
    """The dtype of autocast by type of device, where it was on."""
    kernels: frozenset[SDPBackend]
    """What was allowed to compute attention."""

    @classmethod
    def now(cls, devices: Sequence[str]) -> Surroundings:
        """Return the modes that are set now."""
        cast = {kind: torch.get_autocast_dtype(kind) for kind in devices if torch.is_autocast_enabled(kind)}
        return cls(torch.is_grad_enabled(), torch.is_inference_mode_enabled(), cast, kernels_now())

    @contextmanager
    def entered(self, *, gradients: bool) -> Iterator[None]:
        """Set the same modes inside this block; no gradients where the caller wants none."""
        with ExitStack() as stack:
            if self.inference:
                stack.enter_context(torch.inference_mode())
            stack.enter_context(torch.set_grad_enabled(self.gradients and gradients))
            for kind, dtype in self.autocast.items():
                stack.enter_context(torch.autocast(kind, dtype=dtype))
            # the caller may need one of them, as for second derivatives
            kernels = self.kernels & kernels_now() or self.kernels
            if kernels != kernels_now():
                stack.enter_context(sdpa_kernel([*kernels]))
            yield


def kernels_now() -> frozenset[SDPBackend]:
    """Return what may compute attention now."""
    return frozenset(kernel for kernel, is_allowed in KERNELS.items() if is_allowed())


@dataclass(frozen=True, eq=False)
class RecordedCall:
    """One call of a function of torch, or of an outermost module that has parameters."""

    function: Callable[..., Any] | None
    """None for a call of a module."""
    module: nn.Module | None
    arguments: Arguments
    results: tuple[Number, ...]
    """The tensors, or the numbers of Python, that it returned, in order, and the states of the values that it
    wrote to.
    """
    places: tuple[Place, ...]
    """Where those that it returned are in that."""
    writes: tuple[tuple[Number, Number], ...]
    """The values that it wrote to, before and after it."""
    surroundings: Surroundings
    random_states: Sequence[tuple[Any, Any]]
    """The generators of random numbers that the call drew from, each with its state before."""
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
        """Return the values of ``results`` after what ``ran`` was called on these values. Another model may
        return less, or more: what it returns at other places is left out.
        """
        returned = values_in(result)
        if isinstance(ran, nn.Module):
            left = [place for place in self.places if place[:1] == (LEFT,)]
            returned |= {place: x for place in left if (x := value_left_at(place, ran)) is not None}
        places = zip(self.results, self.places, strict=False)  # states of what it wrote to have none
        found = {number: returned[place] for number, place in places if place in returned}
        return found | {after: values[before] for before, after in self.writes}


@dataclass(frozen=True, eq=False)
class Escape:
    """Where a value left torch in a way that is not followed, such as ``int()``, ``if`` or ``numpy()``."""

    function: Callable[..., Any]
    arguments: Arguments
    read: Any
    """What it gave: a truth or a number of Python; None if it is something else, such as an array."""
    line: str
    later: Number
    """Values from this number on were seen after it."""

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
    """Every value, as an object, or its outline if only a proof asks for it; the entries of a tensor may have
    been changed since.
    """
    before: dict[Number, Tensor]
    """Copies of values that a later in-place function changed."""
    escapes: list[Escape] = field(default_factory=list)
    watched: frozenset[int] = frozenset()
    """By ``id``, the parameters whose gradients were looked at."""
    loaded: set[Number] = field(default_factory=set)
    """The tensors that a ``DataLoader`` returned."""
    made: set[Number] = field(default_factory=set)
    """The tensors that were made of no other, but of lists and random numbers."""
    sized: set[Number] = field(default_factory=set)
    """The tensors that were made of no other, and that their size says all of."""
    module_names: dict[int, str] = field(default_factory=dict)
    """By ``id`` of a module, what the script called it."""
    gradients: dict[int, Tensor] = field(default_factory=dict)
    """By ``id`` of the parameter: what this backward pass added to its gradient."""
    found: ModuleState = field(default_factory=ModuleState)
    """What its modules held before they were called."""
    passes: list[BackwardPass] = field(default_factory=list)
    """Each backward pass through what was computed here; there are several where several losses share it."""

    def value(self, number: Number) -> Any:
        """Return a value as it was when it was used."""
        return unfollowed(self.before.get(number, self.tensors.get(number)))

    def without_gradients_of(self, parameters: Collection[int]) -> MicroBatch:
        """Return the micro-batch as if nobody had looked at the gradients of these parameters."""
        gradients = {key: x for key, x in self.gradients.items() if key not in parameters}
        return replace(self, gradients=gradients, watched=self.watched.difference(parameters))

    def without_passes_of(self, parameters: Collection[int]) -> MicroBatch | None:
        """Return the micro-batch with the loss of those passes alone that give a gradient to more than these
        parameters; None if there is none, itself if there are several.
        """
        others = [each for each in self.passes if not each.reached or not each.reached.issubset(parameters)]
        if len(others) == 1:
            return replace(self, loss=others[0].loss, passes=others)
        return self if others or not self.passes else None

    def add_gradient(self, parameter: int, gradient: Tensor) -> None:
        """Add what one backward pass gave."""
        earlier = self.gradients.get(parameter)
        self.gradients[parameter] = gradient if earlier is None else earlier + gradient


@dataclass(frozen=True)
class Event:
    """Something that the loop did besides computing a loss, in order."""

    kind: str
    """backward, clip, unscale, step or schedule; what a script does to gradients by hand is zero, scale,
    assign (a multiple of what the backward passes gave), or edit if it is something else.
    """
    subject: Any = None
    """The optimizer or the scheduler; for ``clip`` and ``zero`` the parameters; for ``backward`` the
    micro-batch; for ``edit`` the line after it.
    """
    factor: float | None = None
    """For ``scale`` and ``assign``."""
    norm: float | None = None
    """For these, the norm of all gradients after it."""
    largest_norm: float | None = None
    """For a clip."""
    has_gradients: bool = True
    """For a step: whether any parameter of the optimizer has a gradient."""
    rates: tuple[float, ...] = ()
    """For a step: the rate of each group of the optimizer."""


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
    """What a script showed until its first optimizer was about to change a weight."""

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
        """Let modules hold what the first of these passes found, and weights what they were before the script
        changed them; what other passes found is known from now on.
        """
        weights = [weight.before for weight in self.changed_weights.values()]
        now = [KeptValue.of(weight.table, weight.name) for weight in weights]
        for micro_batch in self.micro_batches:
            micro_batch.found.add(now)
        window[0].found.put_back()
        ModuleState(weights).put_back()

    @property
    def stepped(self) -> list[Optimizer]:
        """The optimizers that were stepped, in the order of their first steps."""
        steps = {id(event.subject): event.subject for event in self.events if event.kind == "step"}
        return list(steps.values())

    def of_optimizer(self, number: int) -> Recording:
        """Return what leads to the first step of one optimizer, by its number among these: the passes since
        another one stepped, but for those that only lead to a step of another one, later on.

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
        begin, step_of_others = 0, 0
        for place, event in enumerate(self.events):
            if event.kind == "backward":
                begin = step_of_others
            elif event.kind == "step" and event.subject is optimizer:
                break
            elif event.kind == "step":
                step_of_others = place + 1
        events = self.events[begin:]
        passes = [event.subject for event in events if event.kind == "backward"]
        return replace(self, events=events, micro_batches=passes)._without_passes_of_others()

    def _without_passes_of_others(self) -> Recording:
        """Return the same without the passes before a step of these optimizers that reach only what others
        hold, as those of a probe that is stepped less often.
        """
        elsewhere, stepped = self.held_elsewhere, self._stepped_first
        events, window = list[Event](), list[Event]()
        for event in self.events:
            window.append(event)
            if event.kind == "step":
                is_own = any(event.subject is optimizer for optimizer in stepped)
                events += _without_passes_of(window, elsewhere) if is_own else window
                window = []
        events += window
        backward = [event.subject for event in events if event.kind == "backward"]
        passes = [each for each in backward if each is not None]  # of later steps the batches alone are kept
        return replace(self, events=events, micro_batches=passes) if elsewhere else self

    @property
    def _stepped_first(self) -> list[Optimizer]:
        """The optimizers that step in the first step."""
        return [event.subject for event in self.events_of_first_step if event.kind == "step"]

    @property
    def held_elsewhere(self) -> set[int]:
        """The parameters, by ``id``, that only optimizers hold which make no step in the first window."""
        stepped = self._stepped_first
        held = {id(p) for optimizer in stepped for g in optimizer.param_groups for p in g["params"]}
        known = {id(p) for optimizer in self.optimizers for g in optimizer.param_groups for p in g["params"]}
        return known - held

    @property
    def first_window(self) -> list[MicroBatch]:
        """The micro-batches of the first step of an optimizer; none if no optimizer was stepped."""
        before = list(takewhile(lambda event: event.kind != "step", self.events))
        if len(before) == len(self.events):
            return []
        passes = [event.subject for event in before if event.kind == "backward"]
        elsewhere = self.held_elsewhere
        if not elsewhere:
            return passes
        # what this step only passes through, as a critic, is not what it trains
        return [each.without_gradients_of(elsewhere) for each in passes]

    @property
    def windows(self) -> list[tuple[Optimizer, list[MicroBatch]]]:
        """The micro-batches of each step, as far as they are recorded, with the optimizer that is stepped."""
        found, window = list[tuple[Optimizer, list[MicroBatch]]](), list[MicroBatch]()
        for event in self.events:
            if event.kind == "backward" and event.subject is not None:
                window.append(event.subject)
            elif event.kind == "step" and window:
                found.append((event.subject, window))
                window = list[MicroBatch]()
        return found

    def again(self, window: Sequence[MicroBatch]) -> MicroBatch | None:
        """Return the first micro-batch of the next step of the same optimizer; None if that step has more or
        fewer micro-batches than this window of the first one, or was not seen.
        """
        windows = self.windows
        for optimizer, others in windows[1:]:
            if optimizer is windows[0][0] and len(others) == len(window):
                return others[0]
        return None

    def drop_discarded(self) -> None:
        """Drop the backward passes since the last step that nothing is left of, as all that they gave was
        zeroed before a later pass: no optimizer gets it, as where a ``GradScaler`` skips a step.
        """
        steps = [place for place, event in enumerate(self.events) if event.kind == "step"]
        begin = steps[-1] + 1 if steps else 0
        since = self.events[begin:]
        last_pass = max((i for i, event in enumerate(since) if event.kind == "backward"), default=0)
        zeroings = [i for i, event in enumerate(since[:last_pass]) if event.kind == "zero"]
        for place in reversed(zeroings):
            if any(event.kind in ("edit", "assign") for event in since[place:]):
                return  # what a script does by hand may take what was there before
            earlier = [event.subject for event in since[:place] if event.kind == "backward"]
            given = {key for each in earlier for key, x in each.gradients.items() if x.any()}
            if earlier and given <= {id(p) for p in since[place].subject}:
                self.events[begin:] = since[place:]
                self.micro_batches = [each for each in self.micro_batches if each not in earlier]
                return

    def scaling_of(self, event: Event) -> str:
        """Return what a ``scale`` or ``assign`` of the first step is, by the second step: "factor" if it
        multiplies gradients by the same number there, "clip" if it leaves the same norm; else "".
        """
        kinds = [e for e in self.events if e.kind == event.kind]
        steps = [i for i, e in enumerate(self.events) if e.kind == "step"]
        first = [e for e in self.events[: steps[0]] if e.kind == event.kind]
        place = next(i for i, e in enumerate(first) if e is event)
        later = kinds[len(first) :][place : place + 1]
        for again in later:
            if isclose(event.factor or 0.0, again.factor or 0.0, rel_tol=1e-4):
                return "factor"
            if isclose(event.norm or 0.0, again.norm or 0.0, rel_tol=1e-3):
                return "clip"
        return ""

    @property
    def never_zeroed(self) -> set[int]:
        """The parameters, by ``id``, to whose gradients the next step of the same optimizers adds, as nothing
        zeroes them or sets them anew after the first one. None if no next step was seen.
        """
        stepped = self._stepped_first
        zeroed, has_passed = set[int](), False
        after = list(dropwhile(lambda event: event.kind != "step", self.events))[1:]
        for event in after:
            has_passed |= event.kind == "backward"
            if event.kind == "assign":
                return set()
            if event.kind == "zero":
                zeroed.update(id(p) for p in event.subject)
            if has_passed and event.kind == "step" and any(event.subject is o for o in stepped):
                return self._given(stepped) - zeroed
        return set()

    def _given(self, stepped: Iterable[Optimizer]) -> set[int]:
        """The parameters of these optimizers, by ``id``, that had a gradient at their first step."""
        own = {
            id(p): id(optimizer) for optimizer in stepped for g in optimizer.param_groups for p in g["params"]
        }
        gradients = {key: self.gradients_at_step[optimizer].get(key) for key, optimizer in own.items()}
        return {key for key, gradient in gradients.items() if gradient is not None and gradient.any()}

    @property
    def events_of_first_step(self) -> list[Event]:
        """All from the first backward pass until the next one after the first step. What came before, such as
        steps of a schedule that bring it to where a run is resumed, is no part of a step.
        """
        events, stepped = list[Event](), False
        for event in dropwhile(lambda event: event.kind != "backward", self.events):
            if stepped and event.kind == "backward":
                break
            stepped |= event.kind == "step"
            events.append(event)
        return events


def _without_passes_of(window: Sequence[Event], parameters: Collection[int]) -> Sequence[Event]:
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
    needed, used = {number}, list[RecordedCall]()
    for call in reversed(calls):
        if needed.intersection(call.results):
            used.append(call)
            needed.update(call.reads)
    return used[::-1]


def sources(calls: Sequence[RecordedCall], numbers: Iterable[Number]) -> set[Number]:
    """Return these values and all values that they are computed from."""
    needed = set(numbers)
    for call in reversed(calls):
        if not needed.isdisjoint(call.results):
            needed.update(call.reads)
    return needed


def model_calls(calls: Sequence[RecordedCall]) -> list[RecordedCall]:
    """Return the calls of modules, and those that read what these gave."""
    made, of_model = set[Number](), list[RecordedCall]()
    for call in calls:
        if call.module is not None or not made.isdisjoint(call.reads):
            made.update(call.results)
            of_model.append(call)
    return of_model
