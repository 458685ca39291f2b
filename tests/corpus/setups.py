"""What the training steps of the lists share: batches, optimizers, a schedule and a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from .case import Arguments
from .gpt import GPT, VOCAB

ROWS, LENGTH = 4, 24
LENGTHS = (LENGTH, LENGTH - 5, LENGTH - 9, LENGTH - 2)
"""Tokens of each row of a padded batch."""
Step = Callable[[nn.Module, Any, Optimizer, LRScheduler | None], Tensor]

# ------------------------------------------------------------------------------------------------- batches


def tokens(rows: int = ROWS, length: int = LENGTH, *, vocab: int = VOCAB, seed: int = 0) -> Tensor:
    """Return random token ids `[B, T]` from 5 on: those below are special."""
    return torch.randint(5, vocab, (rows, length), generator=torch.Generator().manual_seed(seed))


def shifted_tokens() -> tuple[Tensor, Tensor]:
    """Return token ids and the token after each."""
    ids = tokens(length=LENGTH + 1)
    return ids[:, :-1], ids[:, 1:]


def language_batch() -> dict[str, Tensor]:
    """Return a batch of a Hugging Face decoder, which shifts the labels itself."""
    ids = tokens()
    return {"input_ids": ids, "labels": ids.clone()}


def padded_batch() -> dict[str, Tensor]:
    """Return a batch that is padded on the right with token 0."""
    inside = torch.arange(LENGTH) < torch.tensor(LENGTHS)[:, None]
    ids = tokens().masked_fill(~inside, 0)
    return {"input_ids": ids, "labels": ids.masked_fill(~inside, -100), "attention_mask": inside.long()}


def masked_batch() -> dict[str, Tensor]:
    """Return a padded batch in which a quarter of the words is masked and predicted."""
    batch = padded_batch()
    ids = batch["input_ids"]
    drawn = torch.rand(ids.shape, generator=torch.Generator().manual_seed(3)) < 0.25
    predicted = drawn & batch["attention_mask"].bool()
    labels = ids.masked_fill(~predicted, -100)
    return batch | {"input_ids": ids.masked_fill(predicted, 4), "labels": labels}


def classified_batch() -> dict[str, Tensor]:
    """Return a padded batch with a class for each row."""
    return padded_batch() | {"labels": torch.tensor([0, 1, 2, 1])}


def translation_batch() -> dict[str, Tensor]:
    """Return a batch of a Hugging Face encoder-decoder."""
    return {"input_ids": tokens(), "labels": tokens(length=14, seed=5)}


def image_batch() -> dict[str, Tensor]:
    """Return four random images with a class each."""
    torch.manual_seed(1)
    return {"pixel_values": torch.randn(ROWS, 3, 32, 32), "labels": torch.arange(ROWS)}


# ---------------------------------------------------------------------------------------- optimizer, step


def adamw(model: nn.Module, lr: float = 1e-3) -> AdamW:
    """Return AdamW of all parameters."""
    return AdamW(model.parameters(), lr=lr)


def adamw_of_trained(model: nn.Module, lr: float) -> AdamW:
    """Return AdamW of the parameters that are not frozen."""
    return AdamW([p for p in model.parameters() if p.requires_grad], lr=lr)


def decay_groups(model: nn.Module, lr: float = 1e-3) -> AdamW:
    """Return AdamW that decays matrices, not vectors."""
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0}]
    return AdamW(groups, lr=lr, betas=(0.9, 0.95))


def rise_and_fall(step: int) -> float:
    """Return the share of the rate: up over 100 steps, then down to a tenth."""
    return min(1.0, (step + 1) / 100, max(0.1, 1 - (step - 99) / 2000))


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


# -------------------------------------------------------------------------------------------------- setups


def own(
    make: Callable[[], nn.Module] = GPT,
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


def with_loss(
    make: Callable[[], nn.Module],
    batch: Any,
    loss: Callable[[nn.Module, Any], Tensor],
    optimizer: Callable[[nn.Module], Optimizer] = adamw,
) -> Arguments:
    """Return the step of a model with a loss of its user's."""
    torch.manual_seed(0)
    model = make()
    return {"model": model, "batch": batch, "loss": loss, "optimizer": optimizer(model)}
