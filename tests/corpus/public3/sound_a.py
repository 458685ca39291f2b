"""Sound language models and encoders, as people write them in 2025 and 2026."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from torch.utils.checkpoint import checkpoint

from corpus.batches import BOS, EOS, MASK, PAD, VOCAB, generator, padded_text, text
from corpus.case import Arguments
from corpus.public2.blocks import remade, setup

from .case import sound
from .parts_a import configure_adamw, plain_adamw, shifted_loss, token_loss

Batch = dict[str, Tensor]
Rotation = tuple[Tensor, Tensor]
"""Cosines and sines `[T, w / 2]`."""

# -------------------------------------------------------------------------------------------- what is shared


def rotation(length: int, width: int, theta: float = 10_000.0) -> Rotation:
    """Return the rotations of the first positions."""
    freqs = theta ** -(torch.arange(0, width, 2) / width)
    angles = torch.outer(torch.arange(length).float(), freqs)
    return angles.cos(), angles.sin()


def apply_rotary(x: Tensor, turn: Rotation) -> Tensor:
    """Rotate the halves of `[..., T, w]` against each other."""
    cos, sin = turn
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).type_as(x)


def causal_band(length: int, window: int | None = None) -> Tensor:
    """Return which pairs see each other: all of the past, or its last ``window`` tokens."""
    seen = torch.ones(length, length, dtype=torch.bool).tril()
    return seen if window is None else seen.triu(1 - window)


class SwiGLU(nn.Module):
    def __init__(self, dim: int, hidden: int):
        super().__init__()
        self.w1, self.w3 = nn.Linear(dim, hidden, bias=False), nn.Linear(dim, hidden, bias=False)
        self.w2 = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


def normal_weights(model: nn.Module, std: float = 0.02) -> None:
    for module in model.modules():
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=std)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)


# ----------------------------------------------------------------------------------------- sinks and windows


class SinkAttention(nn.Module):
    """Grouped attention whose softmax has one more place, a learned number of each head."""

    def __init__(self, dim: int, heads: int, groups: int, window: int | None):
        super().__init__()
        self.heads, self.groups, self.window, self.head_dim = heads, groups, window, dim // heads
        self.q_proj = nn.Linear(dim, dim)
        self.k_proj, self.v_proj = (nn.Linear(dim, groups * self.head_dim) for _ in range(2))
        self.o_proj = nn.Linear(dim, dim)
        self.sinks = nn.Parameter(torch.zeros(heads))

    def forward(self, x: Tensor, turn: Rotation) -> Tensor:
        batch, length, dim = x.shape
        q = self.q_proj(x).view(batch, length, self.heads, -1).transpose(1, 2)
        k = self.k_proj(x).view(batch, length, self.groups, -1).transpose(1, 2)
        v = self.v_proj(x).view(batch, length, self.groups, -1).transpose(1, 2)
        q, k = apply_rotary(q, turn), apply_rotary(k, turn)
        k = k.repeat_interleave(self.heads // self.groups, dim=1)
        v = v.repeat_interleave(self.heads // self.groups, dim=1)
        scores = q @ k.transpose(2, 3) * self.head_dim**-0.5
        hidden = ~causal_band(length, self.window).to(x.device)
        scores = scores.masked_fill(hidden, torch.finfo(scores.dtype).min)
        sinks = self.sinks.view(1, -1, 1, 1).expand(batch, -1, length, 1)
        weights = torch.cat((scores, sinks), dim=-1).softmax(dim=-1)[..., :-1]
        return self.o_proj((weights @ v).transpose(1, 2).reshape(batch, length, dim))


class ClampedGLU(nn.Module):
    """A gated feed-forward whose inputs are clamped and whose linear half is one more than it was."""

    def __init__(self, dim: int, hidden: int, limit: float = 7.0, alpha: float = 1.702):
        super().__init__()
        self.gate_up, self.down = nn.Linear(dim, 2 * hidden), nn.Linear(hidden, dim)
        self.limit, self.alpha = limit, alpha

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return self.down(gate * torch.sigmoid(self.alpha * gate) * (up + 1))


class SinkModel(nn.Module):
    def __init__(self, dim: int = 48, layers: int = 4):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, dim)
        self.attention = nn.ModuleList(
            SinkAttention(dim, 4, 2, 8 if i % 2 == 0 else None) for i in range(layers)
        )
        self.mlp = nn.ModuleList(ClampedGLU(dim, dim) for _ in range(layers))
        self.norms = nn.ModuleList(nn.RMSNorm(dim, eps=1e-5) for _ in range(2 * layers + 1))
        self.unembedding = nn.Linear(dim, VOCAB, bias=False)
        normal_weights(self)

    def forward(self, ids: Tensor) -> Tensor:
        x, turn = self.embedding(ids), rotation(ids.shape[1], 12, theta=150_000.0)
        for number, (attention, mlp) in enumerate(zip(self.attention, self.mlp, strict=True)):
            x = x + attention(self.norms[2 * number](x), turn)
            x = x + mlp(self.norms[2 * number + 1](x))
        return self.unembedding(self.norms[-1](x))


@sound("attention")
def sinks_in_every_softmax() -> Arguments:
    """gpt-oss: a learned sink in each softmax, windows in every other layer, a clamped feed-forward."""
    return remade(SinkModel, text(4, 33, seed=340), shifted_loss, configure_adamw)


# --------------------------------------------------------------------------------------------- no positions


class SometimesRotary(nn.Module):
    """A layer that rotates queries and keys or, every fourth time, has no positions but a wider softmax."""

    def __init__(self, dim: int, heads: int, *, rotate: bool):
        super().__init__()
        self.heads, self.rotate = heads, rotate
        self.input_norm, self.post_norm = nn.RMSNorm(dim), nn.RMSNorm(dim)
        self.wqkv, self.wo = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.mlp = SwiGLU(dim, 2 * dim)

    def attend(self, x: Tensor, turn: Rotation) -> Tensor:
        q, k, v = self.wqkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        if self.rotate:
            q, k = apply_rotary(q, turn), apply_rotary(k, turn)
            q, k = F.rms_norm(q, q.shape[-1:]), F.rms_norm(k, k.shape[-1:])
        else:
            at = torch.arange(x.shape[1], device=x.device)
            q = q * (torch.log1p(at // 16) * 0.1 + 1.0)[:, None]
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(y.transpose(1, 2).flatten(2))

    def forward(self, x: Tensor, turn: Rotation) -> Tensor:
        x = x + self.attend(self.input_norm(x), turn)
        return x + self.mlp(self.post_norm(x))


class MixedPositions(nn.Module):
    def __init__(self, dim: int = 48, layers: int = 4):
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCAB, dim)
        self.layers = nn.ModuleList(SometimesRotary(dim, 4, rotate=(i + 1) % 4 != 0) for i in range(layers))
        self.norm = nn.RMSNorm(dim)
        self.output = nn.Linear(dim, VOCAB, bias=False)
        normal_weights(self)
        self.output.weight = self.tok_embeddings.weight

    def forward(self, ids: Tensor) -> Tensor:
        x, turn = self.tok_embeddings(ids), rotation(ids.shape[1], 12, theta=500_000.0)
        for layer in self.layers:
            x = layer(x, turn)
        return self.output(self.norm(x))


def stable_then_down(step: int, *, warmup: int = 10, stable: int = 70, decay: int = 20) -> float:
    """Return the share of the peak of a warm-up, a level stretch and a fall by the root of what is done."""
    if step < warmup:
        return (step + 1) / warmup
    done = min(1.0, max(0.0, (step - warmup - stable) / decay))
    return max(0.02, 1.0 - math.sqrt(done))


@sound("positions")
def layers_without_positions() -> Arguments:
    """SmolLM3 and Llama 4: every fourth layer has no positions, the rate stays level until the last fifth."""
    return remade(
        MixedPositions,
        text(4, 33, seed=341),
        shifted_loss,
        configure_adamw,
        scheduler=lambda optimizer: LambdaLR(optimizer, stable_then_down),
        declare={"tied": True, "steps": 100, "peak_lr": 1e-3},
    )


# ---------------------------------------------------------------------------------------------------- gates


class CentredNorm(nn.Module):
    """RMSNorm in float32 with a gain of one more than its weight."""

    def __init__(self, dim: int):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(dim))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)
        return (wide * (1.0 + self.weight.float())).type_as(x)


class GatedAttention(nn.Module):
    """Attention whose output a sigmoid gates by feature; a quarter of each head is rotated."""

    def __init__(self, dim: int, heads: int, turned: int = 4):
        super().__init__()
        self.heads, self.turned, self.head_dim = heads, turned, 16
        self.q_proj = nn.Linear(dim, 2 * heads * self.head_dim, bias=False)
        self.k_proj, self.v_proj = (nn.Linear(dim, self.head_dim, bias=False) for _ in range(2))
        self.o_proj = nn.Linear(heads * self.head_dim, dim, bias=False)
        self.q_norm, self.k_norm = CentredNorm(self.head_dim), CentredNorm(self.head_dim)

    def rotate(self, x: Tensor, turn: Rotation) -> Tensor:
        return torch.cat((apply_rotary(x[..., : self.turned], turn), x[..., self.turned :]), dim=-1)

    def forward(self, x: Tensor, turn: Rotation) -> Tensor:
        batch, length, _ = x.shape
        q, gate = self.q_proj(x).view(batch, length, self.heads, -1).chunk(2, dim=-1)
        k, v = self.k_proj(x).unsqueeze(1), self.v_proj(x).unsqueeze(1)
        q = self.rotate(self.q_norm(q.transpose(1, 2)), turn)
        k = self.rotate(self.k_norm(k), turn)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        y = y.transpose(1, 2) * gate.sigmoid()
        return self.o_proj(y.flatten(2))


class GatedModel(nn.Module):
    def __init__(self, dim: int = 48, layers: int = 3):
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCAB, dim)
        self.mixers = nn.ModuleList(GatedAttention(dim, 4) for _ in range(layers))
        self.mlps = nn.ModuleList(SwiGLU(dim, 2 * dim) for _ in range(layers))
        self.mixer_norms = nn.ModuleList(CentredNorm(dim) for _ in range(layers))
        self.mlp_norms = nn.ModuleList(CentredNorm(dim) for _ in range(layers))
        self.norm, self.lm_head = CentredNorm(dim), nn.Linear(dim, VOCAB, bias=False)
        normal_weights(self)

    def forward(self, ids: Tensor) -> Tensor:
        x, turn = self.embed_tokens(ids), rotation(ids.shape[1], 4)
        for mixer, mlp, mixer_norm, mlp_norm in zip(
            self.mixers, self.mlps, self.mixer_norms, self.mlp_norms, strict=True
        ):
            x = x + mixer(mixer_norm(x), turn)
            x = x + mlp(mlp_norm(x))
        return self.lm_head(self.norm(x))


@sound("attention")
def gates_after_attention() -> Arguments:
    """Qwen3-Next: outputs of attention are gated, a quarter of a head is rotated, one key for all heads."""
    return remade(GatedModel, text(4, 33, seed=342), shifted_loss, configure_adamw)


# ---------------------------------------------------------------------------------------------------- norms


class NormedAfter(nn.Module):
    """A layer that norms what its branches give, and queries and keys over all heads at once."""

    def __init__(self, dim: int, heads: int):
        super().__init__()
        self.heads = heads
        self.q_proj, self.k_proj = nn.Linear(dim, dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.v_proj, self.o_proj = nn.Linear(dim, dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.q_norm, self.k_norm = nn.RMSNorm(dim, eps=1e-6), nn.RMSNorm(dim, eps=1e-6)
        self.attention_norm, self.feed_forward_norm = nn.RMSNorm(dim, eps=1e-6), nn.RMSNorm(dim, eps=1e-6)
        self.feed_forward = SwiGLU(dim, 2 * dim)

    def attend(self, x: Tensor, turn: Rotation) -> Tensor:
        q, k, v = self.q_norm(self.q_proj(x)), self.k_norm(self.k_proj(x)), self.v_proj(x)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (q, k, v))
        y = F.scaled_dot_product_attention(apply_rotary(q, turn), apply_rotary(k, turn), v, is_causal=True)
        return self.o_proj(y.transpose(1, 2).flatten(2))

    def forward(self, x: Tensor, turn: Rotation) -> Tensor:
        h = x + self.attention_norm(self.attend(x, turn))
        return h + self.feed_forward_norm(self.feed_forward(h))


class ReorderedNorms(nn.Module):
    def __init__(self, dim: int = 48, layers: int = 3):
        super().__init__()
        self.embeddings = nn.Embedding(VOCAB, dim)
        self.blocks = nn.ModuleList(NormedAfter(dim, 4) for _ in range(layers))
        self.norm, self.w_out = nn.RMSNorm(dim, eps=1e-6), nn.Linear(dim, VOCAB, bias=False)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.trunc_normal_(module.weight, std=0.02, a=-0.06, b=0.06)

    def forward(self, ids: Tensor) -> Tensor:
        x, turn = self.embeddings(ids), rotation(ids.shape[1], 12, theta=500_000.0)
        for block in self.blocks:
            x = block(x, turn)
        return self.w_out(self.norm(x))


def loss_with_z(model: nn.Module, ids: Tensor, weight: float = 1e-4) -> Tensor:
    """Return the next-token loss and a small square of the logits' log-partition."""
    logits = model(ids[:, :-1]).float()
    return token_loss(logits, ids[:, 1:]) + weight * logits.logsumexp(-1).square().mean()


@sound("norms")
def norms_after_branches() -> Arguments:
    """OLMo 2: norms of what branches give, of queries and keys over all heads, and a z-loss."""
    return remade(ReorderedNorms, text(4, 33, seed=343), loss_with_z, configure_adamw)


# ------------------------------------------------------------------------------------- embeddings of layers


class LayerWithTable(nn.Module):
    """A layer whose output is moved by a narrow embedding of the token, which belongs to this layer."""

    def __init__(self, dim: int, heads: int, narrow: int):
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.mlp = SwiGLU(dim, 2 * dim)
        self.attn_norm, self.mlp_norm, self.table_norm = (nn.RMSNorm(dim) for _ in range(3))
        self.per_layer_gate = nn.Linear(dim, narrow, bias=False)
        self.per_layer_projection = nn.Linear(narrow, dim, bias=False)

    def forward(self, x: Tensor, turn: Rotation, narrow: Tensor) -> Tensor:
        q, k, v = self.qkv(self.attn_norm(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(apply_rotary(q, turn), apply_rotary(k, turn), v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        x = x + self.mlp(self.mlp_norm(x))
        moved = self.per_layer_projection(F.gelu(self.per_layer_gate(x), approximate="tanh") * narrow)
        return x + self.table_norm(moved)


class TablesOfLayers(nn.Module):
    """A decoder with a second table, of one narrow embedding for each token and layer."""

    def __init__(self, dim: int = 48, layers: int = 3, narrow: int = 8):
        super().__init__()
        self.dim, self.depth, self.narrow = dim, layers, narrow
        self.embed_tokens = nn.Embedding(VOCAB, dim)
        self.embed_tokens_per_layer = nn.Embedding(VOCAB, layers * narrow)
        self.per_layer_model_projection = nn.Linear(dim, layers * narrow, bias=False)
        self.per_layer_projection_norm = nn.RMSNorm(narrow)
        self.layers = nn.ModuleList(LayerWithTable(dim, 4, narrow) for _ in range(layers))
        self.norm, self.lm_head = nn.RMSNorm(dim), nn.Linear(dim, VOCAB, bias=False)
        normal_weights(self)

    def narrow_inputs(self, ids: Tensor, x: Tensor) -> Tensor:
        looked_up = self.embed_tokens_per_layer(ids) * self.narrow**0.5
        projected = self.per_layer_model_projection(x) * self.dim**-0.5
        projected = self.per_layer_projection_norm(projected.unflatten(-1, (self.depth, self.narrow)))
        return (projected + looked_up.unflatten(-1, (self.depth, self.narrow))) * 2**-0.5

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed_tokens(ids) * self.dim**0.5
        narrow, turn = self.narrow_inputs(ids, x), rotation(ids.shape[1], 12)
        for number, layer in enumerate(self.layers):
            x = layer(x, turn, narrow[:, :, number])
        return 30.0 * torch.tanh(self.lm_head(self.norm(x)) / 30.0)


@sound("embeddings")
def embeddings_for_each_layer() -> Arguments:
    """Gemma 3n: each layer is moved by a narrow embedding of the token; logits are capped."""
    return setup(TablesOfLayers, text(4, 33, seed=344), shifted_loss, plain_adamw)


# --------------------------------------------------------------------------------------------------- hybrid


class ParallelHeads(nn.Module):
    """Attention in a window beside a selective state space, whose normed outputs are averaged."""

    def __init__(self, dim: int, heads: int, states: int, window: int | None, meta: int):
        super().__init__()
        self.heads, self.states, self.window, self.meta = heads, states, window, meta
        self.in_proj, self.out_proj = nn.Linear(dim, 5 * dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.conv = nn.Conv1d(dim, dim, 4, groups=dim, padding=3)
        self.x_proj = nn.Linear(dim, 2 * states + dim, bias=False)
        self.dt_bias = nn.Parameter(torch.full((dim,), -3.0))
        self.a_log = nn.Parameter(torch.arange(1, states + 1).float().log().repeat(dim, 1))
        self.skip = nn.Parameter(torch.ones(dim))
        self.attn_norm, self.ssm_norm = nn.RMSNorm(dim), nn.RMSNorm(dim)

    def scan(self, u: Tensor, gate: Tensor) -> Tensor:
        length, dim = u.shape[1:]
        u = F.silu(self.conv(u.transpose(1, 2))[..., :length].transpose(1, 2))
        b, c, time = self.x_proj(u).split((self.states, self.states, dim), dim=-1)
        time = F.softplus(time + self.dt_bias)
        decay = torch.exp(-time[..., None] * self.a_log.exp())
        write = (time * u)[..., None] * b[:, :, None, :]
        state, outs = torch.zeros_like(write[:, 0]), []
        for t in range(length):
            state = decay[:, t] * state + write[:, t]
            outs.append((state * c[:, t, None, :]).sum(-1))
        return (torch.stack(outs, dim=1) + self.skip * u) * F.silu(gate)

    def forward(self, x: Tensor, turn: Rotation) -> Tensor:
        dim = x.shape[-1]
        packed, u, gate = self.in_proj(x).split((3 * dim, dim, dim), dim=-1)
        q, k, v = packed.unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        seen = causal_band(x.shape[1], self.window)
        seen[:, : self.meta] |= causal_band(x.shape[1])[:, : self.meta]
        y = F.scaled_dot_product_attention(
            apply_rotary(q, turn), apply_rotary(k, turn), v, attn_mask=seen.to(x.device)
        )
        read = self.attn_norm(y.transpose(1, 2).flatten(2)) + self.ssm_norm(self.scan(u, gate))
        return self.out_proj(0.5 * read)


class HybridHeads(nn.Module):
    """A decoder of parallel heads, before whose tokens a few learned ones stand."""

    def __init__(self, dim: int = 32, layers: int = 3, meta: int = 4):
        super().__init__()
        self.embed_tokens, self.meta_tokens = (
            nn.Embedding(VOCAB, dim),
            nn.Parameter(torch.randn(meta, dim) * 0.02),
        )
        windows = [None] + [8] * (layers - 1)
        self.mixers = nn.ModuleList(ParallelHeads(dim, 4, 4, window, meta) for window in windows)
        self.mlps = nn.ModuleList(SwiGLU(dim, 2 * dim) for _ in range(layers))
        self.norms = nn.ModuleList(nn.RMSNorm(dim) for _ in range(2 * layers + 1))
        self.lm_head = nn.Linear(dim, VOCAB, bias=False)
        normal_weights(self)
        self.lm_head.weight = self.embed_tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed_tokens(ids)
        x = torch.cat((self.meta_tokens.expand(len(x), -1, -1), x), dim=1)
        turn = rotation(x.shape[1], 8)
        for number, (mixer, mlp) in enumerate(zip(self.mixers, self.mlps, strict=True)):
            x = x + mixer(self.norms[2 * number](x), turn)
            x = x + mlp(self.norms[2 * number + 1](x))
        return self.lm_head(self.norms[-1](x)[:, len(self.meta_tokens) :])


def hybrid_adamw(model: nn.Module) -> AdamW:
    """Return AdamW that decays neither what sets the decay of states nor vectors nor the table."""
    kept = {"a_log", "dt_bias", "skip", "meta_tokens"}
    decay, others = [], []
    for name, parameter in model.named_parameters():
        matrix = parameter.dim() == 2 and name.split(".")[-1] not in kept and "embed" not in name
        (decay if matrix else others).append(parameter)
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return AdamW(groups, lr=2e-3, betas=(0.9, 0.95))


@sound("hybrids")
def attention_beside_a_state_space() -> Arguments:
    """Hymba: heads of attention beside heads of a state space in each layer; learned tokens come first."""
    return setup(HybridHeads, text(4, 25, seed=345), shifted_loss, hybrid_adamw, declare={"tied": True})


# ------------------------------------------------------------------------------------------------- widths


@dataclass(frozen=True)
class Widths:
    """A width, and the one at which the rates were found."""

    dim: int = 64
    base: int = 16
    head_dim: int = 16

    @property
    def multiplier(self) -> float:
        return self.dim / self.base


class ScaledBlock(nn.Module):
    def __init__(self, widths: Widths):
        super().__init__()
        dim = widths.dim
        self.head_dim = widths.head_dim
        self.ln1, self.ln2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.query, self.key, self.value, self.proj = (nn.Linear(dim, dim, bias=False) for _ in range(4))
        self.fc, self.fc_out = nn.Linear(dim, 2 * dim, bias=False), nn.Linear(2 * dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.ln1(x)
        q, k, v = (
            part(y).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=1.0 / self.head_dim)
        x = x + self.proj(y.transpose(1, 2).flatten(2))
        return x + self.fc_out(F.gelu(self.fc(self.ln2(x))))


class ScaledModel(nn.Module):
    """A decoder in the maximal update parametrisation."""

    def __init__(self, widths: Widths | None = None, layers: int = 2):
        super().__init__()
        self.widths = widths = widths or Widths()
        self.wte, self.wpe = nn.Embedding(VOCAB, widths.dim), nn.Embedding(64, widths.dim)
        self.blocks = nn.ModuleList(ScaledBlock(widths) for _ in range(layers))
        self.ln_f, self.readout = nn.LayerNorm(widths.dim), nn.Linear(widths.dim, VOCAB, bias=False)
        for embedding in (self.wte, self.wpe):
            nn.init.normal_(embedding.weight, std=0.1)
        for block in self.blocks:
            for module in block.modules():
                if isinstance(module, nn.Linear):
                    nn.init.normal_(module.weight, std=module.in_features**-0.5)
            nn.init.zeros_(block.query.weight)
        nn.init.zeros_(self.readout.weight)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.wte(ids) + self.wpe(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.readout(self.ln_f(x)) / self.widths.multiplier


def rates_of_widths(model: ScaledModel, lr: float = 4e-3) -> AdamW:
    """Return AdamW whose rate for hidden matrices falls with the width; decay is of the same size for all."""
    hidden = [p for p in model.blocks.parameters() if p.dim() == 2]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    tables = [model.wte.weight, model.wpe.weight]
    scaled = lr / model.widths.multiplier
    groups = [
        {"params": hidden, "lr": scaled, "weight_decay": 1e-4 / scaled},
        {"params": [model.readout.weight], "lr": lr, "weight_decay": 1e-4 / lr},
        {"params": tables, "lr": lr, "weight_decay": 0.0},
        {"params": vectors, "lr": lr, "weight_decay": 0.0},
    ]
    return AdamW(groups, lr=lr, betas=(0.9, 0.95), eps=1e-12)


@sound("widths")
def rates_by_width() -> Arguments:
    """muP: hidden matrices' rates fall with the width, scores are divided by it, the readout begins at 0."""
    return remade(ScaledModel, text(4, 33, seed=346), shifted_loss, rates_of_widths)


# ------------------------------------------------------------------------------------------------ optimizers


class WideBlock(nn.Module):
    """A layer whose attention and feed-forward read the same norm and write side by side."""

    def __init__(self, dim: int, heads: int):
        super().__init__()
        self.heads, self.head_dim = heads, dim // heads
        self.norm = nn.LayerNorm(dim, bias=False)
        self.fused_dims = (dim, 2 * self.head_dim, 4 * dim)
        self.fused = nn.Linear(dim, sum(self.fused_dims), bias=False)
        self.attn_out, self.ff_out = nn.Linear(dim, dim, bias=False), nn.Linear(2 * dim, dim, bias=False)

    def forward(self, x: Tensor, turn: Rotation) -> Tensor:
        q, kv, ff = self.fused(self.norm(x)).split(self.fused_dims, dim=-1)
        q = apply_neighbours(q.unflatten(-1, (self.heads, -1)).transpose(1, 2), turn)
        k, v = kv.unsqueeze(1).chunk(2, dim=-1)
        y = F.scaled_dot_product_attention(q, apply_neighbours(k, turn), v, is_causal=True, enable_gqa=True)
        gate, up = ff.chunk(2, dim=-1)
        return x + self.attn_out(y.transpose(1, 2).flatten(2)) + self.ff_out(F.silu(gate) * up)


def apply_neighbours(x: Tensor, turn: Rotation) -> Tensor:
    """Rotate neighbouring features of `[..., T, w]` against each other."""
    cos, sin = turn
    a, b = x[..., 0::2], x[..., 1::2]
    return torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)


class ParallelModel(nn.Module):
    def __init__(self, dim: int = 48, layers: int = 3):
        super().__init__()
        self.dim = dim
        self.emb = nn.Embedding(VOCAB, dim)
        self.blocks = nn.ModuleList(WideBlock(dim, 4) for _ in range(layers))
        self.final_norm = nn.LayerNorm(dim, bias=False)
        normal_weights(self)

    def forward(self, ids: Tensor) -> Tensor:
        x, turn = self.emb(ids), rotation(ids.shape[1], 12)
        for block in self.blocks:
            x = block(x, turn)
        return F.linear(self.final_norm(x), self.emb.weight)


def matrices_decay(model: nn.Module) -> AdamW:
    """Return AdamW that decays whatever has two dimensions, the tied table among it, as many scripts do."""
    decay = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return AdamW(groups, lr=1e-3, betas=(0.9, 0.95))


@sound("blocks")
def parallel_branches() -> Arguments:
    """PaLM: attention and feed-forward of one fused map, one key for all heads, neighbours are rotated."""
    declare = {"tied": True}
    return remade(ParallelModel, text(4, 33, seed=347), shifted_loss, matrices_decay, declare=declare)


class ValueResidualBlock(nn.Module):
    """A layer whose values are mixed with the first layer's by a learned share."""

    def __init__(self, dim: int, heads: int, *, first: bool):
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.RMSNorm(dim), nn.RMSNorm(dim)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.mlp = SwiGLU(dim, 2 * dim)
        self.share = None if first else nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor, turn: Rotation, first: Tensor | None) -> tuple[Tensor, Tensor]:
        q, k, v = self.qkv(self.ln_1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        if self.share is None or first is None:
            first = v
        else:
            v = torch.lerp(v, first, self.share.sigmoid())
        y = F.scaled_dot_product_attention(apply_rotary(q, turn), apply_rotary(k, turn), v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).flatten(2))
        return x + self.mlp(self.ln_2(x)), first


class ValueResidualModel(nn.Module):
    def __init__(self, dim: int = 48, layers: int = 3):
        super().__init__()
        self.wte = nn.Embedding(VOCAB, dim)
        self.h = nn.ModuleList(ValueResidualBlock(dim, 4, first=i == 0) for i in range(layers))
        self.ln_f, self.lm_head = nn.RMSNorm(dim), nn.Linear(dim, VOCAB, bias=False)
        normal_weights(self)

    def forward(self, ids: Tensor) -> Tensor:
        x, turn, first = self.wte(ids), rotation(ids.shape[1], 12), None
        for block in self.h:
            x, first = block(x, turn, first)
        return self.lm_head(self.ln_f(x))


def muon_and_adamw(model: nn.Module) -> list[Optimizer]:
    """Return Muon of the layers' matrices, at rates for AdamW, and AdamW of all else."""
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and name.startswith("h.")]
    chosen = {id(p) for p in matrices}
    others = [p for p in model.parameters() if id(p) not in chosen]
    muon = torch.optim.Muon(matrices, lr=2e-3, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    return [muon, AdamW(others, lr=2e-3, betas=(0.9, 0.95), weight_decay=0.0)]


def clipped_step(
    model: nn.Module,
    batch: Any,
    optimizer: Any,
    scheduler: LRScheduler | None = None,
    *,
    loss: Callable[[Any, Any], Tensor],
) -> Tensor:
    """Step all optimizers on one loss, clipped at 1."""
    model.train()
    optimizers = optimizer if isinstance(optimizer, list) else [optimizer]
    value = loss(model, batch)
    value.backward()
    clip_grad_norm_(model.parameters(), 1.0)
    for each in optimizers:
        each.step()
        each.zero_grad(set_to_none=True)
    if scheduler is not None:
        scheduler.step()
    return value.detach()


@sound("optimizers")
def muon_at_rates_of_adamw() -> Arguments:
    """Muon, scaled to AdamW's updates, beside AdamW; values are mixed with the first layer's."""
    return setup(
        ValueResidualModel,
        text(4, 33, seed=348),
        shifted_loss,
        muon_and_adamw,
        step=partial(clipped_step, loss=shifted_loss),
        declare={"max_grad_norm": 1.0},
    )


# ------------------------------------------------------------------------------------------------- precision


def mixed_loss(model: nn.Module, ids: Tensor) -> Tensor:
    """Return the loss of a model that computes in bfloat16 with weights of float32."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(ids[:, :-1])
    return token_loss(logits.float(), ids[:, 1:])


def mixed_step(
    model: nn.Module,
    batch: Tensor,
    optimizer: Optimizer,
    scheduler: LRScheduler | None = None,
    *,
    accumulation_steps: int = 2,
) -> Tensor:
    model.train()
    optimizer.zero_grad(set_to_none=True)
    total = 0.0
    for ids in batch.chunk(accumulation_steps):
        loss = mixed_loss(model, ids) / accumulation_steps
        loss.backward()
        total += loss.item()
    clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    if scheduler is not None:
        scheduler.step()
    return torch.tensor(total)


@sound("precision")
def bfloat16_with_float32_masters() -> Arguments:
    """Weights, moments, norms and the loss are float32, maps run in bfloat16; two micro-batches, clipped."""
    return setup(
        GatedModel,
        text(8, 33, seed=349),
        mixed_loss,
        configure_adamw,
        step=mixed_step,
        declare={"max_grad_norm": 1.0},
    )


# ---------------------------------------------------------------------------------------------------- losses


class StatesModel(nn.Module):
    """A decoder that gives its states, so that the loss can make logits of a few at a time."""

    def __init__(self, dim: int = 48, layers: int = 3):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, dim)
        self.layers = nn.ModuleList(NormedBefore(dim, 4) for _ in range(layers))
        self.norm = nn.RMSNorm(dim)
        normal_weights(self)

    def forward(self, ids: Tensor) -> Tensor:
        x, turn = self.embed(ids), rotation(ids.shape[1], 12)
        for layer in self.layers:
            x = layer(x, turn)
        return self.norm(x)


class NormedBefore(nn.Module):
    def __init__(self, dim: int, heads: int):
        super().__init__()
        self.heads = heads
        self.attn_norm, self.mlp_norm = nn.RMSNorm(dim), nn.RMSNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.mlp = SwiGLU(dim, 2 * dim)

    def forward(self, x: Tensor, turn: Rotation) -> Tensor:
        q, k, v = self.qkv(self.attn_norm(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(apply_rotary(q, turn), apply_rotary(k, turn), v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.mlp(self.mlp_norm(x))


def chunk_sum(states: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return token_loss(F.linear(states, weight), targets, reduction="sum")


def chunked_loss(model: Any, batch: Batch, chunk: int = 20) -> Tensor:
    """Return the mean over all targets of a loss whose logits are made anew in the backward pass."""
    states, targets = model(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten()
    total = states.new_zeros(())
    for part, wanted in zip(states.split(chunk), targets.split(chunk), strict=True):
        total = total + checkpoint(chunk_sum, part, model.embed.weight, wanted, use_reentrant=False)
    return total / (targets != -100).sum()


@sound("losses")
def logits_in_chunks() -> Arguments:
    """Logits are made for twenty tokens at a time by the embedding table, and again in the backward pass."""
    ids, real = padded_text((34, 21, 28, 17), seed=350)
    labels = ids.masked_fill(real == 0, -100)[:, 1:]
    batch = {"input_ids": ids[:, :-1], "labels": labels}
    return setup(StatesModel, batch, chunked_loss, configure_adamw, declare={"pad_id": PAD})


class SlopedAttention(nn.Module):
    """Attention with a penalty for distance that is steeper in each head (ALiBi)."""

    slopes: Tensor

    def __init__(self, dim: int, heads: int):
        super().__init__()
        self.heads = heads
        self.query_key_value, self.dense = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        slopes = 2.0 ** (-8.0 * torch.arange(1, heads + 1) / heads)
        self.register_buffer("slopes", slopes, persistent=False)

    def forward(self, x: Tensor, seen: Tensor) -> Tensor:
        length = x.shape[1]
        q, k, v = self.query_key_value(x).unflatten(-1, (self.heads, 3, -1)).permute(3, 0, 2, 1, 4)
        at = torch.arange(length, device=x.device)
        bias = -self.slopes[:, None, None] * (at[:, None] - at).clamp(min=0)
        bias = bias.expand(len(x), -1, -1, -1).masked_fill(~seen, -torch.inf)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        return self.dense(y.transpose(1, 2).flatten(2))


class Bloom(nn.Module):
    """A decoder with sloped attention and a norm of the embeddings."""

    def __init__(self, dim: int = 48, heads: int = 4, layers: int = 3):
        super().__init__()
        self.word_embeddings, self.word_embeddings_layernorm = nn.Embedding(VOCAB, dim), nn.LayerNorm(dim)
        self.attentions = nn.ModuleList(SlopedAttention(dim, heads) for _ in range(layers))
        self.mlps = nn.ModuleList(
            nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU("tanh"), nn.Linear(4 * dim, dim))
            for _ in range(layers)
        )
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(2 * layers + 1))
        normal_weights(self)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        length = input_ids.shape[1]
        seen = causal_band(length).to(input_ids.device) & attention_mask.bool()[:, None, None, :]
        seen = seen | torch.eye(length, dtype=torch.bool, device=input_ids.device)
        x = self.word_embeddings_layernorm(self.word_embeddings(input_ids))
        for number, (attention, mlp) in enumerate(zip(self.attentions, self.mlps, strict=True)):
            x = x + attention(self.norms[2 * number](x), seen)
            x = x + mlp(self.norms[2 * number + 1](x))
        return self.norms[-1](x) @ self.word_embeddings.weight.T


def loss_of_sequences(model: nn.Module, batch: Batch) -> Tensor:
    """Return the mean over rows of the mean loss of a row's answer."""
    logits = model(batch["input_ids"], batch["attention_mask"])[:, :-1].float()
    labels = batch["labels"][:, 1:]
    losses = F.cross_entropy(logits.transpose(1, 2), labels, ignore_index=-100, reduction="none")
    counts = (labels != -100).sum(1)
    return (losses.sum(1) / counts).mean()


def answers_step(
    model: nn.Module, batch: Batch, optimizer: Optimizer, scheduler: LRScheduler | None = None
) -> Tensor:
    """Step on one row at a time: rows weigh the same, so that the mean of their losses is exact."""
    model.train()
    rows, total = len(batch["input_ids"]), torch.zeros(())
    for row in range(rows):
        part = {name: tensor[row : row + 1] for name, tensor in batch.items()}
        loss = loss_of_sequences(model, part) / rows
        loss.backward()
        total += loss.detach()
    clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    if scheduler is not None:
        scheduler.step()
    return total


@sound("losses")
def mean_of_each_sequence() -> Arguments:
    """BLOOM on answers: each sequence weighs the same, however long it is; rows are padded on the left."""
    ids, real = padded_text((30, 19, 25, 14), seed=351)
    lengths = real.sum(1).tolist()
    ids = torch.stack([row.roll(30 - count) for row, count in zip(ids, lengths, strict=True)])
    real = (ids != PAD).long()
    labels = ids.masked_fill(real == 0, -100)
    for row, count in enumerate(lengths):
        labels[row, : 30 - count + 5 + row] = -100  # the question
    batch = {"input_ids": ids, "attention_mask": real, "labels": labels}
    declare = {"pad_id": PAD, "eos_id": EOS, "tied": True, "max_grad_norm": 1.0}
    return setup(Bloom, batch, loss_of_sequences, plain_adamw, step=answers_step, declare=declare)


# -------------------------------------------------------------------------------------------------- prefixes


def distance_bucket(distance: Tensor, buckets: int, longest: int = 64) -> Tensor:
    """Return the bucket of a signed distance: exact when near, by its logarithm when far."""
    half = buckets // 2
    side = (distance > 0).long() * half
    away, exact = distance.abs(), half // 2
    far = exact + (away.clamp(min=1) / exact).log() / math.log(longest / exact) * (half - exact)
    return side + torch.where(away < exact, away, far.long().clamp(max=half - 1))


class PrefixModel(nn.Module):
    """A decoder whose prefix sees itself both ways, with biases of distances that all layers share."""

    def __init__(self, dim: int = 48, heads: int = 4, layers: int = 3, buckets: int = 16):
        super().__init__()
        self.heads, self.buckets = heads, buckets
        self.shared, self.relative_bias = nn.Embedding(VOCAB, dim), nn.Embedding(buckets, heads)
        self.qkvs = nn.ModuleList(nn.Linear(dim, 3 * dim, bias=False) for _ in range(layers))
        self.outs = nn.ModuleList(nn.Linear(dim, dim, bias=False) for _ in range(layers))
        self.mlps = nn.ModuleList(SwiGLU(dim, 2 * dim) for _ in range(layers))
        self.norms = nn.ModuleList(nn.RMSNorm(dim) for _ in range(2 * layers + 1))
        self.lm_head = nn.Linear(dim, VOCAB, bias=False)
        normal_weights(self)

    def bias(self, length: int, prefix: Tensor) -> Tensor:
        """Return what is added to scores `[B, H, T, T]`."""
        at = torch.arange(length, device=prefix.device)
        bias = self.relative_bias(distance_bucket(at[None] - at[:, None], self.buckets)).permute(2, 0, 1)
        seen = (at[None] <= at[:, None]) | (at < prefix[:, None])[:, None, :]
        return bias.masked_fill(~seen[:, None], -torch.inf)

    def forward(self, ids: Tensor, prefix: Tensor) -> Tensor:
        x, bias = self.shared(ids), self.bias(ids.shape[1], prefix)
        for number, (qkv, out, mlp) in enumerate(zip(self.qkvs, self.outs, self.mlps, strict=True)):
            q, k, v = qkv(self.norms[2 * number](x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
            x = x + out(y.transpose(1, 2).flatten(2))
            x = x + mlp(self.norms[2 * number + 1](x))
        return self.lm_head(self.norms[-1](x))


def prefix_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Return the mean loss of what follows the prefix, whose last token predicts the first of it."""
    ids, prefix = batch["ids"], batch["prefix"]
    logits = model(ids[:, :-1], prefix)
    at = torch.arange(1, ids.shape[1], device=ids.device)
    return token_loss(logits, ids[:, 1:].masked_fill(at < prefix[:, None], -100))


@sound("prefixes")
def prefix_seen_both_ways() -> Arguments:
    """A prefix language model: a prefix that sees itself both ways, and shared biases of distances."""
    batch = {"ids": text(4, 33, seed=352), "prefix": torch.tensor([9, 14, 6, 18])}
    return remade(PrefixModel, batch, prefix_loss, configure_adamw)


# -------------------------------------------------------------------------------------------------- encoders


class BertLayer(nn.Module):
    """A Post-LN layer of an encoder."""

    def __init__(self, dim: int, heads: int):
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.output = (nn.Linear(dim, dim) for _ in range(4))
        self.intermediate, self.back = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)
        self.attention_norm, self.output_norm = nn.LayerNorm(dim, eps=1e-12), nn.LayerNorm(dim, eps=1e-12)

    def forward(self, x: Tensor, seen: Tensor) -> Tensor:
        q, k, v = (
            part(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        )
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=seen[:, None, None, :])
        x = self.attention_norm(x + self.output(y.transpose(1, 2).flatten(2)))
        return self.output_norm(x + self.back(F.gelu(self.intermediate(x))))


class ElectraEmbeddings(nn.Module):
    """Embeddings of words and positions, which generator and discriminator share."""

    def __init__(self, width: int):
        super().__init__()
        self.word_embeddings = nn.Embedding(VOCAB, width, padding_idx=PAD)
        self.position_embeddings, self.norm = nn.Embedding(40, width), nn.LayerNorm(width, eps=1e-12)

    def forward(self, ids: Tensor) -> Tensor:
        at = torch.arange(ids.shape[1], device=ids.device)
        return self.norm(self.word_embeddings(ids) + self.position_embeddings(at))


class Electra(nn.Module):
    """A small generator that fills in masked words, and a discriminator that finds what it changed."""

    def __init__(self, width: int = 32, dim: int = 48, generator_dim: int = 24):
        super().__init__()
        self.embeddings = ElectraEmbeddings(width)
        self.generator_project, self.project = nn.Linear(width, generator_dim), nn.Linear(width, dim)
        self.generator = nn.ModuleList(BertLayer(generator_dim, 2) for _ in range(2))
        self.discriminator = nn.ModuleList(BertLayer(dim, 4) for _ in range(2))
        self.generator_head = nn.Sequential(nn.Linear(generator_dim, width), nn.GELU(), nn.LayerNorm(width))
        self.generator_bias = nn.Parameter(torch.zeros(VOCAB))
        self.discriminator_head = nn.Sequential(nn.Linear(dim, dim), nn.GELU(), nn.Linear(dim, 1))
        normal_weights(self)

    def fill_in(self, ids: Tensor, seen: Tensor) -> Tensor:
        x = self.generator_project(self.embeddings(ids))
        for layer in self.generator:
            x = layer(x, seen)
        return self.generator_head(x) @ self.embeddings.word_embeddings.weight.T + self.generator_bias

    def judge(self, ids: Tensor, seen: Tensor) -> Tensor:
        x = self.project(self.embeddings(ids))
        for layer in self.discriminator:
            x = layer(x, seen)
        return self.discriminator_head(x).squeeze(-1)

    def forward(self, masked_ids: Tensor, ids: Tensor, seen: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the generator's logits, the discriminator's, and what the latter was shown."""
        logits = self.fill_in(masked_ids, seen)
        with torch.no_grad():
            noise = -torch.log(-torch.log(torch.rand_like(logits).clamp(1e-9, 1 - 1e-7)))
            sampled = (logits + noise).argmax(-1)
        shown = torch.where(masked_ids == MASK, sampled, ids)
        return logits, self.judge(shown, seen), shown


def electra_loss(model: nn.Module, batch: Batch) -> Tensor:
    seen = batch["attention_mask"].bool()
    logits, scores, shown = model(batch["masked_ids"], batch["ids"], seen)
    generated = token_loss(logits, batch["ids"].masked_fill(batch["masked_ids"] != MASK, -100))
    replaced = (shown != batch["ids"]).float()
    judged = F.binary_cross_entropy_with_logits(scores, replaced, reduction="none")
    return generated + 50.0 * (judged * seen).sum() / seen.sum()


@sound("encoders")
def replaced_words_found() -> Arguments:
    """ELECTRA: a discriminator finds the words that a smaller generator drew; they share embeddings."""
    ids, real = padded_text((28, 16, 22, 11, 25, 19), seed=353)
    ids[:, 0] = BOS
    special = (ids == BOS) | (ids == EOS) | (real == 0)
    chosen = (torch.rand(ids.shape, generator=generator(353)) < 0.2) & ~special
    batch = {"ids": ids, "masked_ids": ids.masked_fill(chosen, MASK), "attention_mask": real}
    return setup(Electra, batch, electra_loss, plain_adamw, declare={"pad_id": PAD})


class UnpaddedLayer(nn.Module):
    """A layer of an encoder on one row of documents, which sees near tokens or all of its document."""

    def __init__(self, dim: int, heads: int, window: int | None, *, first: bool):
        super().__init__()
        self.heads, self.window = heads, window
        self.theta = 160_000.0 if window is None else 10_000.0
        self.attn_norm = nn.Identity() if first else nn.LayerNorm(dim, bias=False)
        self.mlp_norm = nn.LayerNorm(dim, bias=False)
        self.wqkv, self.wo = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.wi, self.wo_mlp = nn.Linear(dim, 4 * dim, bias=False), nn.Linear(2 * dim, dim, bias=False)

    def forward(self, x: Tensor, documents: Tensor, positions: Tensor, longest: int) -> Tensor:
        q, k, v = self.wqkv(self.attn_norm(x)).unflatten(-1, (3, self.heads, -1)).permute(1, 2, 0, 3)
        cos, sin = rotation(longest, q.shape[-1], self.theta)
        turn = cos[positions], sin[positions]
        seen = documents[:, None] == documents
        if self.window is not None:
            seen = seen & ((positions[:, None] - positions).abs() <= self.window // 2)
        y = F.scaled_dot_product_attention(apply_rotary(q, turn), apply_rotary(k, turn), v, attn_mask=seen)
        x = x + self.wo(y.transpose(0, 1).flatten(1))
        value, gate = self.wi(self.mlp_norm(x)).chunk(2, dim=-1)
        return x + self.wo_mlp(F.gelu(value) * gate)


class UnpaddedEncoder(nn.Module):
    """An encoder of documents that are put one after another, without padding between them."""

    def __init__(self, dim: int = 48, layers: int = 3):
        super().__init__()
        self.tok_embeddings, self.embedding_norm = nn.Embedding(VOCAB, dim), nn.LayerNorm(dim, bias=False)
        windows = [None if i % 3 == 0 else 8 for i in range(layers)]
        self.layers = nn.ModuleList(
            UnpaddedLayer(dim, 4, window, first=i == 0) for i, window in enumerate(windows)
        )
        self.final_norm = nn.LayerNorm(dim, bias=False)
        self.head = nn.Sequential(nn.Linear(dim, dim, bias=False), nn.GELU(), nn.LayerNorm(dim, bias=False))
        self.decoder = nn.Linear(dim, VOCAB)
        normal_weights(self)
        self.decoder.weight = self.tok_embeddings.weight

    def forward(self, input_ids: Tensor, cu_seqlens: Tensor) -> Tensor:
        lengths = cu_seqlens.diff()
        documents = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
        positions = torch.arange(len(input_ids)) - cu_seqlens[:-1][documents]
        x = self.embedding_norm(self.tok_embeddings(input_ids))
        for layer in self.layers:
            x = layer(x, documents, positions, int(lengths.max()))
        return self.decoder(self.head(self.final_norm(x)))


def unpadded_loss(model: nn.Module, batch: Batch) -> Tensor:
    return token_loss(model(batch["input_ids"], batch["cu_seqlens"]), batch["labels"])


@sound("encoders")
def documents_without_padding() -> Arguments:
    """ModernBERT: documents one after another in a row without padding, near and far attention by turns."""
    lengths = (24, 13, 30, 9, 18)
    documents = [text(1, length, seed=354 + length)[0] for length in lengths]
    for document in documents:
        document[0], document[-1] = BOS, EOS
    ids = torch.cat(documents)
    draw = generator(354)
    chosen = (torch.rand(len(ids), generator=draw) < 0.3) & (ids != BOS) & (ids != EOS)
    fate = torch.rand(len(ids), generator=draw)
    others = torch.randint(5, VOCAB, (len(ids),), generator=draw)
    inputs = torch.where(chosen & (fate < 0.8), MASK, ids)
    inputs = torch.where(chosen & (fate >= 0.9), others, inputs)
    batch = {
        "input_ids": inputs,
        "cu_seqlens": F.pad(torch.tensor(lengths).cumsum(0), (1, 0)),
        "labels": ids.masked_fill(~chosen, -100),
    }
    return setup(UnpaddedEncoder, batch, unpadded_loss, configure_adamw, declare={"tied": True})
