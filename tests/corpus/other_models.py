"""Models that are no language models of one file: diffusion, torch's own layers, images."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .gpt import VOCAB

causal_mask = nn.Transformer.generate_square_subsequent_mask


class DiTBlock(nn.Module):
    """A layer whose norms and branches are scaled by a condition, all of them zero at the start."""

    def __init__(self, dim: int, heads: int):
        super().__init__()
        self.n1 = nn.LayerNorm(dim, elementwise_affine=False)
        self.n2 = nn.LayerNorm(dim, elementwise_affine=False)
        self.a = nn.MultiheadAttention(dim, heads, batch_first=True)
        self.m = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))
        self.ada = nn.Linear(dim, 6 * dim)
        nn.init.zeros_(self.ada.weight)
        nn.init.zeros_(self.ada.bias)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        scale1, shift1, gate1, scale2, shift2, gate2 = self.ada(F.silu(condition))[:, None].chunk(6, -1)
        y = self.n1(x) * (1 + scale1) + shift1
        x = x + gate1 * self.a(y, y, y, need_weights=False)[0]
        return x + gate2 * self.m(self.n2(x) * (1 + scale2) + shift2)


class DiT(nn.Module):
    """A diffusion Transformer over patches of 2 x 2, conditioned on a time and a class."""

    def __init__(self, dim: int = 64, layers: int = 4):
        super().__init__()
        self.p = nn.Conv2d(4, dim, 2, 2)
        self.register_buffer("pos", torch.randn(1, 16, dim) * 0.02)
        self.t = nn.Sequential(nn.Linear(32, dim), nn.SiLU(), nn.Linear(dim, dim))
        self.y = nn.Embedding(11, dim)
        self.b = nn.ModuleList(DiTBlock(dim, 4) for _ in range(layers))
        self.nf = nn.LayerNorm(dim, elementwise_affine=False)
        self.out = nn.Linear(dim, 16)
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.out.bias)

    def forward(self, x: Tensor, t: Tensor, y: Tensor) -> Tensor:
        h = self.p(x).flatten(2).transpose(1, 2) + self.pos
        angles = t[:, None] * torch.exp(-torch.arange(16) / 16 * 9)
        condition = self.t(torch.cat([angles.cos(), angles.sin()], -1)) + self.y(y)
        for block in self.b:
            h = block(h, condition)
        return self.out(self.nf(h))


def patches(x: Tensor) -> Tensor:
    """Return the 16 patches `[B, 16, 16]` of images `[B, 4, 8, 8]`."""
    return x.unfold(2, 2, 2).unfold(3, 2, 2).permute(0, 2, 3, 1, 4, 5).reshape(len(x), 16, 16)


def flow_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the error of the predicted velocity at random times, with random noise."""
    x, classes = batch
    noise, time = torch.randn_like(x), torch.rand(len(x))
    t = time[:, None, None, None]
    velocity = model(x * (1 - t) + noise * t, time * 1000, classes)
    return F.mse_loss(velocity, patches(noise - x))


class TorchDecoder(nn.Module):
    """A decoder of nn.TransformerEncoder with a causal mask."""

    def __init__(self):
        super().__init__()
        self.e = nn.Embedding(VOCAB, 64)
        self.p = nn.Parameter(torch.randn(64, 64) * 0.02)
        layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True, norm_first=True)
        self.t = nn.TransformerEncoder(layer, 4)
        self.o = nn.Linear(64, VOCAB)

    def forward(self, ids: Tensor) -> Tensor:
        length = ids.shape[1]
        x = self.e(ids) * 0.1 + self.p[:length]
        return self.o(self.t(x, mask=causal_mask(length), is_causal=True))


class TorchSeq2Seq(nn.Module):
    """nn.Transformer with time first inside."""

    def __init__(self):
        super().__init__()
        self.e = nn.Embedding(VOCAB, 64)
        self.p = nn.Parameter(torch.randn(64, 1, 64) * 0.02)
        self.t = nn.Transformer(64, 4, 3, 3, 128)
        self.o = nn.Linear(64, VOCAB)

    def embed(self, ids: Tensor) -> Tensor:
        """Return vectors `[T, B, D]` of ids `[B, T]`."""
        return self.e(ids.T) + self.p[: ids.shape[1]]

    def translate(self, source: Tensor, target: Tensor) -> Tensor:
        return self.t(source, target, tgt_mask=causal_mask(len(target)))

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        return self.o(self.translate(self.embed(source), self.embed(target))).transpose(0, 1)


def next_target_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the mean loss of the next token of the target."""
    source, target = batch
    return F.cross_entropy(model(source, target[:, :-1]).flatten(0, 1), target[:, 1:].flatten())


class MeanClassifier(nn.Module):
    """nn.TransformerEncoder whose mean over real tokens is classified."""

    def __init__(self, classes: int = 3):
        super().__init__()
        self.e = nn.TransformerEncoder(nn.TransformerEncoderLayer(64, 4, 128, batch_first=True), 4)
        self.te = nn.Embedding(VOCAB, 64)
        self.pe = nn.Parameter(torch.randn(1, 64, 64) * 0.02)
        self.c = nn.Linear(64, classes)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        h = self.e(self.te(ids) + self.pe[:, : ids.shape[1]], src_key_padding_mask=~mask)
        return self.c((h * mask[..., None]).sum(1) / mask.sum(1, keepdim=True))


class PatchClassifier(nn.Module):
    """A classifier of images with a zero head."""

    def __init__(self):
        super().__init__()
        self.p = nn.Conv2d(3, 64, 8, 8)
        self.pos = nn.Parameter(torch.randn(1, 17, 64) * 0.02)
        self.cls = nn.Parameter(torch.zeros(1, 1, 64))
        layers = (nn.TransformerEncoderLayer(64, 4, 128, batch_first=True, norm_first=True) for _ in range(4))
        self.b = nn.ModuleList(layers)
        self.n, self.o = nn.LayerNorm(64), nn.Linear(64, 10)
        nn.init.zeros_(self.o.weight)
        nn.init.zeros_(self.o.bias)

    def forward(self, pixels: Tensor) -> Tensor:
        x = self.p(pixels).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.expand(len(x), -1, -1), x], 1) + self.pos
        for block in self.b:
            x = block(x)
        return self.o(self.n(x[:, 0]))
