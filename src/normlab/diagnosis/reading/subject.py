"""The subject of a diagnosis: a model, a batch, a loss and the structure of the residual stream."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from torch import Tensor, nn

from normlab.diagnosis.reading.structure import Structure, read_structure
from normlab.errors import UserError
from normlab.spec.arguments import validate_arguments
from normlab.trace.setup import Loss
from normlab.trace.tensors import Tap, call_model, map_tensors, tensors_in, unwrap
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


def cropped(subject: Subject, tokens: int) -> tuple[Subject, int]:
    """Return the subject on the first rows of its batch, and its number of tokens.

    There are as many rows as keep its longest stream within ``tokens`` tokens, but at least one.

    Raises UserError where the loss fails on fewer rows, as one does that holds targets of its own.
    """
    rows, used = _count(subject.batch) or 1, _tokens(subject)
    kept = max(1, rows * tokens // used)
    if kept >= rows:
        return subject, used
    small = replace(subject, batch=split(subject.batch, -(-rows // kept))[0])
    try:
        return small, _tokens(small)
    except Exception as error:
        raise UserError(
            f"on the first {kept} of the {rows} rows of the batch the loss fails with "
            f"{type(error).__name__}: {error}; give a batch of at most {tokens} tokens, or tokens={used} "
            "to use all of it"
        ) from error


def _tokens(subject: Subject) -> int:
    taps = [stack.sublayers[0].before for stack in subject.structure.stacks]
    return max(x.numel() // x.shape[-1] for x in subject.trace(taps).once().taps.values())


def _count(batch: Any) -> int:
    return next((len(x) for _, x in tensors_in(batch) if x.ndim), 0)


def split(batch: Any, parts: int) -> list[Any]:
    """Split a batch into at most ``parts`` mini-batches of consecutive rows.

    Every tensor whose first dimension is that of the first one is split; anything else goes to all parts.

    Raises UserError for a batch without a tensor.
    """
    count = _count(batch)
    if not count:
        raise UserError(f"a batch of type {type(batch).__name__} has no rows to split; pass batches=[…]")
    bounds = [round(i * count / min(parts, count)) for i in range(min(parts, count) + 1)]

    def rows(a: int, b: int) -> Any:
        return map_tensors(batch, lambda _, x: x[a:b] if x.ndim and len(x) == count else x)

    return [rows(a, b) for a, b in pairwise(bounds)]
