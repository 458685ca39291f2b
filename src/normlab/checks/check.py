"""Test one training step against every property that applies.

``check`` makes a ``StepUnderTest`` of what the user gives, and ``examine`` asks one property after the other,
within a budget. The budget decides which properties are reached, and never what is said of one.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from typing import Any, Final

# each registers its properties
import normlab.checks.gradients
import normlab.checks.loss
import normlab.checks.optimizers
import normlab.checks.outputs
import normlab.checks.references
import normlab.checks.round_trips
import normlab.checks.schedule
import normlab.checks.siblings
import normlab.checks.start
import normlab.checks.step
import normlab.checks.structure
import normlab.checks.tokens  # noqa: F401
from normlab.base.memory import available_bytes, gibibytes
from normlab.checks.property import (
    PROPERTIES,
    Answer,
    Note,
    Property,
    Skip,
    Violation,
    folded,
    report_order,
    require_property,
)
from normlab.checks.report import Report, UnreachedLoss
from normlab.errors import UserError, in_one_line, is_own
from normlab.setups.given import setup_of
from normlab.setups.setup import Loss, Setup, shown
from normlab.trace.budget import Cost, Deadline, OutOfTimeError, passes_until
from normlab.trace.description import describe
from normlab.trace.facts import Unknown
from normlab.trace.preparation import prepare, require_memory
from normlab.trace.restore import restored, same_globals, same_random_state
from normlab.trace.step_under_test import StepUnderTest
from normlab.trace.tensors import unscanned, unwrap

CHEAP: Final = (1, 8, 32)
"""Numbers of passes: properties that take no more than these have their turn first, so that a small budget
reaches as many as it can.
"""
OF_EACH_LOSS: Final = ("finite", "targets", "counted", "padded_loss")
"""What is asked of each loss that is added up, beside the properties of tokens: what does not depend on how
much it weighs in the sum.
"""
NOT_FINITE: Final = Skip("numbers are not finite", applies=True)
"""Why nothing else is judged where ``finite`` fails."""
Progress = Callable[[str, int, int], None]
"""``progress(name, done, of)``, called before each property."""


def check(
    model: Any,
    batch: Any = None,
    *,
    loss: Loss | None = None,
    budget_s: float = 60.0,
    progress: Progress | None = None,
    allow: Collection[str] = (),
    **setup: Any,
) -> Report:
    """Test whether one training step does what its author thinks it does; the model is left unchanged.

    Give ``model`` and ``batch`` (a tensor, a tuple of arguments or a mapping of keywords), one ``Setup``, or
    a trainer (of transformers, TRL or torchtitan, or a LightningModule with its loader as a pair), which is
    run up to its first steps; ``setup`` are a setup's other fields: optimizer, scheduler, step, make, lr,
    declare. Each property holds, fails, or could not be tested, with the reason. ``budget_s`` seconds decide
    whether a property is reached, never its verdict. ``allow`` names properties that may fail: their failures
    are shown, but do not count. The same arguments give the same report.

    Args:
        model: a module, a ``Setup``, or a trainer.
        batch: what the model is called with; None if ``model`` holds it.
        loss: ``loss(model, batch)``; None if the model computes it.
        budget_s: seconds, above 0.
        progress: is called before each property.
        allow: names of properties.
        setup: the other fields of a ``Setup``.

    Raises UserError for a setup that cannot be run: wrong kinds, unknown words, a model that raises.

    >>> report = normlab.check(model, batch, loss=loss, optimizer=optimizer)
    >>> report.ok, report.page("check.html").name
    (True, 'check.html')
    """
    started = time.monotonic()
    step_setup = setup_of("check", model, batch, loss, setup)
    require_budget(budget_s)
    allowed = (allow,) if isinstance(allow, str) else tuple(allow)
    for name in allowed:
        require_property(name, "allow")
    with guarded_step(step_setup, budget_s, started) as (step, not_copied):
        report = examine(step, properties(), progress, allowed)
        report = replace(report, facts={**report.facts, **not_copied})
    return _with_added_losses(report, step_setup, budget_s, started)


def _with_added_losses(report: Report, setup: Setup, budget_s: float, started: float) -> Report:
    """Return a report with what fails in one of the losses that are added up, if nothing else says so, and
    with the losses that were not reached.
    """
    if not setup.added:
        return report
    violations, unreached = list[Violation](), list[UnreachedLoss]()
    for failure in report.failures:
        violations += [replace(failure, follows=()), *failure.follows]
    for number, added in enumerate(setup.added, start=1):
        alone = replace(added, model=setup.model, declare=setup.declare)
        try:
            failures = _failures_of_added(alone, budget_s, started)
        except UserError as error:
            unreached.append(UnreachedLoss(number, str(error)))
            continue
        reported = {violation.property for violation in violations}
        for failure in failures:
            if failure.property not in reported:
                evidence = f"in loss {number} of {len(setup.added)} that are added up, {failure.evidence}"
                violations.append(replace(failure, evidence=evidence))
    failed = {violation.property for violation in violations}
    return replace(
        report,
        failures=folded(violations, report.allowed),
        holds=tuple(name for name in report.holds if name not in failed),
        untestable={name: why for name, why in report.untestable.items() if name not in failed},
        unjudged=tuple(name for name in report.unjudged if name not in failed),
        unreached_losses=tuple(unreached),
    )


def _failures_of_added(alone: Setup, budget_s: float, started: float) -> Sequence[Violation]:
    """Return what fails in one of the losses that are added up.

    Raises UserError if that cannot be computed, or the time is over before most of it could be judged.
    """
    if time.monotonic() - started > budget_s:
        raise UserError("the time was over before it had its turn; a larger budget reaches it")
    tests = [tested for tested in properties() if tested.group == "tokens" or tested.name in OF_EACH_LOSS]
    with guarded_step(alone, budget_s, started) as (step, _):
        report = examine(step, tests)
    if report.verdict == "undecided":
        raise UserError(f"only {report.shortfall}")
    return report.failures


def require_budget(budget_s: object) -> None:
    """Raise UserError for anything but a number of seconds above 0."""
    if isinstance(budget_s, bool) or not isinstance(budget_s, (int, float)) or not budget_s > 0:
        raise UserError(f"budget_s is {shown(budget_s)}, but must be a number of seconds above 0")


@contextmanager
def guarded_step(
    setup: Setup, budget_s: float, started: float
) -> Iterator[tuple[StepUnderTest, Mapping[str, str]]]:
    """Yield the step of a setup, which is left as it was after this block, and what could not be copied.

    Args:
        setup: the setup.
        budget_s: seconds for the whole check.
        started: when its clock began, by ``time.monotonic``.
    """
    require_memory(unwrap(setup.model))
    with ExitStack() as stack:
        not_copied = stack.enter_context(restored(setup))
        for guard in (same_globals(), same_random_state(0), unscanned()):
            stack.enter_context(guard)
        if setup.declare.init not in (None, "class") and not isinstance(setup.declare.init, tuple):
            # reads the model's stream as a diagnosis does, which most checks need not load
            from normlab.checks.declared import resolved_init

            setup = resolved_init(setup)
        yield StepUnderTest(setup, budget_s=budget_s, started=started), not_copied


def properties() -> list[Property]:
    """All properties, causes before consequences."""
    return sorted(PROPERTIES.values(), key=lambda tested: report_order(tested.name))


def examine(
    step: StepUnderTest,
    tests: Sequence[Property],
    progress: Progress | None = None,
    allowed: tuple[str, ...] = (),
) -> Report:
    """Test a step against these properties, the quick ones first.

    Args:
        step: the step; it keeps what it computes for one property for the others.
        tests: the properties, in any order.
        progress: is called before each property.
        allowed: names of properties whose failures are shown, but do not count.
    """
    answers, seconds = list[Answer](), dict[str, float]()
    holds, skipped = list[str](), dict[str, Skip]()
    if "loss" not in step.setup.cannot:
        prepare(step)
    in_turn = sorted(tests, key=lambda tested: (*_turn(step, tested), report_order(tested.name)))
    for done, tested in enumerate(in_turn):
        if progress is not None:
            progress(tested.name, done, len(tests))
        step.turn_to(tested.group)
        start = time.monotonic()
        its_answers, skip = answers_of(step, tested)
        seconds[tested.name] = time.monotonic() - start
        answers += its_answers
        fails = any(isinstance(answer, Violation) for answer in its_answers)
        if fails and tested.name == "finite":  # NaN equals nothing: every comparison would fail
            skipped |= {other.name: NOT_FINITE for other in tests if other.name != "finite"}
            break
        if skip is not None and not fails:
            skipped[tested.name] = skip
        elif not fails:
            holds.append(tested.name)
        if tested.name == "finite":
            _ask_early(step, tests)
    names = sorted(skipped, key=report_order)
    return Report(
        model=type(step.model).__name__,
        failures=folded((answer for answer in answers if isinstance(answer, Violation)), allowed),
        notes=tuple(answer for answer in answers if isinstance(answer, Note)),
        holds=tuple(sorted(holds, key=report_order)),
        untestable={name: reason_of(step, skipped[name], skipped.values()) for name in names},
        seconds=seconds,
        facts=describe(step),
        unjudged=tuple(name for name in names if skipped[name].applies),
        allowed=allowed,
    )


def _ask_early(step: StepUnderTest, tests: Iterable[Property]) -> None:
    """Ask now whether those properties apply of which a few passes tell, so that it does not depend on the
    budget. The step keeps what it computes for the answers.
    """
    for tested in tests:
        takes_passes_alone = tested.asking.passes and not tested.asking.steps
        if takes_passes_alone and _seconds(step, tested.asking) <= step.left_s:
            with suppress(Exception, OutOfTimeError), passes_until(Deadline(step.ends)):
                tested.applies(step)


def reason_of(step: StepUnderTest, skip: Skip, skipped: Iterable[Skip]) -> str:
    """Why a property was not judged; for want of time, with a budget that would do for all of these."""
    if not skip.lacks_s:
        return skip.reason
    enough = step.budget_s + sum(each.lacks_s for each in skipped)
    why_whole = f"; the whole batch is used because, {step.why_whole}" if step.why_whole else ""
    return f"{skip.reason}; a budget of {enough:.0f} s would reach all that apply{why_whole}"


def _turn(step: StepUnderTest, tested: Property) -> tuple[bool, int]:
    """When a property has its turn: after the one that all others need, the cheaper the sooner."""
    if "loss" in step.setup.cannot:
        passes = tested.passes
    else:
        passes = _seconds(step, tested.cost) / step.estimates.pass_s
    return tested.name != "finite", sum(passes > most for most in CHEAP)


def _seconds(step: StepUnderTest, cost: Cost) -> float:
    """About how many seconds that takes; none if the loss cannot be computed."""
    return 0.0 if "loss" in step.setup.cannot else step.estimates.seconds_of(cost)


def answers_of(step: StepUnderTest, tested: Property) -> tuple[list[Answer], Skip | None]:
    """Return the answers of a property, usually up to the first failure, and why it stopped.

    A property raises Unknown if nothing is known by which it could be judged, and then does not apply. If
    anything else keeps it from being judged, it applies, and counts as one that is left open.
    """
    answers = list[Answer]()
    lacking = sorted(tested.uses & step.setup.cannot.keys())
    if lacking:
        return answers, Skip(step.setup.cannot[lacking[0]], applies=True)
    try:
        with passes_until(Deadline(step.ends)):
            if _seconds(step, tested.asking) <= max(step.left_s, 0.0):
                tested.applies(step)
            _require_time(step, tested)
            _require_memory(step, tested)
            for answer in tested.test(step) or ():
                answers.append(replace(answer, property=answer.property or tested.name))
                if isinstance(answer, Violation) and not tested.several:
                    break
    except OutOfTimeError:
        reason = "it takes longer than was estimated, and the time is over"
        return answers, Skip(reason, applies=True, lacks_s=step.budget_s)
    except (Unknown, UserError) as error:
        lacks_s = error.lacks_s if isinstance(error, TooLongError) else 0.0
        return answers, Skip(str(error), applies=not isinstance(error, Unknown), lacks_s=lacks_s)
    except Exception as error:  # the model may be anyone's, and may raise, as on a changed batch
        if "loss" in step.setup.cannot:
            return answers, Skip(step.setup.cannot["loss"], applies=True)
        who = "normlab itself" if is_own(error) else "while this was tested, the step"
        return answers, Skip(f"{who} raised {in_one_line(error)}", applies=True)
    return answers, None


class TooLongError(UserError):
    """A property takes longer than is left of the budget, by ``lacks_s`` seconds."""

    def __init__(self, sentence: str, lacks_s: float) -> None:
        super().__init__(sentence)
        self.lacks_s = lacks_s


def _require_time(step: StepUnderTest, tested: Property) -> None:
    """Raise TooLongError if a property takes longer than is left, and Unknown if no budget would suffice."""
    needed, left = _seconds(step, tested.cost), max(step.left_s, 0.0)
    if needed > left:
        _begin_without_a_pass(step, tested)
        raise TooLongError(f"it takes about {needed:.2g} s, and {left:.2g} s are left", needed - left)


def _begin_without_a_pass(step: StepUnderTest, tested: Property) -> None:
    """Begin a test, up to its first pass. Raises Unknown if the test does so by then: no budget would change
    that.
    """
    try:
        with passes_until(Deadline(-math.inf)):  # a deadline in the past: the first pass raises
            tested.applies(step)
            next(iter(tested.test(step) or ()), None)
    except Unknown:
        raise
    except (Exception, OutOfTimeError):
        return


def _require_memory(step: StepUnderTest, tested: Property) -> None:
    """Raise UserError if a property of a large model takes more memory than is free."""
    if not step.large:
        return
    needed = step.estimates.bytes_of(tested.cost, gradient="gradient" in tested.uses)
    free = available_bytes()
    if needed > free:
        raise UserError(f"it takes about {gibibytes(needed)} of memory, but only {gibibytes(free)} are free")
