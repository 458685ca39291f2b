"""Properties of a training step, each one small function; docs/check.md says how each is tested."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

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


PROPERTIES: Final[dict[str, Property]] = {}
"""By name, in the order in which their violations are reported: causes before consequences."""

ORDER: Final = (
    "finite", "optimizer_coverage", "evaluation_repeats", "targets", "rows", "causality", "reach", "padding",
    "documents", "counted", "order", "attention_scale", "ties", "residual", "norms", "dropout_repeats",
    "training_equals_evaluation", "compiled_equals_plain", "inputs", "reference", "adapters", "gradients",
    "derivative", "step", "frozen", "siblings", "seeds", "start", "buffers", "explained", "reduction",
    "padded_loss",
    "initial_loss", "nonlinear", "precision", "groups", "update", "schedule", "repeats", "state_dict", "meta",
    "cache", "overfit",
)  # fmt: skip


OF_RANKS: Final = (
    "ranks_data", "ranks_ties", "ranks_weights", "ranks_gradients", "ranks_clipping", "ranks_update",
    "ranks_agree",
)  # fmt: skip
"""The properties of a step on several processes, which ``normlab.parallel`` tests."""

AT_REST: Final[frozenset[Ability]] = frozenset()
FORWARD: Final[frozenset[Ability]] = frozenset({"loss"})
OTHER_BATCHES: Final[frozenset[Ability]] = frozenset({"loss", "batch"})
BACKWARD: Final[frozenset[Ability]] = frozenset({"loss", "gradient"})
WHOLE_STEP: Final[frozenset[Ability]] = frozenset({"loss", "gradient", "step"})


def property_of(group: str, *, explains: Iterable[str] = (), **settings: Any) -> Callable[[Test], Test]:
    """Register a function of a ``StepUnderTest`` as a property by its own name; its docstring is the
    statement.
    """

    def add(test: Test) -> Test:
        name = test.__name__
        PROPERTIES[name] = Property(name, group, test, frozenset(explains), **settings)
        return test

    return add


def require_property(name: str, where: str) -> None:
    """Raise UserError, with the nearest name, unless a property, or one of the user's own, has this name."""
    known = dict.fromkeys((*ORDER, *OF_RANKS, *PROPERTIES))
    if name not in known:
        raise UserError(f"{where} names {name!r}, which is no property{nearest(name, known)}")


def rank(name: str) -> int:
    """The place of a property in the report; a property of the user's own comes last."""
    return ORDER.index(name) if name in ORDER else len(ORDER)


def folded(violations: Iterable[Violation], allowed: Collection[str] = ()) -> tuple[Violation, ...]:
    """Return the violations, causes first, each with the violations that it explains.

    A cause has the first place among its own and those of what it explains. An allowed one explains nothing:
    what does not count must not hide what does.
    """
    ordered = sorted(violations, key=lambda v: rank(v.property))
    found = dict.fromkeys(v.property for v in ordered)
    causes = {name: _cause_of(name, [n for n in found if n not in allowed]) for name in found}

    explained: dict[int, list[Violation]] = {
        i: [] for i, v in enumerate(ordered) if causes[v.property] is None
    }
    first = {v.property: i for i, v in reversed(list(enumerate(ordered)))}
    place = {i: rank(ordered[i].property) for i in explained}
    for one in ordered:
        cause = causes[one.property]
        if cause is not None:
            explained[first[cause]].append(one)
            place[first[cause]] = min(place[first[cause]], rank(one.property))
    return tuple(
        replace(ordered[i], follows=tuple(explained[i]))
        for i in sorted(explained, key=lambda i: (place[i], i))
    )


def _cause_of(name: str, failed: Collection[str]) -> str | None:
    """Return the property among those that failed that explains this one, and that none of them explains."""
    known = [name]
    while True:
        here = known[-1]
        behind = [n for n in failed if here in PROPERTIES[n].explains and n not in known]
        if not behind:
            return here if here != name else None
        known.append(behind[0])


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
