"""Decoders of one file whose streams or starts are unusual."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer

from corpus.batches import VOCAB, text
from corpus.case import LATER, OWN_3, PLANTED_1, PUBLIC, UNSEEN, Arguments, sound
from corpus.models import llama
from corpus.models.gpt import Block, Gpt
from corpus.models.llama import Llama, Rms, Rotations
from corpus.models.parts import capped, causal
from corpus.training import changed, full_setup, groups, loss_setup, next_token

# ------------------------------------------------------------------------------------------- unusual streams


class Universal(Gpt):
    def __init__(self):
        super().__init__(layers=1)

    def run(self, x: Tensor) -> Tensor:
        for _ in range(4):
            x = self.blocks[0](x)
        return x


@sound(origin=OWN_3)
def universal() -> Arguments:
    """One layer that is applied four times."""
    return full_setup(Universal)


def repeat_first(model: nn.Module) -> None:
    model.blocks = nn.ModuleList([model.blocks[0]] * 4)


@sound(origin=PLANTED_1)
def shared_list() -> Arguments:
    """One layer stands four times in the list: nothing but a declaration tells this from ALBERT."""
    return full_setup(changed(repeat_first))


@sound(origin=PUBLIC)
def repeated_block() -> Arguments:
    """One block of a rotary decoder stands four times in the list, as in ALBERT."""
    return loss_setup(changed(repeat_first, Llama), text(8), remade=False)


class UNet(Gpt):
    def run(self, x: Tensor) -> Tensor:
        kept: list[Tensor] = []
        for block in self.blocks[:2]:
            x = block(x)
            kept.append(x)
        for block in self.blocks[2:]:
            x = block(x + 0.5 * kept.pop())
        return x

    def logits(self, x: Tensor) -> Tensor:
        return 30 * torch.tanh(super().logits(x) / 30)


@sound(origin=OWN_3)
def unet_softcap() -> Arguments:
    """Layers of the second half read those of the first, and logits are capped."""
    return full_setup(UNet)


class Hourglass(Gpt):
    """The middle blocks see one vector for each four tokens, delayed so that none sees ahead."""

    def run(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x)
        late = F.pad(x, (0, 0, 3, 0))[:, : x.shape[1]]
        short = late.unflatten(1, (-1, 4)).mean(2)
        for block in self.blocks[1:3]:
            short = block(short)
        return self.blocks[3](x + short.repeat_interleave(4, dim=1))


@sound(origin=LATER)
def hourglass_with_nadam() -> Arguments:
    """A decoder that is shorter in the middle, trained by NAdam on the mean of two halves."""

    def step(model: nn.Module, batch: Tensor, optimizer: Optimizer, scheduler: Any) -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        losses = []
        for half in batch.chunk(2):
            loss = next_token(model, half) / 2
            loss.backward()
            losses.append(loss.detach())
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return torch.stack(losses).sum()

    def nadam(model: nn.Module) -> Optimizer:
        return torch.optim.NAdam(groups(model), lr=1e-3, decoupled_weight_decay=True)

    return loss_setup(partial(Hourglass, dropout=0.0), text(seed=36), optimizer=nadam, step=step)


class MinGru(nn.Module):
    """A gated recurrence, in the place of attention, whose gates depend on the input alone."""

    def __init__(self, dim: int, dropout: float):
        super().__init__()
        self.gate, self.candidate, self.out = (nn.Linear(dim, dim) for _ in range(3))
        nn.init.constant_(self.gate.bias, -1.0)

    def forward(self, x: Tensor) -> Tensor:
        share, new = self.gate(x).sigmoid(), self.candidate(x)
        state = torch.zeros_like(x[:, 0])
        states = []
        for t in range(x.shape[1]):
            state = (1 - share[:, t]) * state + share[:, t] * new[:, t]
            states.append(state)
        return self.out(torch.stack(states, dim=1))


class RecurrentHybrid(nn.Module):
    """A decoder with one attention layer between recurrent ones, and no positions."""

    def __init__(self, dim: int = 48):
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, dim)
        nn.init.normal_(self.tokens.weight, std=0.02)
        recurrent = partial(Block, dim, 0.0, attention=MinGru)
        self.blocks = nn.ModuleList([recurrent(), Block(dim, 0.0), recurrent()])
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, VOCAB)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


@sound(origin=UNSEEN)
def recurrent_hybrid() -> Arguments:
    """A hybrid of gated recurrences and attention, in the default draws of PyTorch."""
    return loss_setup(RecurrentHybrid, text(length=24, seed=31))


# -------------------------------------------------------------------------------------------- unusual starts


def add_weight_norm(model: Gpt) -> None:
    for block in model.blocks:
        nn.utils.parametrizations.weight_norm(block.attn.out)


@sound(origin=OWN_3)
def weightnorm() -> Arguments:
    """Output matrices are parametrised by their norms."""
    return full_setup(changed(add_weight_norm))


def draw_by_depth(model: Gpt) -> None:
    for depth, block in enumerate(model.blocks, start=1):
        nn.init.normal_(block.attn.out.weight, 0, 0.02 / math.sqrt(2 * depth))
        nn.init.normal_(block.mlp.down.weight, 0, 0.02 / math.sqrt(2 * depth))


@sound(origin=OWN_3)
def depth_init() -> Arguments:
    """Output matrices are drawn smaller in each layer than in the last."""
    return full_setup(changed(draw_by_depth, partial(Gpt, layers=6)))


class CappedHeads(llama.Attention):
    """Capped scores, one head of keys and values, normed keys and normed values."""

    def __init__(self, dim: int):
        super().__init__(dim, groups=1)
        self.norm_k, self.norm_v = nn.RMSNorm(dim // 4, eps=1e-6), nn.RMSNorm(dim // 4, eps=1e-6)

    def place(self, q: Tensor, k: Tensor, rotations: Rotations) -> tuple[Tensor, Tensor]:
        return super().place(q, self.norm_k(k), rotations)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None) -> Tensor:
        scores = capped(q @ k.mT / math.sqrt(q.shape[-1]), 50.0)
        hidden = ~causal(q.shape[-2], q.device)
        return scores.masked_fill(hidden, float("-inf")).softmax(-1) @ self.norm_v(v)


class Sandwich(llama.Block):
    """A block with a norm before and after each branch."""

    def __init__(self, dim: int):
        super().__init__(dim, attention=CappedHeads)
        self.after_1, self.after_2 = Rms(dim), Rms(dim)

    def forward(self, x: Tensor, rotations: Rotations, seen: Tensor | None = None) -> Tensor:
        x = x + self.after_1(self.attn(self.norm_1(x), rotations, seen))
        return x + self.after_2(self.mlp(self.norm_2(x)))


class CappedDecoder(Llama):
    """A decoder in the manner of Gemma 2: scaled embeddings, capped logits."""

    def __init__(self):
        super().__init__(layers=3, tied=True, block=Sandwich)

    def run(self, x: Tensor, rotations: Rotations, seen: Tensor | None) -> Tensor:
        return super().run(x * math.sqrt(x.shape[-1]), rotations, seen)

    def forward(self, ids: Tensor) -> Tensor:
        return capped(super().forward(ids), 30.0)


@sound(origin=UNSEEN)
def capped_sandwich_decoder() -> Arguments:
    """Capped scores and logits, sandwich norms, one normed head for keys and values, a z-loss."""

    def loss(model: nn.Module, ids: Tensor) -> Tensor:
        logits = model(ids)[:, :-1].float()
        z = logits.logsumexp(dim=-1)
        picked = logits.gather(-1, ids[:, 1:, None]).squeeze(-1)
        return (z - picked).mean() + 1e-4 * z.square().mean()

    return loss_setup(CappedDecoder, text(seed=34), loss, declare={"tied": True})
