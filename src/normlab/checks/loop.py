"""Properties of the loop: the user's own step, the schedule of its rates, and whether it learns."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any, Final

import torch
from torch import Tensor
from torch.optim import Optimizer

from normlab.checks.property import Note, Untestable, Violation, fail, note, property_of
from normlab.checks.step import Step, distance
from normlab.trace.facts.unknown import Unknown
from normlab.trace.rehearsal import Rates, Rehearsal, Seen, groups_of, parameters_of, plain_step, simulated
from normlab.trace.tensors import map_tensors, tensors_in
from normlab.trace.trace import Trace

SMALL: Final = 2.0**-40
"""Factor of gradients that no clipping touches; powers of two round nothing."""
LARGE: Final = 2.0**20
"""Factor of gradients that every clipping touches."""
LEARNT: Final = 10
"""Steps in a row below the first loss that show a batch to be learnt; as many are the warm-up."""
TRIED: Final = 40


# ------------------------------------------------------------------------------------------- copies to run
def rehearsal(step: Step, *, exact: bool = False, whole: Any = None) -> Rehearsal:
    """Copies of model, optimizers and scheduler, and the user's step to run on them, or a plain one."""
    parts = step.together()
    whole = whole or step.setup.step or plain_step(step.loss_of)
    several = isinstance(step.setup.optimizer, (list, tuple)) or len(parts[1]) > 1
    return Rehearsal(*parts, whole, several, exact)


def rehearsed(step: Step, batch: Any, scale: float = 1.0) -> tuple[Rehearsal, Seen]:
    """Run the step once, in float64 where that can be had."""
    _ = step.exact
    if step.is_exact:
        with suppress(Exception):
            run = rehearsal(step, exact=True)
            return run, run.run(batch, scale=scale)
    run = rehearsal(step)
    return run, run.run(batch, scale=scale)


def cloned(batch: Any) -> Any:
    """The batch with tensors of its own."""
    return map_tensors(batch, lambda _, x: x.clone())


def bare(step: Step) -> tuple[list[Optimizer], Any]:
    """Copies of optimizers and scheduler that hold the user's own parameters; they must never be stepped."""
    given = step.setup.optimizer
    ready = list(given) if isinstance(given, (list, tuple)) else [given]
    if not all(isinstance(o, Optimizer) for o in ready):
        return step.together()[1:]
    scheduler = step.setup.scheduler
    kept = [
        step.model,
        *parameters_of(ready),
        *(t for o in ready for _, t in tensors_in(list(o.state.values()))),
    ]
    bound = scheduler if hasattr(scheduler, "step") else None
    optimizers, bound = copy.deepcopy((ready, bound), {id(x): x for x in kept})
    if scheduler is not None and bound is None:
        bound = scheduler(optimizers[0] if len(optimizers) == 1 else optimizers)
    return optimizers, bound


def rates_of(step: Step) -> Rates:
    """The rates that the optimizers will have, those they have where there is no scheduler."""
    if "rates" not in step.kept:
        optimizers, scheduler = bare(step)
        if scheduler is None:
            step.kept["rates"] = Rates([0], [[float(g["lr"]) for g in groups_of(optimizers)]], None)
        else:
            step.kept["rates"] = simulated(optimizers, scheduler, step.declare.steps)
    return step.kept["rates"]


# -------------------------------------------------------------------------------------------------- the step
@property_of("loop", explains=["repeats", "overfit"], passes=16)
def step(step: Step) -> Iterator[Violation | Note]:
    """The optimizer sees the gradient of the loss on the whole batch: fresh, averaged, clipped, once a step.

    The user's step runs on copies, in float64 and without dropout. Its gradients are made so small that no
    clipping acts, when they are compared with those of the loss; and so large that every clipping acts, when it
    is looked at.
    """
    if step.setup.step is None:
        raise Untestable(
            "no step was handed over: step=lambda model, batch, optimizer, scheduler: … tests the loop"
        )
    if step.setup.optimizer is None:
        raise Untestable("no optimizer was handed over: pass optimizer=")
    run, seen = rehearsed(step, step.batch, SMALL)
    yield from _first(
        _steps_once(step, run, seen),
        lambda: _has_gradients(seen),
        lambda: _is_fresh(step, run, seen),
        lambda: _clips_well(step, run) if seen.clips else None,
        lambda: _averages(step, run, seen),
        lambda: _trains(step, seen),
    )


def _first(found: Violation | None, *tests: Any) -> Iterator[Violation]:
    for test in tests:
        if found is not None:
            break
        found = test()
    if found is not None:
        yield found


def _steps_once(step: Step, run: Rehearsal, seen: Seen) -> Violation | None:
    counts = [seen.calls.count(i) for i in range(len(run.optimizers))]
    if not any(counts):
        if any(any(c != "scheduler" for c in run.run(step.batch).calls) for _ in range(7)):
            raise Untestable(
                "the step steps the optimizer in some of its calls; hand over one of a whole batch"
            )
        return fail("step", "it never calls optimizer.step() of the optimizer that it is given", "call it")
    if max(counts) > 1:
        return fail(
            "step",
            f"it steps the optimizer {max(counts)} times in one batch of {len(seen.training)} passes",
            "step once, after the last backward",
        )
    if min(counts) < 1:
        return fail(
            "step", f"optimizer {counts.index(0) + 1} of {len(counts)} is never stepped", "step each of them"
        )
    return None


def _has_gradients(seen: Seen) -> Violation | None:
    if any(bool(g.any()) for g in seen.gradients.values()):
        return None
    return fail(
        "step", "every gradient is zero when the optimizer is called", "zero them before backward, not after"
    )


def _is_fresh(step: Step, run: Rehearsal, seen: Seen) -> Violation | None:
    again = run.run(step.batch, scale=SMALL)
    k, rest = fit(again.gradients, seen.gradients)
    limit = _tolerance(step, run)
    if rest <= limit and abs(k - 1) <= limit:
        return None
    return fail(
        "step",
        f"called again with the same weights, the optimizer sees another gradient ({k:.3g} times the first)",
        "zero the gradients once in each step; keep nothing from one step to the next",
    )


def _clips_well(step: Step, run: Rehearsal) -> Violation | None:
    seen = run.run(step.batch, scale=LARGE)
    advice = "clip all parameters after the last backward, and after unscaling, right before the step"
    if seen.late:
        return fail("step", "gradients grow by a backward after they were clipped", advice)
    covered = frozenset[int]()
    for clip, norm in reversed(list(zip(seen.clips, seen.norms, strict=False))):
        if abs(norm - clip.left) > 1e-3 * clip.left and not covered & clip.held:
            return fail(
                "step",
                f"the gradients' norm is clipped to {clip.left:.4g}, and is {norm:.4g} when the optimizer is called",
                advice,
            )
        covered |= clip.held
    left_out = [n for i, n in run.names.items() if n in seen.gradients and i not in covered]
    if covered and any(bool(seen.gradients[n].any()) for n in left_out):
        return fail(
            "step",
            f"{len(left_out)} parameters are not clipped ({', '.join(left_out[:3])}), so that the norm stays above "
            f"{seen.clips[-1].asked:.4g}",
            advice,
        )
    return None


def _averages(step: Step, run: Rehearsal, seen: Seen) -> Violation | None:
    training = not seen.training or any(seen.training)
    trace = Trace(
        run.model, _as(run, step.batch), step.loss_of, training=training, dropout=False, exact=run.exact
    )
    want = {n: trace.gradients.get(n) for n in run.held}
    k, rest = fit(seen.gradients, want, SMALL)
    limit = _tolerance(step, run)
    if rest <= limit and abs(k - 1) <= limit:
        return None
    other = fit(run.run(step.batch, scale=SMALL, seed=1).gradients, seen.gradients)
    if other[1] > limit:
        raise Untestable("the step draws numbers of its own, so that no two of its gradients are the same")
    passes = len(seen.training)
    if rest <= limit:
        return fail(
            "step",
            f"the gradient is {k:.4g} times that of the loss on the whole batch ({passes} passes of the model)",
            "divide the loss by the number of micro-batches, or by what counts in all of them; unscale before the step",
        )
    if passes > 1 and not _splits(step):
        raise Untestable(
            "the loss is no mean over rows: that of micro-batches differs from that of the whole batch"
        )
    return fail(
        "step",
        f"the gradient is not that of the loss on the whole batch: {rest:.1%} of it points elsewhere ({passes} passes)",
        "weigh micro-batches by the targets that they count, and let every row take part in the same loss",
    )


def _splits(step: Step) -> bool:
    """Whether the loss of the whole batch is the mean, or the sum, of those of its rows."""
    trace, facts = step.exact.again(training=True), step.facts
    try:
        counts = facts.targets.counted.reshape(facts.rows, -1).sum(1).tolist()
    except (Unknown, RuntimeError):
        counts = [1] * facts.rows
    rows = [i for i, n in enumerate(counts) if n]
    losses = [float(trace.again(batch=facts.with_rows(torch.tensor([i]))).loss) for i in rows]
    mean = sum(counts[i] * loss for i, loss in zip(rows, losses, strict=True)) / sum(counts)
    return any(abs(float(trace.loss) - x) <= step.rounding * abs(x) for x in (mean, sum(losses)))


def _trains(step: Step, seen: Seen) -> Violation | None:
    if not seen.training or any(seen.training):
        return None
    a, b = step.logits(step.plain), step.logits(step.plain.again(training=True))
    if distance(a, b) <= step.rounding:
        return None
    return fail(
        "step",
        "the model is in evaluation mode in it, and differs in training mode: no dropout acts",
        "call model.train() at the start of the step",
    )


def fit(
    gradients: Mapping[str, Tensor], want: Mapping[str, Tensor | None], scale: float = 1.0
) -> tuple[float, float]:
    """The factor k of g = k · want, and the share of g that it does not explain."""
    pairs = [
        (gradients[n].double() / scale, w.double())
        for n, w in want.items()
        if w is not None and n in gradients
    ]
    lost = sum(float(w.double().norm()) ** 2 for n, w in want.items() if w is not None and n not in gradients)
    size = sum(float((w * w).sum()) for _, w in pairs) + lost
    k = sum(float((g * w).sum()) for g, w in pairs) / max(size, 1e-300)
    rest = sum(float((g - k * w).norm()) ** 2 for g, w in pairs) + k * k * lost
    own = {n for n, w in want.items() if w is not None}
    rest += sum(float((g.double() / scale).norm()) ** 2 for n, g in gradients.items() if n not in own)
    whole = sum(float((g.double() / scale).norm()) ** 2 for g in gradients.values())
    return k, math.sqrt(rest / max(whole, 1e-300))


def _as(run: Rehearsal, batch: Any) -> Any:
    return map_tensors(batch, lambda _, x: x.double() if run.exact and x.is_floating_point() else x)


def _tolerance(step: Step, run: Rehearsal) -> float:
    """What rounding may do to a gradient: measured where the step does not run in float64."""
    if run.exact:
        return step.rounding
    if "gradient rounding" not in step.kept:
        trace = Trace(run.model, step.batch, step.loss_of, training=True, dropout=False)
        base = {n: g for n, g in trace.gradients.items() if g is not None}
        eps = max(torch.finfo(p.dtype).eps for p in run.model.parameters() if p.is_floating_point())
        draw = torch.Generator().manual_seed(0)
        moved = {
            n: p.detach() * (1 + eps * (torch.rand(p.shape, generator=draw) - 0.5).to(p))
            for n, p in run.model.named_parameters()
            if p.is_floating_point()
        }
        other = trace.again(weights=moved).gradients
        step.kept["gradient rounding"] = 4 * fit({n: other[n] for n in base}, base)[1] + eps  # type: ignore[misc]
    return step.kept["gradient rounding"]


# ---------------------------------------------------------------------------------------------- the schedule
@property_of("loop", explains=["overfit"], passes=8)
def schedule(step: Step) -> Iterator[Violation | Note]:
    """The rate reaches what is asked and stays above zero, by one step of the scheduler a step, also resumed."""
    given, optimizer = step.setup.scheduler, step.setup.optimizer
    if given is None:
        raise Untestable("no scheduler was handed over: pass scheduler=")
    if optimizer is None:
        raise Untestable("no optimizer was handed over: pass optimizer=")
    mine = list(optimizer) if isinstance(optimizer, (list, tuple)) else [optimizer]
    steered = getattr(given, "optimizer", None)
    if isinstance(steered, Optimizer) and all(steered is not o for o in mine):
        if not all(isinstance(o, Optimizer) for o in mine):
            raise Untestable(
                "the scheduler has an optimizer of its own: hand that over, or a function of each"
            )
        yield fail("scheduler", "it sets the rates of another optimizer", "build it with this optimizer")
        return
    rates = rates_of(step)
    if isinstance(rates.ended, TypeError) and len(rates.steps) == 1:
        raise Untestable("its rates follow what step() is given, and cannot be foretold")
    answer = _too_low(step, rates) or _wasted(step, rates) or _counted(step) or _resumes(step)
    if answer is not None:
        yield answer


def _too_low(step: Step, rates: Rates) -> Violation | Note | None:
    top, numbers, planned = rates.top, rates.steps, step.declare.steps
    peak = max(top)
    at = top.index(peak)
    followed = f"in {planned or numbers[-1] + 1} steps"
    if peak <= 0:
        return fail(
            "scheduler", f"the rate is never above 0 {followed}", "look at its unit: steps, not epochs"
        )
    asked = step.declare.peak_lr or step.setup.lr
    if asked is None:
        return None
    rise = max((b - a for a, b in zip(top[:at], top[1 : at + 1], strict=True)), default=0.0)
    after = min(at + 1, len(top) - 1)
    fall = (peak - top[after]) / max(numbers[after] - numbers[at], 1) * (numbers[at] + 1)
    if asked - rise - fall <= peak * (1 + 1e-6) and peak <= asked * (1 + 1e-6) + rise:
        return None
    if not planned and numbers[-1] + 1 < min(len(top), numbers[-1]) and rates.ended is None:
        return None
    more = "" if planned else "; declare steps= if more are planned"
    return fail(
        "scheduler",
        f"the rate's peak is {peak:.4g} at step {numbers[at]} {followed}, and {asked:.4g} is asked{more}",
        "a factor of LambdaLR multiplies the optimizer's rate; warm-up counts steps",
    )


def _wasted(step: Step, rates: Rates) -> Violation | Note | None:
    top, planned = rates.top, step.declare.steps
    lowest = min(min(row) for row in rates.rates)
    if planned is None:
        return None
    if rates.ended is not None:
        return fail(
            "scheduler",
            f"it raises {type(rates.ended).__name__} after {rates.steps[-1] + 1} of {planned} steps",
        )
    if lowest < 0:
        return fail(
            "scheduler",
            f"a rate falls to {lowest:.3g}: below 0 the loss is driven up",
            "end the schedule at 0",
        )
    zeros = sum(rate == 0 for rate in top)
    if zeros > 2 and zeros / len(top) > 0.01:
        return fail(
            "scheduler",
            f"the rate is 0 in {zeros / len(top):.0%} of the {planned} steps that are planned",
            "count the scheduler's steps as the optimizer's are counted",
        )
    return note("scheduler", f"the rate is 0 in {zeros} of {planned} steps") if zeros > 2 else None


def _counted(step: Step) -> Violation | Note | None:
    """How often the user's step moves the schedule."""
    if step.setup.step is None:
        return None
    run = rehearsal(step)
    calls = [*run.run(step.batch).calls, *run.run(step.batch).calls]
    moved, steps = calls.count("scheduler"), calls.count(0)
    if not moved or not steps:
        return note("scheduler", "the step does not step it") if not moved else None
    if moved > steps:
        return fail(
            "scheduler",
            f"it is stepped {moved / steps:.3g} times for each step of the optimizer",
            "step it once, after the optimizer",
        )
    if calls[0] == "scheduler":
        return fail(
            "scheduler",
            "it is stepped before the optimizer, so that its first rate is left out",
            "step it after",
        )
    return None


def _resumes(step: Step) -> Violation | Note | None:
    """Whether a schedule goes on with the same rates when it is saved and loaded."""
    (optimizers, scheduler), (others, loaded) = bare(step), bare(step)
    if not hasattr(scheduler, "state_dict"):
        return note("scheduler", "it has no state_dict, so that no checkpoint can hold it")
    try:
        for _ in range(3):
            scheduler.step()
        for a, b in zip(optimizers, others, strict=True):
            b.load_state_dict(a.state_dict())
        loaded.load_state_dict(copy.deepcopy(scheduler.state_dict()))
        both: list[list[list[float]]] = [[], []]
        for _ in range(3):
            for rows, s, held in ((both[0], scheduler, optimizers), (both[1], loaded, others)):
                s.step()
                rows.append([float(g["lr"]) for g in groups_of(held)])
    except Exception:
        return None
    if both[0] == both[1]:
        return None
    return fail(
        "scheduler",
        f"loaded after 3 steps it goes on with rates {both[1][0][0]:.4g}, not {both[0][0][0]:.4g}",
        "keep all that it counts in its state_dict",
    )


# ---------------------------------------------------------------------------------------- repeats, learning
@property_of("loop", explains=["overfit"], passes=10)
def repeats(step: Step) -> Iterator[Violation | Note]:
    """The same batch gives the same step twice, from the same weights and seeds, and is left as it was."""
    if step.setup.optimizer is None:
        yield from _same_gradients(step)
        return
    held = cloned(step.batch)
    before = dict(tensors_in(cloned(held)))
    run, first = rehearsed(step, held)
    for place, x in tensors_in(held):
        if place in before and (x.shape != before[place].shape or distance(x, before[place]) > 0):
            yield fail(
                ".".join(map(str, place)) or "step",
                "the step writes into the batch, so that it is another when it is used again",
                "change a copy of it",
            )
            return
    again = rehearsal(step, exact=run.exact).run(held)
    if first.gradients and fit(again.gradients, first.gradients)[1] > _tolerance(step, run):
        yield fail(
            "step",
            "two copies of the model, with the same batch and seeds, get different gradients",
            "look for what outlives a step: globals, counters, caches, generators of its own",
        )


def _same_gradients(step: Step) -> Iterator[Violation]:
    trace = step.exact.again(training=True)
    a, b = trace.gradients, trace.again().gradients
    known = {n: g for n, g in a.items() if g is not None}
    if fit({n: b[n] for n in known if b[n] is not None}, known)[1] > step.rounding:  # type: ignore[misc]
        yield fail(
            "loss", "the same batch twice, with the same seeds, gives different gradients", "keep no state"
        )


@property_of("learns", passes=60)
def overfit(step: Step) -> Iterator[Violation | Note]:
    """A small batch is learnt by the user's own step: its loss falls below where it began, and stays there.

    Dropout is off and the seeds are the same in each step, so that at a rate of 0 the loss would not change at
    all. Rates are those of the schedule's peak, reached in ten steps.
    """
    if step.setup.optimizer is None:
        raise Untestable("no optimizer was handed over: pass optimizer=")
    rows = min(step.facts.rows, 4)
    small = step.facts.with_rows(torch.arange(rows)) if rows < step.facts.rows else step.batch
    small = map_tensors(small, lambda _, x: x)
    losses = _learn(step, small if _runs(step, small) else step.batch, None)
    if _learnt(losses):
        return
    last = losses[-1]
    if not math.isfinite(last):
        answer = fail(
            "optimizer", f"the loss is {last} after {len(losses) - 1} steps on one batch", "lower the rate"
        )
    else:
        answer = fail(
            "optimizer",
            f"{len(losses) - 1} steps on one batch bring its loss from {losses[0]:.4g} to {last:.4g}",
            "lower the rate if the loss grows, raise it if it stays",
        )
    with suppress(Unknown):
        if step.facts.trained and math.isfinite(last):
            yield note(answer.module, answer.evidence)
            return
    yield answer


def _learnt(losses: list[float]) -> bool:
    floor = losses[0] - 1e-6 * abs(losses[0])
    return len(losses) > LEARNT and all(x < floor for x in losses[-LEARNT:])


def _runs(step: Step, batch: Any) -> bool:
    try:
        rehearsal(step).run(cloned(batch))
    except Exception:
        return False
    return True


def _learn(step: Step, batch: Any, whole: Any) -> list[float]:
    """The losses of a batch before each step and after the last."""
    run = rehearsal(step, whole=whole)
    trace = Trace(run.model, cloned(batch), step.loss_of, training=True, dropout=False)
    losses = [float(trace.loss)]
    peaks = rates_of(step).peaks
    sets_rates = step.setup.scheduler is not None or step.setup.step is None
    for i in range(TRIED):
        ramp = min(1.0, (i + 1) / LEARNT)
        run.run(cloned(batch), acts=True, rates=[ramp * rate for rate in peaks] if sets_rates else None)
        losses.append(float(trace.again().loss))
        if not math.isfinite(losses[-1]) or _learnt(losses):
            break
    return losses
