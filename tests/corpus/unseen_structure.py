"""Planted faults, and their sound twins, in outputs, structure and start."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from corpus.case import Arguments, Case, collect
from corpus.unseen_parts import (
    Block,
    Gpt,
    SwiGlu,
    adamw,
    angles,
    draw,
    groups,
    heads_of,
    next_token,
    rotate,
    text,
)

CASES: dict[str, Case] = {}
case = collect(CASES)


class MultiQueryAttention(nn.Module):
    """Causal attention with one head for keys and values, and normed queries and keys."""

    def __init__(self, d: int, heads: int = 4, dropout: float = 0.1, *, always: bool = False) -> None:
        super().__init__()
        self.heads, self.width, self.dropout, self.always = heads, d // heads, dropout, always
        self.wq = nn.Linear(d, d, bias=False)
        self.wkv = nn.Linear(d, 2 * self.width, bias=False)
        self.wo = nn.Linear(d, d, bias=False)
        self.q_norm = nn.RMSNorm(self.width, eps=1e-6)
        self.k_norm = nn.RMSNorm(self.width, eps=1e-6)

    def forward(self, x: Tensor) -> Tensor:
        turn = angles(x.shape[1], self.width).to(x.device)
        q = rotate(self.q_norm(heads_of(self.wq(x), self.heads)), turn.cos(), turn.sin())
        k, v = heads_of(self.wkv(x), 2).chunk(2, dim=1)
        k = rotate(self.k_norm(k), turn.cos(), turn.sin())
        p = self.dropout if self.training or self.always else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True, enable_gqa=True)
        return self.wo(y.transpose(1, 2).flatten(2))


class MultiQueryBlock(nn.Module):
    """A Pre-norm block of multi-query attention and SwiGLU."""

    def __init__(self, d: int, *, always: bool) -> None:
        super().__init__()
        self.norm1 = nn.RMSNorm(d, eps=1e-6)
        self.attn = MultiQueryAttention(d, always=always)
        self.norm2 = nn.RMSNorm(d, eps=1e-6)
        self.ffn = SwiGlu(d, 2 * d)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.ffn(self.norm2(x))


class MultiQueryDecoder(nn.Module):
    """A decoder of such blocks with a tied head."""

    def __init__(self, vocabulary: int = 256, d: int = 64, depth: int = 3, *, always: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, d)
        self.blocks = nn.ModuleList(MultiQueryBlock(d, always=always) for _ in range(depth))
        self.norm = nn.RMSNorm(d, eps=1e-6)
        self.apply(draw)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.norm(x) @ self.embed.weight.T


def _multi_query(*, always: bool) -> Arguments:
    torch.manual_seed(110)
    return {
        "model": MultiQueryDecoder(always=always),
        "batch": text(4, 32, 256, seed=11),
        "loss": next_token,
        "optimizer": adamw(6e-4),
        "make": lambda: MultiQueryDecoder(always=always),
        "declare": {"tied": True},
    }


@case("evaluation_repeats", place="blocks.?|blocks.*.attn*")
def attention_dropout_in_evaluation() -> Arguments:
    """The fused attention gets its dropout in evaluation too."""
    return _multi_query(always=True)


@case()
def attention_dropout_in_evaluation_sound() -> Arguments:
    return _multi_query(always=False)


def _grown(old: nn.Embedding, rows: int) -> nn.Parameter:
    """Return the old rows with freshly drawn ones below."""
    more = torch.randn(rows - old.num_embeddings, old.embedding_dim) * 0.02
    return nn.Parameter(torch.cat((old.weight.detach(), more)))


def extend(model: Gpt, rows: int, *, tie: bool) -> Gpt:
    """Give the model a larger vocabulary."""
    model.wte.weight = _grown(model.wte, rows)
    model.wte.num_embeddings = rows
    d = model.wte.embedding_dim
    head = nn.Linear(d, rows, bias=False)
    with torch.no_grad():
        head.weight.copy_(model.wte.weight)
    model.lm_head = head
    if tie:
        model.lm_head.weight = model.wte.weight
    return model


def _extended(*, tie: bool) -> Arguments:
    torch.manual_seed(111)
    model = extend(Gpt(vocabulary=200, depth=2), 212, tie=tie)
    ids = text(4, 32, 212, seed=12)
    return {
        "model": model,
        "batch": ids,
        "loss": next_token,
        "optimizer": torch.optim.AdamW(groups(model), lr=3e-4),
        "make": lambda: extend(Gpt(vocabulary=200, depth=2), 212, tie=tie),
        "declare": {"tied": True},
    }


@case("ties", place="lm_head*|wte*")
def tie_lost_in_larger_vocabulary() -> Arguments:
    """The vocabulary grows by new rows; the head gets a copy of the embedding and not the embedding."""
    return _extended(tie=False)


@case()
def tie_lost_in_larger_vocabulary_sound() -> Arguments:
    return _extended(tie=True)


class NormedStreamBlock(Block):
    """A block that adds to the normed stream: ``x = ln(x); x = x + f(x)``."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.ln_1(x)
        x = x + self.attn(x)
        x = self.ln_2(x)
        return x + self.mlp(x)


class NormedStreamGpt(Gpt):
    """A GPT-2 of such blocks."""

    block = NormedStreamBlock


def _streamed(kind: type[Gpt]) -> Arguments:
    torch.manual_seed(112)
    return {
        "model": kind(depth=4, d=48, dropout=0.1),
        "batch": text(4, 32, 200, seed=13),
        "loss": next_token,
        "optimizer": adamw(1e-3),
        "make": lambda: kind(depth=4, d=48, dropout=0.1),
        "declare": {"tied": True, "causal": True},
    }


@case("residual", "norms", place="blocks*")
def residual_from_the_norm() -> Arguments:
    """The residual branch is added to the normed stream and not to the stream."""
    return _streamed(NormedStreamGpt)


@case()
def residual_from_the_norm_sound() -> Arguments:
    return _streamed(Gpt)


class DefaultDrawnDecoder(nn.Module):
    """A decoder that leaves its linear layers as PyTorch draws them and ties its head to the embedding."""

    def __init__(self, vocabulary: int = 300, d: int = 96, *, scaled: bool = True) -> None:
        super().__init__()
        self.token_embedding = nn.Embedding(vocabulary, d)
        self.position_embedding = nn.Embedding(64, d)
        if scaled:
            with torch.no_grad():
                self.token_embedding.weight.mul_(0.02)
                self.position_embedding.weight.mul_(0.02)
        self.blocks = nn.Sequential(*(Block(d, 6, dropout=0.1) for _ in range(3)))
        self.ln = nn.LayerNorm(d)
        self.head = nn.Linear(d, vocabulary, bias=False)
        self.head.weight = self.token_embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        positions = torch.arange(ids.shape[1], device=ids.device)
        x = self.token_embedding(ids) + self.position_embedding(positions)
        return self.head(self.ln(self.blocks(x)))


def _default_drawn(*, scaled: bool) -> Arguments:
    torch.manual_seed(113)
    return {
        "model": DefaultDrawnDecoder(scaled=scaled),
        "batch": text(4, 32, 300, seed=14),
        "loss": next_token,
        "optimizer": lambda model: torch.optim.AdamW(model.parameters(), lr=3e-4),
        "make": lambda: DefaultDrawnDecoder(scaled=scaled),
        "declare": {"tied": True},
    }


@case("start", "initial_loss", place="token_embedding*|head*|loss")
def unit_embedding_as_head() -> Arguments:
    """The embedding keeps its unit deviation and is the head too: the first loss is far above chance."""
    return _default_drawn(scaled=False)


@case()
def unit_embedding_as_head_sound() -> Arguments:
    return _default_drawn(scaled=True)
