"""What an adapter is handed: a case that it can build as often as it needs, and what it gives back."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tests"))  # where the corpus is

from corpus.public2.case import PublicCase  # noqa: E402
from corpus.public2.run import plain_step  # noqa: E402

__all__ = [
    "STEPS_OF_A_LOG",
    "Finding",
    "NotCalledError",
    "PublicCase",
    "Training",
    "WithLoss",
    "logged",
    "tensors_of",
    "training",
]
STEPS_OF_A_LOG = 30


@dataclass(frozen=True)
class Finding:
    """One thing that a tool reports: the id of its check, the module or parameter, and its message."""

    check: str
    place: str
    message: str


class NotCalledError(Exception):
    """A tool that calls models by their inputs has nothing to call this one with."""


class WithLoss(nn.Module):
    """A model and its loss as one module, for tools that call a model and take a loss of what it gives."""

    def __init__(self, of: Training):
        super().__init__()
        self.model, self.loss, self.batch = of.model, of.loss, of.batch

    def forward(self, batch: Any = None) -> Tensor:
        """Return the loss of a batch, or of the case's own."""
        batch = self.batch if batch is None else batch
        return self.model(**batch).loss if self.loss is None else self.loss(self.model, batch)


@dataclass
class Training:
    """The model of a case with all that trains it, new from its builder."""

    model: nn.Module
    batch: Any
    loss: Callable[[nn.Module, Any], Tensor] | None
    optimizers: list[torch.optim.Optimizer]
    scheduler: Any
    arguments: dict[str, Any]

    def value(self) -> Tensor:
        """Return the loss of the model on the batch, with its graph; without a loss the model has one."""
        return WithLoss(self)()

    def inputs(self) -> dict[str, Any]:
        """Return what the loss calls the model with first, by the names of its arguments."""
        calls: list[dict[str, Any]] = []

        def note(module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
            calls.append(signature(module.forward).bind(*arguments, **named).arguments)

        handle = self.model.register_forward_pre_hook(note, with_kwargs=True)
        try:
            self.value()
        finally:
            handle.remove()
        if not calls:
            raise NotCalledError("the loss calls parts of the model, and never all of it")
        return dict(calls[0])

    def step(self) -> Tensor:
        """Make one training step as the case does, or as a plain loop does where it says nothing."""
        if own_step := self.arguments.get("step"):
            return own_step(self.model, self.batch, self.arguments["optimizer"], self.scheduler)
        arguments = self.arguments | {"loss": lambda *_: self.value()}
        loss = plain_step(arguments, self.optimizers)
        if self.scheduler is not None:
            self.scheduler.step()
        return loss


def training(case: PublicCase) -> Training:
    """Build a case with the same random numbers each time."""
    torch.manual_seed(0)
    arguments = case.build()
    chosen, scheduler = arguments["optimizer"], arguments.get("scheduler")
    optimizers = chosen if isinstance(chosen, list) else [chosen]
    if callable(scheduler):
        scheduler = scheduler(optimizers[0])
    return Training(
        arguments["model"], arguments["batch"], arguments.get("loss"), optimizers, scheduler, arguments
    )


def logged(steps: Training) -> list[dict[str, float]]:
    """Return what a loop would log of each step: the loss, the norm of the gradient, and the rate."""
    norms: list[float] = []

    def note(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"]]
        known = [gradient.float().norm() for gradient in gradients if gradient is not None]
        norms.append(float(torch.stack(known).norm()) if known else 0.0)

    optimizer = steps.optimizers[0]
    optimizer.register_step_pre_hook(note)
    records = []
    for step in range(STEPS_OF_A_LOG):
        rate = float(optimizer.param_groups[0]["lr"])
        loss = float(steps.step())
        records.append({"step": step, "loss": loss, "lr": rate, "grad_norm": norms[-1] if norms else 0.0})
    return records


def tensors_of(batch: Any) -> list[Tensor]:
    """Return the tensors of a batch, whatever holds them."""
    if isinstance(batch, Tensor):
        return [batch]
    if isinstance(batch, dict):
        batch = list(batch.values())
    if isinstance(batch, list | tuple):
        return [tensor for part in batch for tensor in tensors_of(part)]
    return []
