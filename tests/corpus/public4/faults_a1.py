"""Reports of models: masks, positions, attention, norms, starts and precision."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from corpus.batches import BOS, PAD, VOCAB, generator, inside, padded_text, text
from corpus.case import Arguments
from corpus.public2.blocks import remade, setup

from .case import report
from .parts_a import (
    Attention,
    Batch,
    FeedForward,
    causal_pairs,
    decaying_adamw,
    draw_weights,
    mean_token_loss,
    next_token_loss,
    rotated,
    step_of,
    undecayed_adamw,
    waves,
)

# ---------------------------------------------------------------------------------------------------- masks


class EvaAttention(nn.Module):
    """Attention without a bias of the keys; ``attn_mask`` is true for patches that hold an image."""

    def __init__(self, dim: int, num_heads: int, *, mask_first: bool):
        super().__init__()
        self.num_heads, self.scale, self.mask_first = num_heads, (dim // num_heads) ** -0.5, mask_first
        self.q_proj, self.v_proj = nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.k_proj, self.proj = nn.Linear(dim, dim, bias=False), nn.Linear(dim, dim)

    def forward(self, x: Tensor, attn_mask: Tensor) -> Tensor:
        q, k, v = (
            proj(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        attn = (q * self.scale) @ k.transpose(-2, -1)
        hidden = ~attn_mask[:, None, None, :]
        if self.mask_first:
            attn = attn.masked_fill(hidden, float("-inf")).softmax(dim=-1)
        else:
            attn = attn.softmax(dim=-1).masked_fill(hidden, float("-inf"))
        return self.proj((attn @ v).transpose(1, 2).flatten(2))


class EvaBlock(nn.Module):
    def __init__(self, dim: int, num_heads: int, *, mask_first: bool, init_values: float = 0.1):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attn = EvaAttention(dim, num_heads, mask_first=mask_first)
        self.mlp = FeedForward(dim, 4)
        self.gamma_1 = nn.Parameter(torch.full((dim,), init_values))
        self.gamma_2 = nn.Parameter(torch.full((dim,), init_values))

    def forward(self, x: Tensor, attn_mask: Tensor) -> Tensor:
        x = x + self.gamma_1 * self.attn(self.norm1(x), attn_mask)
        return x + self.gamma_2 * self.mlp(self.norm2(x))


class Eva(nn.Module):
    """A ViT of images with different numbers of patches, which reads its class token."""

    def __init__(
        self, dim: int = 48, depth: int = 3, pixels: int = 27, classes: int = 6, *, mask_first: bool
    ):
        super().__init__()
        self.patch_embed = nn.Linear(pixels, dim)
        self.cls_token = nn.Parameter(torch.randn(1, 1, dim) * 0.02)
        self.pos_embed = nn.Parameter(torch.randn(1, 21, dim) * 0.02)
        self.blocks = nn.ModuleList(EvaBlock(dim, 4, mask_first=mask_first) for _ in range(depth))
        self.fc_norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, classes)

    def forward(self, patches: Tensor, patch_mask: Tensor) -> Tensor:
        x = self.patch_embed(patches)
        x = torch.cat((self.cls_token.expand(len(x), -1, -1), x), dim=1)
        x = x + self.pos_embed[:, : x.shape[1]]
        attn_mask = F.pad(patch_mask, (1, 0), value=True)
        for block in self.blocks:
            x = block(x, attn_mask)
        return self.head(self.fc_norm(x[:, 0]))


def image_loss(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch["patches"], batch["patch_mask"]), batch["labels"])


@report("huggingface/pytorch-image-models#2236", "masks", "finite", "padding")
def mask_after_the_softmax(*, faulty: bool) -> Arguments:
    """Hidden patches get minus infinity after the softmax instead of before it."""
    mask = inside((20, 12, 16, 9, 20, 14), 20)
    patches = torch.randn(6, 20, 27, generator=generator(400)) * mask[..., None]
    batch = {"patches": patches, "patch_mask": mask, "labels": torch.tensor([0, 3, 1, 5, 2, 4])}
    make = partial(Eva, mask_first=not faulty)
    return setup(make, batch, image_loss, decaying_adamw)


def split_attention(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor | None) -> Tensor:
    """Attend in one row after another, within its length if lengths are given."""
    rows = []
    for row in range(len(q)):
        length = q.shape[2] if lengths is None else int(lengths[row])
        part = slice(row, row + 1), slice(None), slice(length)
        y = F.scaled_dot_product_attention(q[part], k[part], v[part])
        rows.append(F.pad(y, (0, 0, 0, q.shape[2] - length)))
    return torch.cat(rows)


class PackedBlock(nn.Module):
    """A block of frames and, behind them, words; the time of the noise moves and scales its norms."""

    def __init__(self, dim: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(dim, elementwise_affine=False)
        self.modulation, self.qkv = nn.Linear(dim, 3 * dim), nn.Linear(dim, 3 * dim)
        self.q_norm, self.k_norm = nn.RMSNorm(dim // heads), nn.RMSNorm(dim // heads)
        self.mlp_in, self.out = nn.Linear(dim, 2 * dim), nn.Linear(3 * dim, dim)

    def forward(self, x: Tensor, vec: Tensor, frames: int, lengths: Tensor | None) -> Tensor:
        shift, scale, gate = self.modulation(F.silu(vec)).unsqueeze(1).chunk(3, dim=-1)
        y = self.norm(x) * (1 + scale) + shift
        q, k, v = self.qkv(y).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        q, k = self.q_norm(q), self.k_norm(k)
        q = torch.cat((rotated(q[:, :, :frames]), q[:, :, frames:]), dim=2)
        k = torch.cat((rotated(k[:, :, :frames]), k[:, :, frames:]), dim=2)
        attended = split_attention(q, k, v, lengths).transpose(1, 2).flatten(2)
        return x + gate * self.out(torch.cat((attended, F.gelu(self.mlp_in(y))), dim=-1))


class FramePack(nn.Module):
    """Predicts the velocity of noised frames, which are told by a text."""

    def __init__(self, dim: int = 48, depth: int = 3, latent: int = 8, words: int = 20, *, use_lengths: bool):
        super().__init__()
        self.use_lengths, self.dim = use_lengths, dim
        self.img_in, self.txt_in = nn.Linear(latent, dim), nn.Linear(words, dim)
        self.time_in = nn.Sequential(nn.Linear(dim, dim), nn.SiLU(), nn.Linear(dim, dim))
        self.blocks = nn.ModuleList(PackedBlock(dim, 4) for _ in range(depth))
        self.norm_out, self.proj_out = nn.LayerNorm(dim), nn.Linear(dim, latent)

    def forward(self, latents: Tensor, time: Tensor, txt: Tensor, txt_mask: Tensor) -> Tensor:
        frames = latents.shape[1]
        vec = self.time_in(waves(time * 1000.0, self.dim))
        lengths = frames + txt_mask.sum(1) if self.use_lengths else None
        x = torch.cat((self.img_in(latents), self.txt_in(txt)), dim=1)
        for block in self.blocks:
            x = block(x, vec, frames, lengths)
        return self.proj_out(self.norm_out(x[:, :frames]))


def velocity_loss(model: nn.Module, batch: Batch) -> Tensor:
    latents = batch["latents"]
    time = torch.sigmoid(torch.randn(len(latents)))
    noise = torch.randn_like(latents)
    mixed = torch.lerp(latents, noise, time[:, None, None])
    predicted = model(mixed, time, batch["txt"], batch["txt_mask"])
    return F.mse_loss(predicted, noise - latents)


@report("kohya-ss/musubi-tuner#413", "masks", "padding")
def split_rows_attend_to_padding(*, faulty: bool) -> Arguments:
    """Attention in one row after another forgets the lengths, so that short texts' padding is read."""
    draw = generator(401)
    mask = inside((10, 4, 7, 5), 10)
    batch = {
        "latents": torch.randn(4, 12, 8, generator=draw),
        "txt": torch.randn(4, 10, 20, generator=draw) * mask[..., None],
        "txt_mask": mask,
    }
    make = partial(FramePack, use_lengths=not faulty)
    return setup(make, batch, velocity_loss, decaying_adamw)


# ------------------------------------------------------------------------------------------------ positions


class AlibiAttention(nn.Module):
    def __init__(self, dim: int, n_heads: int):
        super().__init__()
        self.n_heads = n_heads
        self.qkv_proj, self.out_proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor, attn_bias: Tensor) -> Tensor:
        q, k, v = self.qkv_proj(x).unflatten(-1, (3, self.n_heads, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=attn_bias)
        return self.out_proj(y.transpose(1, 2).flatten(2))


class LunarisBlock(nn.Module):
    def __init__(self, dim: int, n_heads: int):
        super().__init__()
        self.ln_1, self.attn = nn.LayerNorm(dim), AlibiAttention(dim, n_heads)
        self.ln_2, self.mlp = nn.LayerNorm(dim), FeedForward(dim)

    def forward(self, x: Tensor, attn_bias: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x), attn_bias)
        return x + self.mlp(self.ln_2(x))


class LunarisMind(nn.Module):
    """A decoder whose only positions are slopes that lower the scores of distant tokens."""

    alibi_slopes: Tensor

    def __init__(self, dim: int = 48, n_heads: int = 4, n_layers: int = 3, *, negative: bool):
        super().__init__()
        self.token_embeddings = nn.Embedding(VOCAB, dim)
        self.blocks = nn.ModuleList(LunarisBlock(dim, n_heads) for _ in range(n_layers))
        self.ln_f, self.lm_head = nn.LayerNorm(dim), nn.Linear(dim, VOCAB, bias=False)
        draw_weights(self)
        self.lm_head.weight = self.token_embeddings.weight
        slopes = 2.0 ** -(torch.arange(1, n_heads + 1) * 8 / n_heads)
        self.register_buffer("alibi_slopes", -slopes if negative else slopes)

    def attention_bias(self, length: int) -> Tensor:
        """Return the slopes times the distance to each earlier token, and no later token."""
        at = torch.arange(length, device=self.alibi_slopes.device)
        distance = at[:, None] - at
        bias = self.alibi_slopes[:, None, None] * distance
        return bias.masked_fill(distance < 0, float("-inf"))

    def forward(self, ids: Tensor) -> Tensor:
        x, attn_bias = self.token_embeddings(ids), self.attention_bias(ids.shape[1])
        for block in self.blocks:
            x = block(x, attn_bias)
        return self.lm_head(self.ln_f(x))


@report("MeryylleA/lunariscodex#75", "positions")
def slopes_favour_distance(*, faulty: bool) -> Arguments:
    """The slopes of ALiBi are positive: the further a token is away, the more it is attended to."""
    make = partial(LunarisMind, negative=not faulty)
    return remade(make, text(4, 33, seed=402), next_token_loss, decaying_adamw, declare={"tied": True})


class ALiBi(nn.Module):
    """Adds to scores what falls with the distance, by a slope for each head."""

    def __init__(self, num_heads: int, *, of_powers: bool):
        super().__init__()
        self.slopes = self.slopes_of_powers(num_heads) if of_powers else self.even_slopes(num_heads)

    @staticmethod
    def even_slopes(num_heads: int) -> list[float]:
        return [2.0 ** (-8.0 * (head + 1) / num_heads) for head in range(num_heads)]

    @classmethod
    def slopes_of_powers(cls, num_heads: int) -> list[float]:
        """Return the slopes of the power of two below, and every other slope of the one above."""
        power = 2 ** int(math.log2(num_heads))
        rest = cls.even_slopes(2 * power)[0::2][: num_heads - power]
        return cls.even_slopes(power) + rest

    def forward(self, scores: Tensor) -> Tensor:
        at = torch.arange(scores.shape[-1], device=scores.device)
        slopes = torch.tensor(self.slopes, device=scores.device)[:, None, None]
        return scores - slopes * (at[:, None] - at).abs()


class SlopedLayer(nn.Module):
    """A layer that builds its scores by hand, as code for another array library does."""

    def __init__(self, dims: int, num_heads: int, *, of_powers: bool):
        super().__init__()
        self.num_heads, self.alibi = num_heads, ALiBi(num_heads, of_powers=of_powers)
        self.query_proj, self.key_proj = nn.Linear(dims, dims, bias=False), nn.Linear(dims, dims, bias=False)
        self.value_proj, self.out_proj = nn.Linear(dims, dims, bias=False), nn.Linear(dims, dims, bias=False)
        self.ln1, self.ln2, self.ff = nn.LayerNorm(dims), nn.LayerNorm(dims), FeedForward(dims)

    def attend(self, x: Tensor, mask: Tensor) -> Tensor:
        queries, keys, values = (
            proj(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for proj in (self.query_proj, self.key_proj, self.value_proj)
        )
        scores = (queries / math.sqrt(queries.shape[-1])) @ keys.transpose(-1, -2)
        weights = (self.alibi(scores) + mask).softmax(dim=-1)
        return self.out_proj((weights @ values).transpose(1, 2).flatten(2))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = x + self.attend(self.ln1(x), mask)
        return x + self.ff(self.ln2(x))


class SlopedDecoder(nn.Module):
    def __init__(self, dims: int = 48, num_heads: int = 6, num_layers: int = 2, *, of_powers: bool):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, dims)
        self.layers = nn.ModuleList(
            SlopedLayer(dims, num_heads, of_powers=of_powers) for _ in range(num_layers)
        )
        self.ln, self.out_proj = nn.LayerNorm(dims), nn.Linear(dims, VOCAB)
        draw_weights(self)

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        mask = torch.full((length, length), -1e9, device=tokens.device).triu(1)
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, mask)
        return self.out_proj(self.ln(x))


@report("ml-explore/mlx#3071", "positions")
def slopes_of_six_heads(*, faulty: bool) -> Arguments:
    """With six heads, ALiBi takes evenly spaced slopes instead of those of four heads and two of eight."""
    make = partial(SlopedDecoder, of_powers=not faulty)
    return setup(make, text(4, 30, seed=403), next_token_loss, decaying_adamw)


# ------------------------------------------------------------------------------------------------ attention


class MemoryAttention(nn.Module):
    """Attention to an episode's memory; maps come before or after features are split into heads."""

    def __init__(self, embed_dim: int, num_heads: int, *, split_first: bool):
        super().__init__()
        self.num_heads, self.head_size, self.split_first = num_heads, embed_dim // num_heads, split_first
        width = self.head_size if split_first else embed_dim
        self.values, self.keys, self.queries = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.fc_out = nn.Linear(embed_dim, embed_dim)

    def heads_of(self, x: Tensor, projection: nn.Linear) -> Tensor:
        if self.split_first:
            return projection(x.unflatten(-1, (self.num_heads, self.head_size)))
        return projection(x).unflatten(-1, (self.num_heads, self.head_size))

    def forward(self, values: Tensor, keys: Tensor, query: Tensor, mask: Tensor) -> Tensor:
        values, keys = self.heads_of(values, self.values), self.heads_of(keys, self.keys)
        queries = self.heads_of(query, self.queries)
        energy = torch.einsum("nqhd,nkhd->nhqk", queries, keys) / self.head_size**0.5
        energy = energy.masked_fill(~mask[:, None, None, :], float("-1e20"))
        attention = energy.softmax(dim=-1)
        return self.fc_out(torch.einsum("nhqk,nkhd->nqhd", attention, values).flatten(2))


class MemoryBlock(nn.Module):
    def __init__(self, embed_dim: int, num_heads: int, *, split_first: bool):
        super().__init__()
        self.attention = MemoryAttention(embed_dim, num_heads, split_first=split_first)
        self.norm1, self.norm2 = nn.LayerNorm(embed_dim), nn.LayerNorm(embed_dim)
        self.norm_kv = nn.LayerNorm(embed_dim)
        self.fc = nn.Sequential(nn.Linear(embed_dim, embed_dim), nn.ReLU())

    def forward(self, memory: Tensor, query: Tensor, mask: Tensor) -> Tensor:
        context = self.norm_kv(memory)
        h = query + self.attention(context, context, self.norm1(query), mask)
        return h + self.fc(self.norm2(h))


class MemoryAgent(nn.Module):
    """A policy and a value that look at what blocks saw earlier in the episode."""

    def __init__(
        self, observation: int = 10, dim: int = 32, blocks: int = 2, actions: int = 4, *, split: bool
    ):
        super().__init__()
        self.dim = dim
        self.encoder = nn.Sequential(nn.Linear(observation, dim), nn.ReLU(), nn.Linear(dim, dim))
        self.transformer = nn.ModuleList(MemoryBlock(dim, 4, split_first=split) for _ in range(blocks))
        self.lin_hidden = nn.Sequential(nn.Linear(dim, dim), nn.ReLU())
        self.policy, self.value = nn.Linear(dim, actions), nn.Linear(dim, 1)

    def forward(self, obs: Tensor, memories: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits of actions and values; ``memories`` are `[N, L, blocks, D]`, the latest last."""
        h = self.encoder(obs).unsqueeze(1)
        length = memories.shape[1]
        ages = waves(torch.arange(length, 0, -1, device=obs.device), self.dim)
        for number, block in enumerate(self.transformer):
            h = block(memories[:, :, number] + ages, h, mask)
        h = self.lin_hidden(h.squeeze(1))
        return self.policy(h), self.value(h).squeeze(-1)


def ppo_loss(model: nn.Module, batch: Batch, clip: float = 0.2) -> Tensor:
    logits, values = model(batch["obs"], batch["memories"], batch["memory_mask"])
    policy = torch.distributions.Categorical(logits=logits)
    ratio = (policy.log_prob(batch["actions"]) - batch["log_probs"]).exp()
    advantages = batch["advantages"]
    clipped = ratio.clamp(1 - clip, 1 + clip) * advantages
    policy_loss = -torch.minimum(ratio * advantages, clipped).mean()
    value_loss = (values - batch["returns"]).square().mean()
    return policy_loss + 0.25 * value_loss - 0.001 * policy.entropy().mean()


def clipped_ppo_step(
    model: nn.Module, batch: Batch, optimizer: Optimizer, scheduler: LRScheduler | None = None
) -> Tensor:
    model.train()
    loss = ppo_loss(model, batch)
    optimizer.zero_grad()
    loss.backward()
    clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    if scheduler is not None:
        scheduler.step()
    return loss.detach()


@report("MarcoMeter/episodic-transformer-memory-ppo#22", "attention")
def heads_share_their_maps(*, faulty: bool) -> Arguments:
    """Features are split into heads before they are mapped: one small map serves all heads."""
    make = partial(MemoryAgent, split=faulty)
    draw = generator(404)
    rows, length = 12, 8
    mask = inside((8, 3, 5, 8, 1, 6, 7, 2, 8, 4, 8, 5), length).flip(1)
    memories = torch.randn(rows, length, 2, 32, generator=draw) * mask[..., None, None]
    batch = {
        "obs": torch.randn(rows, 10, generator=draw),
        "memories": memories,
        "memory_mask": mask,
        "actions": torch.randint(0, 4, (rows,), generator=draw),
        "advantages": torch.randn(rows, generator=draw),
        "returns": torch.randn(rows, generator=draw),
    }
    torch.manual_seed(0)
    with torch.no_grad():
        logits, _ = make()(batch["obs"], memories, mask)
    batch["log_probs"] = logits.log_softmax(-1).gather(1, batch["actions"][:, None]).squeeze(1)
    declare = {"max_grad_norm": 0.5}
    return setup(make, batch, ppo_loss, undecayed_adamw, step=clipped_ppo_step, declare=declare)


# ---------------------------------------------------------------------------------------------------- norms


class PostNormDecoderLayer(nn.Module):
    """A decoder's layer that norms after each of its three branches."""

    def __init__(self, dims: int, num_heads: int, *, first_norm_again: bool):
        super().__init__()
        self.first_norm_again = first_norm_again
        self.self_attention, self.cross_attention = Attention(dims, num_heads), Attention(dims, num_heads)
        self.ln1, self.ln2, self.ln3 = (nn.LayerNorm(dims) for _ in range(3))
        self.linear1, self.linear2 = nn.Linear(dims, 4 * dims), nn.Linear(4 * dims, dims)

    def forward(self, x: Tensor, memory: Tensor, x_mask: Tensor, memory_mask: Tensor) -> Tensor:
        x = self.ln1(x + self.self_attention(x, mask=x_mask))
        second = self.ln1 if self.first_norm_again else self.ln2
        x = second(x + self.cross_attention(x, memory, memory_mask))
        return self.ln3(x + self.linear2(F.relu(self.linear1(x))))


class PostNormEncoderLayer(nn.Module):
    def __init__(self, dims: int, num_heads: int):
        super().__init__()
        self.attention = Attention(dims, num_heads)
        self.ln1, self.ln2 = nn.LayerNorm(dims), nn.LayerNorm(dims)
        self.linear1, self.linear2 = nn.Linear(dims, 4 * dims), nn.Linear(4 * dims, dims)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = self.ln1(x + self.attention(x, mask=mask))
        return self.ln2(x + self.linear2(F.relu(self.linear1(x))))


class PostNormTranslator(nn.Module):
    def __init__(self, dims: int = 48, num_heads: int = 4, layers: int = 2, *, first_norm_again: bool):
        super().__init__()
        self.source, self.target = nn.Embedding(VOCAB, dims), nn.Embedding(VOCAB, dims)
        self.encoder = nn.ModuleList(PostNormEncoderLayer(dims, num_heads) for _ in range(layers))
        self.decoder = nn.ModuleList(
            PostNormDecoderLayer(dims, num_heads, first_norm_again=first_norm_again) for _ in range(layers)
        )
        self.to_words = nn.Linear(dims, VOCAB)
        self.dims = dims

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        at = torch.arange(max(source.shape[1], target.shape[1]), device=source.device)
        positions = waves(at, self.dims)
        real = (source != PAD)[:, None, None, :]
        memory = self.source(source) + positions[: source.shape[1]]
        for layer in self.encoder:
            memory = layer(memory, real)
        x = self.target(target) + positions[: target.shape[1]]
        past = causal_pairs(target.shape[1]).to(source.device)
        for layer in self.decoder:
            x = layer(x, memory, past, real)
        return self.to_words(x)


def translation_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    source, target = batch
    return mean_token_loss(model(source, target[:, :-1]), target[:, 1:], ignore_index=PAD)


@report("ml-explore/mlx#1636", "norms", "gradients")
def first_norm_used_twice(*, faulty: bool) -> Arguments:
    """In a Post-LN decoder, the first norm also follows the second branch, and the second is unused."""
    source, _ = padded_text((18, 11, 15, 8), seed=405)
    target, _ = padded_text((12, 16, 9, 14), seed=406)
    make = partial(PostNormTranslator, first_norm_again=faulty)
    batch = (source, F.pad(target, (1, 0), value=BOS))
    return setup(make, batch, translation_loss, undecayed_adamw, declare={"pad_id": PAD})


# ------------------------------------------------------------------------------------------- initialisation


class LlamaAttention(nn.Module):
    def __init__(self, n_embd: int, n_head: int):
        super().__init__()
        self.n_head = n_head
        linear = partial(nn.Linear, n_embd, n_embd, bias=False)
        self.q_attn, self.k_attn, self.v_attn, self.c_proj = (linear() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            attn(x).unflatten(-1, (self.n_head, -1)).transpose(1, 2)
            for attn in (self.q_attn, self.k_attn, self.v_attn)
        )
        y = F.scaled_dot_product_attention(rotated(q), rotated(k), v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).flatten(2))


class LlamaMLP(nn.Module):
    def __init__(self, n_embd: int):
        super().__init__()
        self.W, self.V = nn.Linear(n_embd, 2 * n_embd, bias=False), nn.Linear(n_embd, 2 * n_embd, bias=False)
        self.W_2 = nn.Linear(2 * n_embd, n_embd, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.W_2(F.silu(self.W(x)) * self.V(x))


class LlamaBlock(nn.Module):
    def __init__(self, n_embd: int, n_head: int):
        super().__init__()
        self.attention_norm, self.attn = nn.RMSNorm(n_embd, eps=1e-5), LlamaAttention(n_embd, n_head)
        self.ffn_norm, self.mlp = nn.RMSNorm(n_embd, eps=1e-5), LlamaMLP(n_embd)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.attention_norm(x))
        return x + self.mlp(self.ffn_norm(x))


class TiedLlama(nn.Module):
    def __init__(self, n_embd: int = 16, n_head: int = 2, n_layer: int = 3):
        super().__init__()
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(VOCAB, n_embd),
                "h": nn.ModuleList(LlamaBlock(n_embd, n_head) for _ in range(n_layer)),
                "lm_head_norm": nn.RMSNorm(n_embd, eps=1e-5),
                "lm_head": nn.Linear(n_embd, VOCAB, bias=False),
            }
        )
        self.transformer["wte"].weight = self.transformer["lm_head"].weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.transformer["wte"](ids)
        for block in self.transformer["h"]:
            x = block(x)
        return self.transformer["lm_head"](self.transformer["lm_head_norm"](x))


def llama3_starts(n_embd: int, n_layer: int, *, heed_tying: bool) -> dict[str, Callable[[Tensor], Tensor]]:
    """Return how parameters start, by patterns of their names."""
    output = n_embd**-0.5
    as_output = partial(nn.init.trunc_normal_, std=output, a=-3 * output, b=3 * output)
    inner = partial(nn.init.trunc_normal_, std=0.02)
    residual = partial(nn.init.trunc_normal_, std=0.02 / math.sqrt(2 * n_layer))
    return {
        r"transformer\.wte\.weight": as_output if heed_tying else partial(nn.init.normal_, std=1.0),
        r"transformer\.lm_head\.weight": as_output,
        r"transformer\.h\.\d+\.attn\.(q_attn|k_attn|v_attn)\.weight": inner,
        r"transformer\.h\.\d+\.attn\.c_proj\.weight": residual,
        r"transformer\.h\.\d+\.mlp\.W\.weight": inner,
        r"transformer\.h\.\d+\.mlp\.(V|W_2)\.weight": residual,
    }


def start_by_name(model: nn.Module, starts: dict[str, Callable[[Tensor], Tensor]]) -> None:
    for name, parameter in model.named_parameters():
        for pattern, start in starts.items():
            if re.fullmatch(pattern, name):
                start(parameter)


@report("Modalities/modalities#456", "initialisation", "initial_loss", "start")
def tied_head_starts_as_a_table(*, faulty: bool) -> Arguments:
    """The tied table starts with a deviation of 1 as an embedding would, though it is the head as well."""

    def make() -> nn.Module:
        model = TiedLlama(n_embd=16, n_layer=3)
        start_by_name(model, llama3_starts(16, 3, heed_tying=not faulty))
        return model

    return remade(make, text(4, 33, seed=407), next_token_loss, decaying_adamw, declare={"tied": True})


# ------------------------------------------------------------------------------------------------ precision


class HalfLinear(nn.Linear):
    """A linear map that computes in bfloat16 with weights of float32."""

    def forward(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.bfloat16()
        return F.linear(x.bfloat16(), self.weight.bfloat16(), bias)


class DraftLayer(nn.Module):
    def __init__(self, dim: int, heads: int):
        super().__init__()
        self.heads = heads
        self.input_norm, self.post_norm = nn.RMSNorm(dim), nn.RMSNorm(dim)
        self.qkv, self.o_proj = HalfLinear(dim, 3 * dim, bias=False), HalfLinear(dim, dim, bias=False)
        self.up, self.down = HalfLinear(dim, 2 * dim, bias=False), HalfLinear(2 * dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.input_norm(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(rotated(q), rotated(k), v, is_causal=True)
        x = x + self.o_proj(y.transpose(1, 2).flatten(2))
        return x + self.down(F.silu(self.up(self.post_norm(x))))


class Draft(nn.Module):
    """A small decoder that learns a large one's distribution from its tokens and states."""

    def __init__(self, dim: int = 48, layers: int = 2):
        super().__init__()
        self.embed_tokens, self.fc = nn.Embedding(VOCAB, dim), HalfLinear(2 * dim, dim, bias=False)
        self.layers = nn.ModuleList(DraftLayer(dim, 4) for _ in range(layers))
        self.norm, self.lm_head = nn.RMSNorm(dim), HalfLinear(dim, VOCAB, bias=False)
        draw_weights(self)

    def forward(self, ids: Tensor, states: Tensor) -> Tensor:
        x = self.fc(torch.cat((self.embed_tokens(ids), states), dim=-1)).float()
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(self.norm(x))


def divergence_loss(model: nn.Module, batch: Batch, *, in_float32: bool) -> Tensor:
    """Return the mean over tokens of the divergence from the verifier's distribution."""
    logits, targets = model(batch["input_ids"], batch["hidden_states"]), batch["verifier_logits"]
    if in_float32:
        logits, targets = logits.float(), targets.float()
    log_p, log_q = logits.log_softmax(-1), targets.log_softmax(-1)
    return F.kl_div(log_p, log_q, reduction="none", log_target=True).sum(-1).mean()


@report("vllm-project/speculators#788", "precision", "precision")
def divergence_in_bfloat16(*, faulty: bool) -> Arguments:
    """The divergence takes its softmaxes in bfloat16, where almost equal distributions cancel."""
    ids = text(4, 24, seed=408)
    states = torch.randn(4, 24, 48, generator=generator(408))
    torch.manual_seed(0)
    verifier = Draft()
    with torch.no_grad():
        verifier.lm_head.weight += 0.01 * torch.randn(VOCAB, 48, generator=generator(409))
        targets = verifier(ids, states)
    batch = {"input_ids": ids, "hidden_states": states, "verifier_logits": targets}
    loss = partial(divergence_loss, in_float32=not faulty)
    return setup(Draft, batch, loss, decaying_adamw, step=step_of(loss))
