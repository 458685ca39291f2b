"""Parts that the cases of ``later`` share: pairs of a fault and its twin, a rotary decoder and experts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from corpus.case import Arguments, Case, collect
from corpus.unseen_parts import PAD, SwiGlu, draw, heads_of, rotate

Rotations = tuple[Tensor, Tensor]


def pairs(cases: dict[str, Case]) -> Callable[..., Any]:
    """Return a decorator that adds a builder twice: with its fault, and as a sound twin."""
    case = collect(cases)

    def planted(*properties: str, place: str = "") -> Callable[..., Any]:
        def add(build: Callable[..., Arguments]) -> Callable[..., Arguments]:
            def fault() -> Arguments:
                return build(faulty=True)

            def twin() -> Arguments:
                return build(faulty=False)

            fault.__name__, twin.__name__ = build.__name__, build.__name__ + "_sound"
            case(*properties, place=place)(fault)
            case()(twin)
            return build

        return add

    return planted


def seeded(make: Callable[[], nn.Module], seed: int) -> nn.Module:
    """Draw a model from a seed."""
    torch.manual_seed(seed)
    return make()


class Rms(nn.Module):
    """Root-mean-square normalisation of each token."""

    def __init__(self, d: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(d))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x if x.dtype == torch.float64 else x.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return normed.to(x.dtype) * self.weight


class Rotary(nn.Module):
    """The rotations of the first positions."""

    def __init__(self, width: int, base: float = 10000.0) -> None:
        super().__init__()
        self.width, self.base = width, base
        self.register_buffer("inv_freq", self.rates(), persistent=False)

    def rates(self) -> Tensor:
        """Return the angle by which each pair of features turns from one position to the next."""
        return self.base ** (-torch.arange(0, self.width, 2).float() / self.width)

    def forward(self, length: int) -> Rotations:
        positions = torch.arange(length, device=self.inv_freq.device).to(self.inv_freq.dtype)
        angles = positions[:, None] * self.inv_freq[None]
        return angles.cos(), angles.sin()


class RotaryAttention(nn.Module):
    """Causal attention with rotary positions and grouped keys and values."""

    def __init__(self, d: int, heads: int = 4, groups: int = 2) -> None:
        super().__init__()
        self.heads, self.groups = heads, groups
        width = d // heads
        self.q = nn.Linear(d, d, bias=False)
        self.k = nn.Linear(d, groups * width, bias=False)
        self.v = nn.Linear(d, groups * width, bias=False)
        self.o = nn.Linear(d, d, bias=False)

    def forward(self, x: Tensor, rotations: Rotations, seen: Tensor | None = None) -> Tensor:
        q = heads_of(self.q(x), self.heads)
        k, v = heads_of(self.k(x), self.groups), heads_of(self.v(x), self.groups)
        q, k = rotate(q, *rotations).to(v.dtype), rotate(k, *rotations).to(v.dtype)
        k, v = (part.repeat_interleave(self.heads // self.groups, dim=1) for part in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, is_causal=seen is None)
        return self.o(y.transpose(1, 2).flatten(2))


class LlamaBlock(nn.Module):
    """A Pre-LN block of rotary attention and a gated feed-forward."""

    def __init__(self, d: int, norm: type[nn.Module] = Rms) -> None:
        super().__init__()
        self.norm_1, self.attn = norm(d), RotaryAttention(d)
        self.norm_2, self.mlp = norm(d), SwiGlu(d, 2 * d)

    def forward(self, x: Tensor, rotations: Rotations, seen: Tensor | None = None) -> Tensor:
        x = x + self.attn(self.norm_1(x), rotations, seen)
        return x + self.mlp(self.norm_2(x))


class Llama(nn.Module):
    """A small decoder with rotary positions and a head of its own."""

    def __init__(self, vocabulary: int = 220, d: int = 64, depth: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, d)
        self.rotary = Rotary(d // 4)
        self.blocks = nn.ModuleList(self.block(d) for _ in range(depth))
        self.norm = Rms(d)
        self.head = nn.Linear(d, vocabulary, bias=False)
        self.apply(draw)

    def block(self, d: int) -> nn.Module:
        """Build one block."""
        return LlamaBlock(d)

    def seen(self, ids: Tensor) -> Tensor | None:
        """Return which pairs see each other, or nothing where the attention is only causal."""
        return None

    def forward(self, ids: Tensor) -> Tensor:
        x, rotations, seen = self.embed(ids), self.rotary(ids.shape[1]), self.seen(ids)
        for block in self.blocks:
            x = block(x, rotations, seen)
        return self.head(self.norm(x))


class Experts(nn.Module):
    """A mixture of gated feed-forwards, of which each token takes the best ``best``."""

    def __init__(self, d: int, count: int = 4, best: int = 2, *, shares_sum_to_one: bool = True) -> None:
        super().__init__()
        self.best, self.shares_sum_to_one = best, shares_sum_to_one
        self.router = nn.Linear(d, count, bias=False)
        self.experts = nn.ModuleList(SwiGlu(d, d) for _ in range(count))

    def scores(self, x: Tensor) -> Tensor:
        """Return how well each expert suits each token."""
        return self.router(x)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        tokens = x.flatten(0, 1)
        shares = self.scores(tokens).softmax(-1)
        weights, chosen = shares.topk(self.best, dim=-1)
        if self.shares_sum_to_one:
            weights = weights / weights.sum(-1, keepdim=True)
        y = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            token, slot = torch.where(chosen == number)
            y = y.index_add(0, token, expert(tokens[token]) * weights[token, slot, None])
        load = F.one_hot(chosen, shares.shape[-1]).to(shares.dtype).sum(1).mean(0) / self.best
        return y.view_as(x), shares.shape[-1] * (load * shares.mean(0)).sum()


class ExpertBlock(nn.Module):
    """A Pre-LN block whose feed-forward is a mixture; it returns how uneven the load is, too."""

    def __init__(self, d: int, moe: nn.Module) -> None:
        super().__init__()
        self.norm_1, self.attn = Rms(d), RotaryAttention(d)
        self.norm_2, self.moe = Rms(d), moe

    def forward(self, x: Tensor, rotations: Rotations) -> tuple[Tensor, Tensor]:
        x = x + self.attn(self.norm_1(x), rotations)
        mixed, uneven = self.moe(self.norm_2(x))
        return x + mixed, uneven


class MixtureLm(Llama):
    """A decoder of mixtures, which returns its logits and the mean unevenness of its loads."""

    def __init__(self, mixture: Callable[[int], nn.Module], depth: int = 2, **sizes: int) -> None:
        self.mixture = mixture
        super().__init__(depth=depth, **sizes)

    def block(self, d: int) -> nn.Module:
        return ExpertBlock(d, self.mixture(d))

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        x, rotations, total = self.embed(ids), self.rotary(ids.shape[1]), 0.0
        for block in self.blocks:
            x, uneven = block(x, rotations)
            total = total + uneven
        return self.head(self.norm(x)), total / len(self.blocks)


def next_token_and_balance(model: nn.Module, ids: Tensor) -> Tensor:
    """Return the cross entropy of the next token and a hundredth of the unevenness."""
    logits, uneven = model(ids)
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()) + 0.01 * uneven


def cross_entropy_of(logits: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    """Return the mean cross entropy of the labels, where there is one."""
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=-100)


class Encoder(nn.Module):
    """A Post-LN encoder of nn.MultiheadAttention with learned positions and a head for each token."""

    def __init__(self, vocabulary: int, classes: int, d: int = 64, depth: int = 2) -> None:
        super().__init__()
        self.word = nn.Embedding(vocabulary, d, padding_idx=PAD)
        self.position = nn.Embedding(80, d)
        self.norm = nn.LayerNorm(d)
        self.layers = nn.ModuleList(EncoderLayer(d) for _ in range(depth))
        self.head = nn.Linear(d, classes)
        self.apply(draw)
        with torch.no_grad():
            self.word.weight[PAD].zero_()

    def hidden_pairs(self, real: Tensor) -> Tensor:
        """Return, for each row and head, which pairs must not see each other."""
        hidden = ~real.bool()[:, None].expand(-1, real.shape[1], -1)
        return hidden.repeat_interleave(4, dim=0)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        x = self.norm(self.word(ids) + self.position.weight[: ids.shape[1]])
        hidden = self.hidden_pairs(mask)
        for layer in self.layers:
            x = layer(x, hidden)
        return self.head(x)


class EncoderLayer(nn.Module):
    """A Post-LN layer."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(d, 4, batch_first=True)
        self.norm_1 = nn.LayerNorm(d)
        self.up, self.down = nn.Linear(d, 2 * d), nn.Linear(2 * d, d)
        self.norm_2 = nn.LayerNorm(d)

    def forward(self, x: Tensor, hidden: Tensor) -> Tensor:
        x = self.norm_1(x + self.attn(x, x, x, attn_mask=hidden, need_weights=False)[0])
        return self.norm_2(x + self.down(F.gelu(self.up(x))))
