"""Models of images: a diffusion Transformer and a classifier of patches."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class DiTBlock(nn.Module):
    """A layer whose norms and branches are scaled by a condition, all of them zero at the start."""

    def __init__(self, dim: int, heads: int):
        super().__init__()
        self.norm_1 = nn.LayerNorm(dim, elementwise_affine=False)
        self.norm_2 = nn.LayerNorm(dim, elementwise_affine=False)
        self.attn = nn.MultiheadAttention(dim, heads, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))
        self.modulate = nn.Linear(dim, 6 * dim)
        nn.init.zeros_(self.modulate.weight)
        nn.init.zeros_(self.modulate.bias)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        modulated = self.modulate(F.silu(condition))[:, None]
        scale_1, shift_1, gate_1, scale_2, shift_2, gate_2 = modulated.chunk(6, -1)
        y = self.norm_1(x) * (1 + scale_1) + shift_1
        x = x + gate_1 * self.attn(y, y, y, need_weights=False)[0]
        return x + gate_2 * self.mlp(self.norm_2(x) * (1 + scale_2) + shift_2)


class DiT(nn.Module):
    """A diffusion Transformer over patches of 2 x 2, conditioned on a time and a class."""

    def __init__(self, dim: int = 64, layers: int = 4):
        super().__init__()
        self.patch = nn.Conv2d(4, dim, 2, 2)
        self.register_buffer("positions", torch.randn(1, 16, dim) * 0.02)
        self.time = nn.Sequential(nn.Linear(32, dim), nn.SiLU(), nn.Linear(dim, dim))
        self.classes = nn.Embedding(11, dim)
        self.blocks = nn.ModuleList(DiTBlock(dim, 4) for _ in range(layers))
        self.norm = nn.LayerNorm(dim, elementwise_affine=False)
        self.out = nn.Linear(dim, 16)
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.out.bias)

    def forward(self, x: Tensor, t: Tensor, y: Tensor) -> Tensor:
        h = self.patch(x).flatten(2).transpose(1, 2) + self.positions
        angles = t[:, None] * torch.exp(-torch.arange(16) / 16 * 9)
        condition = self.time(torch.cat([angles.cos(), angles.sin()], -1)) + self.classes(y)
        for block in self.blocks:
            h = block(h, condition)
        return self.out(self.norm(h))


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


class PatchClassifier(nn.Module):
    """A classifier of images with a zero head."""

    def __init__(self):
        super().__init__()
        self.patch = nn.Conv2d(3, 64, 8, 8)
        self.positions = nn.Parameter(torch.randn(1, 17, 64) * 0.02)
        self.cls = nn.Parameter(torch.zeros(1, 1, 64))
        layers = (nn.TransformerEncoderLayer(64, 4, 128, batch_first=True, norm_first=True) for _ in range(4))
        self.blocks = nn.ModuleList(layers)
        self.norm, self.head = nn.LayerNorm(64), nn.Linear(64, 10)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, pixels: Tensor) -> Tensor:
        x = self.patch(pixels).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.expand(len(x), -1, -1), x], 1) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x[:, 0]))
