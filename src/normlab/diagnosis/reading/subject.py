"""The subject of a diagnosis: a model, a batch, a loss and the structure of the residual stream."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from normlab.diagnosis.reading.structure import Structure, read_structure
from normlab.diagnosis.reading.taps import bare, call_model, eager, leaves
from normlab.errors import UserError
from normlab.spec.arguments import validate_arguments

Loss = Callable[[nn.Module, Any], Tensor]
"""``loss(model, batch)``: a scalar with its graph."""


def output_loss(model: nn.Module, batch: Any) -> Tensor:
    """Return the loss in the model's own output, as Hugging Face's models have it for batches with labels; of
    a tuple or a dict, the only number in it.

    Raises UserError with what to pass where there is none.
    """
    output = call_model(model, batch)
    loss = output if isinstance(output, Tensor) else getattr(output, "loss", None)
    numbers = [x for _, x in leaves(output) if x.ndim == 0 and x.is_floating_point()]
    if loss is None and len(numbers) == 1:
        loss = numbers[0]
    if not isinstance(loss, Tensor) or loss.ndim:
        raise UserError(
            f"{type(model).__name__} puts out no loss: give a batch with labels, or a function "
            "loss=lambda model, batch: … that returns a differentiable scalar"
        )
    return loss


@validate_arguments
@dataclass(frozen=True)
class Subject:
    """A model in evaluation mode on one batch."""

    model: nn.Module
    batch: Any
    loss_of: Loss
    structure: Structure

    @classmethod
    def of(
        cls,
        model: nn.Module,
        batch: Any,
        loss: Loss | None = None,
        *,
        blocks: str | Sequence[str] = (),
        branches: Sequence[str] = (),
    ) -> Subject:
        """Read the structure; ``blocks`` and ``branches`` as for ``read_structure``."""
        structure = read_structure(model, batch, blocks=blocks, branches=branches)
        return cls(bare(model), batch, loss or output_loss, structure)

    def loss(self) -> Tensor:
        """Return the scalar loss with its graph, without dropout."""
        with undisturbed(self.model):
            return self.loss_of(self.model, self.batch)

    def forward(self) -> Any:
        """Return the model's output, whatever it is, with its graph, without dropout."""
        with undisturbed(self.model):
            return call_model(self.model, self.batch)


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Keep the model in evaluation mode inside this block, as ``eager`` runs it, and restore modes and random
    state afterwards.
    """
    modes = [(module, module.training) for module in model.modules()]
    devices = sorted({p.device.index for p in model.parameters() if p.device.type == "cuda"})
    try:
        with torch.random.fork_rng(devices=devices), eager():
            model.eval()
            yield
    finally:
        for module, training in modes:
            module.training = training
