"""Sound models that use one part in several places, or set the rows of a batch against each other."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from corpus.case import Arguments, Case, collect
from corpus.unseen_parts import PAD, CausalAttention, MaskedLayer, Mlp, adamw, draw, groups, padded, text

CASES: dict[str, Case] = {}
case = collect(CASES)


class SharedExperts(nn.Module):
    """A router over experts that all layers share."""

    def __init__(self, d: int, experts: nn.ModuleList) -> None:
        super().__init__()
        self.router = nn.Linear(d, len(experts), bias=False)
        self.experts = experts

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        shares = self.router(x).softmax(dim=-1)
        best, chosen = shares.topk(2, dim=-1)
        best = best / best.sum(dim=-1, keepdim=True)
        weights = torch.zeros_like(shares).scatter(-1, chosen, best)
        y = sum(weights[..., n, None] * expert(x) for n, expert in enumerate(self.experts))
        load = (weights > 0).float().mean(dim=(0, 1))
        return y, len(self.experts) / 2 * (load * shares.mean(dim=(0, 1))).sum()


class SharedExpertsDecoder(nn.Module):
    """A decoder whose layers have attention and routers of their own and experts in common."""

    def __init__(self, vocabulary: int = 200, d: int = 48, depth: int = 3) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, d), nn.Embedding(48, d)
        experts = nn.ModuleList(Mlp(d) for _ in range(4))
        self.attns = nn.ModuleList(CausalAttention(d, 4) for _ in range(depth))
        self.moes = nn.ModuleList(SharedExperts(d, experts) for _ in range(depth))
        self.norms = nn.ModuleList(nn.LayerNorm(d) for _ in range(2 * depth))
        self.norm = nn.LayerNorm(d)
        self.head = nn.Linear(d, vocabulary, bias=False)
        self.apply(draw)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        balance = x.new_zeros(())
        for n, (attn, moe) in enumerate(zip(self.attns, self.moes, strict=True)):
            x = x + attn(self.norms[2 * n](x))
            y, uneven = moe(self.norms[2 * n + 1](x))
            x, balance = x + y, balance + uneven
        return self.head(self.norm(x)), balance / len(self.moes)


def _balanced_loss(model: nn.Module, ids: Tensor) -> Tensor:
    logits, balance = model(ids)
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()) + 0.01 * balance


@case()
def experts_shared_by_layers() -> Arguments:
    """A mixture of experts whose layers share their experts on purpose."""
    torch.manual_seed(205)
    return {
        "model": SharedExpertsDecoder(),
        "batch": text(4, 40, 200, seed=35),
        "loss": _balanced_loss,
        "optimizer": adamw(1e-3),
        "make": SharedExpertsDecoder,
    }


class TextTower(nn.Module):
    """An encoder of texts to unit vectors, with a learnt temperature."""

    def __init__(self, vocabulary: int = 260, d: int = 64, out: int = 32) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, d), nn.Embedding(48, d)
        self.layers = nn.ModuleList(MaskedLayer(d) for _ in range(2))
        self.norm = nn.LayerNorm(d)
        self.project = nn.Linear(d, out, bias=False)
        self.logit_scale = nn.Parameter(torch.tensor(math.log(1 / 0.07)))
        self.apply(draw)

    def encode(self, ids: Tensor) -> Tensor:
        """Return a unit vector for each row."""
        real = ids != PAD
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for layer in self.layers:
            x = layer(x, real[:, None, None, :])
        mean = (self.norm(x) * real[..., None]).sum(1) / real.sum(1, keepdim=True)
        return F.normalize(self.project(mean), dim=-1)

    def forward(self, query: Tensor, passage: Tensor) -> Tensor:
        return self.logit_scale.exp() * self.encode(query) @ self.encode(passage).T


def _contrast(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    logits = model(batch["query"], batch["passage"])
    own = torch.arange(len(logits), device=logits.device)
    return (F.cross_entropy(logits, own) + F.cross_entropy(logits.T, own)) / 2


def _contrast_step(
    model: TextTower, batch: Mapping[str, Tensor], optimizer: torch.optim.Optimizer, scheduler: Any
) -> Tensor:
    loss = _contrast(model.train(), batch)
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    with torch.no_grad():
        model.logit_scale.clamp_(max=math.log(100.0))
    return loss.detach()


@case()
def contrastive_pairs() -> Arguments:
    """One tower for queries and passages, whose loss sets each row against the others of its batch."""
    torch.manual_seed(206)
    query, _ = padded([8, 12, 6, 10, 9, 12], 12, 260, seed=36)
    passage, _ = padded([24, 15, 20, 18, 11, 22], 24, 260, seed=37)
    return {
        "model": TextTower(),
        "batch": {"query": query, "passage": passage},
        "loss": _contrast,
        "optimizer": lambda model: torch.optim.AdamW(groups(model, 0.2), lr=5e-4, betas=(0.9, 0.98)),
        "step": _contrast_step,
        "make": TextTower,
        "declare": {"pad_id": PAD, "causal": False},
    }
