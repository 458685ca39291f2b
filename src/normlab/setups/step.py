"""The whole training step of a setup that brings none of its own."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from normlab.errors import UserError
from normlab.setups.setup import Loss, Setup, StepFunction, shown
from normlab.trace.autograd import FROZEN
from normlab.trace.trace import NO_LOSS


def require_one_number(loss: Tensor) -> None:
    """Raise UserError for a loss that is not one number in a tensor."""
    if loss.numel() != 1:
        raise UserError(f"loss(model, batch) returned {shown(loss)}, and must return one number: a mean")


def require_trainable(loss: Any) -> None:
    """Raise UserError, with what to return, for a loss that no backward pass can start from."""
    if not isinstance(loss, Tensor):
        raise UserError(NO_LOSS)
    require_one_number(loss)
    if not loss.requires_grad:
        raise UserError(FROZEN)


def needs_closure(optimizer: Optimizer) -> bool:
    """Return whether an optimizer's step must be given a function that computes the gradients; that of LBFGS
    must.
    """
    # of its class: whoever watches an optimizer may stand in place of its step, and take anything
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    return closure is not None and closure.default is closure.empty


def plain_step(
    loss_of: Loss,
    *,
    clip: Callable[[nn.Module], object] = lambda model: None,
    after: Callable[[nn.Module], object] = lambda model: None,
    scheduled: bool = False,
) -> StepFunction:
    """Return the usual step: zero, backward, clip, step, schedule. The step raises UserError for a
    loss that cannot be trained on.

    Args:
        loss_of: The loss.
        clip: Called with the model before the optimizers step.
        after: Called with the model after that.
        scheduled: Whether the scheduler is stepped at the end, if there is one.
    """

    def step(model: nn.Module, batch: Any, optimizer: Any, scheduler: Any) -> Tensor:
        model.train()
        optimizers = optimizer if isinstance(optimizer, list) else [optimizer]

        def closure() -> Tensor:
            for each in optimizers:
                each.zero_grad()
            loss = loss_of(model, batch)
            require_trainable(loss)
            loss.backward()
            clip(model)
            return loss

        loss = closure()
        for each in optimizers:
            if needs_closure(each):
                each.step(closure)
            else:
                each.step()
        after(model)
        if scheduled and scheduler is not None:
            scheduler.step()
        return loss

    return step


def with_step(setup: Setup) -> Setup:
    """Return the setup with a step, if it has none and the plain step would ignore its scheduler or the norm
    to which it declares that gradients are clipped.
    """
    norm = setup.declare.max_grad_norm
    if setup.step is not None or (setup.scheduler is None and norm is None):
        return setup

    def clip(model: nn.Module) -> None:
        if norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), norm)

    return replace(setup, step=plain_step(setup.loss_of, clip=clip, scheduled=True))
