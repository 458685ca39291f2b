"""What a running script showed of its first step, as data: a dataflow from tensors to the loss.

``recorder`` fills it in while the script runs, ``flow`` makes a loss function of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_flatten, tree_unflatten

Number: TypeAlias = int
"""The number of a value: of a tensor, in one of the states that in-place functions give it."""


@dataclass(frozen=True)
class Reference:
    """Stands for a recorded value among the arguments of a call."""

    number: Number


@dataclass(frozen=True)
class Surroundings:
    """The modes of torch in which a call ran."""

    gradients: bool
    inference: bool
    autocast: Mapping[str, torch.dtype]
    """The dtype of autocast by type of device, where it was on."""

    @classmethod
    def now(cls, devices: Sequence[str]) -> Surroundings:
        """Return the modes that are set now."""
        cast = {kind: torch.get_autocast_dtype(kind) for kind in devices if torch.is_autocast_enabled(kind)}
        return cls(torch.is_grad_enabled(), torch.is_inference_mode_enabled(), cast)

    @contextmanager
    def entered(self, *, gradients: bool) -> Iterator[None]:
        """Set the same modes inside this block; no gradients where the caller wants none."""
        with ExitStack() as stack:
            stack.enter_context(torch.set_grad_enabled(self.gradients and gradients))
            for kind, dtype in self.autocast.items():
                stack.enter_context(torch.autocast(kind, dtype=dtype))
            yield


@dataclass(frozen=True, eq=False)
class RecordedCall:
    """One call of a function of torch, or of an outermost module that has parameters."""

    function: Callable[..., Any] | None
    """None for a call of a module."""
    module: nn.Module | None
    arguments: tuple[list[Any], Any]
    """Positional arguments and keywords, flattened, with a ``Reference`` for each recorded tensor."""
    results: tuple[Number, ...]
    """The tensors that it returned, in order; for an in-place function, the state that it left."""
    changes: Number | None
    """The value that an in-place function wrote to."""
    surroundings: Surroundings
    random_state: Tensor | None
    """The state of torch's generator before a call that drew from it."""
    line: str
    """Where the script called it: ``train.py:42``."""

    @property
    def name(self) -> str:
        """What to call it in a sentence."""
        if self.module is not None:
            return type(self.module).__name__
        return str(getattr(self.function, "__name__", self.function))

    @property
    def reads(self) -> list[Number]:
        """The recorded values among its arguments."""
        return [leaf.number for leaf in self.arguments[0] if isinstance(leaf, Reference)]

    def with_values(self, values: Mapping[Number, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return positional arguments and keywords, with these values in place of the references."""
        leaves, form = self.arguments
        filled = [values[leaf.number] if isinstance(leaf, Reference) else leaf for leaf in leaves]
        return tree_unflatten(filled, form)


@dataclass(eq=False)
class MicroBatch:
    """What led to one backward pass."""

    calls: list[RecordedCall]
    loss: Number
    """The value from which the backward pass began, before a ``GradScaler`` scaled it."""
    scale: float
    """What a ``GradScaler`` multiplied it by; 1 without one."""
    names: dict[Number, str]
    """What the script called its tensors, as far as names were found."""
    tensors: dict[Number, Tensor]
    """Every value, as an object; its numbers may have been changed since."""
    before: dict[Number, Tensor]
    """Copies of values that a later in-place function changed."""
    module_names: dict[int, str] = field(default_factory=dict)
    """By ``id`` of a module, what the script called it."""
    gradients: dict[int, Tensor] = field(default_factory=dict)
    """By ``id`` of the parameter: what this backward pass added to its gradient."""


@dataclass(frozen=True)
class Event:
    """Something that the loop did besides computing a loss, in order."""

    kind: str
    """backward, clip, unscale, step or schedule."""
    subject: Any = None
    """The optimizer or the scheduler; for ``clip`` the parameters; for ``backward`` the micro-batch."""
    largest_norm: float | None = None
    """For a clip."""
    rates: tuple[float, ...] = ()
    """For a step: the rate of each group of the optimizer."""


@dataclass(eq=False)
class Recording:
    """What a script showed until its first optimizer was about to change a weight."""

    micro_batches: list[MicroBatch] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    optimizers: list[Optimizer] = field(default_factory=list)
    schedulers: list[Any] = field(default_factory=list)
    escapes: list[str] = field(default_factory=list)
    """Where tensors of the window left torch: ``item() in train.py:30``."""
    compiled: bool = False
    """Whether the script compiles something, which was run as it was written."""

    @property
    def first_window(self) -> list[MicroBatch]:
        """The micro-batches of the first step of an optimizer; none if no optimizer was stepped."""
        before = list(takewhile(lambda event: event.kind != "step", self.events))
        if len(before) == len(self.events):
            return []
        return [event.subject for event in before if event.kind == "backward"]

    @property
    def events_of_first_step(self) -> list[Event]:
        """All until the next backward pass after the first step."""
        events, stepped = list[Event](), False
        for event in self.events:
            if stepped and event.kind == "backward":
                break
            stepped |= event.kind == "step"
            events.append(event)
        return events


KEPT_WHOLE: Final = (Tensor, nn.Module)
"""Objects that are leaves of arguments, whatever they contain."""


def flattened(arguments: Any) -> tuple[list[Any], Any]:
    """Return the leaves of nested arguments and their form, for ``tree_unflatten``."""
    leaves, form = tree_flatten(arguments, is_leaf=lambda leaf: isinstance(leaf, KEPT_WHOLE))
    return leaves, form
