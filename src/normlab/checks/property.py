"""Properties of a training step, each one small function; docs/check.md says how each is tested."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from normlab.trace.facts import Unknown

if TYPE_CHECKING:
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
class Property:
    """One property: its name, what it states, its test, and the properties whose violations it explains."""

    name: str
    group: str
    test: Test
    explains: frozenset[str] = frozenset()
    passes: float = 4.0
    """About how many forward passes it takes; it is left out if the budget does not hold them."""
    several: bool = False
    """Whether it names every failure, and not just the first."""
    applies: Callable[[StepUnderTest], object] = lambda step: step
    """Raises Unknown, within a pass, if there is nothing to test, which no budget would change."""

    @property
    def statement(self) -> str:
        """What it states, in one sentence."""
        return " ".join((self.test.__doc__ or "").split("\n\n")[0].split())


PROPERTIES: Final[dict[str, Property]] = {}
"""By name, in the order in which their violations are reported: causes before consequences."""

ORDER: Final = (
    "finite", "optimizer_coverage", "evaluation_repeats", "targets", "rows", "causality", "reach", "padding",
    "documents", "counted", "order", "attention_scale", "ties", "residual", "norms", "dropout_repeats",
    "training_equals_evaluation", "compiled_equals_plain", "inputs", "gradients", "derivative", "step",
    "frozen", "siblings", "seeds", "start", "buffers", "explained", "reduction", "initial_loss", "nonlinear",
    "precision", "groups", "update", "schedule", "repeats", "state_dict", "meta", "cache", "overfit",
)  # fmt: skip


def property_of(group: str, *, explains: Iterable[str] = (), **settings: Any) -> Callable[[Test], Test]:
    """Register a function of a ``StepUnderTest`` as a property by its own name; its docstring is the
    statement.
    """

    def add(test: Test) -> Test:
        name = test.__name__
        PROPERTIES[name] = Property(name, group, test, frozenset(explains), **settings)
        return test

    return add


def rank(name: str) -> int:
    """The place of a property in the report; a property of the user's own comes last."""
    return ORDER.index(name) if name in ORDER else len(ORDER)


def folded(violations: Iterable[Violation]) -> tuple[Violation, ...]:
    """Return the violations, causes first, each with the violations that it explains."""
    kept: list[Violation] = []
    for one in sorted(violations, key=lambda v: rank(v.property)):
        causes = [i for i, v in enumerate(kept) if one.property in PROPERTIES[v.property].explains]
        if causes:
            kept[causes[0]] = replace(kept[causes[0]], follows=(*kept[causes[0]].follows, one))
        else:
            kept.append(one)
    return tuple(kept)


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
