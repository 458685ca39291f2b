"""Properties of the loop: its optimizers, the user's own step, the schedule, and whether it learns."""

from __future__ import annotations

import copy
import inspect
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import chain, pairwise
from math import isclose
from typing import Final

import torch
from torch.optim import SGD, Optimizer

from normlab.checks.property import Answers, fail, needs, note, property_of
from normlab.trace.compare import distance
from normlab.trace.dry_run import (
    BIG,
    SEED,
    DryRun,
    ObservedStep,
    fit,
    groups_of,
    learnt,
    parameters_of,
    splits,
    written,
)
from normlab.trace.facts import Unknown
from normlab.trace.facts.stacks import common, odd_one, siblings
from normlab.trace.facts.targets import CLOSE
from normlab.trace.gradients import without_gradient
from normlab.trace.optimizers import Held, Moved, Rates, factors, first_step, held, masters_of, resumed
from normlab.trace.step_under_test import SMALL, StepUnderTest
from normlab.trace.tensors import unregistered

LOOP: Final = ("groups", "update", "step", "repeats", "overfit")
NO_STEP: Final = "there is no step: pass step=, a function of model, batch, optimizer and scheduler"
SORTED: Final = "sort parameters by their number of dimensions, not by their names"


@property_of("optimizer", explains=[*LOOP, "evaluation_repeats", "state_dict"], passes=3)
def optimizer_coverage(step: StepUnderTest) -> Answers:
    """Every trainable parameter is in exactly one optimizer group; no group holds one of another model.

    A parameter that is not the model's must at least have a gradient, like a loss's own parameter, or be the
    copy that the user's step makes one of the model's equal to, like a master in float32.
    """
    model, optimizers = step.handed
    names, every = {id(p): n for n, p in model.named_parameters()}, parameters_of(optimizers)
    counts, foreign = Counter(map(id, every)), [p for p in every if id(p) not in names]
    foreign = without_gradient(step, foreign) if model is step.model else []
    masters = masters_of(step) if foreign and step.setup.step and step.copyable else {}
    foreign = [p for p in foreign if all(p is not every[i] for i in masters)]
    left = (n for n, p in model.named_parameters() if p.requires_grad and id(p) not in counts)
    missing = [n for n in left if not step.declare.is_frozen(n) and n not in masters.values()]
    twice = [names[i] for i, k in counts.items() if k > 1 and i in names]
    loose = {
        path: [p for m in held for p in m.parameters() if id(p) not in counts]
        for path, held in unregistered(step.model).items()
    }
    hidden = [path for path, own in loose.items() if len(without_gradient(step, own)) < len(own)]
    if hidden:
        say = "modules in a plain list get a gradient, but are not among model.parameters()"
        yield fail(hidden[0], say, "hold them in an nn.ModuleList or an nn.ModuleDict")
    elif foreign:
        say = f"{len(foreign)} of the {len(counts)} parameters that it holds are not the model's"
        yield fail("optimizer", say, "build it after the model was copied, moved, wrapped or changed")
    elif missing:
        say = f"{len(missing)} trainable parameters are in no optimizer ({', '.join(missing[:3])})"
        yield fail(common(missing), say, "pass it all of model.parameters(), or freeze these")
    elif twice:
        yield fail(twice[0], f"{len(twice)} parameters are held and stepped twice", "put each in one group")


@property_of("optimizer", explains=["update", "overfit"], passes=2)
def groups(step: StepUnderTest) -> Answers:
    """Each parameter has the weight decay, the learning rate and the optimizer that suit its role."""
    model, optimizers = step.handed
    every = [h for h in held(model, optimizers) if h.parameter.requires_grad]
    roles = {h.name: step.facts.roles.get(h.name, "hidden") for h in every}
    decays = (_decay([h for h in every if h.optimizer is o], roles, o) for o in optimizers)
    yield from chain(_settings(step, optimizers), _muon(every, roles), *decays, _odd_one(step, every))


def _settings(step: StepUnderTest, optimizers: Sequence[Optimizer]) -> Answers:
    for group in groups_of(optimizers):
        betas = group.get("betas")
        if isinstance(betas, (tuple, list)) and len(betas) == 2 and float(betas[0]) ** 2 >= float(betas[1]):
            say = f"betas are {tuple(map(float, betas))}, but beta1 must be below the square root of beta2"
            yield fail("optimizer", f"{say} (Reddi et al. 2018, section 3, 1904.09237)", "swap them")
    own, asked = {float(g.get("initial_lr", g["lr"])) for g in groups_of(optimizers)}, step.setup.lr
    if asked and step.setup.scheduler is None and all(abs(rate - asked) > 1e-6 * asked for rate in own):
        yield fail("optimizer", f"its rates are {sorted(own)}; {asked} was asked for", "pass it that rate")


def _muon(every: Sequence[Held], roles: Mapping[str, str]) -> Answers:
    wrong = [h.name for h in every if h.orthogonal and roles[h.name] != "hidden"]
    if wrong:
        say = f"Muon is made for hidden matrices, but steps {len(wrong)} embeddings, heads or vectors"
        yield fail(wrong[0], say, "give them to AdamW")


def _decay(every: Sequence[Held], roles: Mapping[str, str], optimizer: Optimizer) -> Answers:
    """What decays in one optimizer. A gain that is centred on 0 may decay."""
    vectors = [h for h in every if roles[h.name] in ("norm", "bias", "scalar")]
    matrices = [h for h in every if roles[h.name] == "hidden" and h.name.endswith("weight")]
    gains, biases = ([h for h in vectors if roles[h.name] == role] for role in ("norm", "bias"))
    exempt = any(not h.decay for h in vectors)
    exempt |= any(not g["params"] and not g.get("weight_decay") for g in optimizer.param_groups)
    centred = [h.name for h in gains if abs(float(h.parameter.detach().float().mean())) < 0.5]
    decayed = [h.name for h in gains if h.decay and h.name not in centred]
    spared, biased = [h.name for h in matrices if not h.decay], [h.name for h in biases if h.decay]
    if decayed and 0 < len(spared) == len(matrices):
        yield fail("optimizer", "gains are decayed and matrices are not: the groups are swapped", SORTED)
    for wrong, are, fails in (
        (decayed, "gains are decayed, though a group without decay exists", exempt),
        (spared, f"of {len(matrices)} matrices are not decayed", len(spared) < len(matrices)),
        (biased, f"of {len(biases)} biases are decayed", len(biased) < len(biases)),
    ):
        if wrong and fails:
            yield fail(wrong[0], f"{len(wrong)} {are} ({', '.join(wrong[:3])})", SORTED)
    if decayed or (biased and exempt):
        yield note("optimizer", f"{len(decayed)} gains and {len(biased)} biases are decayed as matrices are")


def _odd_one(step: StepUnderTest, every: Sequence[Held]) -> Answers:
    """A parameter whose rate or decay differs from that of all its siblings, three or more."""
    settings = {
        h.name: f"rate {h.rate:.4g} and decay {h.decay:.4g} by {type(h.optimizer).__name__}" for h in every
    }
    for names in siblings(step.facts.stacks, settings).values():
        if len(names) > 3 and (odd := odd_one({n: settings[n] for n in names})):
            yield fail(odd.key, f"it has {odd.value}, its siblings {odd.rest}", "make one group by role")


@property_of("optimizer", explains=["overfit"], passes=5)
def update(step: StepUnderTest) -> Answers:
    """The first step follows the optimizer's rule, moves every parameter downhill, and survives rounding."""
    moved, wide = first_step(step), dict[str, Moved]()
    live = [m for m in moved if bool(m.gradient.any())]
    if any(2 * stuck > entries for stuck, entries in (m.lost() for m in live)):
        with suppress(Exception):  # a model may not run in float64
            wide = {m.name: m for m in first_step(step, exact=True)}
        if wide and not any(m.change.any() for m in (*moved, *wide.values())):
            yield note("optimizer", "its first step moves nothing, not even in float64")
            return
    yield from chain(_moves_well(moved, live), _lost(live, wide), _by_rule(live))


def _moves_well(moved: Sequence[Moved], live: Sequence[Moved]) -> Answers:
    for m in moved:
        if not torch.isfinite(m.change).all():
            yield fail(m.name, "its update is not finite", "look at the rate, at eps and at the gradient")
        elif not m.parameter.requires_grad and bool(m.change.any()):
            yield fail(m.name, "it is frozen, yet it moves", "leave it out of the optimizer")
    if still := [m.name for m in live if not m.group["lr"]]:
        yield fail(common(still), f"{len(still)} parameters with a gradient have rate 0", "see their group")
    if not any(m.state for m in moved) and sum(float((m.gradient * m.change).sum()) for m in live) > 0:
        yield fail("optimizer", "its first step goes up the gradient", "look for a flipped sign")


def _lost(live: Sequence[Moved], wide: Mapping[str, Moved]) -> Answers:
    """Parameters of which most entries do not move; a failure if these are most of all entries."""
    counts = [m.lost(wide.get(m.name)) for m in live]
    if lost := [m for m, (stuck, entries) in zip(live, counts, strict=True) if 2 * stuck > entries]:
        kind, place = str(lost[0].parameter.dtype).removeprefix("torch."), common([m.name for m in lost])
        say = f"{kind} rounds most of the update away in {len(lost)} of {len(live)} parameters"
        stuck, entries = (sum(each) for each in zip(*counts, strict=True))
        advice = "keep the weights, or a copy of them in the optimizer, in float32"
        yield fail(place, say, advice) if 2 * stuck > entries else note(place, say)


def _by_rule(live: Sequence[Moved]) -> Answers:
    for m in live:
        if off := m.off:
            say = f"its first step is {off:.2g} of its size off the rule of {type(m.optimizer).__name__}"
            yield fail(m.name, say, "look at decay, bias correction, and what else changes the weights")
    damped = [m for m in live if m.damped]
    if 2 * len(damped) > len(live):
        usual = inspect.signature(type(damped[0].optimizer)).parameters.get("eps")
        say = f"eps is above most of the gradient in {len(damped)} of {len(live)} parameters"
        if usual is not None and float(damped[0].group["eps"]) > usual.default:
            yield fail("optimizer", f"{say}, so Adam's step is below the rate", "lower eps")
        else:
            yield note(common([m.name for m in damped]), say)


@property_of(
    "loop", explains=["repeats", "overfit"], passes=12, applies=lambda step: needs(step.setup.step, NO_STEP)
)
def step(step: StepUnderTest) -> Answers:
    """Once a step, optimizers get the gradient of the whole batch's loss: fresh, averaged and clipped."""
    exact, seen, again = step.twice
    run = step.rehearsal(exact=exact)
    yield from _steps_once(step, run, seen)
    yield from _is_fresh(step, seen, again)
    yield from _clips(step, run, seen)
    yield from _averages(step, run, seen)
    yield from _trains(step, seen)


def _steps_once(step: StepUnderTest, run: DryRun, seen: ObservedStep) -> Answers:
    counts = [seen.calls.count(i) for i in range(len(run.optimizers))]
    if not any(counts):
        if any(any(c != "scheduler" for c in run.run(step.stepped).calls) for _ in range(7)):
            raise Unknown("it steps the optimizer only in some calls; pass the step of a whole batch")
        yield fail("step", "it never calls step() of the optimizer that it is given", "call it")
    elif max(counts) > 1:
        say = f"it steps the optimizer {max(counts)} times in one batch of {len(seen.training)} passes"
        yield fail("step", say, "step once, after the last backward")
    elif min(counts) < 1:
        yield fail("step", f"optimizer {counts.index(0) + 1} of {len(counts)} is never stepped", "step each")


def _is_fresh(step: StepUnderTest, seen: ObservedStep, again: ObservedStep) -> Answers:
    other = fit(again.gradients, seen.gradients)
    if other.apart > step.gradient_rounding and written(step.stepped, seen.batch) is None:
        say = f"from the same weights the second gradient is {other.factor:.3g} times the first"
        yield fail("step", say, "zero the gradients once in each step; keep nothing for the next")


def _clips(step: StepUnderTest, run: DryRun, seen: ObservedStep) -> Answers:
    asked = step.declare.max_grad_norm
    if not seen.clips and not asked:
        return
    small, seen = seen, run.run(step.stepped, scale=BIG)
    if not seen.clips:
        if isclose(fit(seen.gradients, small.gradients).factor, BIG / SMALL, rel_tol=CLOSE):
            yield fail("step", f"nothing clips gradients, but a norm of {asked:.4g} is declared", "clip them")
        return
    spared = sorted(seen.nonzero - {run.names.get(i) for i in seen.clipped})
    advice = "clip all parameters after the last backward, and after unscaling, right before the step"
    if seen.late:
        yield fail("step", "gradients grow in a backward pass after they were clipped", advice)
    elif seen.undone:
        left, norm = seen.undone
        yield fail("step", f"the norm is clipped to {left:.4g}, but is {norm:.4g} in the optimizer", advice)
    elif spared:
        yield fail("step", f"{len(spared)} parameters are not clipped ({', '.join(spared[:3])})", advice)
    elif asked and not isclose(seen.clips[-1][1], asked, rel_tol=1e-3):  # torch adds 1e-6 to a norm
        say = f"gradients are clipped to {seen.clips[-1][1]:.4g}, but {asked:.4g} is declared"
        yield fail("step", say, "clip to the norm that was asked for")


def _averages(step: StepUnderTest, run: DryRun, seen: ObservedStep) -> Answers:
    want = run.gradients(step.stepped, training=not seen.training or any(seen.training))
    own, floor, passes = fit(seen.gradients, want, SMALL), step.gradient_rounding, len(seen.training)
    needs(any(bool(g.any()) for g in want.values()), "the loss has no gradient in what the optimizer holds")
    if own.apart <= floor or any(max(own.rest, abs(own.factor / k - 1)) <= floor for k in factors(step)):
        return
    if not seen.nonzero:
        yield fail("step", "every gradient is zero in the optimizer", "zero them before backward")
    needs(not seen.moved, "the step writes to the weights between its passes, so no gradient is right")
    if fit(run.run(step.stepped, scale=SMALL, seed=SEED + 1).gradients, seen.gradients).rest > floor:
        raise Unknown("the step draws random numbers of its own, so no two of its gradients are the same")
    if own.rest <= floor:
        say = f"the gradient is {own.factor:.4g} times that of the whole batch, in {passes} passes"
        yield fail("step", say, "divide by the number of micro-batches; unscale before the step")
    if passes > 1 and not splits(step.exact.again(training=True), step.facts, step.rounding):
        raise Unknown("the loss is not a mean over rows: micro-batches have another one than the whole batch")
    say = f"{own.rest:.1%} of the gradient is not that of the whole batch, in {passes} passes"
    yield fail("step", say, "weight micro-batches by the targets that they count; use the same loss")


def _trains(step: StepUnderTest, seen: ObservedStep) -> Answers:
    """Whether dropout, if there is any, is active in the step."""
    if not seen.training or any(seen.training):
        return
    if distance(step.logits(step.plain), step.logits(step.plain.again(training=True))) > step.rounding:
        say = "its model is in evaluation mode, and would differ in training mode: dropout is not active"
        yield fail("step", say, "call model.train() at the start of the step")


@property_of("loop", explains=["overfit"], passes=4)
def schedule(step: StepUnderTest) -> Answers:
    """The learning rate reaches its intended peak, stays above 0 and moves once a step, even on resuming."""
    needs(step.setup.scheduler, "there is no scheduler: pass scheduler=")
    mine, steered = step.setup.optimizers, getattr(step.setup.scheduler, "optimizer", None)
    if isinstance(steered, Optimizer) and all(steered is not o for o in mine):
        why = "the scheduler has an optimizer of its own: pass that, or a function for each"
        needs(all(isinstance(o, Optimizer) for o in mine), why)
        yield fail("scheduler", "it sets the rates of another optimizer", "build it with this optimizer")
    course = step.rates
    if isinstance(course.ended, TypeError) and len(course.steps) == 1:
        raise Unknown("its rates depend on what step() is given, and cannot be known in advance")
    yield from chain(_peak(step, course), _planned(step, course), _moves_once(step), _resumes(step, course))


def _peak(step: StepUnderTest, course: Rates) -> Answers:
    asked, peak, count = step.declare.peak_lr or step.setup.lr, max(course.top), course.steps[-1] + 1
    if peak <= 0:
        yield fail("scheduler", f"the rate is never above 0 in {count} steps", "count steps, not epochs")
    elif asked is not None and not course.reaches(asked):
        more = "" if step.declare.steps else "; declare steps= if more are planned"
        say = f"the peaks are {sorted({*course.peaks})} in {count} steps, but {asked:.4g} was asked for{more}"
        yield fail("scheduler", say, "a LambdaLR multiplies the optimizer's rate; count steps")


def _planned(step: StepUnderTest, course: Rates) -> Answers:
    """Over the planned steps, the schedule does not end, and is at 0 only at its ends."""
    if (planned := step.declare.steps) is None:
        return
    lowest, zeros = min(map(min, course.rates)), sum(a == b == 0 for a, b in pairwise(course.top))
    share, length = zeros / len(course.top), "make it as long as the run"
    if course.ended is not None:
        say = f"step() raises after {course.steps[-1]} of {planned} steps: {course.ended}"
        yield fail("scheduler", say, length)
    elif lowest < 0:
        yield fail("scheduler", f"a rate falls to {lowest:.3g}, and drives the loss up", "end it at 0")
    elif course.rises_again and not course.periodic:
        say = f"it is over before the {planned} planned steps: the rate falls, and rises again"
        yield fail("scheduler", say, f"{length}; use warm restarts to start again")
    elif zeros > 2:
        say = f"the rate stays 0 in {share:.2%} of the {planned} planned steps"
        advice = "count its steps in the same way as the optimizer's"
        yield fail("scheduler", say, advice) if share > 0.01 else note("scheduler", say)
    elif course.rises_again:
        yield note("scheduler", f"the rate falls and rises again and again in the {planned} planned steps")


def _moves_once(step: StepUnderTest) -> Answers:
    if step.setup.step is None:
        return
    run = step.rehearsal()
    calls = [*run.run(step.stepped).calls, *run.run(step.stepped).calls]
    moved, steps = calls.count("scheduler"), calls.count(0)
    if not moved:
        yield note("scheduler", "the step does not step it")
    elif moved > steps > 0:
        say = f"it is stepped {moved / steps:.3g} times for each step of the optimizer"
        yield fail("scheduler", say, "step it once, after the optimizer")
    elif steps and calls[0] == "scheduler":
        yield fail("scheduler", "it is stepped before the optimizer: its first rate is lost", "step it after")


def _resumes(step: StepUnderTest, course: Rates) -> Answers:
    if not hasattr(course.scheduler, "state_dict"):
        yield note("scheduler", "it has no state_dict, so no checkpoint can hold it")
        return
    own, loaded = resumed(step.setup)
    if own != loaded:
        say = f"loaded after 3 steps it continues with the rate {loaded[0]:.4g}, not {own[0]:.4g}"
        yield fail("scheduler", say, "keep all that it counts in its state_dict")


@property_of("loop", explains=["overfit"], passes=13)
def repeats(step: StepUnderTest) -> Answers:
    """The same batch, weights and seeds give the same step twice, and the step leaves the batch as it was."""
    place = "step"
    if step.setup.optimizer is None:
        place, step = "loss", copy.copy(step)
        step.setup = replace(step.setup, optimizer=lambda model: SGD(model.parameters()), step=None)
    _, first, again = step.twice
    if (where := written(step.stepped, first.batch)) is not None:
        yield fail(where, "the step writes into the batch, which is different from then on", "change a copy")
    elif fit(again.gradients, first.gradients).apart > step.gradient_rounding:
        say = "the same weights get a different gradient from the same batch and seeds"
        yield fail(place, say, "look for state that outlives a step: globals, counters, generators")


@property_of("learns", passes=30)
def overfit(step: StepUnderTest) -> Answers:
    """The user's own step learns a small batch: the loss falls below its first value and stays there."""
    batch, peaks = step.stepped, step.rates.peaks
    if step.facts.rows > 4:
        with suppress(Exception):
            small = step.facts.with_rows(torch.arange(4))
            step.rehearsal().run(small)
            batch = small
    by_hand = step.setup.scheduler is None and step.setup.step is not None
    losses = step.rehearsal().losses(batch, () if by_hand else peaks)
    if learnt(losses):
        return
    plain = step.rehearsal(plain=True)
    own = step.setup.step is not None and learnt(plain.losses(batch, peaks))
    say = f"{len(losses) - 1} steps on one batch bring its loss from {losses[0]:.4g} to {losses[-1]:.4g}"
    place, known = "step" if own else "optimizer", False
    with suppress(Unknown):
        known = step.facts.trained and math.isfinite(losses[-1])
    yield note(place, say) if known else fail(place, say, "lower the rate if the loss grows, else raise it")
