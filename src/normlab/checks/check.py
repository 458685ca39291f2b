"""Test one training step against every property that applies."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from torch import nn

# each registers its properties
import normlab.checks.gradients
import normlab.checks.loss
import normlab.checks.optimizers
import normlab.checks.outputs
import normlab.checks.round_trips
import normlab.checks.schedule
import normlab.checks.siblings
import normlab.checks.start
import normlab.checks.step
import normlab.checks.structure
import normlab.checks.tokens  # noqa: F401
from normlab.checks.property import PROPERTIES, Answer, Note, Property, Violation, folded, rank
from normlab.checks.report import Report
from normlab.errors import UserError, in_one_line, is_own
from normlab.setups.setup import Loss, Setup, setup_of, shown
from normlab.trace.facts import Unknown
from normlab.trace.restore import restored, same_globals, same_random_state
from normlab.trace.step_under_test import StepUnderTest
from normlab.trace.tensors import unscanned

Progress = Callable[[str, int, int], None]
"""``progress(name, done, of)``, called before each property."""


def check(
    model: nn.Module | Setup,
    batch: Any = None,
    *,
    loss: Loss | None = None,
    budget_s: float = 60.0,
    progress: Progress | None = None,
    **setup: Any,
) -> Report:
    """Test whether one training step does what its author thinks it does; the model is left unchanged.

    Give ``model`` and ``batch`` (a tensor, a tuple of arguments or a mapping of keywords), or one ``Setup``;
    ``setup`` are its other fields: optimizer, scheduler, step, make, lr, declare. Each property holds, fails,
    or could not be tested, with the reason. ``budget_s`` seconds decide whether a property is reached, never
    its verdict. The same arguments give the same report.

    Raises UserError for a setup that cannot be run: wrong kinds, unknown words, a model that raises.

    >>> report = normlab.check(model, batch, loss=loss, optimizer=optimizer)
    >>> report.ok, report.page("check.html").name
    (True, 'check.html')
    """
    given = setup_of("check", model, batch, loss, setup)
    if isinstance(budget_s, bool) or not isinstance(budget_s, (int, float)) or not budget_s > 0:
        raise UserError(f"budget_s is {shown(budget_s)}, but must be a number of seconds above 0")
    with ExitStack() as stack:
        for guard in (restored(given), same_globals(), same_random_state(0), unscanned()):
            stack.enter_context(guard)
        if given.declare.init not in (None, "class") and not isinstance(given.declare.init, tuple):
            # reads the model's stream as a diagnosis does, which most checks need not load
            from normlab.checks.declared import resolved_init

            given = resolved_init(given)
        return examine(StepUnderTest(given, budget_s=budget_s), properties(), progress)


def properties() -> list[Property]:
    """All properties, causes before consequences."""
    return sorted(PROPERTIES.values(), key=lambda p: rank(p.name))


def examine(step: StepUnderTest, tests: Sequence[Property], progress: Progress | None = None) -> Report:
    """Test a step against these properties, the quick ones first."""
    answers, seconds = list[Answer](), dict[str, float]()
    holds, untestable = list[str](), dict[str, str]()
    step.refuse_what_cannot_run()
    _ = step.pass_s
    for done, one in enumerate(sorted(tests, key=lambda p: (p.name != "finite", p.passes > 8, rank(p.name)))):
        if progress is not None:
            progress(one.name, done, len(tests))
        step.turn_to(one.group)
        start = time.monotonic()
        here, reason = _test(step, one)
        seconds[one.name] = time.monotonic() - start
        answers += here
        if not any(isinstance(answer, Violation) for answer in here):
            untestable |= {one.name: reason} if reason else {}
            holds += [] if reason else [one.name]
        elif one.name == "finite":
            untestable |= {p.name: "numbers are not finite" for p in tests if p.name != "finite"}
            break
    return Report(
        model=type(step.model).__name__,
        failures=folded(one for one in answers if isinstance(one, Violation)),
        notes=tuple(one for one in answers if isinstance(one, Note)),
        holds=tuple(sorted(holds, key=rank)),
        untestable={name: untestable[name] for name in sorted(untestable, key=rank)},
        seconds=seconds,
        facts=step.described(),
    )


def _test(step: StepUnderTest, one: Property) -> tuple[list[Answer], str]:
    """The answers of a property, usually up to the first failure, and why it stopped."""
    answers, needed = list[Answer](), one.passes * step.pass_s
    try:
        one.applies(step)
        if one.name != "finite" and needed > (left := step.left_s):
            say = f"it takes about {needed:.0f} s, but only {max(left, 0):.0f} s are left"
            why = f"; the whole batch is used because, {step.why_whole}" if step.why_whole else ""
            raise Unknown(f"{say}; budget_s={step.budget_s - left + needed + 5:.0f} would reach it{why}")
        for answer in one.test(step) or ():
            answers.append(replace(answer, property=answer.property or one.name))
            if isinstance(answer, Violation) and not one.several:
                break
    except (Unknown, UserError) as error:
        return answers, str(error)
    except Exception as error:  # the model may be anyone's, and may raise on a changed batch
        who = "normlab itself" if is_own(error) else "when it was changed, the step"
        return answers, f"{who} raised {in_one_line(error)}"
    return answers, ""
