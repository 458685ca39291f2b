"""Sound decoders whose layers, streams or starts are unusual, third list."""

from __future__ import annotations

import math
import random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import AdamW

from .case import Arguments, Case, collect
from .gpt import GPT, Block, made_of, small
from .rotary import RotaryBlock, rotate
from .rotary import made_of as rotary_of
from .setups import own, shifted_tokens

SOUND3: dict[str, Case] = {}
case = collect(SOUND3)

# -------------------------------------------------------------------------------------------------- layers


class DeepNorm(Block):
    def forward(self, x: Tensor) -> Tensor:
        x = self.n1(1.8 * x + self.attention(x))
        return self.n2(1.8 * x + self.m(x))


@case()
def deepnorm() -> Arguments:
    return own(made_of(DeepNorm))


class ReZero(Block):
    """A layer without norms, whose branches have a scale of zero at the start."""

    def __init__(self, *args: Any):
        super().__init__(*args)
        self.n1, self.n2 = nn.Identity(), nn.Identity()
        self.a = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.a * self.attention(x)
        return x + self.a * self.m(x)


@case()
def rezero() -> Arguments:
    return own(made_of(ReZero))


class LayerScale(Block):
    def __init__(self, dim: int, *args: Any):
        super().__init__(dim, *args)
        self.g1, self.g2 = (nn.Parameter(torch.full((dim,), 1e-4)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.g1 * self.attention(self.n1(x))
        return x + self.g2 * self.m(self.n2(x))


@case()
def layerscale() -> Arguments:
    return own(made_of(LayerScale))


class Parallel(Block):
    """A layer whose attention and feed-forward read the same norm."""

    def __init__(self, *args: Any):
        super().__init__(*args)
        del self.n2

    def forward(self, x: Tensor) -> Tensor:
        normed = self.n1(x)
        return x + self.attention(normed) + self.m(normed)


@case()
def parallel() -> Arguments:
    return own(made_of(Parallel))


class StochasticDepth(Block):
    """A layer that is skipped in a fifth of the training steps, as Python's random numbers have it."""

    def forward(self, x: Tensor) -> Tensor:
        return x if self.training and random.random() > 0.8 else super().forward(x)


@case()
def stochdepth() -> Arguments:
    return own(made_of(StochasticDepth), step=None)


# ----------------------------------------------------------------------------------------------- attention


class Alibi(RotaryBlock):
    """Attention with a penalty for distance, and no other positions."""

    def place(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return q, k

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (y.repeat_interleave(2, 1) for y in (k, v))
        i = torch.arange(q.shape[-2])
        slopes = 2.0 ** -torch.arange(1, self.heads + 1)[:, None, None].float()
        bias = -(i[:, None] - i[None]).clamp_min(0) * slopes
        scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5 + bias
        return scores.masked_fill(i[None] > i[:, None], -torch.inf).softmax(-1) @ v


@case()
def alibi_own() -> Arguments:
    return own(rotary_of(Alibi))


class Windowed(RotaryBlock):
    """Attention to the last four tokens."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        i = torch.arange(q.shape[-2])
        distance = i[:, None] - i[None]
        mask = (distance >= 0) & (distance < 4)
        return F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)


@case()
def sliding_own() -> Arguments:
    return own(rotary_of(Windowed))


class NormedHeads(RotaryBlock):
    """Attention of normed queries and keys, with a scale of its own."""

    def place(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        q, k = (F.rms_norm(y, (y.shape[-1],)) for y in (q, k))
        return rotate(q), rotate(k)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.12, enable_gqa=True)


@case()
def qknorm_own() -> Arguments:
    return own(rotary_of(NormedHeads))


class PrefixBlock(Block):
    """Attention that sees all of the first eight tokens."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        length = q.shape[-2]
        mask = torch.ones(length, length, dtype=torch.bool).tril()
        mask[:8, :8] = True
        return F.scaled_dot_product_attention(q, k, v, mask)


@case()
def prefix_lm() -> Arguments:
    """A prefix is read in both directions, and nothing in it is predicted."""
    ids, labels = shifted_tokens()
    labels = labels.clone()
    labels[:, :7] = -100
    return own(made_of(PrefixBlock), batch=(ids, labels), step=None)


class WidthScaled(Block):
    """Attention whose scores are divided by the head's width, as in µP."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=1 / q.shape[-1])


def mup_groups(model: nn.Module, lr: float) -> AdamW:
    """Return AdamW with a quarter of the rate for hidden matrices."""
    named = list(model.named_parameters())
    groups = [
        {"params": [p for n, p in named if p.dim() > 1 and not n.startswith("h.")], "lr": lr},
        {"params": [p for n, p in named if p.dim() > 1 and n.startswith("h.")], "lr": lr / 4},
        {"params": [p for _, p in named if p.dim() < 2], "lr": lr},
    ]
    return AdamW(groups, weight_decay=0.0)


@case()
def mup() -> Arguments:
    return own(made_of(WidthScaled), optimizer=mup_groups)


# ------------------------------------------------------------------------------------------ streams, starts


class Universal(GPT):
    """One layer that is applied four times."""

    def __init__(self):
        super().__init__(64, 1)

    def blocks(self, x: Tensor) -> Tensor:
        for _ in range(4):
            x = self.h[0](x)
        return x


@case()
def universal() -> Arguments:
    return own(Universal)


class UNet(GPT):
    """Layers of the second half read those of the first, and logits are capped."""

    def blocks(self, x: Tensor) -> Tensor:
        half = len(self.h) // 2
        kept: list[Tensor] = []
        for block in self.h[:half]:
            x = block(x)
            kept.append(x)
        for block in self.h[half:]:
            x = block(x + 0.5 * kept.pop())
        return x

    def logits(self, x: Tensor) -> Tensor:
        return 30 * torch.tanh(super().logits(x) / 30)


@case()
def unet_softcap() -> Arguments:
    return own(lambda: UNet(64, 4))


@case()
def weightnorm() -> Arguments:
    def make() -> GPT:
        model = small()
        for block in model.h:
            nn.utils.parametrizations.weight_norm(block.o)
        return model

    return own(make)


@case()
def depth_init() -> Arguments:
    """Output matrices are drawn smaller in each layer than in the last."""

    def make() -> GPT:
        model = GPT(64, 6)
        for i, block in enumerate(model.h, start=1):
            nn.init.normal_(block.o.weight, 0, 0.02 / math.sqrt(2 * i))
            nn.init.normal_(block.m[2].weight, 0, 0.02 / math.sqrt(2 * i))
        return model

    return own(make)
