"""Faults that ``derivative`` names: a gradient that is not the derivative of the loss."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from corpus.batches import BOS, FIRST, PAD, generator, padded_text
from corpus.case import UNSEEN, Arguments, twins
from corpus.models import llama
from corpus.models.llama import Llama, Rms, Rotations
from corpus.training import labelled, loss_setup


class FusedRms(torch.autograd.Function):
    """Divide by the root mean square, with a backward written by hand."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, short: bool) -> Tensor:  # noqa: FBT001
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
        y = x * scale
        ctx.save_for_backward(y, scale)
        ctx.short = short
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        y, scale = ctx.saved_tensors
        if ctx.short:
            return grad * scale, None
        return (grad - y * (grad * y).mean(-1, keepdim=True)) * scale, None


class FusedNorm(Rms):
    short = False

    def forward(self, x: Tensor) -> Tensor:
        return FusedRms.apply(x, self.short) * self.weight


class ShortNorm(FusedNorm):
    short = True


class AlibiEncoder(Llama):
    """An encoder for masked tokens whose scores fall with the distance of two tokens."""

    def __init__(self, norm: type[nn.Module]):
        super().__init__(layers=3, block=partial(llama.Block, norm=norm, attention=Unrotated))
        self.norm = norm(64)
        self.register_buffer("slopes", 2.0 ** -torch.arange(2.0, 9.0, 2.0))

    def forward(self, ids: Tensor, mask: Tensor, labels: Tensor) -> dict[str, Tensor]:
        at = torch.arange(ids.shape[1], device=ids.device)
        bias = -self.slopes[:, None, None] * (at[:, None] - at[None, :]).abs()
        bias = bias[None].masked_fill(~mask.bool()[:, None, None, :], float("-inf"))
        logits = self.head(self.norm(self.run(self.tokens(ids), self.rotary(at), bias)))
        return {"loss": labelled(logits, labels), "logits": logits}


class Unrotated(llama.Attention):
    def place(self, q: Tensor, k: Tensor, rotations: Rotations) -> tuple[Tensor, Tensor]:
        return q, k


@twins("derivative", place="*norm*|blocks.*", origin=UNSEEN)
def short_backward_of_fused_norm(*, faulty: bool) -> Arguments:
    """The backward of a fused RMSNorm takes its scale for a constant."""
    ids, mask = padded_text([32, 19, 27, 23], seed=9)
    chosen = (torch.rand(ids.shape, generator=generator(9)) < 0.2) & (ids >= FIRST)
    batch = {"ids": ids.masked_fill(chosen, BOS), "mask": mask, "labels": ids.masked_fill(~chosen, -100)}
    make = partial(AlibiEncoder, ShortNorm if faulty else FusedNorm)
    return loss_setup(make, batch, None, declare={"pad_id": PAD, "causal": False})
