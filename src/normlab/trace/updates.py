"""What a step under test does to parameters and rates, measured by letting its optimizers act on copies."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from math import isclose
from typing import Any, Final

import torch
from torch import Tensor
from torch.optim import Optimizer

from normlab.trace.dry_run import groups_of, parameters_of, sample
from normlab.trace.facts import Unknown
from normlab.trace.facts.facts import Facts
from normlab.trace.optimizers import Held, copied, held
from normlab.trace.step_under_test import StepUnderTest
from normlab.trace.tensors import Place, map_tensors, rows_of
from normlab.trace.update_rules import RULES

STEPS: Final = 8
"""How many whole steps are taken where one is not enough."""

FOLLOWED: Final = 4
"""After how many steps rates are looked at, to see whether each step multiplies them."""


@dataclass(frozen=True)
class Moved(Held):
    """What the first step does to a parameter, in a sample of its entries."""

    before: Tensor
    gradient: Tensor
    change: Tensor
    state: Mapping[str, Any]
    """The optimizer's, before the step."""

    def lost(self, wide: Moved | None = None) -> tuple[int, int]:
        """Return how many entries have a gradient but do not move, and how many have one.

        None is lost if the rate is 0 or the optimizer keeps the weights in a wider type. Nor is an entry lost
        if a state keeps what it did not move: then both differ alike from the same step in a wider type.
        """
        p, has_gradient, states = self.parameter, self.gradient != 0, self._states
        wider = [x for x in states.values() if x.dtype.itemsize > p.dtype.itemsize]
        if not self.group["lr"] or any(torch.equal(x.to(p), p) for x in wider):
            return 0, 0
        stuck = has_gradient & (self.change == 0)
        if wide is not None:
            not_moved, wide_states = wide.change - self.change, wide._states
            for name in states.keys() & wide_states.keys():
                kept_back = sample(states[name]) - sample(wide_states[name])
                # a state that keeps what was not moved differs by just that: the two differences are nearer
                # to each other than either is to 0
                least = torch.minimum(kept_back.abs(), not_moved.abs())
                stuck &= (kept_back - not_moved).abs() >= least
        return int(stuck.sum()), int(has_gradient.sum())

    def moves_expected(self, wide: Moved) -> float:
        """Return how many entries would move in a step if each update were rounded up or down at random,
        without bias. ``wide`` is the same step without rounding.
        """
        spacing = torch.finfo(self.parameter.dtype).eps * self.before.abs().clamp_min(1e-300)
        return float((wide.change.abs() / spacing).clamp_max(1).sum())

    @property
    def _states(self) -> dict[str, Tensor]:
        """Tensors of the parameter's shape in the optimizer's state, after the step."""
        state, shape = self.optimizer.state.get(self.parameter, {}), self.parameter.shape
        return {str(n): x for n, x in state.items() if isinstance(x, Tensor) and x.shape == shape}

    @property
    def off(self) -> float:
        """How far the step is from the rule of its optimizer's class, as a share of it; 0 up to rounding."""
        if (rule := RULES.get(type(self.optimizer).__name__)) is None:
            return 0.0
        want = rule(self.before, self.gradient, self.group, self.state)
        apart, size = float((self.change - want).norm()), float(want.norm())
        rounding = 8 * torch.finfo(self.parameter.dtype).eps * (float(self.before.norm()) + size)
        return apart / max(size, 1e-300) if apart > rounding else 0.0

    @property
    def damped(self) -> bool:
        """Whether eps exceeds most entries of the first gradient that Adam sees."""
        first = type(self.optimizer).__name__ in RULES and "eps" in self.group and not self.state
        return first and float(self.gradient[self.gradient != 0].abs().median()) < float(self.group["eps"])


def first_step(step: StepUnderTest, *, exact: bool = False) -> list[Moved]:
    """Let the optimizers act once, at the schedule's peak, and return what happens to each parameter."""
    run, rates = step.whole_step.dry_run(exact=exact, plain=True), step.whole_step.rates.peaks
    parameters = held(run.model, run.optimizers)
    at_first = [sample(h.parameter) for h in parameters]
    states = [map_tensors(h.optimizer.state.get(h.parameter, {}), lambda _, x: sample(x)) for h in parameters]
    seen, moved = run.run(step.step_batch, rates=rates), list[Moved]()
    for h, first, state in zip(parameters, at_first, states, strict=True):
        before = seen.weights.get(h.name, first)  # what the forward pass changed is not the optimizer's doing
        after = sample(h.parameter)
        gradient = seen.gradients.get(h.name, torch.zeros_like(before))
        change = (after - before).masked_fill(after == before, 0)  # infinity may stay unmoved, as in a mask
        moved.append(Moved(**vars(h), before=before, gradient=gradient, change=change, state=state))
    return moved


def unmoved(step: StepUnderTest) -> set[str]:
    """Return the parameters that several steps at the schedule's peak leave as they were, bit for bit.

    The steps are taken in turn on the batch and on each half of its rows, if the model runs on those, so that
    no gradient is small by chance in all of them.
    """
    run, rates = step.whole_step.dry_run(plain=True), step.whole_step.rates.peaks
    parameters = held(run.model, run.optimizers)
    before = [h.parameter.detach().clone() for h in parameters]
    batches = [step.step_batch, *_halves(step.step_batch)]
    for i in range(STEPS):
        try:
            run.run(batches[i % len(batches)], rates=rates)
        except Exception:  # a model may accept one number of rows alone
            batches = [step.step_batch]
            run.run(step.step_batch, rates=rates)
    return {h.name for h, x in zip(parameters, before, strict=True) if torch.equal(h.parameter, x)}


def _halves(batch: Any) -> list[Any]:
    """Return the first and the second half of a batch's rows; none of a batch of one row."""
    rows = rows_of(batch)
    if rows < 2:
        return []
    halves: list[Any] = []
    for part in (slice(None, rows // 2), slice(rows // 2, None)):
        halves.append(map_tensors(batch, partial(_rows_in, rows=rows, part=part)))
    return halves


def _rows_in(_: Place, x: Tensor, rows: int, part: slice) -> Tensor:
    return x[part] if x.ndim and len(x) == rows else x


def depends_on_others(step: StepUnderTest) -> dict[str, bool]:
    """Return, by parameter, whether the step of an entry depends on the gradients of other entries, by more
    than one factor on them all.

    That of a rule for each entry, such as Adam's, does not, nor does that of one that clips; an
    orthogonalised one does. Copies of the optimizers are stepped with random gradients, twice; those of the
    first half of each parameter are larger the second time, and the steps of the second halves are compared.
    What an optimizer that raises holds is left out.
    """
    steps: list[dict[str, Tensor]] = []
    for factor in (1.0, 3.0):
        model, optimizers, _ = copied(step.setup)
        draw = torch.Generator().manual_seed(0)
        for p in model.parameters():
            gradient = torch.randn(p.shape, generator=draw)
            gradient.view(-1)[: p.numel() // 2] *= factor
            p.grad = gradient.to(p)
            p.data = torch.zeros_like(p)  # so that the parameter afterwards is its step, unrounded
        for group in groups_of(optimizers):
            group["lr"] = 1.0  # a warm-up may begin at 0
        held_by = [h for h in held(model, optimizers) if h.parameter.requires_grad]
        failed = [optimizer for optimizer in optimizers if not _steps(optimizer)]
        moved = [h for h in held_by if all(h.optimizer is not o for o in failed)]
        steps.append({h.name: _second_half(h.parameter) for h in moved})
    first, second = steps
    return {name: _differ(x, second[name]) for name, x in first.items() if name in second}


def _steps(optimizer: Optimizer) -> bool:
    """Step an optimizer; return whether it does not raise."""
    with suppress(Exception):  # anybody's rule, which may refuse vectors
        optimizer.step()
        return True
    return False


def _second_half(p: Tensor) -> Tensor:
    return p.detach().reshape(-1)[p.numel() // 2 :].clone()


def _differ(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors differ by more than one factor and by more than rounding."""
    wide, other = a.double(), b.double()
    factor = float(wide @ other) / max(float(other @ other), 1e-300)
    return float((wide - factor * other).norm()) > 8 * torch.finfo(a.dtype).eps * float(wide.norm())


def masters_of(step: StepUnderTest) -> dict[int, str]:
    """Return the parameters that are rounded copies of masters, which optimizers hold in a wider type, and
    that the user's step changes when those change; by the place of their masters.
    """
    run, pairs = step.whole_step.dry_run(), dict[int, tuple[str, Tensor]]()
    held_by_optimizers = parameters_of(run.optimizers)
    copies = {n: p for n, p in run.model.named_parameters() if all(p is not q for q in held_by_optimizers)}
    for place, master in enumerate(held_by_optimizers):
        if id(master) in run.names:
            continue  # it is a parameter of the model itself
        rounded = (n for n, p in copies.items() if p.shape == master.shape and torch.equal(master.to(p), p))
        name = next(rounded, None)
        if name is not None:
            pairs[place] = name, copies.pop(name)
    before = {place: p.detach().clone() for place, (_, p) in pairs.items()}
    for place in pairs:  # far from the copy's values, so that the step's own copying shows
        held_by_optimizers[place].data = held_by_optimizers[place].data * 2 + 1
    with suppress(Exception):  # none where it cannot be run
        run.run(step.step_batch, rates=step.whole_step.rates.peaks)
    return {place: name for place, (name, p) in pairs.items() if not p.equal(before[place])}


def factors(step: StepUnderTest) -> tuple[float, ...]:
    """Return what a step may multiply its loss by: 1, and what turns a sum over targets into a mean."""
    with suppress(Unknown):
        targets, of_half = step.facts.targets, step.half or step.facts.targets
        share_of_weight = float(of_half.weight.sum() / targets.weight.sum())
        share_of_targets = int(of_half.counted.sum()) / int(targets.counted.sum())
        rounding = max(targets.rounding, of_half.rounding)
        # a mean gives half of the rows as much weight as all of them, a sum their share of the targets
        grows_with_targets = isclose(share_of_weight, share_of_targets, rel_tol=rounding)
        if grows_with_targets and not isclose(share_of_weight, 1, rel_tol=rounding):
            batch = step.batch if step.has_own_step_batch else step.step_batch
            if step.is_exact:
                batch = map_tensors(batch, lambda _, x: x.double() if x.is_floating_point() else x)
            on_all = step.exact.again(batch=batch)
            return 1.0, 1 / float(Facts(on_all, step.declare).targets.weight.sum())
    return (1.0,)


def rates_by_themselves(step: StepUnderTest) -> Iterator[list[float]]:
    """Yield each group's rate, as a share of the scheduled one, at first and after each of a few steps of
    optimizers and scheduler alone, with random gradients.
    """
    model, optimizers, scheduler = copied(step.setup)
    groups, course = groups_of(optimizers), step.whole_step.rates.rates
    draw = torch.Generator().manual_seed(0)
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=draw).to(p)
    yield [1.0 for _ in groups]
    for planned in course[:FOLLOWED] if scheduler is not None else course * FOLLOWED:
        if not all(map(_steps, optimizers)):
            return
        yield _shares(groups, planned)
        if scheduler is not None:
            scheduler.step()


def rates_in_own_step(step: StepUnderTest) -> Iterator[list[float]]:
    """Yield the same for whole steps of the user's own, without a scheduler."""
    run, (planned,) = step.whole_step.dry_run(), step.whole_step.rates.rates
    yield [1.0 for _ in planned]
    for _ in range(FOLLOWED):
        run.run(step.step_batch, rates=())
        yield _shares(groups_of(run.optimizers), planned)


def _shares(groups: Iterable[Mapping[str, Any]], planned: Sequence[float]) -> list[float]:
    return [float(group["lr"]) / rate if rate else 1.0 for group, rate in zip(groups, planned, strict=True)]
