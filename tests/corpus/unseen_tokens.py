"""Planted faults, and their sound twins, in what a token may see."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from corpus.case import Arguments, Case, collect
from corpus.unseen_parts import (
    EOS,
    PAD,
    Block,
    MaskedLayer,
    Mlp,
    SwiGlu,
    adamw,
    angles,
    draw,
    left_padded,
    next_token,
    rotate,
    text,
)

CASES: dict[str, Case] = {}
case = collect(CASES)


class ShortConv(nn.Module):
    """A gated depthwise convolution over time."""

    def __init__(self, d: int, width: int = 3, *, symmetric: bool = False) -> None:
        super().__init__()
        self.left = 0 if symmetric else width - 1
        self.conv = nn.Conv1d(d, d, width, groups=d, padding=width // 2 if symmetric else 0)
        self.gate = nn.Linear(d, d)
        self.out = nn.Linear(d, d)

    def forward(self, x: Tensor) -> Tensor:
        mixed = self.conv(F.pad(x.transpose(1, 2), (self.left, 0))).transpose(1, 2)
        return self.out(mixed * F.silu(self.gate(x)))


class ConvLayer(nn.Module):
    """A Pre-LN layer that mixes tokens with a short convolution."""

    def __init__(self, d: int, *, symmetric: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(d)
        self.mix = ShortConv(d, symmetric=symmetric)
        self.norm_mlp = nn.LayerNorm(d)
        self.mlp = Mlp(d)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mix(self.norm(x))
        return x + self.mlp(self.norm_mlp(x))


class HybridDecoder(nn.Module):
    """A decoder whose layers take turns: convolution, attention, convolution, attention."""

    def __init__(self, vocabulary: int = 240, d: int = 48, *, symmetric: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, d)
        self.layers = nn.ModuleList()
        for _ in range(2):
            self.layers.append(ConvLayer(d, symmetric=symmetric))
            self.layers.append(Block(d, 4))
        self.norm = nn.LayerNorm(d)
        self.head = nn.Linear(d, vocabulary, bias=False)
        self.apply(draw)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def _hybrid(*, symmetric: bool) -> Arguments:
    torch.manual_seed(101)
    return {
        "model": HybridDecoder(symmetric=symmetric),
        "batch": text(4, 32, 240, seed=1),
        "loss": next_token,
        "optimizer": adamw(1e-3),
        "make": lambda: HybridDecoder(symmetric=symmetric),
    }


@case("causality", place="layers.[02].mix*|layers.[02]")
def symmetric_convolution() -> Arguments:
    """The short convolution is padded on both sides and so sees one token ahead."""
    return _hybrid(symmetric=True)


@case()
def symmetric_convolution_sound() -> Arguments:
    return _hybrid(symmetric=False)


class LastTokenClassifier(nn.Module):
    """A causal classifier of rows that are padded on the left: it reads the state of the last token."""

    def __init__(
        self, vocabulary: int = 200, d: int = 64, classes: int = 4, *, by_length: bool = False
    ) -> None:
        super().__init__()
        self.by_length = by_length
        self.tokens = nn.Embedding(vocabulary, d)
        self.positions = nn.Embedding(64, d)
        self.layers = nn.ModuleList(MaskedLayer(d) for _ in range(3))
        self.norm = nn.LayerNorm(d)
        self.score = nn.Linear(d, classes)
        self.apply(draw)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> dict[str, Tensor]:
        length = input_ids.shape[1]
        at = (attention_mask.cumsum(1) - 1).clamp(min=0)
        x = self.tokens(input_ids) + self.positions(at)
        causal = torch.ones(length, length, dtype=torch.bool, device=x.device).tril()
        itself = torch.eye(length, dtype=torch.bool, device=x.device)
        seen = (causal & attention_mask.bool()[:, None, None, :]) | itself
        for layer in self.layers:
            x = layer(x, seen)
        last = attention_mask.sum(1) - 1 if self.by_length else torch.full_like(labels, length - 1)
        logits = self.score(self.norm(x[torch.arange(len(x)), last]))
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


def _last_token(*, by_length: bool) -> Arguments:
    torch.manual_seed(102)
    ids, mask = left_padded([24, 9, 17, 11, 20, 7], 24, 200, seed=2)
    labels = torch.tensor([0, 3, 1, 2, 3, 0])
    return {
        "model": LastTokenClassifier(by_length=by_length),
        "batch": {"input_ids": ids, "attention_mask": mask, "labels": labels},
        "optimizer": adamw(5e-4, decay=0.01),
        "make": lambda: LastTokenClassifier(by_length=by_length),
        "declare": {"pad_id": PAD, "causal": True},
    }


@case("padding", "reach", "inputs")
def last_token_by_length_of_left_padding() -> Arguments:
    """The last token is looked up at ``length - 1``, as for right padding, in rows padded on the left."""
    return _last_token(by_length=True)


@case()
def last_token_by_length_of_left_padding_sound() -> Arguments:
    return _last_token(by_length=False)


def _packed(ids: Tensor) -> Tensor:
    """Number the documents of packed rows; an EOS belongs to the document that it ends."""
    ends = (ids == EOS).long()
    return ends.cumsum(1) - ends


class PackedDecoder(nn.Module):
    """A decoder of packed rows: documents do not see each other, and each has its own positions."""

    def __init__(self, vocabulary: int = 220, d: int = 64, *, late: bool = True) -> None:
        super().__init__()
        self.late = late
        self.tokens = nn.Embedding(vocabulary, d)
        self.positions = nn.Embedding(48, d)
        self.layers = nn.ModuleList(MaskedLayer(d) for _ in range(3))
        self.norm = nn.LayerNorm(d)
        self.head = nn.Linear(d, vocabulary, bias=False)
        self.apply(draw)
        self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        documents = _packed(ids) if self.late else (ids == EOS).long().cumsum(1)
        at = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        fresh = F.pad(documents[:, 1:] != documents[:, :-1], (1, 0), value=True)
        start = at.masked_fill(~fresh, 0).cummax(1).values
        x = self.tokens(ids) + self.positions(at - start)
        same = documents[:, :, None] == documents[:, None, :]
        seen = (same & (at[:, :, None] >= at[:, None, :])).unsqueeze(1)
        for layer in self.layers:
            x = layer(x, seen)
        return self.head(self.norm(x))


def _packing(*, late: bool) -> Arguments:
    torch.manual_seed(103)
    ids = text(4, 48, 220, seed=3)
    for row, ends in enumerate([(9, 30), (17,), (5, 21, 38), (25, 40)]):
        ids[row, list(ends)] = EOS
    return {
        "model": PackedDecoder(late=late),
        "batch": ids,
        "loss": next_token,
        "optimizer": adamw(1e-3),
        "make": lambda: PackedDecoder(late=late),
        "declare": {"documents": _packed(ids), "eos_id": EOS, "tied": True},
    }


@case("documents")
def end_counted_to_next_document() -> Arguments:
    """Documents are numbered by a running count of EOS, so that an EOS falls into the next document."""
    return _packing(late=False)


@case()
def end_counted_to_next_document_sound() -> Arguments:
    return _packing(late=True)


def rotate_in_time(x: Tensor, table: Tensor) -> Tensor:
    """Turn queries or keys that are laid out as [B, T, H, D]."""
    at = table[: x.shape[1], None, :]
    return rotate(x, at.cos(), at.sin())


class GroupedRotaryAttention(nn.Module):
    """Causal attention with rotary positions and half as many heads for keys and values."""

    def __init__(self, d: int, heads: int = 4, *, transposed: bool = False) -> None:
        super().__init__()
        self.heads, self.width, self.transposed = heads, d // heads, transposed
        self.q = nn.Linear(d, d, bias=False)
        self.kv = nn.Linear(d, d, bias=False)
        self.o = nn.Linear(d, d, bias=False)
        self.register_buffer("table", angles(64, self.width), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x).unflatten(-1, (self.heads, self.width))
        k, v = self.kv(x).unflatten(-1, (self.heads, self.width)).chunk(2, dim=2)
        if self.transposed:
            q, k, v = (part.transpose(1, 2) for part in (q, k, v))
            q, k = rotate_in_time(q, self.table), rotate_in_time(k, self.table)
        else:
            q, k = rotate_in_time(q, self.table), rotate_in_time(k, self.table)
            q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o(y.transpose(1, 2).flatten(2))


class RotaryLayer(nn.Module):
    """A layer in the manner of Llama."""

    def __init__(self, d: int, *, transposed: bool) -> None:
        super().__init__()
        self.attn_norm = nn.RMSNorm(d, eps=1e-5)
        self.attn = GroupedRotaryAttention(d, transposed=transposed)
        self.mlp_norm = nn.RMSNorm(d, eps=1e-5)
        self.mlp = SwiGlu(d, 2 * d)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.attn_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class RotaryDecoder(nn.Module):
    """A small Llama with grouped queries."""

    def __init__(self, vocabulary: int = 256, d: int = 64, *, transposed: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, d)
        self.layers = nn.ModuleList(RotaryLayer(d, transposed=transposed) for _ in range(3))
        self.norm = nn.RMSNorm(d, eps=1e-5)
        self.head = nn.Linear(d, vocabulary, bias=False)
        self.apply(draw)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def _rotary(*, transposed: bool) -> Arguments:
    torch.manual_seed(104)
    return {
        "model": RotaryDecoder(transposed=transposed),
        "batch": (text(4, 32, 256, seed=4),),
        "loss": lambda model, batch: next_token(model, batch[0]),
        "optimizer": adamw(6e-4),
        "make": lambda: RotaryDecoder(transposed=transposed),
    }


@case("order", place="layers.*")
def rotary_along_heads() -> Arguments:
    """Queries and keys are transposed before the rotation, which then turns heads and not positions."""
    return _rotary(transposed=True)


@case()
def rotary_along_heads_sound() -> Arguments:
    return _rotary(transposed=False)
