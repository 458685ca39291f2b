"""Decoders of one file whose layers share parts, or whose parts have optimizers of their own."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR
from transformers.optimization import Adafactor

from corpus.batches import VOCAB, text
from corpus.case import LATER, UNSEEN, Arguments, sound
from corpus.models import llama
from corpus.models.experts import ExpertBlock, Experts, Mixture, next_token_and_balance
from corpus.models.llama import Llama, Rotary, Rotations, rotate
from corpus.models.parts import capped, draw, heads_of
from corpus.training import loss_setup, next_token


class SharedExperts(Llama):
    """A decoder whose layers have attention and routers of their own and experts in common."""

    def __init__(self):
        super().__init__(layers=3, block=partial(ExpertBlock, mlp=Experts))
        for block in self.blocks[1:]:
            block.mlp.experts = self.blocks[0].mlp.experts

    forward = Mixture.forward
    balance = Mixture.balance


@sound(origin=UNSEEN)
def experts_shared_by_layers() -> Arguments:
    """A mixture of experts whose layers share their experts on purpose."""
    return loss_setup(SharedExperts, text(length=40, seed=35), next_token_and_balance)


class SharedAttention(Llama):
    """Four layers take turns with two attentions; each has a mixture of many experts of its own."""

    def __init__(self):
        many = partial(Experts, count=12, best=1, shares_sum_to_one=False)
        super().__init__(48, tied=True, block=partial(ExpertBlock, mlp=many))
        for number in (2, 3):
            self.blocks[number].attn = self.blocks[number - 2].attn

    forward = Mixture.forward
    balance = Mixture.balance


@sound(origin=LATER)
def idle_experts_and_shared_attention() -> Arguments:
    """Some of the experts get no token of this batch; the step goes through a scaler that is off."""

    def step(model: nn.Module, batch: Tensor, optimizer: Optimizer, scheduler: Any) -> Tensor:
        scaler = torch.amp.GradScaler("cpu", enabled=False)
        loss = next_token_and_balance(model, batch)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        return loss

    batch, declare = text(length=16, seed=37), {"tied": True}
    return loss_setup(SharedAttention, batch, next_token_and_balance, seed=37, step=step, declare=declare)


class ResidualLayer(nn.Module):
    """Normed queries and keys, values mixed with those of the first layer, a squared ReLU; no gains."""

    def __init__(self, dim: int, *, first: bool):
        super().__init__()
        self.qkv, self.out = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.up, self.down = nn.Linear(dim, 4 * dim, bias=False), nn.Linear(4 * dim, dim, bias=False)
        self.share = None if first else nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor, rotations: Rotations, before: Tensor | None) -> tuple[Tensor, Tensor]:
        normed = F.rms_norm(x, x.shape[-1:])
        q, k, v = (heads_of(part, 4) for part in self.qkv(normed).chunk(3, dim=-1))
        if self.share is not None:
            v = (1 - self.share) * v + self.share * before
        q, k = (rotate(F.rms_norm(part, part.shape[-1:]), *rotations) for part in (q, k))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(F.relu(self.up(F.rms_norm(x, x.shape[-1:]))).square()), v


class ValueResidualGpt(nn.Module):
    """A decoder of such layers, whose logits are capped and whose last projections start at zero."""

    def __init__(self, dim: int = 64):
        super().__init__()
        self.tokens, self.rotary = nn.Embedding(VOCAB, dim), Rotary(dim // 4)
        self.layers = nn.ModuleList(ResidualLayer(dim, first=i == 0) for i in range(4))
        self.head = nn.Linear(dim, VOCAB, bias=False)
        self.apply(draw)
        for layer in self.layers:
            nn.init.zeros_(layer.out.weight)
            nn.init.zeros_(layer.down.weight)

    def forward(self, ids: Tensor) -> Tensor:
        x, first = F.rms_norm(self.tokens(ids), (self.tokens.embedding_dim,)), None
        rotations = self.rotary(torch.arange(ids.shape[1], device=ids.device))
        for layer in self.layers:
            x, values = layer(x, rotations, first)
            first = values if first is None else first
        return capped(self.head(F.rms_norm(x, x.shape[-1:])), 15.0)


class Schedules:
    """The schedules of several optimizers, which step together."""

    def __init__(self, schedules: list[LambdaLR]):
        self.schedules = schedules

    def step(self) -> None:
        for schedule in self.schedules:
            schedule.step()


@sound(origin=LATER)
def value_residual_with_muon() -> Arguments:
    """Muon takes the blocks' matrices, AdamW the embedding, the head and the scalars."""

    def share_out(model: ValueResidualGpt) -> list[Optimizer]:
        others = [
            {"params": [model.tokens.weight], "lr": 3e-2},
            {"params": [model.head.weight], "lr": 4e-3},
            {"params": [p for p in model.layers.parameters() if p.dim() < 2], "lr": 1e-2},
        ]
        matrices = [p for p in model.layers.parameters() if p.dim() == 2]
        return [
            torch.optim.Muon(matrices, lr=0.02, momentum=0.95, weight_decay=0.01),
            AdamW(others, betas=(0.8, 0.95), eps=1e-10, weight_decay=0.0),
        ]

    def share(step: int) -> float:
        """Warm up for 20 of 1,000 steps and let the rate fall over the last 300."""
        return min((step + 1) / 20, 1.0, max(1000 - step, 0) / 300)

    def step(model: nn.Module, batch: Tensor, optimizers: Sequence[Optimizer], schedules: Any) -> Tensor:
        loss = next_token(model, batch)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        schedules.step()
        model.zero_grad(set_to_none=True)
        return loss

    batch, declare = text(length=48, seed=41), {"steps": 1000}
    arguments = loss_setup(ValueResidualGpt, batch, optimizer=share_out, seed=41, step=step, declare=declare)
    schedules = Schedules([LambdaLR(optimizer, share) for optimizer in arguments["optimizer"]])
    return arguments | {"scheduler": schedules}


class BucketBias(nn.Module):
    """A learned bias for each head and bucket of distances: near ones alone, far ones together."""

    def __init__(self, buckets: int = 12):
        super().__init__()
        self.near = buckets // 2
        self.table = nn.Embedding(buckets, 4)

    def forward(self, length: int) -> Tensor:
        at = torch.arange(length, device=self.table.weight.device)
        back = (at[:, None] - at[None]).clamp(min=0)
        wide = torch.log(back.clamp(min=1) / self.near) / math.log(48 / self.near)
        far = (self.near + wide * (self.table.num_embeddings - self.near)).long()
        bucket = torch.where(back < self.near, back, far.clamp(max=self.table.num_embeddings - 1))
        bias = self.table(bucket).permute(2, 0, 1)
        return bias.masked_fill(at[:, None] < at[None], float("-inf"))


class BiasedHeads(llama.Attention):
    """Attention without rotations, whose scores have a bias in the place of a mask."""

    def __init__(self, dim: int):
        super().__init__(dim, groups=4)

    def place(self, q: Tensor, k: Tensor, rotations: Rotations) -> tuple[Tensor, Tensor]:
        return q, k


class BucketDecoder(Llama):
    """A decoder as in T5: one table of biases for all layers, wide embeddings, narrowed before the head."""

    def __init__(self, dim: int = 64):
        super().__init__(dim, 3, tied=True, block=partial(llama.Block, attention=BiasedHeads))
        self.bias = BucketBias()
        for module in self.blocks.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=module.in_features**-0.5)
        nn.init.normal_(self.tokens.weight)
        nn.init.normal_(self.bias.table.weight, std=dim**-0.5)

    def seen(self, ids: Tensor) -> Tensor:
        return self.bias(ids.shape[1])

    def forward(self, ids: Tensor) -> Tensor:
        rotations = self.rotary(self.positions(ids))
        x = self.norm(self.run(self.tokens(ids), rotations, self.seen(ids)))
        return self.head(x * self.tokens.embedding_dim**-0.5)


@sound(origin=LATER)
def bucketed_biases_with_adafactor() -> Arguments:
    """Embeddings of unit deviation are tied to a head whose input is narrowed."""

    def adafactor(model: nn.Module) -> Optimizer:
        return Adafactor(model.parameters(), lr=1e-3, scale_parameter=False, relative_step=False)

    return loss_setup(BucketDecoder, text(length=40, seed=32), optimizer=adafactor)
