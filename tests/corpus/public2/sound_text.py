"""Sound language models of today's kinds: attention, streams, loops, recurrences, mixtures, objectives."""

from __future__ import annotations

import copy
import math
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from corpus.batches import (
    BOS,
    EOS,
    MASK,
    PAD,
    VOCAB,
    documents_of,
    documents_text,
    generator,
    padded_text,
    text,
    tokens,
)
from corpus.case import Arguments
from corpus.models.parts import capped, causal

from .blocks import (
    Attention,
    Cosines,
    Decoder,
    DecoderLayer,
    GatedMLP,
    RMSNorm,
    Rotary,
    adamw,
    adamw_of,
    decaying_adamw,
    init_weights,
    language_loss,
    next_token_loss,
    remade,
    rotate,
    setup,
    token_log_probs,
)
from .case import sound

# ----------------------------------------------------------------------------------------------- attention


class OffsetNorm(nn.Module):
    """RMSNorm whose gain is one more than its weight, which begins at zero."""

    def __init__(self, dim: int):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(dim))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * (1 + self.weight)


class SandwichLayer(nn.Module):
    """A layer with norms before and after each branch, capped scores, and every other time a window."""

    def __init__(self, dim: int, heads: int, groups: int, window: int | None):
        super().__init__()
        self.heads, self.groups, self.window, self.width = heads, groups, window, 16
        self.norms = nn.ModuleList(OffsetNorm(dim) for _ in range(4))
        self.q, self.o = nn.Linear(dim, heads * 16, bias=False), nn.Linear(heads * 16, dim, bias=False)
        self.kv = nn.Linear(dim, 2 * groups * 16, bias=False)
        self.mlp = GatedMLP(dim)

    def attend(self, x: Tensor, cosines: Cosines) -> Tensor:
        q = self.q(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        k, v = self.kv(x).unflatten(-1, (2, self.groups, -1)).permute(2, 0, 3, 1, 4)
        q, k = rotate(q, cosines), rotate(k, cosines)
        k, v = (part.repeat_interleave(self.heads // self.groups, 1) for part in (k, v))
        scores = capped(q @ k.transpose(-1, -2) / math.sqrt(self.width), 50.0)
        seen = causal(x.shape[1], x.device)
        if self.window is not None:
            seen = seen.triu(1 - self.window)
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        return self.o((weights @ v).transpose(1, 2).flatten(2))

    def forward(self, x: Tensor, cosines: Cosines) -> Tensor:
        x = x + self.norms[1](self.attend(self.norms[0](x), cosines))
        return x + self.norms[3](self.mlp(self.norms[2](x)))


class SandwichDecoder(nn.Module):
    """A decoder of the Gemma 2 kind."""

    def __init__(self, dim: int = 48):
        super().__init__()
        self.embed, self.rotary = nn.Embedding(VOCAB, dim), Rotary(16)
        self.layers = nn.ModuleList(SandwichLayer(dim, 4, 2, 8 if i % 2 == 0 else None) for i in range(4))
        self.norm = OffsetNorm(dim)
        self.apply(init_weights)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) * self.embed.embedding_dim**0.5
        cosines = self.rotary(torch.arange(ids.shape[1], device=ids.device))
        for layer in self.layers:
            x = layer(x, cosines)
        return capped(self.norm(x) @ self.embed.weight.T, 30.0)


@sound("attention")
def sandwich_norms_and_caps() -> Arguments:
    """Norms around branches, capped scores and logits, windows in every other layer, a tied scaled table."""
    return remade(SandwichDecoder, text(4, 32, seed=50), language_loss, declare={"tied": True})


class LatentAttention(nn.Module):
    """Keys and values from a narrow latent, and a rotary key that all heads share (DeepSeek-V2)."""

    def __init__(self, dim: int, heads: int, latent: int = 16, turned: int = 8):
        super().__init__()
        self.heads, self.turned, self.width = heads, turned, dim // heads
        self.q_down, self.q_norm = nn.Linear(dim, 24, bias=False), RMSNorm(24)
        self.q_up = nn.Linear(24, heads * (self.width + turned), bias=False)
        self.kv_down, self.kv_norm = nn.Linear(dim, latent + turned, bias=False), RMSNorm(latent)
        self.kv_up = nn.Linear(latent, 2 * heads * self.width, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)

    def forward(self, x: Tensor, cosines: Cosines, mask: Tensor | None = None) -> Tensor:
        q = self.q_up(self.q_norm(self.q_down(x))).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        latent, key = self.kv_down(x).split((self.kv_norm.weight.numel(), self.turned), -1)
        k, v = self.kv_up(self.kv_norm(latent)).unflatten(-1, (2, self.heads, -1)).permute(2, 0, 3, 1, 4)
        q = torch.cat((q[..., : self.width], rotate(q[..., self.width :], cosines)), -1)
        key = rotate(key[:, None], cosines).expand(-1, self.heads, -1, -1)
        y = F.scaled_dot_product_attention(q, torch.cat((k, key), -1), v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


def latent_layer(dim: int, heads: int) -> DecoderLayer:
    layer = DecoderLayer(dim, heads)
    layer.self_attn = LatentAttention(dim, heads)
    return layer


class LatentDecoder(Decoder):
    def __init__(self):
        super().__init__(layers=3, layer=latent_layer)
        self.rotary = Rotary(8)


@sound("attention")
def latent_attention() -> Arguments:
    """Multi-head latent attention with a decoupled rotary key."""
    return remade(LatentDecoder, text(4, 32, seed=51), language_loss, decaying_adamw)


class DifferentialAttention(nn.Module):
    """The difference of two attention maps, whose share is learned, and a norm of each head."""

    def __init__(self, dim: int, heads: int, depth: int):
        super().__init__()
        self.heads, self.width = heads, dim // heads // 2
        self.q_proj, self.k_proj = nn.Linear(dim, dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.v_proj, self.o_proj = nn.Linear(dim, dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.start = 0.8 - 0.6 * math.exp(-0.3 * depth)
        self.shares = nn.Parameter(torch.randn(4, self.width) * 0.1)
        self.norm = RMSNorm(2 * self.width)

    def forward(self, x: Tensor, cosines: Cosines, mask: Tensor | None = None) -> Tensor:
        q = self.q_proj(x).unflatten(-1, (2 * self.heads, -1)).transpose(1, 2)
        k = self.k_proj(x).unflatten(-1, (2 * self.heads, -1)).transpose(1, 2)
        v = self.v_proj(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        scores = rotate(q, cosines) @ rotate(k, cosines).transpose(-1, -2) / math.sqrt(self.width)
        weights = scores.masked_fill(~causal(x.shape[1], x.device), -torch.inf).softmax(-1)
        first, second = weights.unflatten(1, (self.heads, 2)).unbind(2)
        a, b, c, d = self.shares
        share = (a * b).sum().exp() - (c * d).sum().exp() + self.start
        y = self.norm((first - share * second) @ v) * (1 - self.start)
        return self.o_proj(y.transpose(1, 2).flatten(2))


class DifferentialDecoder(Decoder):
    def __init__(self):
        super().__init__(dim=48, layers=3)
        for depth, layer in enumerate(self.layers):
            layer.self_attn = DifferentialAttention(48, 4, depth)
        self.rotary = Rotary(6)
        self.apply(init_weights)


@sound("attention")
def differential_attention() -> Arguments:
    """Attention as the difference of two maps."""
    return setup(DifferentialDecoder, text(4, 32, seed=52), language_loss)


# ------------------------------------------------------------------------------------------------- streams


class HyperLayer(nn.Module):
    """A branch that reads a mixture of streams and writes to each, by weights that depend on the token."""

    def __init__(self, dim: int, branch: nn.Module, streams: int, number: int):
        super().__init__()
        self.norm, self.branch, self.wide_norm = RMSNorm(dim), branch, RMSNorm(dim)
        self.read = nn.Parameter(F.one_hot(torch.tensor(number % streams), streams).float())
        self.mix, self.write = nn.Parameter(torch.eye(streams)), nn.Parameter(torch.ones(streams))
        self.read_by_token = nn.Linear(dim, 1, bias=False)
        self.write_by_token = nn.Linear(dim, 1, bias=False)
        self.scale = nn.Parameter(torch.full((2,), 0.01))

    def forward(self, x: Tensor, *more: Any) -> Tensor:
        """Pass on streams `[N, B, T, D]`."""
        wide = self.wide_norm(x)
        read = self.read[:, None, None, None] + self.scale[0] * torch.tanh(self.read_by_token(wide))
        write = self.write[:, None, None, None] + self.scale[1] * torch.tanh(self.write_by_token(wide))
        y = self.branch(self.norm((read * x).sum(0)), *more)
        return torch.einsum("nbtd,nm->mbtd", x, self.mix) + write * y


class HyperDecoder(nn.Module):
    def __init__(self, dim: int = 48, streams: int = 3):
        super().__init__()
        self.streams = streams
        self.embed, self.rotary = nn.Embedding(VOCAB, dim), Rotary(dim // 4)
        self.attentions = nn.ModuleList(HyperLayer(dim, Attention(dim, 4), streams, 2 * i) for i in range(3))
        self.mlps = nn.ModuleList(HyperLayer(dim, GatedMLP(dim), streams, 2 * i + 1) for i in range(3))
        self.norm, self.head = RMSNorm(dim), nn.Linear(dim, VOCAB, bias=False)
        self.apply(init_weights)

    def forward(self, ids: Tensor) -> Tensor:
        cosines = self.rotary(torch.arange(ids.shape[1], device=ids.device))
        x = self.embed(ids).expand(self.streams, -1, -1, -1)
        for attention, mlp in zip(self.attentions, self.mlps, strict=True):
            x = mlp(attention(x, cosines))
        return self.head(self.norm(x.sum(0)))


def hyper_adamw(model: nn.Module) -> AdamW:
    """Return AdamW that decays matrices, but not what connects streams."""
    matrices = [
        p for n, p in model.named_parameters() if p.dim() > 1 and not n.endswith((".mix", "token.weight"))
    ]
    chosen = {id(p) for p in matrices}
    return adamw_of(matrices, [p for p in model.parameters() if id(p) not in chosen])


@sound("streams")
def hyper_connections() -> Arguments:
    """Dynamic hyper-connections: three streams that each branch reads and writes by learned weights."""
    return setup(HyperDecoder, text(4, 32, seed=53), language_loss, hyper_adamw)


class SpeedrunBlock(nn.Module):
    """A block with a share of the first layer's values, normed queries and keys, and a squared ReLU."""

    def __init__(self, dim: int, heads: int):
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.up, self.down = nn.Linear(dim, 4 * dim, bias=False), nn.Linear(4 * dim, dim, bias=False)
        self.value_share = nn.Parameter(torch.tensor([0.5, 0.5]))
        self.stream_share = nn.Parameter(torch.tensor([1.0, 0.0]))

    def forward(
        self, x: Tensor, start: Tensor, first: Tensor | None, cosines: Cosines
    ) -> tuple[Tensor, Tensor]:
        x = self.stream_share[0] * x + self.stream_share[1] * start
        q, k, v = (
            self.qkv(F.rms_norm(x, x.shape[-1:])).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        )
        first = v if first is None else first
        v = self.value_share[0] * v + self.value_share[1] * first
        q, k = (rotate(F.rms_norm(part, part.shape[-1:]), cosines) for part in (q, k))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.relu(self.up(F.rms_norm(x, x.shape[-1:]))).square()), first


class Speedrun(nn.Module):
    """A decoder with skips from its first to its second half, zero-drawn outputs and capped logits."""

    def __init__(self, dim: int = 48, layers: int = 4):
        super().__init__()
        self.embed, self.rotary = nn.Embedding(VOCAB, dim), Rotary(dim // 4)
        self.blocks = nn.ModuleList(SpeedrunBlock(dim, 4) for _ in range(layers))
        self.skips = nn.Parameter(torch.ones(layers // 2))
        self.lm_head = nn.Linear(dim, VOCAB, bias=False)
        self.apply(init_weights)
        for name, parameter in self.named_parameters():
            if name.endswith(("out.weight", "down.weight")) or name == "lm_head.weight":
                nn.init.zeros_(parameter)

    def forward(self, ids: Tensor) -> Tensor:
        cosines = self.rotary(torch.arange(ids.shape[1], device=ids.device))
        start = x = F.rms_norm(self.embed(ids), (self.embed.embedding_dim,))
        first, kept = None, []
        half = len(self.blocks) // 2
        for number, block in enumerate(self.blocks):
            if number >= half:
                x = x + self.skips[number - half] * kept.pop()
            x, first = block(x, start, first, cosines)
            if number < half:
                kept.append(x)
        return capped(self.lm_head(F.rms_norm(x, x.shape[-1:])), 15.0)


def speedrun_optimizers(model: nn.Module) -> list[Optimizer]:
    """Return Muon of the blocks' matrices, and Adam of the table, the head and the scalars."""
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and n.startswith("blocks.")]
    scalars = [p for p in model.parameters() if p.ndim < 2]
    table, head = [p for n, p in model.named_parameters() if n in ("embed.weight", "lm_head.weight")]
    adam = torch.optim.Adam(
        [{"params": [head], "lr": 2e-3}, {"params": [table], "lr": 6e-3}, {"params": scalars, "lr": 4e-3}],
        betas=(0.8, 0.95),
    )
    return [torch.optim.Muon(matrices, lr=0.02, momentum=0.95, weight_decay=0.0), adam]


@sound("streams")
def values_and_skips() -> Arguments:
    """Shared values, skips between halves, zero outputs, capped logits, Muon beside Adam."""
    return setup(Speedrun, text(4, 32, seed=54), language_loss, speedrun_optimizers)


def unit(x: Tensor) -> Tensor:
    return F.normalize(x, dim=-1)


class SphereBlock(nn.Module):
    """A layer on the sphere: its branches move a unit vector by learned rates (nGPT)."""

    def __init__(self, dim: int, heads: int, layers: int):
        super().__init__()
        self.heads, self.width = heads, dim // heads
        self.qkv, self.out = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.up, self.down = nn.Linear(dim, 4 * dim, bias=False), nn.Linear(2 * dim, dim, bias=False)
        self.attention_rate = nn.Parameter(torch.full((dim,), 1 / layers))
        self.mlp_rate = nn.Parameter(torch.full((dim,), 1 / layers))
        self.qk_scale = nn.Parameter(torch.ones(dim))
        self.up_scale = nn.Parameter(torch.ones(4 * dim))

    def forward(self, x: Tensor, cosines: Cosines) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        scale = self.qk_scale.view(self.heads, 1, self.width)
        q, k = scale * unit(rotate(q, cosines)), scale * unit(rotate(k, cosines))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.width**0.5)
        y = unit(self.out(y.transpose(1, 2).flatten(2)))
        x = unit(x + self.attention_rate.abs() * (y - x))
        gate, value = (self.up(x) * self.up_scale * x.shape[-1] ** 0.5).chunk(2, -1)
        y = unit(self.down(F.silu(gate) * value))
        return unit(x + self.mlp_rate.abs() * (y - x))


class Sphere(nn.Module):
    def __init__(self, dim: int = 48, layers: int = 3):
        super().__init__()
        self.embed, self.rotary = nn.Embedding(VOCAB, dim), Rotary(dim // 4)
        self.blocks = nn.ModuleList(SphereBlock(dim, 4, layers) for _ in range(layers))
        self.head, self.logit_scale = (
            nn.Linear(dim, VOCAB, bias=False),
            nn.Parameter(torch.full((VOCAB,), 4.0)),
        )
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=dim**-0.5)
        self.normalize()

    @torch.no_grad()
    def normalize(self) -> None:
        """Bring each matrix's vectors along the model's width to length one."""
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                along = 0 if name.endswith(("out.weight", "down.weight")) else 1
                parameter.copy_(F.normalize(parameter, dim=along))

    def forward(self, ids: Tensor) -> Tensor:
        cosines = self.rotary(torch.arange(ids.shape[1], device=ids.device))
        x = unit(self.embed(ids))
        for block in self.blocks:
            x = block(x, cosines)
        return self.head(x) * self.logit_scale


def sphere_step(
    model: Any, batch: Tensor, optimizer: Optimizer, scheduler: LRScheduler | None = None
) -> Tensor:
    model.train()
    optimizer.zero_grad()
    loss = language_loss(model, batch)
    loss.backward()
    optimizer.step()
    model.normalize()
    return loss.detach()


@sound("streams")
def weights_on_the_sphere() -> Arguments:
    """States and weights of length one, without norms' gains or decay; the step brings weights back."""
    optimizer = partial(AdamW, lr=3e-3, weight_decay=0.0)
    return setup(
        Sphere,
        text(4, 32, seed=55),
        language_loss,
        lambda model: optimizer(model.parameters()),
        step=sphere_step,
    )


# --------------------------------------------------------------------------------------------------- loops


class Looped(nn.Module):
    """A prelude, a block that runs several times on its own output and the prelude's, and a coda."""

    def __init__(self, dim: int = 48, loops: int = 4):
        super().__init__()
        self.loops = loops
        self.embed, self.rotary = nn.Embedding(VOCAB, dim), Rotary(dim // 4)
        self.prelude, self.core, self.coda = (DecoderLayer(dim, 4) for _ in range(3))
        self.adapter, self.loop_norm = nn.Linear(2 * dim, dim, bias=False), RMSNorm(dim)
        self.norm, self.head = RMSNorm(dim), nn.Linear(dim, VOCAB, bias=False)
        self.apply(init_weights)

    def forward(self, ids: Tensor) -> Tensor:
        cosines = self.rotary(torch.arange(ids.shape[1], device=ids.device))
        start = self.prelude(self.embed(ids), cosines)
        state = torch.zeros_like(start)
        for _ in range(self.loops):
            state = self.loop_norm(self.core(self.adapter(torch.cat((state, start), -1)), cosines))
        return self.head(self.norm(self.coda(state, cosines)))


@sound("loops")
def looped_block() -> Arguments:
    """A block that runs four times, fed with the prelude's output each time."""
    return remade(Looped, text(4, 32, seed=56), language_loss, decaying_adamw)


# --------------------------------------------------------------------------------------------- recurrences


class TokenShiftMixer(nn.Module):
    """An RWKV recurrence: shifted tokens, a decay for each channel, a bonus for the present."""

    def __init__(self, dim: int):
        super().__init__()
        self.mixes = nn.Parameter(torch.rand(3, dim))
        self.key, self.value = nn.Linear(dim, dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.receptance, self.output = nn.Linear(dim, dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.decay = nn.Parameter(torch.linspace(-4.0, 1.0, dim))
        self.bonus = nn.Parameter(torch.full((dim,), 0.3))

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        before = F.pad(x, (0, 0, 1, 0))[:, :length]
        r, k, v = (x * mix + before * (1 - mix) for mix in self.mixes)
        r, k, v = self.receptance(r).sigmoid(), self.key(k), self.value(v)
        at = torch.arange(length, device=x.device)
        gap = (at[:, None] - at[None] - 1).clamp(min=0)[..., None]
        reach = -gap * self.decay.exp() + k[:, None]  # [B, T, S, D]
        reach = torch.where((at[:, None] == at[None])[..., None], k[:, None] + self.bonus, reach)
        weights = reach.masked_fill((at[:, None] < at[None])[..., None], -torch.inf).softmax(2)
        return self.output(r * (weights * v[:, None]).sum(2))


class TokenShiftMLP(nn.Module):
    def __init__(self, dim: int):
        super().__init__()
        self.mix = nn.Parameter(torch.rand(dim))
        self.key, self.value = nn.Linear(dim, 2 * dim, bias=False), nn.Linear(2 * dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        before = F.pad(x, (0, 0, 1, 0))[:, : x.shape[1]]
        return self.value(F.relu(self.key(x * self.mix + before * (1 - self.mix))).square())


class Recurrent(nn.Module):
    """A model of mixers that need no positions."""

    def __init__(self, mixers: list[nn.Module], mlps: list[nn.Module], dim: int = 48):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, dim)
        self.mixers, self.mlps = nn.ModuleList(mixers), nn.ModuleList(mlps)
        self.mixer_norms = nn.ModuleList(nn.LayerNorm(dim) for _ in mixers)
        self.mlp_norms = nn.ModuleList(nn.LayerNorm(dim) for _ in mlps)
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, VOCAB, bias=False)
        init_weights(self.embed)
        init_weights(self.head)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for mixer, mixer_norm, mlp, mlp_norm in zip(
            self.mixers, self.mixer_norms, self.mlps, self.mlp_norms, strict=True
        ):
            x = x + mixer(mixer_norm(x))
            x = x + mlp(mlp_norm(x))
        return self.head(self.norm(x))


@sound("recurrences")
def shifted_tokens_and_decay() -> Arguments:
    """A recurrence of the RWKV kind."""

    def make() -> nn.Module:
        return Recurrent([TokenShiftMixer(48) for _ in range(2)], [TokenShiftMLP(48) for _ in range(2)])

    return setup(make, text(4, 24, seed=57), language_loss)


class DeltaRule(nn.Module):
    """A gated delta rule: a state that is decayed, corrected at a key and read at a query."""

    def __init__(self, dim: int, heads: int = 4):
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.conv = nn.Conv1d(3 * dim, 3 * dim, 3, groups=3 * dim, bias=False)
        self.strength, self.gate = nn.Linear(dim, heads, bias=False), nn.Linear(dim, dim, bias=False)
        self.step_proj, self.dt_bias = (
            nn.Linear(dim, heads, bias=False),
            nn.Parameter(torch.full((heads,), -3.0)),
        )
        self.a_log = nn.Parameter(torch.arange(1, heads + 1).float().log())
        self.norm = RMSNorm(dim // heads)

    def forward(self, x: Tensor) -> Tensor:
        u = self.conv(F.pad(self.qkv(x).transpose(1, 2), (2, 0))).transpose(1, 2)
        q, k, v = F.silu(u).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 1, 3, 4)
        q, k = F.normalize(q, dim=-1) * q.shape[-1] ** -0.5, F.normalize(k, dim=-1)
        strength = self.strength(x).sigmoid()
        decay = torch.exp(-self.a_log.exp() * F.softplus(self.step_proj(x) + self.dt_bias))
        state = x.new_zeros(len(x), self.heads, q.shape[-1], v.shape[-1])
        out = []
        for t in range(x.shape[1]):
            state = state * decay[:, t, :, None, None]
            error = v[:, t] - torch.einsum("bhkv,bhk->bhv", state, k[:, t])
            state = state + torch.einsum("bhk,bhv->bhkv", k[:, t], error * strength[:, t, :, None])
            out.append(torch.einsum("bhkv,bhk->bhv", state, q[:, t]))
        y = self.norm(torch.stack(out, dim=1)) * F.silu(self.gate(x)).unflatten(-1, (self.heads, -1))
        return self.out(y.flatten(2))


class CausalMixer(nn.Module):
    """Attention without positions."""

    def __init__(self, dim: int, heads: int = 4):
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


@sound("recurrences")
def delta_rule_hybrid() -> Arguments:
    """Two gated delta rules and a layer of attention that has no positions of its own."""

    def make() -> nn.Module:
        return Recurrent([DeltaRule(48), DeltaRule(48), CausalMixer(48)], [GatedMLP(48) for _ in range(3)])

    return remade(make, text(4, 24, seed=58), language_loss)


class StateSpace(nn.Module):
    """A Mamba 2 mixer in its quadratic form, with a scalar decay for each head."""

    def __init__(self, dim: int, heads: int = 4, states: int = 8):
        super().__init__()
        self.heads, self.states, self.inner = heads, states, 2 * dim
        self.in_proj = nn.Linear(dim, 2 * self.inner + 2 * states + heads, bias=False)
        self.conv1d = nn.Conv1d(
            self.inner + 2 * states, self.inner + 2 * states, 4, groups=self.inner + 2 * states
        )
        self.a_log, self.d = (
            nn.Parameter(torch.arange(1, heads + 1).float().log()),
            nn.Parameter(torch.ones(heads)),
        )
        time = torch.exp(torch.rand(heads) * (math.log(0.1) - math.log(0.001)) + math.log(0.001))
        self.dt_bias = nn.Parameter(time + torch.log(-torch.expm1(-time)))
        self.norm, self.out_proj = RMSNorm(self.inner), nn.Linear(self.inner, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, u, time = self.in_proj(x).split((self.inner, self.inner + 2 * self.states, self.heads), -1)
        u = F.silu(self.conv1d(F.pad(u.transpose(1, 2), (3, 0))).transpose(1, 2))
        u, b, c = u.split((self.inner, self.states, self.states), -1)
        time = F.softplus(time + self.dt_bias)
        run = (-self.a_log.exp() * time).cumsum(1).transpose(1, 2)
        decay = (
            (run[..., :, None] - run[..., None, :])
            .masked_fill(~causal(x.shape[1], x.device), -torch.inf)
            .exp()
        )
        u = u.unflatten(-1, (self.heads, -1))
        weights = (c @ b.transpose(1, 2))[:, None] * decay
        y = torch.einsum("bhts,bshd->bthd", weights, u * time[..., None]) + u * self.d[:, None]
        return self.out_proj(self.norm(y.flatten(2) * F.silu(gate)))


def space_adamw(model: nn.Module) -> AdamW:
    return adamw(model, 2e-3)


@sound("recurrences")
def state_space_duality() -> Arguments:
    """Mamba 2 mixers with feed-forwards between them."""

    def make() -> nn.Module:
        return Recurrent([StateSpace(32) for _ in range(3)], [GatedMLP(32, 48) for _ in range(3)], dim=32)

    return setup(make, text(4, 32, seed=59), language_loss, space_adamw)


# ------------------------------------------------------------------------------------------------ mixtures


class BiasedExperts(nn.Module):
    """Experts chosen by sigmoid scores with a bias that evens loads, and one that all tokens share."""

    bias: Tensor
    load: Tensor

    def __init__(self, dim: int, experts: int = 6, top: int = 2):
        super().__init__()
        self.top, self.experts_n = top, experts
        self.router = nn.Linear(dim, experts, bias=False)
        self.up = nn.Parameter(torch.randn(experts, dim, 2 * 24) * 0.02)
        self.down = nn.Parameter(torch.randn(experts, 24, dim) * 0.02)
        self.shared = GatedMLP(dim, 24)
        self.register_buffer("bias", torch.zeros(experts))
        self.register_buffer("load", torch.zeros(experts), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.router(x).sigmoid()
        chosen = (scores + self.bias).topk(self.top, dim=-1).indices
        weights = scores.gather(-1, chosen)
        weights = 2.5 * weights / weights.sum(-1, keepdim=True)
        gates = torch.zeros_like(scores).scatter(-1, chosen, weights)
        if self.training:
            self.load += (gates.detach() > 0).float().sum((0, 1))
        gate, value = torch.einsum("btd,edf->btef", x, self.up).chunk(2, -1)
        return self.shared(x) + torch.einsum("bte,btef,efd->btd", gates, F.silu(gate) * value, self.down)

    @torch.no_grad()
    def even(self, rate: float = 1e-3) -> None:
        """Move the bias of each expert against its load of this step."""
        self.bias += rate * torch.sign(self.load.mean() - self.load)
        self.load.zero_()


class ExpertLayer(DecoderLayer):
    def __init__(self, dim: int, heads: int):
        super().__init__(dim, heads)
        self.mlp = BiasedExperts(dim)


def evening_step(
    model: Any, batch: Tensor, optimizer: Optimizer, scheduler: LRScheduler | None = None
) -> Tensor:
    model.train()
    optimizer.zero_grad()
    total = torch.zeros(())
    for ids in batch.chunk(2):
        loss = language_loss(model, ids) / 2
        loss.backward()
        total += loss.detach()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    for layer in model.layers:
        layer.mlp.even()
    return total


@sound("mixtures of experts")
def bias_evens_loads() -> Arguments:
    """Sigmoid routing, a shared expert, and biases that even loads once a step, outside the loss."""
    make = partial(Decoder, layer=ExpertLayer)
    declare = {"max_grad_norm": 1.0}
    return setup(make, text(4, 32, seed=60), language_loss, step=evening_step, declare=declare)


class SwitchExperts(nn.Module):
    """One expert for each token, with noise while training, and terms for even loads and small logits."""

    def __init__(self, dim: int, experts: int = 4):
        super().__init__()
        self.router = nn.Linear(dim, experts, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(dim, dim), nn.ReLU(), nn.Linear(dim, dim)) for _ in range(experts)
        )
        self.balance = self.size = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        seen = flat
        if self.training:
            seen = flat * torch.empty_like(flat).uniform_(0.99, 1.01)
        logits = self.router(seen).float()
        shares = logits.softmax(-1)
        weight, chosen = shares.max(-1)
        load = F.one_hot(chosen, len(self.experts)).float().mean(0)
        self.balance = len(self.experts) * (load * shares.mean(0)).sum()
        self.size = logits.logsumexp(-1).square().mean()
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            at = (chosen == number).nonzero().squeeze(-1)
            out = out.index_add(0, at, expert(flat[at]) * weight[at, None])
        return out.view_as(x)


class SwitchLayer(DecoderLayer):
    def __init__(self, dim: int, heads: int):
        super().__init__(dim, heads)
        self.mlp = SwitchExperts(dim)


def switch_loss(model: Any, ids: Tensor) -> Tensor:
    logits = model(ids)
    experts = [layer.mlp for layer in model.layers]
    balance, size = sum(e.balance for e in experts), sum(e.size for e in experts)
    return next_token_loss(logits, ids) + 0.01 * balance + 0.001 * size


@sound("mixtures of experts")
def one_expert_for_each_token() -> Arguments:
    """Top-1 routing by the probability of the chosen expert, with jitter and two terms of the loss."""
    return setup(partial(Decoder, layer=SwitchLayer), text(4, 32, seed=61), switch_loss)


# ---------------------------------------------------------------------------------------------- objectives


class FurtherHeads(nn.Module):
    """A decoder whose further depths share its table and its head (DeepSeek-V3)."""

    def __init__(self, depths: int = 2, dim: int = 48):
        super().__init__()
        self.decoder = Decoder(dim)
        self.joins = nn.ModuleList(nn.Linear(2 * dim, dim, bias=False) for _ in range(depths))
        self.state_norms = nn.ModuleList(RMSNorm(dim) for _ in range(depths))
        self.token_norms = nn.ModuleList(RMSNorm(dim) for _ in range(depths))
        self.blocks = nn.ModuleList(DecoderLayer(dim, 4) for _ in range(depths))
        self.norms = nn.ModuleList(RMSNorm(dim) for _ in range(depths))
        self.joins.apply(init_weights)
        self.blocks.apply(init_weights)

    def forward(self, ids: Tensor) -> list[Tensor]:
        """Return the logits of each depth: at depth d those of t stand for token t + 1 + d."""
        state = self.decoder.hidden(ids)
        out = [self.decoder.lm_head(state)]
        for depth, block in enumerate(self.blocks):
            following = self.decoder.embed_tokens(ids[:, depth + 1 :])
            parts = (self.state_norms[depth](state[:, :-1]), self.token_norms[depth](following))
            state = self.joins[depth](torch.cat(parts, -1))
            state = block(state, self.decoder.rotary(torch.arange(state.shape[1], device=ids.device)))
            out.append(self.decoder.lm_head(self.norms[depth](state)))
        return out


def further_loss(model: nn.Module, ids: Tensor) -> Tensor:
    total = torch.zeros(())
    for depth, logits in enumerate(model(ids)):
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, depth + 1 :].flatten())
        total = total + (loss if depth == 0 else 0.15 * loss)
    return total


@sound("multi-token prediction")
def two_further_depths() -> Arguments:
    """Two further depths in sequence, with the table and the head of the first."""
    return remade(FurtherHeads, text(4, 32, seed=62), further_loss, decaying_adamw)


class FillIn(nn.Module):
    """An encoder with rotary positions that fills in masked tokens."""

    def __init__(self, dim: int = 48):
        super().__init__()
        self.decoder = Decoder(dim, layers=3)

    def forward(self, ids: Tensor) -> Tensor:
        return self.decoder(ids, torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool, device=ids.device))


def fill_in_loss(model: nn.Module, ids: Tensor) -> Tensor:
    """Return the bound of masked diffusion: losses of masked tokens by the inverse of their share."""
    share = torch.rand(len(ids), 1).clamp(min=0.05)
    masked = torch.rand(ids.shape) < share
    losses = F.cross_entropy(model(ids.masked_fill(masked, MASK)).transpose(1, 2), ids, reduction="none")
    return (losses * masked / share).mean()


@sound("diffusion of text")
def masked_diffusion() -> Arguments:
    """A masked diffusion language model, whose masks are drawn in the loss."""
    return setup(FillIn, tokens(8, 24, seed=63), fill_in_loss)


class BertPretraining(nn.Module):
    """Masked words and whether the second sentence follows, with types of tokens and a tied, biased head."""

    def __init__(self, dim: int = 48):
        super().__init__()
        self.words, self.places = nn.Embedding(VOCAB, dim, padding_idx=PAD), nn.Embedding(64, dim)
        self.types, self.norm = nn.Embedding(2, dim), nn.LayerNorm(dim)
        self.drop = nn.Dropout(0.1)
        layer = nn.TransformerEncoderLayer(dim, 4, 2 * dim, 0.1, F.gelu, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.pool, self.relation = nn.Linear(dim, dim), nn.Linear(dim, 2)
        self.transform, self.transform_norm = nn.Linear(dim, dim), nn.LayerNorm(dim)
        self.bias = nn.Parameter(torch.zeros(VOCAB))
        self.apply(init_weights)
        with torch.no_grad():
            self.words.weight[PAD].zero_()

    def forward(self, ids: Tensor, types: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        at = torch.arange(ids.shape[1], device=ids.device)
        x = self.drop(self.norm(self.words(ids) + self.places(at) + self.types(types)))
        x = self.encoder(x, src_key_padding_mask=mask == 0)
        h = self.transform_norm(F.gelu(self.transform(x)))
        return h @ self.words.weight.T + self.bias, self.relation(torch.tanh(self.pool(x[:, 0])))


def bert_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    words, relation = model(batch["ids"], batch["types"], batch["mask"])
    masked = F.cross_entropy(words.transpose(1, 2), batch["labels"], ignore_index=-100)
    return masked + F.cross_entropy(relation, batch["follows"])


@sound("encoders")
def masked_words_and_relation() -> Arguments:
    """BERT's two objectives on padded pairs of sentences."""
    ids, mask = padded_text((28, 20, 24, 17), seed=64)
    ids[:, 0] = BOS
    types = torch.zeros_like(ids)
    for row, (middle, end) in enumerate(((13, 28), (9, 20), (12, 24), (8, 17))):
        ids[row, middle] = EOS
        types[row, middle + 1 : end] = 1
    chosen = (torch.rand(ids.shape, generator=generator(64)) < 0.25) & (ids > MASK)
    batch = {
        "ids": ids.masked_fill(chosen, MASK),
        "types": types,
        "mask": mask,
        "labels": ids.masked_fill(~chosen, -100),
        "follows": torch.tensor([0, 1, 1, 0]),
    }
    return remade(BertPretraining, batch, bert_loss, declare={"pad_id": PAD})


class BiasedAttention(nn.Module):
    """Attention with a learned bias for each distance and no scale (T5)."""

    def __init__(self, dim: int, heads: int):
        super().__init__()
        self.heads = heads
        self.q, self.k = nn.Linear(dim, dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.v, self.o = nn.Linear(dim, dim, bias=False), nn.Linear(dim, dim, bias=False)
        for part in (self.k, self.v, self.o):
            nn.init.normal_(part.weight, std=dim**-0.5)
        nn.init.normal_(self.q.weight, std=dim**-0.5 * (dim // heads) ** -0.5)

    def forward(self, x: Tensor, memory: Tensor, bias: Tensor | None, seen: Tensor) -> Tensor:
        q, k, v = (
            map_(part).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for map_, part in ((self.q, x), (self.k, memory), (self.v, memory))
        )
        scores = q @ k.transpose(-1, -2)
        if bias is not None:
            scores = scores + bias
        return self.o((scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v).transpose(1, 2).flatten(2))


class TextToText(nn.Module):
    """An encoder-decoder whose layers share the bias of distances of their side, tied to its scaled head."""

    def __init__(self, dim: int = 48, heads: int = 4, layers: int = 2):
        super().__init__()
        self.shared = nn.Embedding(VOCAB, dim)
        self.near, self.past = nn.Embedding(33, heads), nn.Embedding(17, heads)
        self.encoder = nn.ModuleList(BiasedAttention(dim, heads) for _ in range(layers))
        self.decoder = nn.ModuleList(BiasedAttention(dim, heads) for _ in range(layers))
        self.crossing = nn.ModuleList(BiasedAttention(dim, heads) for _ in range(layers))
        self.encoder_mlps = nn.ModuleList(GatedMLP(dim) for _ in range(layers))
        self.decoder_mlps = nn.ModuleList(GatedMLP(dim) for _ in range(layers))
        self.norms = nn.ModuleList(RMSNorm(dim) for _ in range(5 * layers + 2))

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        norms, real = iter(self.norms), (source != PAD)[:, None, None]
        at, to = (
            torch.arange(source.shape[1], device=source.device),
            torch.arange(target.shape[1], device=source.device),
        )
        near = self.near((at[None] - at[:, None]).clamp(-16, 16) + 16).permute(2, 0, 1)
        past = self.past((to[:, None] - to[None]).clamp(0, 16)).permute(2, 0, 1)
        x = self.shared(source)
        for attention, mlp in zip(self.encoder, self.encoder_mlps, strict=True):
            y = next(norms)(x)
            x = x + attention(y, y, near, real)
            x = x + mlp(next(norms)(x))
        memory, x = next(norms)(x), self.shared(target)
        for attention, crossing, mlp in zip(self.decoder, self.crossing, self.decoder_mlps, strict=True):
            y = next(norms)(x)
            x = x + attention(y, y, past, causal(target.shape[1], source.device))
            x = x + crossing(next(norms)(x), memory, None, real)
            x = x + mlp(next(norms)(x))
        return next(norms)(x) * self.shared.embedding_dim**-0.5 @ self.shared.weight.T


def text_to_text_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Return the loss of labels, which the decoder reads moved to the right behind a start token."""
    labels = batch["labels"]
    given = F.pad(labels.clamp(min=PAD), (1, 0), value=PAD)[:, :-1]
    logits = model(batch["source"], given)
    return F.cross_entropy(logits.transpose(1, 2), labels, ignore_index=-100)


@sound("encoder-decoder")
def text_to_text() -> Arguments:
    """T5: shared biases of distances, no scale of scores, a tied head with a scale, padding as start."""
    source, _ = padded_text((22, 15, 18, 10), seed=65)
    target, real = padded_text((14, 12, 9, 14), seed=66)
    batch = {"source": source, "labels": target.masked_fill(real == 0, -100)}
    return setup(
        TextToText, batch, text_to_text_loss, partial(adamw, lr=3e-3), declare={"tied": True, "pad_id": PAD}
    )


# ------------------------------------------------------------------------------------------- post-training


def packed_chat_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    documents = batch["documents"]
    seen = (documents[:, :, None] == documents[:, None]) & causal(documents.shape[1], documents.device)
    logits = model(batch["ids"], seen[:, None], batch["positions"])
    return next_token_loss(logits, batch["labels"])


@sound("post-training")
def packed_answers() -> Arguments:
    """Prompts and answers packed into rows, each apart from the others, with losses of the answers alone."""
    ids, documents = documents_text(((11, 23), (15, 27), (9, 19, 28)), 32, seed=67)
    at = torch.arange(32).expand_as(ids)
    first = F.pad(documents[:, 1:] != documents[:, :-1], (1, 0), value=True)
    positions = at - torch.where(first, at, 0).cummax(1).values
    labels = ids.masked_fill(positions < 5, -100)  # the prompts
    batch = {"ids": ids, "positions": positions, "documents": documents, "labels": labels}
    declare = {"documents": documents_of(ids), "eos_id": EOS}
    return setup(Decoder, batch, packed_chat_loss, partial(adamw, lr=5e-4), declare=declare)


def answers(width: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return padded prompts with answers, and which tokens but the first belong to answers."""
    lengths = (width, width - 6, width - 3, width - 8, width - 1, width - 4)
    ids, real = padded_text(lengths, seed=seed)
    ids[:, :7] = tokens(6, 7, seed=1)  # the prompts of both sides of a pair
    answer = real.bool()
    answer[:, :7] = False
    return ids, answer[:, 1:]


def preference_loss(
    model: nn.Module, batch: dict[str, Tensor], *, reference: nn.Module, beta: float = 0.1
) -> Tensor:
    gains = []
    for side in ("chosen", "rejected"):
        ids, answer = batch[side], batch[f"{side}_answer"]
        own = (token_log_probs(model(ids), ids) * answer).sum(-1)
        with torch.no_grad():
            before = (token_log_probs(reference(ids), ids) * answer).sum(-1)
        gains.append(own - before)
    return -F.logsigmoid(beta * (gains[0] - gains[1])).mean()


@sound("post-training")
def preferences() -> Arguments:
    """DPO against a frozen copy, by the summed log-probabilities of the answers."""
    torch.manual_seed(0)
    model = Decoder()
    reference = copy.deepcopy(model).requires_grad_(False).eval()
    (chosen, one), (rejected, two) = answers(24, 68), answers(22, 69)
    batch = {"chosen": chosen, "chosen_answer": one, "rejected": rejected, "rejected_answer": two}
    loss = partial(preference_loss, reference=reference)
    optimizer = adamw(model, 5e-4)
    return {"model": model, "batch": batch, "loss": loss, "optimizer": optimizer, "declare": {"pad_id": PAD}}


def relative_loss(model: nn.Module, batch: dict[str, Tensor], *, reference: nn.Module) -> Tensor:
    """Return GRPO's loss: clipped ratios by advantages of groups, and the divergence from the reference."""
    ids, answer = batch["ids"], batch["answer"]
    logps = token_log_probs(model(ids), ids)
    with torch.no_grad():
        before = token_log_probs(reference(ids), ids)
    ratio = (logps - batch["old_logps"]).exp()
    advantages = batch["advantages"][:, None]
    policy = -torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    gap = before - logps
    divergence = gap.exp() - gap - 1
    each = policy + 0.04 * divergence
    return ((each * answer).sum(-1) / answer.sum(-1)).mean()


@sound("post-training")
def groups_of_answers() -> Arguments:
    """GRPO with the old policy's log-probabilities in the batch and a frozen reference."""
    torch.manual_seed(0)
    reference = Decoder().requires_grad_(False).eval()
    model = copy.deepcopy(reference).requires_grad_(True).train()
    ids, answer = answers(24, 70)
    for group in ids.view(2, 3, -1):
        group[:, :7] = group[0, :7]
    rewards = torch.tensor([0.0, 1.0, 0.5, 0.2, 0.9, 0.1]).view(2, 3)
    advantages = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)
    with torch.no_grad():
        old = token_log_probs(model(ids), ids)
    batch = {"ids": ids, "answer": answer.float(), "advantages": advantages.flatten(), "old_logps": old}
    loss = partial(relative_loss, reference=reference)
    optimizer = adamw(model, 5e-4)
    return {"model": model, "batch": batch, "loss": loss, "optimizer": optimizer, "declare": {"pad_id": PAD}}


class Scorer(nn.Module):
    """A decoder that gives a row the score of its last token."""

    def __init__(self):
        super().__init__()
        self.decoder = Decoder()
        self.decoder.lm_head = nn.Identity()
        self.score = nn.Linear(self.decoder.dim, 1, bias=False)
        init_weights(self.score)

    def forward(self, ids: Tensor) -> Tensor:
        last = (ids != PAD).long().cumsum(1).argmax(1)
        return self.score(self.decoder(ids))[torch.arange(len(ids)), last, 0]


def reward_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    chosen, rejected = model(batch["chosen"]), model(batch["rejected"])
    return (
        -F.logsigmoid(chosen - rejected - batch["margin"]).mean() + 0.01 * (chosen + rejected).square().mean()
    )


@sound("post-training")
def reward_of_pairs() -> Arguments:
    """A reward model of pairs with margins and centred scores, padded on the right."""
    (chosen, _), (rejected, _) = answers(24, 71), answers(22, 72)
    batch = {"chosen": chosen, "rejected": rejected, "margin": torch.tensor([0.0, 0.5, 0.2, 0.0, 0.3, 0.1])}
    return setup(Scorer, batch, reward_loss, declare={"pad_id": PAD})


class SoftPrompt(nn.Module):
    """A frozen decoder behind learned vectors."""

    def __init__(self, count: int = 5):
        super().__init__()
        self.base = Decoder().requires_grad_(False)
        start = torch.randperm(VOCAB, generator=generator(73))[:count]
        self.prompt = nn.Parameter(self.base.embed_tokens.weight[start].clone())

    def forward(self, ids: Tensor) -> Tensor:
        prompt = self.prompt.expand(len(ids), -1, -1)
        x = torch.cat((prompt, self.base.embed_tokens(ids)), dim=1)
        return self.base.lm_head(self.base.run(x)[:, len(self.prompt) :])


@sound("post-training")
def soft_prompt() -> Arguments:
    """Prompt tuning: a few learned vectors before the words, all else is frozen."""
    return setup(
        SoftPrompt,
        text(4, 24, seed=73),
        language_loss,
        lambda model: AdamW([model.prompt], lr=3e-2, weight_decay=0.0),
        scheduler=lambda optimizer: LambdaLR(optimizer, lambda step: max(0.1, 1 - step / 200)),
        declare={"frozen": ("base.*",), "steps": 200, "peak_lr": 3e-2},
    )
