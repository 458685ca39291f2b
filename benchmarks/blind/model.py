"""An encoder-decoder Transformer from the papers' equations in plain PyTorch, Post-LN or Pre-LN.

One embedding serves source, target and output; positions are sinusoids and the activation is ReLU. Post-LN is
``LN(x + F(x))``; Pre-LN is ``x + F(LN(x))`` with a last norm on each stack.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

PAD = 0


class ScaleNorm(nn.Module):
    """``g·x/‖x‖`` with one trained ``g``, which starts at ``√d``."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.g = nn.Parameter(torch.tensor(math.sqrt(dim)))

    def forward(self, x: Tensor) -> Tensor:
        return self.g * F.normalize(x, dim=-1, eps=1e-5)


NORMS = {"layernorm": nn.LayerNorm, "scalenorm": ScaleNorm}


class Attention(nn.Module):
    """Scaled dot-product attention of several heads, with biases."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.output = (nn.Linear(dim, dim) for _ in range(4))

    def forward(self, x: Tensor, memory: Tensor, mask: Tensor) -> Tensor:
        split = [
            y.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for y in (self.query(x), self.key(memory), self.value(memory))
        ]
        heads = F.scaled_dot_product_attention(*split, attn_mask=mask)
        return self.output(heads.transpose(1, 2).flatten(2))


class FeedForward(nn.Sequential):
    """``W2·ReLU(W1·x)``, with biases."""

    def __init__(self, dim: int, inner: int) -> None:
        super().__init__(nn.Linear(dim, inner), nn.ReLU(), nn.Linear(inner, dim))


class Stack(nn.Module):
    """The encoder's layers, or the decoder's where each layer also attends to the encoder's output."""

    def __init__(self, size: dict[str, Any], *, decoder: bool) -> None:
        super().__init__()
        dim, side = size["dim"], "decoder" if decoder else "encoder"
        self.pre = size[f"{side}_placement"] == "pre"
        attentions = 2 if decoder else 1
        self.layers = nn.ModuleList()
        for _ in range(size[f"{side}_layers"]):
            self.layers.extend(Attention(dim, size["heads"]) for _ in range(attentions))
            self.layers.append(FeedForward(dim, size["ffn_dim"]))
        norm = NORMS[size["norm"]]
        self.norms = nn.ModuleList(norm(dim) for _ in self.layers)
        self.last = norm(dim) if self.pre else nn.Identity()
        self.sublayers = attentions + 1

    def forward(self, x: Tensor, mask: Tensor, memory: Tensor | None, memory_mask: Tensor | None) -> Tensor:
        for number, (layer, norm) in enumerate(zip(self.layers, self.norms, strict=True)):
            read = norm(x) if self.pre else x
            match layer, number % self.sublayers:
                case FeedForward(), _:
                    branch = layer(read)
                case _, 0:
                    branch = layer(read, read, mask)
                case _:
                    branch = layer(read, memory, memory_mask)
            x = x + branch if self.pre else norm(x + branch)
        return self.last(x)


class Transformer(nn.Module):
    """Token ids to logits, with a plain embedding or FixNorm's, whose rows have length 1 at every use."""

    def __init__(self, size: dict[str, Any], vocab: int, seed: int) -> None:
        super().__init__()
        self.fixnorm = size["embedding"] == "fixnorm"
        self.embedding = nn.Parameter(torch.empty(vocab, size["dim"]))
        self.encoder, self.decoder = Stack(size, decoder=False), Stack(size, decoder=True)
        self.start(size["scheme"], torch.Generator().manual_seed(seed))
        places = torch.arange(size["max_positions"])[:, None]
        angles = places * 10000.0 ** (-torch.arange(0, size["dim"], 2) / size["dim"])
        self.register_buffer("positions", torch.cat([angles.sin(), angles.cos()], 1), persistent=False)

    def start(self, scheme: str, random: torch.Generator) -> None:
        """Xavier's normal numbers, with SmallInit's N(0, 2/(d + 4d)) in attention; biases are 0."""
        dim = self.embedding.shape[1]
        nn.init.normal_(self.embedding, std=dim**-0.5, generator=random)
        if self.fixnorm:
            nn.init.uniform_(self.embedding, -0.01, 0.01, generator=random)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                fans = (
                    5 * dim
                    if scheme == "smallinit" and module.weight.shape == (dim, dim)
                    else sum(module.weight.shape)
                )
                nn.init.normal_(module.weight, std=math.sqrt(2 / fans), generator=random)
                nn.init.zeros_(module.bias)

    def table(self) -> Tensor:
        return F.normalize(self.embedding, dim=-1) if self.fixnorm else self.embedding

    def embed(self, ids: Tensor) -> Tensor:
        table = self.table()
        return table[ids] * math.sqrt(table.shape[1]) + self.positions[: ids.shape[1]]

    def encode(self, source: Tensor) -> tuple[Tensor, Tensor]:
        """The encoder's output and the mask that hides padding."""
        seen = (source != PAD)[:, None, None, :]
        return self.encoder(self.embed(source), seen, None, None), seen

    def decode(self, target: Tensor, memory: Tensor, seen: Tensor) -> Tensor:
        causal = torch.ones(target.shape[1], target.shape[1], dtype=torch.bool).tril()
        return self.decoder(self.embed(target), causal, memory, seen) @ self.table().T

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        return self.decode(target, *self.encode(source))
