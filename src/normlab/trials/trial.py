"""``trial``: train copies of a setup at several rates, for a short while, and say which of them train."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

from torch import nn

from normlab.config.units import duration
from normlab.errors import UserError
from normlab.trace.setup import Loss, Setup, setup_of
from normlab.trace.untouched import same_globals
from normlab.trials import STEPS
from normlab.trials.attempts import LEAST_STEPS, Attempts, Plan, batches_of
from normlab.trials.change import Changes, Variant, variants
from normlab.trials.journal import Journal, fingerprint
from normlab.trials.scan import Scan
from normlab.trials.trials import INTERRUPTED, Trials

FEWEST: Final = 3
"""With fewer trials, nothing is compared; if the budget does not hold so many, they get fewer steps."""
WHOLE: Final = 8
"""A scan takes so many trials, with both sides of the best rate and the upper edge."""
OPTIONS: Final = ("seed", "folder", "progress", "announce")
"""Arguments of ``trial`` itself, not of the setup."""


def trial(
    model: nn.Module | Setup,
    batch: Any = None,
    *,
    loss: Loss | None = None,
    steps: int = STEPS,
    budget_s: float = 600.0,
    rates: Sequence[float] | None = None,
    change: Changes = (),
    **rest: Any,
) -> Trials:
    """Train copies of a setup at several learning rates, ``steps`` steps each, and say which of them train.

    Give ``model`` and ``batch``, or one ``Setup``. ``rest`` are the setup's other fields (optimizer,
    scheduler, step, make, lr, declare), and ``seed`` for the trials' random states, ``folder`` to keep them
    in, ``progress(name, done, of)``, and ``announce(sentence)``, called with the plan before the first trial.

    Every trial begins at the same weights, and sees the same batches and random numbers; ``Course`` says
    which rates its groups have. The scan begins at the setup's own rate; ``rates`` replaces the scan.
    ``change`` repeats it with one change. If nothing is learnt in so few steps, trials at the rates whose
    loss still falls get twice as long, until the budget is spent. Ctrl-C ends the scan and gives the answer
    so far. With a ``folder`` the same call continues where it stopped. The setup itself does not change.

    Raises UserError for a setup that cannot be trained, and for a folder that holds another one's trials.

    >>> trials = normlab.trial(model, batch, loss=loss, optimizer=optimizer, rates=(1e-3, 1e-2), steps=16)
    >>> [round(one.rate, 4) for one in trials.rates], trials.page("trial.html").name
    ([0.001, 0.01], 'trial.html')
    """
    setup = setup_of("trial", model, batch, loss, rest, OPTIONS)
    options = {name: value for name, value in rest.items() if name in OPTIONS}
    plan = Plan(steps, budget_s, tuple(rates or ()), **options)
    if setup.optimizer is None:
        raise UserError("there is no optimizer: pass optimizer=, as in torch.optim.AdamW(…, lr=1e-3)")
    with same_globals():
        return _walk(variants(setup, change, steps), plan)


def _walk(every: Sequence[Variant], plan: Plan) -> Trials:
    """Plan, scan and answer, for the setup and for each change of it, on the same batches."""
    batches, held = batches_of(every[0].setup, plan.seed), dict[str, str]()
    if plan.folder is not None:
        changes = [one.change for one in every]
        asked = {"steps": plan.steps, "seed": plan.seed, "rates": plan.rates, "change": changes}
        held = fingerprint(every[0].setup, batches(plan.steps), **asked)
    journal, share = Journal(plan.folder, held), plan.budget_s / len(every)
    scans = [Scan(Attempts(one, plan, batches, journal, share * (i + 1))) for i, one in enumerate(every)]
    steps, sentence = _planned(plan, scans[0])
    if plan.announce is not None:
        plan.announce(f"for each of {len(every)} setups, {sentence}" if len(every) > 1 else sentence)
    if steps < LEAST_STEPS:
        return replace(scans[0].answer(steps, sentence), plan=sentence)
    answers = list[Trials]()
    for scan in scans:
        try:
            answers.append(scan.run(steps))
        except KeyboardInterrupt:
            if scan.tried:
                answers.append(scan.answer(steps, INTERRUPTED))
            elif answers:
                answers[-1] = replace(answers[-1], cut=INTERRUPTED)
            else:
                raise
            break
    return replace(answers[0], plan=sentence, beside=tuple(answers[1:]), seconds=journal.seconds)


def _planned(plan: Plan, scan: Scan) -> tuple[int, str]:
    """The steps of a trial, and the sentence about what the first scan's time holds and can tell."""
    own, share, asked = scan.attempts.measured, scan.attempts.deadline, plan.steps
    took, step_s, planned = own.took, own.seconds[0], scan.attempts.variant.setup.declare.steps
    left = share - took
    enough = duration((took + WHOLE * asked * step_s) * plan.budget_s / share)
    steps = asked if FEWEST * asked * step_s <= left else max(int(left / step_s / FEWEST), 0)
    if steps < LEAST_STEPS:
        need = duration(FEWEST * asked * step_s)
        return steps, (
            f"too short to tell: {FEWEST} trials of {asked} steps take {need}, at {step_s:.2g} s a step, but "
            f"{duration(max(left, 0.0))} are left; a budget of {enough} would give a range"
        )
    scan.about = min(WHOLE, trials := int(left / (steps * step_s)))
    text = f"{duration(left)} allows {trials} trials of {steps} steps, {duration(steps * step_s)} each"
    if planned:
        part = trials * steps / planned
        times = f"{part:.1%} of" if part < 1 else f"{part:.1f} times"
        text += f", {times} the {planned:,} steps that are planned"
    if steps < asked:
        return steps, f"{text}: too few for {asked} steps each, for which a range takes {enough}"
    if trials < WHOLE:
        return steps, f"{text}: rates can be compared, perhaps not their range; {enough} would do for that"
    return steps, f"{text}: enough for a range"
