"""How the verdict on one property came about: facts, copies, passes and comparisons, then the answers.

It is for debugging a wrong verdict, in the order of CONTRIBUTING.md; ``normlab check --trace`` prints it.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial
from typing import Any

from normlab.base.io import to_plain
from normlab.checks.check import NOT_FINITE, answers_of, guarded_step, reason_of, require_budget
from normlab.checks.property import PROPERTIES, Answer, Note, Skip, Violation, require_property
from normlab.checks.report import Verdict
from normlab.errors import UserError
from normlab.setups.given import setup_of
from normlab.setups.setup import Loss
from normlab.trace.changes import setting_among
from normlab.trace.description import ReadFact, read_facts, tested_batch
from normlab.trace.preparation import prepare
from normlab.trace.step_under_test import StepUnderTest
from normlab.trace.trace import Trace
from normlab.trace.trail import Entry, Trail, listening


@dataclass(frozen=True)
class CopiesRun:
    """Which copies of the model ran, and on what."""

    stand_in: bool
    """Whether copies may stand in for the model; if not, passes run the model itself."""
    why_not: str
    exact: bool
    """Whether they run in float64."""
    why_inexact: str
    narrowed: tuple[str, ...]
    """The types in which a pass in float64 computes in part."""
    rounding: float
    """The relative difference that two runs may show by rounding alone."""
    part: bool
    """Whether a part of the batch stands for all of it."""
    batch: str
    """Which part it is, or why all of a large batch is tested; empty for a small batch."""


@dataclass(frozen=True)
class PropertyTrace:
    """What led to the verdict on one property, in order."""

    name: str
    statement: str
    model: str
    facts: tuple[ReadFact, ...]
    copies: CopiesRun | None
    """None if the loss cannot be computed, so that nothing was run."""
    entries: tuple[Entry, ...]
    """The passes and comparisons that the property made; what the check had prepared is used again."""
    failures: tuple[Violation, ...]
    """Its own, or those of ``finite``, without which no other property is tested."""
    notes: tuple[Note, ...]
    untestable: str
    """Why it was not judged; empty if it was."""
    applies: bool
    """Whether there was something to judge."""

    @property
    def verdict(self) -> Verdict:
        """Whether the property holds or fails; undecided if it could not be tested."""
        if self.failures:
            return "fails"
        return "undecided" if self.untestable else "holds"

    def to_plain(self) -> dict[str, Any]:
        """The same as values that JSON can hold."""
        plain: dict[str, Any] = to_plain(self)
        return {"verdict": self.verdict, **plain}


def trace_property(
    name: str,
    model: Any,
    batch: Any = None,
    *,
    loss: Loss | None = None,
    budget_s: float = 60.0,
    **setup: Any,
) -> PropertyTrace:
    """Test one property as ``normlab.check`` does, with its arguments, and note what led to the verdict.

    Raises UserError for an unknown property, with the nearest name, and as ``normlab.check`` does.

    >>> trace_property("causality", model, batch, loss=loss).verdict
    'holds'
    """
    require_property(name, "trace_property")
    if name not in PROPERTIES:
        raise UserError(
            f"trace_property takes a property of one process, and {name} is a property of several processes"
        )
    started = time.monotonic()
    step_setup = setup_of("trace_property", model, batch, loss, setup)
    require_budget(budget_s)
    with guarded_step(step_setup, budget_s, started) as (step, _):
        return trace_step(step, name)


def trace_step(step: StepUnderTest, name: str) -> PropertyTrace:
    """Test one property of a step, and note what led to the verdict."""
    chosen = PROPERTIES[name]
    facts, copies = tuple[ReadFact, ...](), None
    shared = dict[str, Trace]()  # traces by name, so that a pass can say which one it changes, and how
    if "loss" not in step.setup.cannot:
        prepare(step)
        facts = tuple(read_facts(step))
        copies = _copies_run(step)
        shared = {"the exact step": step.exact, "the unchanged step": step.unchanged}
    trail = Trail(partial(setting_among, shared))
    answers, skip = _finite_answers(step, name)
    if skip is None:
        step.turn_to(chosen.group)
        with listening(trail):
            answers, skip = answers_of(step, chosen)
    failures = tuple(answer for answer in answers if isinstance(answer, Violation))
    return PropertyTrace(
        name=name,
        statement=chosen.statement,
        model=type(step.model).__name__,
        facts=facts,
        copies=copies,
        entries=tuple(trail.entries),
        failures=failures,
        notes=tuple(answer for answer in answers if isinstance(answer, Note)),
        untestable="" if skip is None else reason_of(step, skip, [skip]),
        applies=skip is None or skip.applies,
    )


def _finite_answers(step: StepUnderTest, name: str) -> tuple[list[Answer], Skip | None]:
    """Test ``finite``, as a check does before any other property, and say what stops the other one."""
    if name == "finite":
        return [], None
    step.turn_to(PROPERTIES["finite"].group)
    answers, _ = answers_of(step, PROPERTIES["finite"])
    failures = [answer for answer in answers if isinstance(answer, Violation)]
    return list[Answer](failures), NOT_FINITE if failures else None


def _copies_run(step: StepUnderTest) -> CopiesRun:
    """Say which copies run. What this computes is kept, so that the property does not compute it again."""
    narrowed = sorted(str(dtype).removeprefix("torch.") for dtype in step.comparison.narrowed)
    return CopiesRun(
        stand_in=step.copies.may_stand_in,
        why_not=step.copies.refusal,
        exact=step.is_exact,
        why_inexact=step.why_inexact,
        narrowed=tuple(narrowed) if step.is_exact else (),
        rounding=step.rounding,
        part=step.tests_a_part,
        batch=tested_batch(step),
    )
