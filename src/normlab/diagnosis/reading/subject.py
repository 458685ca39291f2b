"""The subject of a diagnosis: a model, a batch, a loss and the structure of the residual stream."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from normlab.diagnosis.reading.structure import Structure, read_structure
from normlab.spec.arguments import validate_arguments
from normlab.trace.setup import Loss
from normlab.trace.tensors import Tap, call_model, unwrap
from normlab.trace.trace import Trace, output_loss
from normlab.trace.untouched import undisturbed


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
        return cls(unwrap(model), batch, loss or output_loss, structure)

    def trace(self, taps: Iterable[Tap] = (), **changes: Any) -> Trace:
        """Return the step that computes the loss, without dropout; it shows the tensors at these taps."""
        return Trace(self.model, self.batch, self.loss_of, taps=tuple(dict.fromkeys(taps))).again(**changes)

    def calls(self, taps: Iterable[Tap] = ()) -> Trace:
        """Return the step that calls the model and computes no loss."""
        return self.trace(taps, loss_of=call_model)

    def loss(self) -> Tensor:
        """Return the scalar loss with its graph, without dropout."""
        with undisturbed(self.model, self.batch):
            return self.loss_of(self.model, self.batch)

    def forward(self) -> Any:
        """Return the model's output, whatever it is, with its graph, without dropout."""
        with undisturbed(self.model, self.batch):
            return call_model(self.model, self.batch)
