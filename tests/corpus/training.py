"""What the cases share besides models and batches: losses, optimizers, schedules, steps, whole setups."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from corpus.batches import text
from corpus.models.llama import Llama

from .batches import PAD, shifted_tokens
from .case import Arguments
from .models.gpt import Gpt

Maker = Callable[[], nn.Module]
Step = Callable[[nn.Module, Any, Optimizer, LRScheduler | None], Tensor]

# ----------------------------------------------------------------------------------------------------- losses


def next_token(model: nn.Module, ids: Tensor) -> Tensor:
    """Return the mean loss of the next token."""
    return F.cross_entropy(model(ids)[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())


def next_real_token(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """Return the mean loss of the next token of padded rows."""
    logits, targets = model(batch["ids"])[:, :-1], batch["ids"][:, 1:]
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=PAD)


def labelled(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the mean loss of the tokens that have a label."""
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)


# ------------------------------------------------------------------------------------------------- optimizers


def adamw(model: nn.Module, lr: float = 1e-3) -> AdamW:
    """Return AdamW of all parameters."""
    return AdamW(model.parameters(), lr=lr)


def adamw_of_trained(model: nn.Module, lr: float = 1e-3) -> AdamW:
    """Return AdamW of the parameters that are not frozen."""
    return AdamW([p for p in model.parameters() if p.requires_grad], lr=lr)


def groups(model: nn.Module, decay: float = 0.1) -> list[dict[str, Any]]:
    """Split the trained parameters: matrices are decayed, vectors are not."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]


def decay_groups(model: nn.Module, lr: float = 1e-3, decay: float = 0.1) -> AdamW:
    """Return AdamW that decays matrices, not vectors."""
    return AdamW(groups(model, decay), lr=lr, betas=(0.9, 0.95))


def decayed_but(model: nn.Module, spared: Iterable[str], lr: float = 5e-4) -> AdamW:
    """Return AdamW that decays all parameters without one of these parts in their names."""
    decayed, others = [], []
    for path, parameter in model.named_parameters():
        (others if any(part in path for part in spared) else decayed).append(parameter)
    return AdamW([{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}], lr=lr)


class WideAdamW(Optimizer):
    """AdamW of copies of the weights in float32, from which the weights are written."""

    def __init__(self, groups: list[dict[str, Any]], lr: float):
        super().__init__(groups, {"lr": lr, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                if not state:
                    state["wide"], state["count"] = p.float(), 0
                    state["mean"], state["square"] = (torch.zeros_like(state["wide"]) for _ in range(2))
                state["count"] += 1
                first, second = group["betas"]
                mean = state["mean"].lerp_(p.grad.float(), 1 - first) / (1 - first ** state["count"])
                square = state["square"].lerp_(p.grad.float().square(), 1 - second)
                size = (square / (1 - second ** state["count"])).sqrt() + group["eps"]
                state["wide"].mul_(1 - group["lr"] * group["weight_decay"])
                state["wide"].addcdiv_(mean, size, value=-group["lr"])
                p.copy_(state["wide"])


def rise_and_fall(step: int) -> float:
    """Return the share of the rate: up over 100 steps, then down to a tenth."""
    return min(1.0, (step + 1) / 100, max(0.1, 1 - (step - 99) / 2000))


# ------------------------------------------------------------------------------------------------------ steps


def halves(batch: tuple[Tensor, ...]) -> list[tuple[Tensor, ...]]:
    """Return the two halves of a batch's rows."""
    return list(zip(*(x.chunk(2) for x in batch), strict=True))


def advance(optimizer: Optimizer, scheduler: LRScheduler | None) -> None:
    """Step the optimizer, then the scheduler if there is one."""
    optimizer.step()
    if scheduler is not None:
        scheduler.step()


def accumulate(model: nn.Module, batch: tuple[Tensor, ...], share: float = 0.5) -> Tensor:
    """Add the gradients of both halves' losses, each with this share, and return the mean loss."""
    total = torch.zeros(())
    for half in halves(batch):
        loss = model(*half)[1]
        (loss * share).backward()
        total += loss.detach() / 2
    return total


def averaged_step(
    model: nn.Module, batch: tuple[Tensor, ...], optimizer: Optimizer, scheduler: LRScheduler | None = None
) -> Tensor:
    """Step on the mean loss of two micro-batches, with gradients clipped at a norm of 1."""
    model.train()
    optimizer.zero_grad()
    loss = accumulate(model, batch)
    clip_grad_norm_(model.parameters(), 1.0)
    advance(optimizer, scheduler)
    return loss


# ----------------------------------------------------------------------------------------------------- setups


def changed(change: Callable[[Any], Any], make: Maker = Gpt) -> Maker:
    """Return a maker of the same model with a change."""

    def changed_model() -> nn.Module:
        model = make()
        change(model)
        return model

    return changed_model


def full_setup(
    make: Maker = Gpt,
    *,
    optimizer: Callable[[nn.Module, float], Optimizer] = decay_groups,
    step: Step | None = averaged_step,
    lr: float = 1e-3,
    scheduled: bool = True,
    batch: tuple[Tensor, ...] | None = None,
    **others: Any,
) -> Arguments:
    """Return the step of a model that returns logits and loss, with all that its user has."""
    torch.manual_seed(0)
    model = make()
    chosen = optimizer(model, lr)
    arguments: Arguments = {
        "model": model,
        "batch": batch or shifted_tokens(),
        "optimizer": chosen,
        "lr": lr,
        "step": step,
        "make": make,
    }
    if scheduled:
        arguments["scheduler"] = LambdaLR(chosen, rise_and_fall)
    return arguments | others


def loss_setup(
    make: Maker,
    batch: Any,
    loss: Callable[[nn.Module, Any], Tensor] | None = next_token,
    optimizer: Callable[[nn.Module], Any] = decay_groups,
    *,
    seed: int = 0,
    remade: bool = True,
    **others: Any,
) -> Arguments:
    """Return the step of a model with a loss of its user's, or its own, and no step of its user's.

    ``remade`` says whether the user hands over how the model is made.
    """
    torch.manual_seed(seed)
    model = make()
    arguments: Arguments = {"model": model, "batch": batch, "optimizer": optimizer(model)}
    if loss is not None:
        arguments["loss"] = loss
    if remade:
        arguments["make"] = make
    return arguments | others


def looped(step: Step, optimizer: Callable[..., Optimizer]) -> Arguments:
    """Return a decoder's step in a training of 240 steps: up over 20 of them, then down to nothing."""

    def share(step: int) -> float:
        return min(1.0, (step + 1) / 20) * max(0.0, 1 - step / 240)

    return loss_setup(
        partial(Llama, layers=3),
        text(8, 48),
        optimizer=lambda model: optimizer(model.parameters()),
        remade=False,
        scheduler=lambda optimizer: LambdaLR(optimizer, share),
        step=step,
        declare={"steps": 240},
    )
