"""Train copies of a setup's model for some steps, at rates that stand in for its own."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from normlab.base.units import count
from normlab.errors import UserError
from normlab.setups.setup import Setup, shown
from normlab.setups.step import plain_step
from normlab.trace.copies import Use, refusal_of, use_of
from normlab.trace.dry_run import groups_of
from normlab.trace.optimizers import copied
from normlab.trace.rates import rates_of
from normlab.trace.restore import generators_of_copies, restored, same_random_state, seed_each
from normlab.trace.tensors import copied_batch, eager, refusal, unwrap

RateOf = Callable[[int, Sequence[float]], Sequence[float]]
"""From a step, counted from 1, and the groups' own rates, to the rates that they are given."""
Enough = Callable[["Training"], str]
"""From a training so far to the reason why it ends here; empty if it continues."""
OWN_STEPS: Final = 4
"""So many steps of the optimizer at its own rates show whether it warms up, and how long a step takes."""
WARMUP: Final = 1 / 5
"""The share of a trial in which its rate rises, if the setup's own rate rises."""


@dataclass
class Training:
    """What a training showed: losses before each step, why it ended early, and the optimizers' own rates."""

    losses: list[float] = field(default_factory=list)
    stopped: str = ""
    seconds: list[float] = field(default_factory=list)
    """Of every step."""
    rates: dict[int, list[float]] = field(default_factory=dict)
    """By batch in which an optimizer was called: each group's rate, as the scheduler or step had set it."""
    model: nn.Module | None = None
    """The copy that is trained."""
    not_copied: Mapping[str, str] = field(default_factory=dict)
    """What the step reaches and is too large to be put back, as a fact for a report."""


def train(
    setup: Setup,
    batches: Iterable[Any],
    rate_of: RateOf | None,
    *,
    seed: int,
    groups: Mapping[str, Any],
    enough: Enough,
) -> Training:
    """Train copies of model, optimizers and scheduler by the user's own step, one batch per step.

    While an optimizer's ``step`` runs, its groups have the rates of ``rate_of``; before and after it, those
    that the scheduler or the step gave them, so that a schedule that multiplies the last rate stays right.
    Without ``rate_of`` they keep their own. ``groups`` replaces options of every group, such as ``betas``, by
    a value or by a function of the group's own value. Model, optimizers, and all that ``restored`` knows are
    put back; random states begin at ``seed``.

    Raises UserError if the first step does not run the copy, or uses the model that it was copied from.
    """
    seen = Training()
    kept = replace(setup, batches=())  # each step gets a copy of its batch
    with restored(kept) as seen.not_copied, same_random_state(seed), eager():
        model, optimizers, scheduler = copied(setup)
        seen.model = model
        seed_each(generators_of_copies(model, *optimizers, scheduler), seed)
        for group in groups_of(optimizers):
            given = {name: value for name, value in groups.items() if name in group}
            group.update({n: value(group[n]) if callable(value) else value for n, value in given.items()})
        step = setup.step or plain_step(setup.loss_of)
        several = isinstance(setup.optimizer, (list, tuple)) or len(optimizers) > 1
        steered: Any = optimizers if several else optimizers[0]
        _give_rates(optimizers, rate_of, seen)
        for batch in batches:
            start = time.monotonic()
            own = copied_batch(batch)
            try:
                if seen.losses:
                    value = step(model, own, steered, scheduler)
                else:
                    # a step may also log what it likes, so reading alone is no use
                    with use_of(unwrap(setup.model), in_graph=True) as strayed, use_of(model) as used:
                        value = step(model, own, steered, scheduler)
                    _refuse_stray(setup, strayed, used)
            except Exception as error:  # as when a loop refuses a loss that is not a number
                if not seen.losses:
                    raise
                seen.stopped = f"raised {type(error).__name__} at step {len(seen.losses) + 1}"
                break
            seen.losses.append(_number(value))
            seen.seconds.append(time.monotonic() - start)
            seen.stopped = enough(seen)
            if seen.stopped:
                break
    return seen


def first_steps(
    setup: Setup, batches: Sequence[Any], *, seed: int, groups: Mapping[str, Any], limit_s: float = math.inf
) -> Training:
    """Train a copy at the setup's own rates for ``OWN_STEPS`` steps of its optimizer; after two of them, end
    once ``limit_s`` seconds have passed. Raises UserError, with whose fault it is, if that does not train the
    copy.
    """

    def enough(seen: Training) -> str:
        late = sum(seen.seconds) > limit_s and len(seen.rates) > 1
        return "seen" if late or len(seen.rates) >= OWN_STEPS else ""

    try:
        seen = train(setup, batches, None, seed=seed, groups=groups, enough=enough)
    except UserError:
        raise
    except Exception as error:
        raise UserError(refusal(_who_raised(setup, error), batches[0], error)) from error
    if not seen.rates:
        raise UserError(
            f"the optimizer's step() is not called in {count(len(seen.losses), 'step')}: call that of "
            "the optimizer that step(model, batch, optimizer, scheduler) receives"
        )
    return seen


def _refuse_stray(setup: Setup, strayed: Use, used: Use) -> None:
    """Raise UserError unless a step has run the copy alone: else losses are those of weights that stay."""
    if not used.modules:
        raise UserError("loss, or step, does not run the model that it is given: call the one it receives")
    if strayed.paths:
        raise UserError(f"no copy of the model can be trained: {refusal_of(setup.model, strayed, used)}")


def _who_raised(setup: Setup, error: Exception) -> str:
    """Return whose code raised in the first steps: that of an optimizer, or of the step, the loss or the
    model that called it last.
    """
    who = "step" if setup.step is not None else "loss" if setup.loss is not None else "the model"
    codes = {getattr(getattr(setup, name), "__code__", None): name for name in ("step", "loss")}
    called = error.__traceback__
    while called is not None:
        frame = called.tb_frame
        owner = frame.f_locals.get("self")
        if isinstance(owner, Optimizer):
            who = type(owner).__name__
        who = codes.get(frame.f_code, who)
        called = called.tb_next
    return who


def _number(value: Any) -> float:
    """The loss that a step returns. Raises UserError if that is not a loss."""
    if isinstance(value, (Tensor, int, float)) and torch.as_tensor(value).numel() == 1:
        return float(value)
    raise UserError(
        f"step(model, batch, optimizer, scheduler) returns {shown(value)}, but must return the loss of its "
        "batch; end it with: return loss"
    )


def _give_rates(optimizers: Sequence[Optimizer], rate_of: RateOf | None, seen: Training) -> None:
    """Give groups their rates while an optimizer's ``step`` runs; record the rates that they had."""
    every = groups_of(optimizers)

    def stepped(own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        held = [group["lr"] for group in every]
        batch = len(seen.losses)
        seen.rates[batch] = [float(lr or 0.0) for lr in held]
        given = rate_of(batch + 1, seen.rates[batch]) if rate_of else held
        for group, lr, rate in zip(every, held, given, strict=True):
            group["lr"] = torch.full_like(lr, float(rate)) if isinstance(lr, Tensor) else rate
        try:
            return own(*args, **kwargs)
        finally:
            for group, lr in zip(every, held, strict=True):
                group["lr"] = lr

    for optimizer in optimizers:  # these are copies, which need not be put back
        own = optimizer.step
        optimizer.step = functools.wraps(own)(functools.partial(stepped, own))  # type: ignore[method-assign]


@dataclass(frozen=True)
class Course:
    r"""The rates that a setup gives its groups; a trial keeps their proportions and the warm-up.

    With the setup's own peaks :math:`p_g` by group, a trial at the rate :math:`\rho` over n steps gives group
    g at step t = 1, ..., n

    .. math:: p_g \frac{\rho}{\max_h p_h} \min(1, t / \min(w n, W))

    where w is 1/5 if the setup warms up, that is, if its rates begin below their peak, and W is the number of
    steps in which they reach it, if a scheduler tells that in advance. Without a warm-up the last factor is
    1. The decay that comes after the peak is left out.
    """

    peaks: Sequence[float]
    warmup: float
    """w, the share of a trial in which the rate rises; 0 for none."""
    longest: int = 0
    """W, the most steps in which it rises; 0 if that is not known."""

    def __post_init__(self) -> None:
        if not 0 < max(self.peaks, default=0.0) < math.inf:
            raise UserError(f"peaks is {list(self.peaks)}, but the largest must be a finite number above 0")

    @property
    def rate(self) -> float:
        """The largest peak of any group: the rate that the setup has today."""
        return max(self.peaks)

    @property
    def rising(self) -> str:
        """The share of a trial that its warm-up takes, in words."""
        return f"{self.warmup:.0%} of a trial" if self.warmup else "none"

    def at(self, rate: float, steps: int) -> RateOf:
        """The rates of a trial of so many steps."""
        rises = min(self.warmup * steps, self.longest or steps)

        def rates(step: int, own: Sequence[float]) -> list[float]:
            ramp = min(1.0, step / rises) if rises else 1.0
            return [peak * (rate / self.rate) * ramp for peak in self.peaks]

        return rates


def read_course(setup: Setup, seen: Training) -> Course:
    """The course that the scheduler tells in advance or, without one, that the first steps show.

    Raises UserError if no rate is known because the step raises it by hand, and nothing says how far.
    """
    steps, rows = range(len(seen.rates)), list(seen.rates.values())
    if setup.scheduler is not None:
        steps, rows, *_ = rates_of(setup)
    tops = [max(row, default=0.0) for row in rows]
    if not setup.declare.steps:  # after an end that is not known, rates may be odd
        end = next((i for i in range(1, len(tops)) if tops[i] < tops[i - 1]), len(tops))
        rows, tops = rows[:end], tops[:end]
    peaks, top = [max(column) for column in zip(*rows, strict=True)], max(tops)
    if not top > 0:
        raise UserError("the rate of every group is 0: give the optimizer, or the scheduler, a rate")
    peak = next(i for i, rate in enumerate(tops) if rate >= top * (1 - 1e-6))
    meant = setup.lr or setup.declare.peak_lr
    if "rate" in setup.cannot:
        if meant is None:
            raise UserError(f"{setup.cannot['rate']}; or pass lr=, the largest rate on the way")
        return Course([meant * rate / top for rate in peaks], WARMUP)
    if setup.scheduler is not None or not peak:
        warms_up = peak or getattr(setup.step, "warms_up", False)
        return Course(peaks, WARMUP if warms_up else 0.0, 1 + steps[peak] if peak else 0)
    if meant is None:
        raise UserError(
            f"the step raises the rate by hand, to {top:.3g} in {len(seen.losses)} steps, and nothing "
            "says how far: pass lr=, the largest rate on the way"
        )
    return Course([meant * one / top for one in peaks], WARMUP)
