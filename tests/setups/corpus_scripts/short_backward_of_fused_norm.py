"""Masked words, and a hand-written backward pass of RMSNorm. --faulty: it takes its scale for a constant."""

import sys
from functools import partial

import torch
import torch.nn.functional as F

from corpus.batches import BOS, FIRST, padded_text
from corpus.models import llama
from corpus.models.llama import Llama, Rms
from corpus.training import decay_groups

SHORT = "--faulty" in sys.argv


class FusedRms(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
        y = x * scale
        ctx.save_for_backward(y, scale)
        return y

    @staticmethod
    def backward(ctx, grad):
        y, scale = ctx.saved_tensors
        if SHORT:
            return grad * scale
        return (grad - y * (grad * y).mean(-1, keepdim=True)) * scale


class FusedNorm(Rms):
    def forward(self, x):
        return FusedRms.apply(x) * self.weight


class Unrotated(llama.Attention):
    def place(self, q, k, rotations):
        return q, k


class AlibiEncoder(Llama):
    def __init__(self):
        super().__init__(layers=3, block=partial(llama.Block, norm=FusedNorm, attention=Unrotated))
        self.norm = FusedNorm(64)
        self.register_buffer("slopes", 2.0 ** -torch.arange(2.0, 9.0, 2.0))

    def forward(self, ids, mask):
        at = torch.arange(ids.shape[1])
        bias = -self.slopes[:, None, None] * (at[:, None] - at[None, :]).abs()
        bias = bias[None].masked_fill(~mask.bool()[:, None, None, :], float("-inf"))
        return self.head(self.norm(self.run(self.tokens(ids), self.rotary(at), bias)))


torch.manual_seed(0)
model = AlibiEncoder()
optimizer = decay_groups(model)
all_ids, all_masks = padded_text([32, 19, 27, 23] * 8, seed=9)
chosen = (torch.rand(all_ids.shape, generator=torch.Generator().manual_seed(9)) < 0.2) & (all_ids >= FIRST)
all_labels = all_ids.masked_fill(~chosen, -100)
all_ids = all_ids.masked_fill(chosen, BOS)
for begin in range(0, 32, 4):
    ids, mask = all_ids[begin : begin + 4], all_masks[begin : begin + 4]
    labels = all_labels[begin : begin + 4]
    logits = model(ids, mask)
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
