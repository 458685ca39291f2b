"""What a running script does to gradients by hand, as in ``p.grad *= 0.5``.

No call could be patched to see that. So gradients are copied after every call that is known to change them,
and compared with their copies before the next one: what has changed in between was changed by hand.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import isclose
from typing import Final

import torch
from torch import Tensor

from normlab.setups.callers import calling_line
from normlab.setups.recording import Event

ROUNDINGS: Final = 64
"""How many roundings of its type a number may differ by when it is computed once more."""
SAME_FACTOR: Final = 1e-4
"""How far the factors of several gradients may lie apart, relative to each other, and still count as one."""


class GradientWatch:
    """The gradients of parameters as they were when they were last looked at."""

    def __init__(self) -> None:
        self.parameters: dict[int, Tensor] = {}
        """By ``id``, the parameters whose gradients are looked at."""
        self.seen: dict[int, Tensor | None] = {}
        """Copies of their gradients when they were last looked at."""

    def add(self, parameters: Iterable[Tensor]) -> None:
        """Look at the gradients of these parameters, too, from the next look on."""
        self.parameters.update({id(p): p for p in parameters})

    def add_as_they_are(self, parameters: Iterable[Tensor]) -> None:
        """Count what these gradients hold already as seen, and not as a change by hand."""
        for p in parameters:
            self.seen.setdefault(id(p), None if p.grad is None else p.grad.detach().clone())

    def look(self) -> None:
        """Copy all gradients as they are now."""
        self.seen = {
            key: None if p.grad is None else p.grad.detach().clone() for key, p in self.parameters.items()
        }

    @property
    def has_some(self) -> bool:
        """Whether any gradient was other than zero."""
        return any(x is not None and bool(x.any()) for x in self.seen.values())

    def added(self, before: Mapping[int, Tensor | None]) -> dict[int, Tensor]:
        """Return what gradients have gained since they were those of ``before``."""
        gained: dict[int, Tensor] = {}
        for key, gradient in self.seen.items():
            if gradient is not None:
                earlier = before.get(key)
                gained[key] = gradient if earlier is None else gradient - earlier
        return gained

    def changes(self, events: Sequence[Event]) -> list[Event]:
        """Look at all gradients, and return what was done to them since the last look.

        ``events`` are those that came before. The kinds of the returned ones are ``zero``, ``scale``,
        ``assign`` or ``edit``, see ``Event``.
        """
        before = self.seen
        self.look()
        changed = {key: x for key, x in self.seen.items() if not _equal(x, before.get(key))}
        if not changed:
            return []
        if all(x is None or not x.any() for x in changed.values()):
            return [Event("zero", [self.parameters[key] for key in changed])]
        nonzero = {key: x for key, x in self.seen.items() if x is not None and x.any()}
        norm = float(sum(x.double().pow(2).sum() for x in nonzero.values())) ** 0.5
        # all gradients, not only the changed ones: a clip multiplies all of them by one factor
        if (factor := _common_factor(nonzero, before)) is not None:
            return [Event("scale", calling_line(), factor=factor, norm=norm)]
        sums = _sums_of_window(events)
        if (factor := _common_factor(nonzero, sums)) is not None:
            assigned = Event("assign", calling_line(), factor=factor, norm=norm)
            left_out = [p for key, p in self.parameters.items() if key in sums and key not in nonzero]
            return [assigned, Event("zero", left_out)] if left_out else [assigned]
        return [Event("edit", calling_line())]


def _sums_of_window(events: Sequence[Event]) -> dict[int, Tensor]:
    """Return the sums of what the backward passes since the last step gave."""
    sums: dict[int, Tensor] = {}
    for event in reversed(events):
        if event.kind == "step":
            break
        if event.kind == "backward":
            for key, gradient in event.subject.gradients.items():
                sums[key] = sums[key] + gradient if key in sums else gradient
    return sums


def _equal(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    return torch.equal(a, b)


def _common_factor(gradients: Mapping[int, Tensor], others: Mapping[int, Tensor | None]) -> float | None:
    """Return k if each of these gradients is k times the other one, up to rounding; None otherwise."""
    common: float | None = None
    for key, gradient in gradients.items():
        factor = _factor(gradient, others.get(key))
        if common is None:
            common = factor
        if factor is None or common is None or not isclose(factor, common, rel_tol=SAME_FACTOR):
            return None
    return common


def _factor(a: Tensor | None, b: Tensor | None) -> float | None:
    """Return k in a = k · b, up to rounding; None if there is none."""
    if a is None or b is None or not b.any():
        return None
    wide_a, wide_b = a.double(), b.double()
    factor = float((wide_a * wide_b).sum() / (wide_b * wide_b).sum())  # by least squares
    apart = float((wide_a - factor * wide_b).norm())
    return factor if apart <= ROUNDINGS * torch.finfo(a.dtype).eps * float(wide_a.norm()) else None
