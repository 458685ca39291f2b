"""What a property of a training step is, and how its violations are put in order.

A property is one small function of a ``StepUnderTest`` that yields what it finds wrong. The other modules of
this room hold the functions; docs/check.md has the equation of each, and how it is tested.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from normlab.base.registry import Registry
from normlab.errors import UserError, nearest
from normlab.trace.budget import Cost
from normlab.trace.facts import Unknown

if TYPE_CHECKING:
    from normlab.setups.setup import Ability
    from normlab.trace.step_under_test import StepUnderTest


@dataclass(frozen=True)
class Violation:
    """A property that does not hold: where, what was seen, and what to do."""

    property: str
    module: str
    """A module or parameter, or "loss", "optimizer", "scheduler", "step", or an entry of the batch."""
    evidence: str
    advice: str = ""
    follows: tuple[Violation, ...] = ()
    """Violations that this one explains."""

    def __str__(self) -> str:
        return f"{self.property} at {self.module or 'the model'}: {self.evidence}"


@dataclass(frozen=True)
class Note:
    """Something unusual that may be intended; it never fails."""

    property: str
    module: str
    evidence: str


Answer = Violation | Note
"""What a test yields. Whoever runs the test fills in its property, so that no test repeats its own name."""
Answers = Iterator[Answer]
Test = Callable[["StepUnderTest"], Answers]
"""Yields failures and notes; raises ``Unknown`` if it cannot be tested, with what to declare or pass."""


@dataclass(frozen=True)
class Skip:
    """Why a property was not judged."""

    reason: str
    applies: bool = False
    """Whether there is something to judge, for which the budget, or what can be done with this step, does not
    suffice; otherwise nothing is known that it could be judged by.
    """
    lacks_s: float = 0.0
    """About how many seconds more it would have taken; 0 if it was not for want of time."""


@dataclass(frozen=True)
class Property:
    """One property: its name, what it states, its test, and the properties whose violations it explains."""

    name: str
    group: str
    test: Test
    explains: frozenset[str] = frozenset()
    passes: float = 4.0
    """About how many exact forward passes it takes; it is left out if the budget does not hold them."""
    steps: float = 0.0
    """About how many whole steps it takes besides."""
    several: bool = False
    """Whether it names every failure, and not just the first."""
    uses: frozenset[Ability] = frozenset({"loss", "gradient", "batch", "step"})
    """What it needs of a step; none if parameters and settings decide, and passes only say which they are."""
    applies: Callable[[StepUnderTest], object] = lambda step: step
    """Raises Unknown if there is nothing to test, which no budget would change."""
    asking: Cost = Cost()
    """What it takes to ask that."""

    @property
    def cost(self) -> Cost:
        """What the whole property takes."""
        return Cost(self.passes, self.steps)

    @property
    def statement(self) -> str:
        """What it states, in one sentence."""
        return " ".join(inspect.cleandoc(self.test.__doc__ or "").split("\n\n")[0].split())

    @property
    def method(self) -> str:
        """What its docstring says besides: how it is tested, in paragraphs."""
        return inspect.cleandoc(self.test.__doc__ or "").partition("\n\n")[2]


PROPERTIES: Final[Registry[Property]] = Registry("property")
"""By name, in the order of their registration; ``ORDER`` has the order in which they are reported."""

ORDER: Final = (
    "finite", "optimizer_coverage", "evaluation_repeats", "targets", "rows", "causality", "reach", "padding",
    "documents", "counted", "order", "attention_scale", "ties", "residual", "norms", "dropout_repeats",
    "training_equals_evaluation", "compiled_equals_plain", "inputs", "reference", "adapters", "gradients",
    "derivative", "step", "frozen", "siblings", "seeds", "start", "buffers", "explained", "reduction",
    "padded_loss",
    "initial_loss", "nonlinear", "precision", "groups", "update", "schedule", "repeats", "state_dict", "meta",
    "cache", "overfit",
)  # fmt: skip
"""The order in which properties are reported: causes before consequences."""


OF_RANKS: Final = (
    "ranks_data", "ranks_ties", "ranks_weights", "ranks_gradients", "ranks_clipping", "ranks_update",
    "ranks_agree",
)  # fmt: skip
"""The properties of a step on several processes, which ``normlab.parallel`` tests."""

# What a test may need of a step. Where a step lacks one of these, the property stays untested.
AT_REST: Final[frozenset[Ability]] = frozenset()
FORWARD: Final[frozenset[Ability]] = frozenset({"loss"})
OTHER_BATCHES: Final[frozenset[Ability]] = frozenset({"loss", "batch"})
BACKWARD: Final[frozenset[Ability]] = frozenset({"loss", "gradient"})
WHOLE_STEP: Final[frozenset[Ability]] = frozenset({"loss", "gradient", "step"})


def property_of(group: str, *, explains: Iterable[str] = (), **settings: Any) -> Callable[[Test], Test]:
    """Register a function of a ``StepUnderTest`` as a property by its own name.

    The first paragraph of its docstring is the statement of the property.

    Args:
        group: properties of one group use the same passes, which are released when the next group begins.
        explains: names of properties that fail if this one does, and whose violations are folded under it.
        settings: the other fields of ``Property``.
    """

    def described(test: Test) -> Property:
        return Property(test.__name__, group, test, frozenset(explains), **settings)

    return PROPERTIES.register_made(described)


def require_property(name: str, where: str) -> None:
    """Raise UserError, with the nearest name, unless a property, or one of the user's own, has this name.

    ``PROPERTIES`` alone would not do: its names are there once the modules that hold the tests are imported,
    and those of several processes once ``normlab.parallel`` is.
    """
    known = dict.fromkeys((*ORDER, *OF_RANKS, *PROPERTIES))
    if name not in known:
        raise UserError(f"{where} names {name!r}, which is not a property{nearest(name, known)}")


def report_order(name: str) -> int:
    """The place of a property in the report; a property of the user's own comes last."""
    return ORDER.index(name) if name in ORDER else len(ORDER)


def folded(violations: Iterable[Violation], allowed: Collection[str] = ()) -> tuple[Violation, ...]:
    """Return the violations, causes first, each with the violations that it explains.

    A cause has the first place among its own and those of what it explains. An allowed one explains nothing:
    what does not count must not hide what does.
    """
    ordered = sorted(violations, key=lambda violation: report_order(violation.property))
    failed = dict.fromkeys(violation.property for violation in ordered)
    may_explain = [name for name in failed if name not in allowed]
    causes = {name: _cause_of(name, may_explain) for name in failed}

    # all of these by the number of a violation in ``ordered``
    first: dict[str, int] = {}
    explained: dict[int, list[Violation]] = {}
    place: dict[int, int] = {}
    for number, violation in enumerate(ordered):
        first.setdefault(violation.property, number)
        if causes[violation.property] is None:
            explained[number] = []
            place[number] = report_order(violation.property)
    for violation in ordered:
        cause = causes[violation.property]
        if cause is None:
            continue
        number = first[cause]
        explained[number].append(violation)
        place[number] = min(place[number], report_order(violation.property))

    numbers = sorted(explained, key=lambda number: (place[number], number))
    return tuple(replace(ordered[number], follows=tuple(explained[number])) for number in numbers)


def _cause_of(name: str, failed: Collection[str]) -> str | None:
    """Return the property among those that failed that explains this one, and that none of them explains."""
    chain = [name]
    while True:
        last = chain[-1]
        # a property of the chain again would be a circle
        behind = [other for other in failed if last in PROPERTIES[other].explains and other not in chain]
        if not behind:
            return last if last != name else None
        chain.append(behind[0])


def fail(module: str, evidence: str, advice: str = "") -> Violation:
    """A violation of the property that is being tested."""
    return Violation("", module, evidence, advice)


def note(module: str, evidence: str) -> Note:
    """A note of the property that is being tested."""
    return Note("", module, evidence)


def needs(fact: object, reason: str) -> None:
    """Raise Unknown, with what to declare or pass, if a property needs a fact that is missing."""
    if not fact:
        raise Unknown(reason)
