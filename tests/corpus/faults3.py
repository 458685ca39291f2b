"""Faults of all kinds, third list."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.checkpoint import checkpoint

from .case import Arguments, Case, collect
from .faults_model import changed
from .gpt import GPT, Block, made_of, small
from .library import GPT2, library
from .places import STEP, TARGETS
from .rotary import RMS, RotaryBlock, RotaryGPT, mixture
from .rotary import made_of as rotary_of
from .setups import (
    LENGTH,
    ROWS,
    accumulate,
    adamw,
    advance,
    decay_groups,
    language_batch,
    own,
    shifted_tokens,
    tokens,
)

FAULTS3: dict[str, Case] = {}
fault = collect(FAULTS3)
Batch = tuple[Tensor, ...]

# ----------------------------------------------------------------------------------------------- attention


class MergedByView(Block):
    def merge(self, y: Tensor) -> Tensor:
        rows, _, length, _ = y.shape
        return self.o(y.reshape(rows, length, -1))


@fault("causality", place="h.0*")
def no_transpose_back() -> Arguments:
    """Heads are merged without a transpose, which scatters a token over others."""
    return own(made_of(MergedByView))


def rotate_other_pairs(x: Tensor) -> Tensor:
    """Rotate halves by angles that are laid out for neighbours."""
    length, width = x.shape[-2:]
    angles = torch.arange(length)[:, None] * 10000.0 ** (-torch.arange(0, width, 2) / width)
    angles = angles.repeat_interleave(2, -1)
    a, b = x.chunk(2, -1)
    return x * angles.cos() + torch.cat([-b, a], -1) * angles.sin()


class OtherPairs(RotaryBlock):
    def place(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return rotate_other_pairs(q), rotate_other_pairs(k)


@fault("order", place="layers.0*")
def rope_mismatch() -> Arguments:
    """The angles are laid out for other pairs than those that are rotated."""
    return own(rotary_of(OtherPairs))


class WeakMask(Block):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        length, width = q.shape[-2:]
        scores = q @ k.transpose(-1, -2) / math.sqrt(width)
        return (scores - 10 * torch.ones(length, length).triu(1)).softmax(-1) @ v


@fault("causality", place="h.0*")
def mask_minus_ten() -> Arguments:
    """The mask takes 10 off the scores of later tokens, which leaves them some weight."""
    return own(made_of(WeakMask))


class MaskAfterSoftmax(Block):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
        return scores.softmax(-1).tril() @ v


@fault("causality", place="h.0*")
def mask_after_softmax() -> Arguments:
    """The mask comes after the softmax, whose sum counts later tokens."""
    return own(made_of(MaskAfterSoftmax))


class Documents(GPT):
    """A decoder that reads document numbers and does nothing with them."""

    def forward(self, ids: Tensor, doc: Tensor, y: Tensor) -> dict[str, Tensor]:
        logits = self.logits(self.blocks(self.embed(ids) + 0 * doc[..., None]))
        return {"logits": logits, "loss": F.cross_entropy(logits.flatten(0, 1), y.flatten())}


@fault("documents", "inputs", place="|doc|h.0*")
def doc_mask_missing() -> Arguments:
    """Two documents stand in a row, and attention goes over both."""
    torch.manual_seed(0)
    model = Documents(64, 4)
    ids, labels = shifted_tokens()
    doc = (torch.arange(LENGTH) >= 10).long()[None].repeat(ROWS, 1)
    return {"model": model, "batch": {"ids": ids, "doc": doc, "y": labels}, "optimizer": decay_groups(model)}


# --------------------------------------------------------------------------------------------------- norms


class NormOfAllTokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.l = nn.LayerNorm([LENGTH, 64])

    def forward(self, x: Tensor) -> Tensor:
        return self.l(x)


@fault("causality", "norms", place="h.1*")
def ln_over_time() -> Arguments:
    """One norm takes its mean and variance over all tokens of a row."""
    return own(changed(lambda model: setattr(model.h[1], "n1", NormOfAllTokens())))


class RMSOverRows(RMS):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean((0, -1), keepdim=True) + self.eps) * self.g


@fault("rows", "norms", place="layers.1*")
def bn_tokens() -> Arguments:
    """One norm takes its mean square over the rows of the batch, too."""

    def make() -> RotaryGPT:
        model = RotaryGPT()
        model.layers[1].norm2.__class__ = RMSOverRows
        return model

    return own(make)


# ------------------------------------------------------------------------------------------ targets, starts


@fault("targets", place=TARGETS)
def rolled_labels() -> Arguments:
    """Labels are rolled, so that the last token is to predict the first."""
    ids = tokens()
    return own(batch=(ids, ids.roll(-1, 1)), step=None)


@fault("start", place="layers.1*")
def expert_std() -> Arguments:
    """One expert's inner matrix is twice as large as the others'."""

    def make() -> RotaryGPT:
        model = mixture()
        model.layers[1].w1.data[2].mul_(2)
        return model

    return own(make)


@fault("start", place="transformer.h.2*")
def hf_bias_nonzero() -> Arguments:
    """One bias is drawn, where GPT-2 starts them at zero."""
    arguments = library("GPT2LMHeadModel", GPT2, language_batch())
    arguments["model"].transformer.h[2].mlp.c_fc.bias.data.normal_(0, 0.02)
    return arguments | {"optimizer": adamw(arguments["model"])}


# ------------------------------------------------------------------------------------------- gradients, step


class DrawsAgain(GPT):
    def blocks(self, x: Tensor) -> Tensor:
        for block in self.h:
            if self.training:
                x = checkpoint(block, x, use_reentrant=False, preserve_rng_state=False)
            else:
                x = block(x)
        return x


@fault("dropout_repeats", "derivative", place="|h|h.*")
def ckpt_rng() -> Arguments:
    """Checkpoints draw other dropout masks in the backward pass than in the forward pass."""
    return own(lambda: DrawsAgain(64, 4))


class NoGraphAtFirst(GPT):
    def embed(self, ids: Tensor) -> Tensor:
        with torch.no_grad():
            return super().embed(ids)


@fault("gradients", "derivative", place="|te*|pe*")
def no_grad_embed() -> Arguments:
    """The embeddings are computed without a graph."""
    return own(lambda: NoGraphAtFirst(64, 4))


def slow_layer(model: nn.Module, lr: float) -> AdamW:
    """Return AdamW with a hundredth of the rate for one layer."""
    named = list(model.named_parameters())
    slow = [p for path, p in named if path.startswith("h.2.")]
    others = [p for path, p in named if not path.startswith("h.2.")]
    return AdamW([{"params": others}, {"params": slow, "lr": lr / 100}], lr=lr)


@fault("groups", place="h.2*|optimizer")
def one_layer_lr() -> Arguments:
    """One layer in the middle has a hundredth of the others' rate."""
    return own(changed(lambda model: None, layers=5), optimizer=slow_layer)


@fault("step", place=STEP)
def clip_subset() -> Arguments:
    """Only the gradients of the layers are clipped, not those of embeddings and head."""

    def step(model: GPT, batch: Batch, optimizer: Optimizer, scheduler: LRScheduler | None) -> Tensor:
        model.train()
        optimizer.zero_grad()
        loss = accumulate(model, batch)
        clip_grad_norm_(model.h.parameters(), 0.05)
        advance(optimizer, scheduler)
        return loss

    return own(small, step=step)
