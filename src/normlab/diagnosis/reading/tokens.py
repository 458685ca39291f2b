"""Padding masks: which positions of a stream hold a token, since statistics leave padding out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from normlab.diagnosis.reading.recording import awake
from normlab.diagnosis.reading.structure import StackView
from normlab.diagnosis.reading.subject import Subject
from normlab.errors import UserError
from normlab.trace.step import FROZEN, gradients_in, zeros_for_none

PaddingMasks = Mapping[str, Tensor]
"""By stack, a mask over the positions of its stream, True where there is a token."""


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
