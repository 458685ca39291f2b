"""Which tokens of a stream are real: statistics leave padding out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from normlab.diagnosis.reading.recording import Called, awake
from normlab.diagnosis.reading.structure import StackView
from normlab.diagnosis.reading.subject import Loss, Subject
from normlab.diagnosis.reading.taps import capture
from normlab.errors import UserError

Real = Mapping[str, Tensor]
"""Stack to a mask over its tokens, True where a token is real, in the order of its stream."""

FROZEN = (
    "the loss has no gradient in the model: its parameters are frozen, or it runs without gradients; "
    "unfreeze what is to be examined, as in model.requires_grad_()"
)


def real_tokens(subject: Subject, *, begun: Mapping[str, Tensor] | None = None) -> Real:
    """Stack to a mask `[...]` over the tokens of its stream `[..., D]`.

    A mask in the batch decides: the keyword ``attention_mask``, or ``decoder_attention_mask`` for a stack
    with cross-attention, `[B, T]`, not zero where a token is real. Without one a token is real if the
    gradient of the loss in it is not zero where the stream begins: what padding holds does not change the
    loss. So a token that has no label and is read by no other counts as padding. For this pass other values
    stand in for parameters that are zero, as ReZero's, since no gradient comes through them; no pass is made
    for a stack whose gradient is ``begun`` with, `[..., D]` by name.

    Raises UserError where there is no mask and no gradient.
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
    """The gradient of the loss where each stack begins."""
    taps = {stack.name: [*(v.before for v in stack.sublayers), stack.sublayers[-1].after] for stack in stacks}
    with capture(subject.model, [tap for some in taps.values() for tap in some]) as seen:
        loss = replace(subject, loss_of=_awake(subject.loss_of)).loss()
    begun = {n: [seen[t] for t in some if seen[t].requires_grad][:1] for n, some in taps.items()}
    if not loss.requires_grad or not all(begun.values()):
        raise UserError(f"{FROZEN}, or pass real={{stack: mask}} to say which tokens are not padding")
    gradients = torch.autograd.grad(loss, [x for (x,) in begun.values()], materialize_grads=True)
    return dict(zip(begun, gradients, strict=True))


def _nonzero(name: str, gradient: Tensor) -> Tensor:
    real = (gradient != 0).any(-1)
    if not real.any():
        raise UserError(
            f"the loss does not change with any token of {name}, so padding cannot be told; "
            "pass real={stack: mask}, or a loss that uses what the model puts out"
        )
    return real


def _awake(loss_of: Loss) -> Loss:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        values = {f"model.{name}": value for name, value in awake(model).items()}
        return functional_call(Called(model, loss_of), values, (batch,))

    return loss


def rows(x: Tensor, real: Tensor) -> Tensor:
    """The real tokens `[N, D]` of a tensor `[..., D]`, without its graph, in float32 or wider.

    Raises UserError for a mask over another number of tokens.
    """
    flat = x.detach().reshape(-1, x.shape[-1])
    if len(flat) != real.numel():
        raise UserError(
            f"a mask of shape {tuple(real.shape)} does not fit a stream of shape {tuple(x.shape)}; pass "
            "real={stack: mask} with a mask over all but the last dimension"
        )
    return flat[real.reshape(-1)].to(torch.promote_types(x.dtype, torch.float32))
