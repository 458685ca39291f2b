"""What several cases of this list are made of: a decoder, an encoder, their losses and optimizers."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import AdamW

from corpus.batches import VOCAB

Cosines = tuple[Tensor, Tensor]
"""Cosines and sines `[B, 1, T, w]`, or `[T, w]` where all rows have the same positions."""

# ------------------------------------------------------------------------------------------------- decoder


def rotate_half(x: Tensor) -> Tensor:
    a, b = x.chunk(2, dim=-1)
    return torch.cat((-b, a), dim=-1)


def rotate(x: Tensor, cosines: Cosines) -> Tensor:
    cos, sin = cosines
    return (x * cos + rotate_half(x) * sin).type_as(x)


def inverse_frequencies(width: int, base: float = 10_000.0) -> Tensor:
    return 1.0 / base ** (torch.arange(0, width, 2).float() / width)


class Rotary(nn.Module):
    inv_freq: Tensor

    def __init__(self, width: int):
        super().__init__()
        self.register_buffer("inv_freq", inverse_frequencies(width), persistent=False)

    def forward(self, positions: Tensor) -> Cosines:
        angles = positions[..., None].float() * self.inv_freq.float()
        angles = torch.cat((angles, angles), dim=-1)
        if positions.dim() == 2:
            angles = angles.unsqueeze(1)
        return angles.cos(), angles.sin()


class RMSNorm(nn.Module):
    def __init__(self, dim: int, eps: float = 1e-6):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(dim)), eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)).type_as(x) * self.weight


class Attention(nn.Module):
    """Rotary attention; ``mask`` says which pairs see each other, and without it attention is causal."""

    def __init__(self, dim: int, heads: int):
        super().__init__()
        self.heads = heads
        self.q_proj, self.k_proj = nn.Linear(dim, dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.v_proj, self.o_proj = nn.Linear(dim, dim, bias=False), nn.Linear(dim, dim, bias=False)

    def split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def forward(self, x: Tensor, cosines: Cosines, mask: Tensor | None = None) -> Tensor:
        q, k, v = (self.split(map_(x)) for map_ in (self.q_proj, self.k_proj, self.v_proj))
        q, k = rotate(q, cosines), rotate(k, cosines)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        return self.o_proj(y.transpose(1, 2).flatten(2))


class GatedMLP(nn.Module):
    def __init__(self, dim: int, hidden: int | None = None):
        super().__init__()
        hidden = hidden or 2 * dim
        self.gate_proj, self.up_proj = nn.Linear(dim, hidden, bias=False), nn.Linear(dim, hidden, bias=False)
        self.down_proj = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nn.Module):
    def __init__(self, dim: int, heads: int):
        super().__init__()
        self.input_layernorm, self.self_attn = RMSNorm(dim), Attention(dim, heads)
        self.post_attention_layernorm, self.mlp = RMSNorm(dim), GatedMLP(dim)

    def forward(self, x: Tensor, cosines: Cosines, mask: Tensor | None = None) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cosines, mask)
        return x + self.mlp(self.post_attention_layernorm(x))


def init_weights(module: nn.Module) -> None:
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


class Decoder(nn.Module):
    """A decoder of the Llama kind."""

    def __init__(
        self,
        dim: int = 48,
        layers: int = 2,
        heads: int = 4,
        *,
        vocab: int = VOCAB,
        layer: Callable[[int, int], nn.Module] = DecoderLayer,
    ):
        super().__init__()
        self.dim = dim
        self.embed_tokens = nn.Embedding(vocab, dim)
        self.rotary = Rotary(dim // heads)
        self.layers = nn.ModuleList(layer(dim, heads) for _ in range(layers))
        self.norm = RMSNorm(dim)
        self.lm_head = nn.Linear(dim, vocab, bias=False)
        self.apply(init_weights)

    def run(self, x: Tensor, mask: Tensor | None = None, positions: Tensor | None = None) -> Tensor:
        """Return the normed states of embedded tokens."""
        if positions is None:
            positions = torch.arange(x.shape[1], device=x.device)
        cosines = self.rotary(positions)
        for layer in self.layers:
            x = layer(x, cosines, mask)
        return self.norm(x)

    def hidden(self, ids: Tensor, mask: Tensor | None = None, positions: Tensor | None = None) -> Tensor:
        return self.run(self.embed_tokens(ids), mask, positions)

    def forward(self, ids: Tensor, mask: Tensor | None = None, positions: Tensor | None = None) -> Tensor:
        return self.lm_head(self.hidden(ids, mask, positions))


# ------------------------------------------------------------------------------------------------- encoder


class EncoderLayer(nn.Module):
    """A Pre-LN layer with packed queries, keys and values; ``seen`` is a mask of keys or of pairs."""

    def __init__(self, dim: int, heads: int, ratio: int = 2):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.fc1, self.fc2 = nn.Linear(dim, ratio * dim), nn.Linear(ratio * dim, dim)

    def attend(self, x: Tensor, seen: Tensor | None) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return self.proj(F.scaled_dot_product_attention(q, k, v, attn_mask=seen).transpose(1, 2).flatten(2))

    def forward(self, x: Tensor, seen: Tensor | None = None) -> Tensor:
        x = x + self.attend(self.norm1(x), seen)
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x))))


def sinusoids(positions: Tensor, dim: int, longest: float = 10_000.0) -> Tensor:
    """Return the waves `[..., D]` of positions or times."""
    rates = torch.exp(-math.log(longest) * torch.arange(dim // 2, device=positions.device) / (dim // 2))
    angles = positions[..., None].float() * rates
    return torch.cat((angles.sin(), angles.cos()), dim=-1)


# ------------------------------------------------------------------------------------ losses and optimizers


def next_token_loss(logits: Tensor, ids: Tensor, ignore: int = -100) -> Tensor:
    """Return the mean loss of the next token, whose id may be ignored."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten(), ignore_index=ignore)


def language_loss(model: nn.Module, ids: Tensor) -> Tensor:
    return next_token_loss(model(ids), ids)


def token_log_probs(logits: Tensor, ids: Tensor) -> Tensor:
    """Return the log-probability `[B, T - 1]` of each token but the first."""
    chosen = ids[:, 1:, None]
    return logits[:, :-1].float().log_softmax(-1).gather(-1, chosen).squeeze(-1)


def adamw(model: nn.Module, lr: float = 1e-3) -> AdamW:
    """Return AdamW of all trained parameters, without decay."""
    trained = [p for p in model.parameters() if p.requires_grad]
    return AdamW(trained, lr=lr, betas=(0.9, 0.95), weight_decay=0.0)


def decaying_adamw(model: nn.Module, lr: float = 1e-3, decay: float = 0.05) -> AdamW:
    """Return AdamW that decays the weights of linear maps alone."""
    decayed = {m.weight for m in model.modules() if isinstance(m, nn.Linear) and m.weight.requires_grad}
    trained = [p for p in model.parameters() if p.requires_grad]
    return adamw_of([p for p in trained if p in decayed], [p for p in trained if p not in decayed], lr, decay)


def adamw_of(
    decayed: list[nn.Parameter], others: list[nn.Parameter], lr: float = 1e-3, decay: float = 0.05
) -> AdamW:
    """Return AdamW that decays the first parameters and not the others."""
    groups: list[dict[str, Any]] = [
        {"params": decayed, "weight_decay": decay},
        {"params": others, "weight_decay": 0.0},
    ]
    return AdamW(groups, lr=lr, betas=(0.9, 0.95))


def setup(
    make: Callable[[], nn.Module],
    batch: Any,
    loss: Callable[[Any, Any], Tensor],
    optimizer: Callable[[Any], Any] = adamw,
    *,
    seed: int = 0,
    **others: Any,
) -> dict[str, Any]:
    """Return the arguments of a check of a new model, and under "maker" what its user does not hand over."""
    torch.manual_seed(seed)
    model = make()
    arguments = {"model": model, "batch": batch, "loss": loss, "optimizer": optimizer(model), "maker": make}
    return arguments | others


def remade(
    make: Callable[[], nn.Module],
    batch: Any,
    loss: Callable[[Any, Any], Tensor],
    optimizer: Callable[[Any], Any] = adamw,
    **others: Any,
) -> dict[str, Any]:
    """Return the arguments of a user who also hands over how the model is made."""
    return setup(make, batch, loss, optimizer, **others) | {"make": make}
