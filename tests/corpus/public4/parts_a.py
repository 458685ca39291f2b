"""What several cases of this half are made of: blocks, losses, optimizers and a plain step."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LRScheduler

Batch = dict[str, Tensor]

# ---------------------------------------------------------------------------------------------------- models


class FeedForward(nn.Sequential):
    def __init__(self, dim: int, ratio: int = 2, dropout: float = 0.0):
        super().__init__(
            nn.Linear(dim, ratio * dim), nn.GELU(), nn.Linear(ratio * dim, dim), nn.Dropout(dropout)
        )


class Attention(nn.Module):
    """Attention of ``x`` to a context, or to itself; ``mask`` is true for pairs that see each other."""

    def __init__(self, dim: int, heads: int):
        super().__init__()
        self.heads = heads
        self.to_q, self.to_kv = nn.Linear(dim, dim), nn.Linear(dim, 2 * dim)
        self.to_out = nn.Linear(dim, dim)

    def forward(
        self, x: Tensor, context: Tensor | None = None, mask: Tensor | None = None, *, causal: bool = False
    ) -> Tensor:
        context = x if context is None else context
        q = self.to_q(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        k, v = self.to_kv(context).unflatten(-1, (2, self.heads, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal)
        return self.to_out(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """A Pre-LN block; with ``cross``, it also reads a memory."""

    def __init__(self, dim: int, heads: int, *, cross: bool = False):
        super().__init__()
        self.attn_norm, self.attn = nn.LayerNorm(dim), Attention(dim, heads)
        self.cross_norm = nn.LayerNorm(dim) if cross else None
        self.cross = Attention(dim, heads) if cross else None
        self.ff_norm, self.ff = nn.LayerNorm(dim), FeedForward(dim)

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        memory: Tensor | None = None,
        memory_mask: Tensor | None = None,
        *,
        causal: bool = False,
    ) -> Tensor:
        x = x + self.attn(self.attn_norm(x), mask=mask, causal=causal)
        if self.cross is not None:
            x = x + self.cross(self.cross_norm(x), memory, memory_mask)
        return x + self.ff(self.ff_norm(x))


def draw_weights(model: nn.Module, std: float = 0.02) -> None:
    """Draw maps and tables from a normal distribution; biases begin at 0."""
    for module in model.modules():
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=std)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)


def redraw_layers(layers: nn.Module) -> None:
    """Draw the matrices of layers anew, which PyTorch's stacks make as copies of one layer."""
    for parameter in layers.parameters():
        if parameter.dim() > 1:
            nn.init.xavier_uniform_(parameter)


def waves(positions: Tensor, dim: int) -> Tensor:
    """Return sines and cosines `[..., D]` of positions."""
    rates = torch.exp(-math.log(10_000.0) * torch.arange(0, dim, 2, device=positions.device) / dim)
    angles = positions[..., None].float() * rates
    return torch.cat((angles.sin(), angles.cos()), dim=-1)


def rotated(x: Tensor, base: float = 10_000.0) -> Tensor:
    """Rotate neighbouring features of `[..., T, w]` by their positions."""
    length, width = x.shape[-2:]
    rates = base ** -(torch.arange(0, width, 2, device=x.device) / width)
    angles = torch.arange(length, device=x.device)[:, None] * rates
    even, odd = x[..., 0::2].float(), x[..., 1::2].float()
    turned = (even * angles.cos() - odd * angles.sin(), odd * angles.cos() + even * angles.sin())
    return torch.stack(turned, dim=-1).flatten(-2).type_as(x)


def causal_pairs(length: int) -> Tensor:
    return torch.ones(length, length, dtype=torch.bool).tril()


# ------------------------------------------------------------------------------------ losses and optimizers


def mean_token_loss(logits: Tensor, targets: Tensor, ignore_index: int = -100) -> Tensor:
    """Return the mean cross-entropy of targets that are already aligned with the logits."""
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=ignore_index)


def next_token_loss(model: nn.Module, ids: Tensor) -> Tensor:
    return mean_token_loss(model(ids[:, :-1]), ids[:, 1:])


def matrices(model: nn.Module) -> set[nn.Parameter]:
    """Return what weight decay is meant for: the weights of linear maps, convolutions and attention."""
    maps = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose2d, nn.ConvTranspose3d)
    weights = {module.weight for module in model.modules() if isinstance(module, maps)}
    packed = {
        module.in_proj_weight for module in model.modules() if isinstance(module, nn.MultiheadAttention)
    }
    tables = {module.weight for module in model.modules() if isinstance(module, nn.Embedding)}
    return (weights | packed) - tables


def decaying_adamw(model: nn.Module, lr: float = 1e-3, weight_decay: float = 0.05) -> AdamW:
    """Return AdamW that decays matrices, and neither tables nor vectors."""
    decayed = matrices(model)
    trained = [p for p in model.parameters() if p.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": [p for p in trained if p in decayed], "weight_decay": weight_decay},
        {"params": [p for p in trained if p not in decayed], "weight_decay": 0.0},
    ]
    return AdamW(groups, lr=lr, betas=(0.9, 0.95))


def undecayed_adamw(model: nn.Module, lr: float = 1e-3) -> AdamW:
    trained = [p for p in model.parameters() if p.requires_grad]
    return AdamW(trained, lr=lr, weight_decay=0.0)


def step_of(loss: Any) -> Any:
    """Return a plain training step on a loss."""

    def step(model: Any, batch: Any, optimizer: Optimizer, scheduler: LRScheduler | None = None) -> Tensor:
        model.train()
        optimizer.zero_grad()
        value = loss(model, batch)
        value.backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        return value.detach()

    return step
