"""Sound models that are written by hand, of families and styles that are less usual."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from corpus.case import Arguments, Case, collect
from corpus.unseen_parts import (
    Block,
    MaskedLayer,
    Mlp,
    SwiGlu,
    adamw,
    angles,
    draw,
    heads_of,
    next_token,
    rotate,
    text,
)

CASES: dict[str, Case] = {}
case = collect(CASES)


class MinGru(nn.Module):
    """A gated recurrence whose gates depend on the input alone."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.gate = nn.Linear(d, d)
        self.candidate = nn.Linear(d, d)
        self.out = nn.Linear(d, d)
        nn.init.constant_(self.gate.bias, -1.0)

    def forward(self, x: Tensor) -> Tensor:
        z, new = self.gate(x).sigmoid(), self.candidate(x)
        state = torch.zeros_like(x[:, 0])
        states = []
        for t in range(x.shape[1]):
            state = (1 - z[:, t]) * state + z[:, t] * new[:, t]
            states.append(state)
        return self.out(torch.stack(states, dim=1))


class RecurrentBlock(nn.Module):
    """A Pre-LN block of a recurrence and a feed-forward."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.norm_mix = nn.LayerNorm(d)
        self.mix = MinGru(d)
        self.norm_mlp = nn.LayerNorm(d)
        self.mlp = Mlp(d)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mix(self.norm_mix(x))
        return x + self.mlp(self.norm_mlp(x))


class RecurrentHybrid(nn.Module):
    """A decoder with one attention layer between recurrent ones, and no positions."""

    def __init__(self, vocabulary: int = 220, d: int = 48) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, d)
        nn.init.normal_(self.embed.weight, std=0.02)
        self.layers = nn.ModuleList([RecurrentBlock(d), Block(d, 4), RecurrentBlock(d)])
        self.norm = nn.LayerNorm(d)
        self.head = nn.Linear(d, vocabulary)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


@case()
def recurrent_hybrid() -> Arguments:
    """A hybrid of gated recurrences and attention, in the default draws of PyTorch."""
    torch.manual_seed(201)
    return {
        "model": RecurrentHybrid(),
        "batch": text(4, 24, 220, seed=31),
        "loss": next_token,
        "optimizer": adamw(1e-3),
        "make": RecurrentHybrid,
    }


class ConvUnit(nn.Module):
    """A residual convolution over time on normed features."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(d)
        self.conv = nn.Conv1d(d, 2 * d, 3, padding=1)
        self.out = nn.Conv1d(2 * d, d, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.out(F.gelu(self.conv(self.norm(x).mT))).mT


class UNetTagger(nn.Module):
    """A tagger that halves its sequence, attends at half the length and comes back with a skip."""

    def __init__(self, vocabulary: int = 200, d: int = 48, tags: int = 9) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, d)
        self.position = nn.Parameter(torch.zeros(64, d))
        self.enter = ConvUnit(d)
        self.down = nn.Conv1d(d, d, 2, stride=2)
        self.middle = nn.ModuleList(MaskedLayer(d) for _ in range(2))
        self.up = nn.ConvTranspose1d(d, d, 2, stride=2)
        self.merge = nn.Linear(2 * d, d)
        self.leave = ConvUnit(d)
        self.norm = nn.LayerNorm(d)
        self.tag = nn.Linear(d, tags)
        nn.init.trunc_normal_(self.position, std=0.02)

    def forward(self, ids: Tensor) -> Tensor:
        fine = self.enter(self.embed(ids) + self.position[: ids.shape[1]])
        x = self.down(fine.mT).mT
        seen = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device)
        for layer in self.middle:
            x = layer(x, seen)
        x = self.merge(torch.cat((self.up(x.mT).mT, fine), dim=-1))
        return self.tag(self.norm(self.leave(x)))


def _tag_loss(model: nn.Module, batch: tuple[Tensor]) -> Tensor:
    (ids,) = batch
    return F.cross_entropy(model(ids).transpose(1, 2), ids % 9, label_smoothing=0.05)


@case()
def unet_tagger() -> Arguments:
    """A U-Net of convolutions and attention that tags each token."""
    torch.manual_seed(202)
    model = UNetTagger()
    optimizer = torch.optim.NAdam(model.parameters(), lr=1e-3)
    return {
        "model": model,
        "batch": (text(4, 32, 200, seed=32),),
        "loss": _tag_loss,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.999),
        "make": UNetTagger,
        "declare": {"causal": False},
    }


class MupAttention(nn.Module):
    """Rotary attention that divides scores by the width of a head, as muP asks."""

    def __init__(self, d: int, heads: int) -> None:
        super().__init__()
        self.heads, self.width = heads, d // heads
        self.q, self.k = nn.Linear(d, d, bias=False), nn.Linear(d, d, bias=False)
        self.v, self.o = nn.Linear(d, d, bias=False), nn.Linear(d, d, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        turn = angles(x.shape[1], self.width).to(x.device)
        q = rotate(heads_of(self.q(x), self.heads), turn.cos(), turn.sin())
        k = rotate(heads_of(self.k(x), self.heads), turn.cos(), turn.sin())
        v = heads_of(self.v(x), self.heads)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=1.0 / self.width)
        return self.o(y.transpose(1, 2).flatten(2))


class MupBlock(nn.Module):
    """A Pre-norm block of such attention."""

    def __init__(self, d: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(d, eps=1e-6), nn.RMSNorm(d, eps=1e-6)
        self.attn = MupAttention(d, heads)
        self.mlp = SwiGlu(d, 2 * d)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class MupDecoder(nn.Module):
    """A decoder in the maximal update parametrisation."""

    def __init__(self, vocabulary: int = 256, d: int = 96, base: int = 32) -> None:
        super().__init__()
        self.multiple = d / base
        self.embed = nn.Embedding(vocabulary, d)
        self.blocks = nn.ModuleList(MupBlock(d, 6) for _ in range(3))
        self.norm = nn.RMSNorm(d, eps=1e-6)
        self.readout = nn.Linear(d, vocabulary, bias=False)
        nn.init.normal_(self.embed.weight, std=0.1)
        nn.init.normal_(self.readout.weight, std=0.02)
        for module in self.blocks.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=1 / math.sqrt(module.in_features))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.readout(self.norm(x)) / self.multiple


def _mup_groups(model: MupDecoder, lr: float = 4e-3) -> list[dict[str, Any]]:
    hidden = [p for p in model.blocks.parameters() if p.dim() == 2]
    inner = {id(p) for p in hidden}
    rest = [p for p in model.parameters() if id(p) not in inner]
    return [
        {"params": hidden, "lr": lr / model.multiple, "weight_decay": 0.1 * model.multiple},
        {"params": rest, "lr": lr, "weight_decay": 0.0},
    ]


@case()
def mup_decoder() -> Arguments:
    """A muP decoder: scores over the head width, a divided readout, rates by width."""
    torch.manual_seed(203)
    return {
        "model": MupDecoder(),
        "batch": text(4, 32, 256, seed=33),
        "loss": next_token,
        "optimizer": lambda model: torch.optim.AdamW(_mup_groups(model), betas=(0.9, 0.95)),
        "make": MupDecoder,
    }


def capped(x: Tensor, bound: float) -> Tensor:
    """Bound values smoothly."""
    return bound * torch.tanh(x / bound)


class CappedAttention(nn.Module):
    """Causal multi-query attention with capped scores, normed keys and normed values."""

    def __init__(self, d: int, heads: int) -> None:
        super().__init__()
        self.heads, self.width = heads, d // heads
        self.q = nn.Linear(d, d, bias=False)
        self.kv = nn.Linear(d, 2 * self.width, bias=False)
        self.k_norm, self.v_norm = nn.RMSNorm(self.width, eps=1e-6), nn.RMSNorm(self.width, eps=1e-6)
        self.o = nn.Linear(d, d, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        turn = angles(length, self.width).to(x.device)
        q = rotate(heads_of(self.q(x), self.heads), turn.cos(), turn.sin())
        k, v = self.kv(x).unsqueeze(1).chunk(2, dim=-1)
        k, v = rotate(self.k_norm(k), turn.cos(), turn.sin()), self.v_norm(v)
        scores = capped(q @ k.mT / math.sqrt(self.width), 50.0)
        later = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        weights = scores.masked_fill(later, float("-inf")).softmax(dim=-1, dtype=torch.float32)
        return self.o((weights.to(v.dtype) @ v).transpose(1, 2).flatten(2))


class SandwichBlock(nn.Module):
    """A block with a norm before and after each branch."""

    def __init__(self, d: int, heads: int) -> None:
        super().__init__()
        self.pre_attn, self.post_attn = nn.RMSNorm(d, eps=1e-6), nn.RMSNorm(d, eps=1e-6)
        self.attn = CappedAttention(d, heads)
        self.pre_mlp, self.post_mlp = nn.RMSNorm(d, eps=1e-6), nn.RMSNorm(d, eps=1e-6)
        self.mlp = SwiGlu(d, 3 * d)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.post_attn(self.attn(self.pre_attn(x)))
        return x + self.post_mlp(self.mlp(self.pre_mlp(x)))


class CappedDecoder(nn.Module):
    """A decoder in the manner of Gemma 2: scaled embeddings, sandwich norms, capped scores and logits."""

    def __init__(self, vocabulary: int = 320, d: int = 64) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, d)
        self.layers = nn.ModuleList(SandwichBlock(d, 4) for _ in range(3))
        self.norm = nn.RMSNorm(d, eps=1e-6)
        self.apply(draw)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) * math.sqrt(self.embed.embedding_dim)
        for layer in self.layers:
            x = layer(x)
        return capped(F.linear(self.norm(x), self.embed.weight), 30.0)


def _z_loss(model: nn.Module, ids: Tensor) -> Tensor:
    logits = model(ids)[:, :-1].float()
    z = logits.logsumexp(dim=-1)
    picked = logits.gather(-1, ids[:, 1:, None]).squeeze(-1)
    return (z - picked).mean() + 1e-4 * z.square().mean()


@case()
def capped_sandwich_decoder() -> Arguments:
    """Capped scores and logits, sandwich norms, one normed head for keys and values, a z-loss."""
    torch.manual_seed(204)
    return {
        "model": CappedDecoder(),
        "batch": text(4, 32, 320, seed=34),
        "loss": _z_loss,
        "optimizer": adamw(1e-3),
        "make": CappedDecoder,
        "declare": {"tied": True},
    }
