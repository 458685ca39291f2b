"""Train copies of a setup's model for some steps, at rates that stand in for its own."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial, wraps
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from normlab.base.units import count
from normlab.errors import UserError
from normlab.setups.setup import Setup, shown
from normlab.setups.step import plain_step
from normlab.trace.copies import refusal_of
from normlab.trace.dry_run import groups_of
from normlab.trace.optimizers import copied
from normlab.trace.restore import generators_of_copies, restored, same_random_state, seed_each
from normlab.trace.tensors import copied_batch, eager, refusal, unwrap
from normlab.trace.use import Use, use_of

RateOf = Callable[[int, Sequence[float]], Sequence[float]]
"""From a step, counted from 1, and the groups' own rates, to the rates that they are given."""
Enough = Callable[["Training"], str]
"""From a training so far to the reason why it ends here; empty if it continues."""
OWN_STEPS: Final = 4
"""How many steps of the optimizer at its own rates show whether it warms up, and how long a step takes."""


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
    without_batches = replace(setup, batches=())  # each step gets a copy of its batch
    with restored(without_batches) as seen.not_copied, same_random_state(seed), eager():
        model, optimizers, scheduler = copied(setup)
        seen.model = model
        seed_each(generators_of_copies(model, *optimizers, scheduler), seed)
        _replace_options(optimizers, groups)
        _give_rates(optimizers, rate_of, seen)
        several = isinstance(setup.optimizer, (list, tuple)) or len(optimizers) > 1
        own_form: Any = optimizers if several else optimizers[0]
        own_step = plain_step(setup.loss_of) if setup.step is None else setup.step

        def step(batch: Any) -> Any:
            return own_step(model, batch, own_form, scheduler)

        for batch in batches:
            start = time.monotonic()
            copy = copied_batch(batch)
            try:
                value = step(copy) if seen.losses else _first_step(setup, model, partial(step, copy))
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


def _replace_options(optimizers: Sequence[Optimizer], options: Mapping[str, Any]) -> None:
    """Replace options of every group that has them by a value, or by a function of the group's own value."""
    for group in groups_of(optimizers):
        for name, value in options.items():
            if name in group:
                group[name] = value(group[name]) if callable(value) else value


def _first_step(setup: Setup, model: nn.Module, step: Callable[[], Any]) -> Any:
    """Take the first step, and return its loss. Raises UserError unless it has run the copy alone.

    A step may read the weights of the setup's own model, for instance to log them. So only what is in the
    graph of the loss counts as a use of that model.
    """
    with use_of(unwrap(setup.model), in_graph=True) as strayed, use_of(model) as used:
        value = step()
    _refuse_stray(setup, strayed, used)
    return value


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
    who = "the model"
    if setup.step is not None:
        who = "step"
    elif setup.loss is not None:
        who = "loss"
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
    groups = groups_of(optimizers)

    def steered(own_step: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(own_step)
        def step(*args: Any, **kwargs: Any) -> Any:
            own_rates = [group["lr"] for group in groups]
            batch = len(seen.losses)
            seen.rates[batch] = [float(lr or 0.0) for lr in own_rates]
            rates = rate_of(batch + 1, seen.rates[batch]) if rate_of else own_rates
            for group, lr, rate in zip(groups, own_rates, rates, strict=True):
                group["lr"] = torch.full_like(lr, float(rate)) if isinstance(lr, Tensor) else rate
            try:
                return own_step(*args, **kwargs)
            finally:
                for group, lr in zip(groups, own_rates, strict=True):
                    group["lr"] = lr

        return step

    for optimizer in optimizers:  # these are copies, which need not be put back
        optimizer.step = steered(optimizer.step)  # type: ignore[method-assign]
