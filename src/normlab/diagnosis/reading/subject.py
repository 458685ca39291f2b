"""The subject of a diagnosis: a model, a batch, a loss, the residual stream, and where it holds tokens."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from normlab.diagnosis.reading.recording import awake
from normlab.diagnosis.reading.structure import StackView, Structure, read_structure
from normlab.errors import UserError
from normlab.trace.setup import Loss
from normlab.trace.step import FROZEN, gradients_in, zeros_for_none
from normlab.trace.tensors import Tap, call_model, map_tensors, tensors_in, unwrap
from normlab.trace.trace import Trace, output_loss
from normlab.trace.untouched import undisturbed

PaddingMasks = Mapping[str, Tensor]
"""By stack, a mask over the positions of its stream, True where there is a token."""


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


def find_padding_masks(subject: Subject, *, begun: Mapping[str, Tensor] | None = None) -> PaddingMasks:
    """Find the padding mask `[...]` of each stack, whose stream is `[..., D]`.

    A mask in the batch decides: the keyword ``attention_mask``, or ``decoder_attention_mask`` for a stack
    with cross-attention, `[B, T]`, not zero where there is a token. Without one, a position holds a token if
    the gradient of the loss in it is not zero where the stream begins: the content of padding does not change
    the loss. A token that has no label and that no other token reads therefore counts as padding. During this
    pass other values replace parameters that are zero, as ReZero's are, since no gradient passes through
    them. ``begun`` gives gradients `[..., D]`, by stack, that are known already and need no pass.

    Raises UserError where there is neither a mask nor a gradient.
    """
    stacks = subject.structure.stacks
    given = {stack.name: mask for stack in stacks if (mask := _given(subject.batch, stack)) is not None}
    known = {name: g for name, g in (begun or {}).items() if name not in given}
    unknown = [stack for stack in stacks if stack.name not in {*given, *known}]
    gradients = {**known, **(_reached(subject, unknown) if unknown else {})}
    return {**given, **{name: _nonzero(name, g) for name, g in gradients.items()}}


def _given(batch: Any, stack: StackView) -> Tensor | None:
    reads_memory = any(view.role == "cross_attention" for view in stack.sublayers)
    name = "decoder_attention_mask" if reads_memory else "attention_mask"
    mask = batch.get(name) if isinstance(batch, Mapping) else None
    return mask != 0 if isinstance(mask, Tensor) and mask.ndim == 2 else None


def _reached(subject: Subject, stacks: list[StackView]) -> dict[str, Tensor]:
    """Return the gradient of the loss where each stack begins, by its name."""
    taps = {stack.name: [*(v.before for v in stack.sublayers), stack.sublayers[-1].after] for stack in stacks}
    every = [tap for some in taps.values() for tap in some]
    with subject.trace(every, weights=awake(subject.model)).with_graph() as passed:
        seen = passed.taps
        begun = {n: [seen[t] for t in some if seen[t].requires_grad][:1] for n, some in taps.items()}
        if passed.loss is None or not passed.loss.requires_grad or not all(begun.values()):
            raise UserError(f"{FROZEN}, or pass padding_masks={{stack: mask}}, True where there is a token")
        tensors = [x for (x,) in begun.values()]
        gradients = zeros_for_none(gradients_in(passed.loss, tensors, subject.model), tensors)
    return dict(zip(begun, gradients, strict=True))


def _nonzero(name: str, gradient: Tensor) -> Tensor:
    mask = (gradient != 0).any(-1)
    if not mask.any():
        raise UserError(
            f"the loss does not change with any token of {name}, so that padding cannot be recognised; pass "
            "padding_masks={stack: mask}, or a loss that uses the model's output"
        )
    return mask


def rows(x: Tensor, mask: Tensor) -> Tensor:
    """Return the tokens `[N, D]` of a tensor `[..., D]` without padding and graph, in float32 or wider.

    Raises UserError for a mask over another number of tokens.
    """
    flat = x.detach().reshape(-1, x.shape[-1])
    if len(flat) != mask.numel():
        raise UserError(
            f"a mask of shape {tuple(mask.shape)} does not fit a stream of shape {tuple(x.shape)}; pass "
            "padding_masks={stack: mask} with a mask over all but the last dimension"
        )
    return flat[mask.reshape(-1)].to(torch.promote_types(x.dtype, torch.float32))
