"""Mixtures of experts, and a decoder that balances their loads."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import llama
from .llama import Llama, Part, Rotations, SwiGlu


class StackedExperts(nn.Module):
    """Four experts whose matrices are stacked, of which each token takes the best two."""

    def __init__(self, dim: int):
        super().__init__()
        self.router = nn.Linear(dim, 4, bias=False)
        self.up = nn.Parameter(torch.randn(4, dim, 2 * dim) * 0.02)
        self.down = nn.Parameter(torch.randn(4, 2 * dim, dim) * 0.02)

    def shares(self, x: Tensor) -> Tensor:
        """Return each expert's share `[B, T, E]` before the choice of two."""
        return self.router(x).softmax(-1)

    def forward(self, x: Tensor) -> Tensor:
        shares = self.shares(x)
        weights, chosen = shares.topk(2, -1)
        gates = torch.zeros_like(shares).scatter(-1, chosen, weights / weights.sum(-1, keepdim=True))
        inner = F.silu(torch.einsum("btd,edf->btef", x, self.up))
        return torch.einsum("bte,btef,efd->btd", gates, inner, self.down)


class Experts(nn.Module):
    """A list of experts, of which each token takes the ``best``; it returns how uneven the load is, too."""

    def __init__(self, dim: int, count: int = 4, best: int = 2, *, shares_sum_to_one: bool = True):
        super().__init__()
        self.best, self.shares_sum_to_one = best, shares_sum_to_one
        self.router = nn.Linear(dim, count, bias=False)
        self.experts = nn.ModuleList(SwiGlu(dim, dim) for _ in range(count))

    def scores(self, x: Tensor) -> Tensor:
        """Return how well each expert suits each token."""
        return self.router(x)

    def weigh(self, weights: Tensor, uneven: Tensor) -> Tensor:
        """Return the weights of the chosen experts, as they are used."""
        return weights / weights.sum(-1, keepdim=True) if self.shares_sum_to_one else weights

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        tokens = x.flatten(0, 1)
        shares = self.scores(tokens).softmax(-1)
        weights, chosen = shares.topk(self.best, -1)
        load = F.one_hot(chosen, shares.shape[-1]).to(shares.dtype).sum(1).mean(0) / self.best
        uneven = shares.shape[-1] * (load * shares.mean(0)).sum()
        weights = self.weigh(weights, uneven)
        y = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            token, slot = torch.where(chosen == number)
            y = y.index_add(0, token, expert(tokens[token]) * weights[token, slot, None])
        return y.view_as(x), uneven


class ExpertBlock(llama.Block):
    """A Pre-LN layer whose feed-forward is a mixture; it returns how uneven the load is, too."""

    def forward(self, x: Tensor, rotations: Rotations, seen: Tensor | None = None) -> tuple[Tensor, Tensor]:
        x = x + self.attn(self.norm_1(x), rotations, seen)
        mixed, uneven = self.mlp(self.norm_2(x))
        return x + mixed, uneven


class Mixture(Llama):
    """A decoder of mixtures, which returns its logits and the mean unevenness of its loads."""

    def __init__(self, experts: Part = Experts):
        super().__init__(layers=2, block=partial(ExpertBlock, mlp=experts))

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        rotations = self.rotary(self.positions(ids))
        x, total = self.tokens(ids), torch.zeros((), device=ids.device)
        for block in self.blocks:
            x, uneven = block(x, rotations)
            total = total + self.balance(uneven)
        return self.head(self.norm(x)), total / len(self.blocks)

    def balance(self, uneven: Tensor) -> Tensor:
        """Return the unevenness of a layer, as it enters the loss."""
        return uneven


def mixture_of(experts: Part) -> Callable[[], Mixture]:
    """Return a maker of the decoder with these experts."""
    return lambda: Mixture(experts)


def next_token_and_balance(model: nn.Module, ids: Tensor) -> Tensor:
    """Return the loss of the next token and a hundredth of the unevenness."""
    logits, uneven = model(ids)
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()) + 0.01 * uneven
