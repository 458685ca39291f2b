"""Branches (attention, feed-forward) and the sublayer that puts a branch under a placement."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Protocol

import torch
from torch import Tensor, nn

from normlab.nn import ops
from normlab.nn.context import Context
from normlab.nn.ops import Dropout
from normlab.nn.placement import Placement, Site, Stream


class Sublayer(nn.Module):
    """A branch f under a placement: ``write(stream, f(read(stream), context))``."""

    def __init__(self, f: nn.Module, place: Placement, site: Site) -> None:
        super().__init__()
        self.f, self.place, self.site = f, place, site

    def forward(self, stream: Stream, context: Context) -> Stream:
        return self.place.write(stream, self.f(self.place.read(stream), context))


class Branch(nn.Module, ABC):
    """A branch whose matrices the schemes fill. Any other module can be a branch and keeps its own start."""

    @abstractmethod
    def matrices(self) -> dict[str, Tensor]:
        """Name (query, key, value, output, ffn_in, ffn_out) to weight `[out, in]`, views of packed ones."""


class Size(Protocol):
    """What a model's size is made of; ``spec.ModelConfig`` is one."""

    @property
    def dim(self) -> int: ...
    @property
    def ffn_dim(self) -> int: ...
    @property
    def heads(self) -> int: ...
    @property
    def encoder_layers(self) -> int: ...
    @property
    def decoder_layers(self) -> int: ...
    @property
    def dropout(self) -> float: ...
    @property
    def attention_dropout(self) -> float: ...
    @property
    def ffn_dropout(self) -> float: ...


class Attention(Branch):
    r"""Multi-head attention :math:`\mathrm{softmax}(QK^\top/\sqrt{d/h})V`, projected by packed matrices.

    Vaswani et al. 2017, Section 3.2 (arXiv 1706.03762). ``source`` says where keys come from: ``"self"`` (one
    packed `[3D, D]` matrix) or ``"memory"`` (`[D, D]` for queries, `[2D, D]` for keys and values). Batches
    are padded on the right, so a causal attention needs no padding mask: what is real never looks at what
    comes later.
    """

    def __init__(self, size: Size, *, source: str, causal: bool = False) -> None:
        super().__init__()
        if size.dim % size.heads:
            fitting = [h for h in range(1, size.dim + 1) if size.dim % h == 0 and h <= 4 * size.heads]
            raise ValueError(
                f"{size.heads} heads do not divide the width {size.dim}; heads that do: {fitting}"
            )
        self.heads, self.causal, self.from_memory = size.heads, causal, source == "memory"
        self.p = size.attention_dropout
        dim = size.dim
        if self.from_memory:
            self.q, self.kv = nn.Linear(dim, dim), nn.Linear(dim, 2 * dim)
        else:
            self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)
        self.dropout = Dropout(size.dropout)

    def matrices(self) -> dict[str, Tensor]:
        """Each projection on its own, `[D, D]` views of the packed weights."""
        if self.from_memory:
            query, (key, value) = self.q.weight, self.kv.weight.chunk(2)
        else:
            query, key, value = self.qkv.weight.chunk(3)
        return {"query": query, "key": key, "value": value, "output": self.out.weight}

    def forward(self, x: Tensor, context: Context) -> Tensor:
        q, k, v = self._from_memory(x, context) if self.from_memory else self._from_self(x)
        mask, causal = self._mask(context), self.causal
        if self.causal and context.cache is not None:
            k, v = context.cache.extend(self, k, v)
            mask, causal = context.cache.mask, False
        p = self.p if self.training else 0.0
        y = ops.attention(q, k, v, mask=mask, causal=causal, p=p)
        return self.dropout(self.out(y.transpose(1, 2).flatten(2)))

    def _split(self, projected: Tensor, parts: int) -> tuple[Tensor, ...]:
        """`[B, T, parts·D]` to ``parts`` tensors `[B, H, T, D/H]`."""
        return projected.unflatten(2, (parts, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)

    def _from_self(self, x: Tensor) -> tuple[Tensor, ...]:
        return self._split(self.qkv(x), 3)

    def _from_memory(self, x: Tensor, context: Context) -> tuple[Tensor, ...]:
        (q,) = self._split(self.q(x), 1)
        kept = context.cache.memory_of(self) if context.cache is not None else None
        if kept is not None:
            return q, *kept
        if context.memory is None:
            raise ValueError("attention to the memory needs context.memory; pass the encoder's output")
        k, v = self._split(self.kv(context.memory), 2)
        if context.cache is not None:
            context.cache.keep_memory(self, k, v)
        return q, k, v

    def _mask(self, context: Context) -> Tensor | None:
        if self.causal:
            return None
        real = context.memory_real if self.from_memory else context.real
        if real is None:
            return None
        mask = real.clone()
        mask[:, 0] = True  # a row of padding alone looks at itself: a softmax over nothing is not a number
        return mask[:, None, None, :]


class FeedForward(Branch):
    r""":math:`W_2 \max(0, W_1 x + b_1) + b_2`. Vaswani et al. 2017, Section 3.3 (arXiv 1706.03762)."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.inner = nn.Linear(size.dim, size.ffn_dim)
        self.outer = nn.Linear(size.ffn_dim, size.dim)
        self.inner_dropout = Dropout(size.ffn_dropout)
        self.dropout = Dropout(size.dropout)

    def matrices(self) -> dict[str, Tensor]:
        """Both weights, `[D_ff, D]` and `[D, D_ff]`."""
        return {"ffn_in": self.inner.weight, "ffn_out": self.outer.weight}

    def forward(self, x: Tensor, context: Context) -> Tensor:
        return self.dropout(self.outer(self.inner_dropout(torch.relu(self.inner(x)))))


BRANCHES = {
    "self_attention": lambda size: Attention(size, source="self"),
    "causal_attention": lambda size: Attention(size, source="self", causal=True),
    "cross_attention": lambda size: Attention(size, source="memory"),
    "ffn": FeedForward,
}
"""Role to branch. The roles of a layer, in order, make the layer."""

ENCODER_LAYER = ("self_attention", "ffn")
DECODER_LAYER = ("causal_attention", "cross_attention", "ffn")
