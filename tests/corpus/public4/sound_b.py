"""Sound setups of today's kinds: decoders, media, retrieval, post-training, policies and tables."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from transformers import Qwen3Config, Qwen3ForCausalLM

from corpus.batches import BOS, EOS, MASK, PAD, VOCAB, generator, inside, padded_text, text
from corpus.public2.blocks import remade, setup

from .case import sound
from .parts_b import (
    Batch,
    FeedForward,
    Layer,
    Llama,
    Rotary,
    Trunk,
    causal_mask,
    decayed_adamw,
    draw_weights,
    labelled_loss,
    logps_of_next,
    masked_mean,
    next_token_loss,
    trained_adamw,
)

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from corpus.case import Arguments

# ------------------------------------------------------------------------------------------------- decoders


def qwen3() -> nn.Module:
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=12,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        use_cache=False,
        bos_token_id=BOS,
        eos_token_id=EOS,
        pad_token_id=PAD,
    )
    return Qwen3ForCausalLM(config)


def answered(seed: int) -> Batch:
    """Return padded rows of a prompt and an answer, of which the answer is asked for."""
    ids, real = padded_text((26, 14, 21, 18, 11, 24), seed=seed)
    labels = ids.masked_fill(real == 0, -100)
    for row, prompt in enumerate((5, 8, 12, 3, 6, 17)):
        labels[row, :prompt] = -100
    return {"input_ids": ids, "attention_mask": real, "labels": labels}


def library_loss(model: nn.Module, batch: Batch) -> Tensor:
    return model(**batch).loss


def accumulated_step(
    model: nn.Module, batch: Batch, optimizer: Optimizer, scheduler: LRScheduler | None = None
) -> Tensor:
    """Step on three micro-batches, whose losses are divided by the targets of all of them."""
    model.train()
    optimizer.zero_grad()
    items = (batch["labels"][:, 1:] != -100).sum()
    total = torch.zeros(())
    for rows in torch.arange(len(batch["labels"])).split(2):
        part = {name: tensor[rows] for name, tensor in batch.items()}
        loss = model(**part, num_items_in_batch=items).loss
        loss.backward()
        total = total + loss.detach()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    if scheduler is not None:
        scheduler.step()
    return total


def cosine_after_warmup(step: int, warmup: int = 5, steps: int = 60, floor: float = 0.1) -> float:
    if step < warmup:
        return (step + 1) / warmup
    progress = min(1.0, (step - warmup) / (steps - warmup))
    return floor + (1 - floor) * (1 + math.cos(math.pi * progress)) / 2


@sound("supervised fine-tuning")
def items_of_all_micro_batches() -> Arguments:
    """Qwen3 of the library: losses of three micro-batches are divided by the targets of the whole batch."""
    return setup(
        qwen3,
        answered(431),
        library_loss,
        decayed_adamw,
        step=accumulated_step,
        scheduler=lambda optimizer: LambdaLR(optimizer, cosine_after_warmup),
        declare={"tied": True, "pad_id": PAD, "max_grad_norm": 1.0, "steps": 60, "peak_lr": 1e-3},
    )


class CrossDecoderLayer(nn.Module):
    """A layer whose queries read keys and values that were made once for all such layers."""

    def __init__(self, dim: int, heads: int):
        super().__init__()
        self.heads = heads
        self.input_layernorm, self.post_attention_layernorm = nn.RMSNorm(dim), nn.RMSNorm(dim)
        self.q_proj, self.o_proj = nn.Linear(dim, dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.mlp = FeedForward(dim, 2 * dim, nn.Linear)

    def forward(self, x: Tensor, k: Tensor, v: Tensor, rotary: Rotary, positions: Tensor) -> Tensor:
        q = self.q_proj(self.input_layernorm(x)).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        y = F.scaled_dot_product_attention(rotary(q, positions), k, v, is_causal=True, enable_gqa=True)
        x = x + self.o_proj(y.transpose(1, 2).flatten(2))
        return x + self.mlp(self.post_attention_layernorm(x))


class DecoderDecoder(nn.Module):
    """YOCO: layers with a near window, then layers that share the keys and values of their result."""

    def __init__(self, dim: int = 48, heads: int = 4, kv_heads: int = 2, window: int = 8):
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCAB, dim)
        self.self_decoder = nn.ModuleList(Layer(dim, heads, kv_heads, nn.Linear) for _ in range(2))
        self.kv_norm = nn.RMSNorm(dim)
        self.kv_proj = nn.Linear(dim, 2 * kv_heads * dim // heads, bias=False)
        self.rotary = Rotary(dim // heads)
        self.cross_decoder = nn.ModuleList(CrossDecoderLayer(dim, heads) for _ in range(2))
        self.norm, self.lm_head = nn.RMSNorm(dim), nn.Linear(dim, VOCAB, bias=False)
        self.kv_heads, self.window = kv_heads, window
        self.apply(draw_weights)

    def forward(self, ids: Tensor) -> Tensor:
        positions = torch.arange(ids.shape[1], device=ids.device)
        near = causal_mask(ids.shape[1], ids.device).triu(1 - self.window)
        x = self.embed_tokens(ids)
        for layer in self.self_decoder:
            x = layer(x, near, positions)
        k, v = self.kv_proj(self.kv_norm(x)).unflatten(-1, (2, self.kv_heads, -1)).permute(2, 0, 3, 1, 4)
        k = self.rotary(k, positions)
        for layer in self.cross_decoder:
            x = layer(x, k, v, self.rotary, positions)
        return self.lm_head(self.norm(x))


@sound("attention")
def keys_made_once() -> Arguments:
    """YOCO: two layers see a near window, two further ones share one set of keys and values."""
    return remade(DecoderDecoder, text(4, 30, seed=432), next_token_loss, decayed_adamw)


class MatrixMemory(nn.Module):
    """The cell of an mLSTM in its parallel form, with exponential gates that are stabilised."""

    def __init__(self, dim: int, heads: int, kernel: int = 4):
        super().__init__()
        inner = 2 * dim
        self.heads = heads
        self.up, self.down = nn.Linear(dim, 2 * inner, bias=False), nn.Linear(inner, dim, bias=False)
        self.conv = nn.Conv1d(inner, inner, kernel, padding=kernel - 1, groups=inner)
        self.q, self.k = nn.Linear(inner, inner, bias=False), nn.Linear(inner, inner, bias=False)
        self.v = nn.Linear(inner, inner, bias=False)
        self.input_gate, self.forget_gate = nn.Linear(inner, heads), nn.Linear(inner, heads)
        self.skip = nn.Parameter(torch.ones(inner))
        self.head_norm = nn.GroupNorm(heads, inner)
        self.apply(draw_weights)
        with torch.no_grad():
            self.forget_gate.bias.copy_(torch.linspace(3.0, 6.0, heads))
            self.input_gate.bias.normal_(std=0.1)

    def memory(self, q: Tensor, k: Tensor, v: Tensor, gates: tuple[Tensor, Tensor]) -> Tensor:
        """Return what queries `[B, H, T, D]` read of the past, as gates `[B, H, T]` have kept it."""
        written, kept = gates[0], F.logsigmoid(gates[1]).cumsum(-1)
        weight = kept[..., :, None] - kept[..., None, :] + written[..., None, :]
        weight = weight.masked_fill(~causal_mask(q.shape[-2], q.device), -torch.inf)
        most = weight.amax(-1, keepdim=True).detach()  # the result is the same for any number here
        scores = (q @ k.mT) * q.shape[-1] ** -0.5 * (weight - most).exp()
        size = torch.maximum(scores.sum(-1, keepdim=True).abs(), (-most).exp())
        return scores @ v / (size + 1e-6)

    def forward(self, x: Tensor) -> Tensor:
        inner, gate = self.up(x).chunk(2, dim=-1)
        mixed = F.silu(self.conv(inner.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2))
        parts = (self.q(mixed), self.k(mixed), self.v(inner))
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        gates = self.input_gate(mixed).transpose(1, 2), self.forget_gate(mixed).transpose(1, 2)
        y = self.memory(q, k, v, gates).transpose(1, 2).flatten(2)
        y = self.head_norm(y.flatten(0, 1)).view_as(y) + self.skip * mixed
        return self.down(y * F.silu(gate))


class MLSTM(nn.Module):
    def __init__(self, dim: int = 32, layers: int = 3):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, dim)
        self.norms = nn.ModuleList(nn.LayerNorm(dim, bias=False) for _ in range(layers))
        self.cells = nn.ModuleList(MatrixMemory(dim, 4) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(dim, bias=False), nn.Linear(dim, VOCAB, bias=False)
        draw_weights(self.embed)
        draw_weights(self.head)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for norm, cell in zip(self.norms, self.cells, strict=True):
            x = x + cell(norm(x))
        return self.head(self.norm(x))


@sound("recurrences")
def matrix_memories() -> Arguments:
    """xLSTM's mLSTM blocks: exponential gates, a stabiliser, a norm of each head and a skip."""
    return remade(MLSTM, text(4, 26, seed=433), next_token_loss, decayed_adamw)


class PatchedBytes(nn.Module):
    """MegaByte: a wide causal model of patches, and a narrow one of the bytes in each patch."""

    def __init__(self, patch: int = 4, wide: int = 64, narrow: int = 32):
        super().__init__()
        self.patch = patch
        self.wide_bytes, self.narrow_bytes = nn.Embedding(256, wide // patch), nn.Embedding(256, narrow)
        self.first_patch = nn.Parameter(0.02 * torch.randn(wide))
        self.first_byte = nn.Parameter(0.02 * torch.randn(narrow))
        self.wide_model, self.narrow_model = Trunk(wide, layers=2), Trunk(narrow, layers=1)
        self.to_narrow = nn.Linear(wide // patch, narrow, bias=False)
        self.head = nn.Linear(narrow, 256, bias=False)
        self.apply(draw_weights)

    def forward(self, ids: Tensor) -> Tensor:
        """Return the logits of each byte itself, made of patches and bytes before it."""
        rows, length = ids.shape
        patches = self.wide_bytes(ids).view(rows, length // self.patch, -1)
        first = self.first_patch.expand(rows, 1, -1)
        context = self.wide_model(torch.cat((first, patches[:, :-1]), dim=1))
        context = self.to_narrow(context.unflatten(-1, (self.patch, -1))).flatten(0, 1)
        within = self.narrow_bytes(ids.view(-1, self.patch))
        first = self.first_byte.expand(len(within), 1, -1)
        x = torch.cat((first, within[:, :-1]), dim=1) + context
        return self.head(self.narrow_model(x)).view(rows, length, -1)


def byte_loss(model: nn.Module, ids: Tensor) -> Tensor:
    return F.cross_entropy(model(ids).flatten(0, 1), ids.flatten())


@sound("bytes")
def bytes_in_patches() -> Arguments:
    """MegaByte: patches of four bytes in a wide model, whose states guide a narrow one of single bytes."""
    return remade(PatchedBytes, text(4, 32, vocab=256, seed=434), byte_loss, decayed_adamw)


# ------------------------------------------------------------------------------------------ images and text


class Resampler(nn.Module):
    """Learned latents that read the features of an image, and themselves."""

    def __init__(self, features: int, dim: int, latents: int = 6):
        super().__init__()
        self.latents = nn.Parameter(0.02 * torch.randn(latents, dim))
        self.project = nn.Linear(features, dim)
        self.norm_media, self.norm_latents = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attend = nn.MultiheadAttention(dim, 4, batch_first=True)
        self.norm_mlp, self.norm_out = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, features: Tensor) -> Tensor:
        x = self.latents.expand(len(features), -1, -1)
        latents = self.norm_latents(x)
        media = torch.cat((self.norm_media(self.project(features)), latents), dim=1)
        x = x + self.attend(latents, media, media, need_weights=False)[0]
        return self.norm_out(x + self.mlp(self.norm_mlp(x)))


class GatedCrossAttention(nn.Module):
    """A branch that reads the image, and one behind it, each of which begins shut."""

    def __init__(self, dim: int):
        super().__init__()
        self.norm_attn, self.norm_mlp = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attend = nn.MultiheadAttention(dim, 4, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))
        self.attn_gate, self.mlp_gate = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor, media: Tensor) -> Tensor:
        seen = self.attend(self.norm_attn(x), media, media, need_weights=False)[0]
        x = x + self.attn_gate.tanh() * seen
        return x + self.mlp_gate.tanh() * self.mlp(self.norm_mlp(x))


class Captioner(nn.Module):
    """Flamingo: a frozen decoder with gated cross-attention before each of its layers."""

    def __init__(self, dim: int = 48, features: int = 20):
        super().__init__()
        self.language = Llama(dim, layers=2).requires_grad_(False)
        self.resampler = Resampler(features, dim)
        self.gated = nn.ModuleList(GatedCrossAttention(dim) for _ in self.language.model.layers)

    def forward(self, ids: Tensor, image: Tensor) -> Tensor:
        media = self.resampler(image)
        x = self.language.embed_tokens(ids)
        mask, positions = causal_mask(ids.shape[1], ids.device), torch.arange(ids.shape[1], device=ids.device)
        for gated, layer in zip(self.gated, self.language.model.layers, strict=True):
            x = layer(gated(x, media), mask, positions)
        return self.language.lm_head(self.language.model.norm(x))


def caption_loss(model: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    ids, labels, image = batch
    return labelled_loss(model(ids, image), labels)


@sound("images and text")
def gates_of_a_frozen_decoder() -> Arguments:
    """Flamingo: a resampler, and branches into a frozen decoder behind tanh gates that begin at 0."""
    ids, real = padded_text((18, 13, 16, 11), seed=435)
    ids[:, 0] = BOS
    batch = (ids, ids.masked_fill(real == 0, -100), torch.randn(4, 12, 20, generator=generator(435)))
    declare = {"frozen": ("language.*",), "pad_id": PAD}
    return setup(Captioner, batch, caption_loss, partial(trained_adamw, lr=5e-3), declare=declare)


class QuantizedAutoencoder(nn.Module):
    """Patches as a few rounded numbers each, between two Transformers."""

    bounds: Tensor

    def __init__(self, dim: int = 48, patch: int = 4, levels: tuple[int, ...] = (7, 5, 5, 5)):
        super().__init__()
        self.patch = patch
        self.embed, self.to_pixels = nn.Linear(3 * patch**2, dim), nn.Linear(dim, 3 * patch**2)
        make_layer = partial(
            nn.TransformerEncoderLayer, dim, 4, 2 * dim, 0.0, "gelu", batch_first=True, norm_first=True
        )
        self.encoder, self.decoder = (nn.ModuleList(make_layer() for _ in range(2)) for _ in range(2))
        self.places = nn.ParameterList(0.02 * torch.randn(16, dim) for _ in range(2))
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(2))
        self.to_codes, self.from_codes = nn.Linear(dim, len(levels)), nn.Linear(len(levels), dim)
        self.register_buffer("bounds", torch.tensor(levels) // 2, persistent=False)

    def codes(self, x: Tensor) -> Tensor:
        """Return rounded numbers from -1 to 1, with the gradient of those before they were rounded."""
        bounded = self.to_codes(x).tanh() * self.bounds
        return (bounded + (bounded.round() - bounded).detach()) / self.bounds

    def forward(self, images: Tensor) -> Tensor:
        patches = F.pixel_unshuffle(images, self.patch).flatten(2).transpose(1, 2)
        x = self.embed(patches) + self.places[0]
        for layer in self.encoder:
            x = layer(x)
        x = self.from_codes(self.codes(self.norms[0](x))) + self.places[1]
        for layer in self.decoder:
            x = layer(x)
        x = self.to_pixels(self.norms[1](x)).transpose(1, 2)
        side = images.shape[-1] // self.patch
        return F.pixel_shuffle(x.unflatten(-1, (side, side)), self.patch)


def pixel_loss(model: nn.Module, images: Tensor) -> Tensor:
    return F.mse_loss(model(images), images)


@sound("quantization")
def scalars_rounded_between_transformers() -> Arguments:
    """FSQ: a tokenizer of images, whose codes are bounded numbers that are rounded straight through."""
    coarse = torch.randn(6, 3, 4, 4, generator=generator(436))
    images = F.interpolate(coarse, size=16, mode="bilinear")
    return remade(QuantizedAutoencoder, images, pixel_loss, partial(decayed_adamw, lr=2e-3))


# --------------------------------------------------------------------------------------------------- speech


class MaskedConv(nn.Module):
    """A convolution over time that sees zeros where there is no token."""

    def __init__(self, dim: int):
        super().__init__()
        self.conv, self.norm = nn.Conv1d(dim, dim, 3, padding=1), nn.LayerNorm(dim)

    def forward(self, x: Tensor, real: Tensor) -> Tensor:
        x = (x * real[..., None]).transpose(1, 2)
        return self.norm(F.relu(self.conv(x)).transpose(1, 2))


class VariancePredictor(nn.Module):
    """A number for each phone."""

    def __init__(self, dim: int):
        super().__init__()
        self.convs = nn.ModuleList(MaskedConv(dim) for _ in range(2))
        self.out = nn.Linear(dim, 1)

    def forward(self, x: Tensor, real: Tensor) -> Tensor:
        for conv in self.convs:
            x = conv(x, real)
        return self.out(x).squeeze(-1)


class FastSpeech(nn.Module):
    """FastSpeech 2: phones, repeated as long as they are spoken, become the bands of frames at once."""

    place: Tensor

    def __init__(self, phones: int = 40, dim: int = 48, bands: int = 12):
        super().__init__()
        self.phones = nn.Embedding(phones, dim, padding_idx=0)
        angles = torch.arange(64)[:, None] * torch.exp(torch.arange(0, dim, 2) * (-math.log(1e4) / dim))
        self.register_buffer("place", torch.cat((angles.sin(), angles.cos()), dim=1), persistent=False)
        make_layer = partial(nn.TransformerEncoderLayer, dim, 4, 2 * dim, 0.0, batch_first=True)
        self.encoder, self.decoder = (nn.ModuleList(make_layer() for _ in range(2)) for _ in range(2))
        self.duration, self.pitch = VariancePredictor(dim), VariancePredictor(dim)
        self.pitch_embed, self.mel = nn.Linear(1, dim), nn.Linear(dim, bands)

    def run(self, layers: nn.ModuleList, x: Tensor, real: Tensor) -> Tensor:
        x = x + self.place[: x.shape[1]]
        for layer in layers:
            x = layer(x, src_key_padding_mask=~real)
        return x

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """Return bands of frames, and what is said of the durations and pitches of phones."""
        real = batch["phones"] != 0
        x = self.run(self.encoder, self.phones(batch["phones"]), real)
        durations, pitches = self.duration(x, real), self.pitch(x, real)
        x = x + self.pitch_embed(batch["pitch"][..., None])
        rows = [row.repeat_interleave(times, dim=0) for row, times in zip(x, batch["durations"], strict=True)]
        x = nn.utils.rnn.pad_sequence(rows, batch_first=True)
        spoken = torch.arange(x.shape[1], device=x.device) < batch["durations"].sum(1)[:, None]
        return self.mel(self.run(self.decoder, x, spoken)), durations, pitches


def spoken_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Return the errors of bands, of logarithms of durations, and of pitches, without padding."""
    mel, durations, pitches = model(batch)
    real = batch["phones"] != 0
    lengths = batch["durations"].sum(1)
    spoken = torch.arange(mel.shape[1], device=mel.device) < lengths[:, None]
    bands = masked_mean((mel - batch["mel"]).abs().mean(-1), spoken)
    timing = masked_mean((durations - (batch["durations"] + 1.0).log()).square(), real)
    return bands + timing + masked_mean((pitches - batch["pitch"]).square(), real)


def spoken_phones(seed: int) -> Batch:
    draw = generator(seed)
    real = inside((9, 6, 8, 5), 9)
    durations = torch.randint(1, 5, (4, 9), generator=draw) * real
    frames = inside(durations.sum(1).tolist(), int(durations.sum(1).max()))
    mel = torch.randn(4, frames.shape[1], 12, generator=draw).cumsum(1) / 3
    return {
        "phones": torch.randint(1, 40, (4, 9), generator=draw) * real,
        "durations": durations,
        "pitch": torch.randn(4, 9, generator=draw) * real,
        "mel": mel * frames[..., None],
    }


@sound("speech")
def lengths_from_durations() -> Arguments:
    """FastSpeech 2: phones are repeated by their durations; these and pitches are learned besides."""
    return remade(FastSpeech, spoken_phones(437), spoken_loss, partial(trained_adamw, lr=2e-3))


class Transducer(nn.Module):
    """An encoder of frames, a short memory of what was said, and a joint that may also say nothing."""

    def __init__(self, features: int = 16, dim: int = 48, tokens: int = 20):
        super().__init__()
        self.frontend = nn.Linear(4 * features, dim)
        self.place = nn.Parameter(0.02 * torch.randn(16, dim))
        make_layer = partial(
            nn.TransformerEncoderLayer, dim, 4, 2 * dim, 0.0, batch_first=True, norm_first=True
        )
        self.encoder = nn.ModuleList(make_layer() for _ in range(2))
        self.norm = nn.LayerNorm(dim)
        self.said, self.context = nn.Embedding(tokens, dim), nn.Conv1d(dim, dim, 2, groups=dim)
        self.joint = nn.Linear(dim, tokens)

    def forward(self, frames: Tensor, lengths: Tensor, tokens: Tensor) -> Tensor:
        """Return log-probabilities `[B, T, U + 1, V]` after each frame and each number of tokens."""
        x = self.frontend(frames.unflatten(1, (-1, 4)).flatten(2))
        x = x + self.place[: x.shape[1]]
        padding = torch.arange(x.shape[1], device=x.device) >= lengths[:, None] // 4
        for layer in self.encoder:
            x = layer(x, src_key_padding_mask=padding)
        before = F.pad(tokens, (2, 0))  # blanks stand before the first token
        said = self.context(self.said(before).transpose(1, 2)).transpose(1, 2)
        return self.joint((self.norm(x)[:, :, None] + said[:, None]).tanh()).log_softmax(-1)


def transducer_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Return the mean of minus the log-probability of all ways to say the tokens, for each token."""
    tokens, frames = batch["tokens"], batch["frame_lengths"] // 4
    logps = model(batch["frames"], batch["frame_lengths"], tokens)
    silent = logps[..., 0]
    spoken = logps[:, :, :-1].gather(-1, tokens[:, None, :, None].expand(-1, logps.shape[1], -1, 1))[..., 0]
    columns: list[Tensor] = []
    ends = []
    for t in range(logps.shape[1]):
        ways = [columns[-1][:, 0] + silent[:, t - 1, 0]] if t else [silent.new_zeros(len(tokens))]
        for u in range(1, logps.shape[2]):
            way = ways[-1] + spoken[:, t, u - 1]
            if t:
                way = torch.logaddexp(way, columns[-1][:, u] + silent[:, t - 1, u])
            ways.append(way)
        columns.append(torch.stack(ways, dim=1))
        ends.append(columns[-1] + silent[:, t])
    rows = torch.arange(len(tokens))
    last = torch.stack(ends, dim=1)[rows, frames - 1, batch["token_lengths"]]
    return -(last / batch["token_lengths"]).mean()


@sound("speech")
def transducer_of_frames() -> Arguments:
    """A transducer: frames four at a time, a memory of two tokens, and the sum over all alignments."""
    draw = generator(438)
    lengths, counts = torch.tensor([48, 36, 40, 28]), torch.tensor([6, 4, 5, 3])
    frames = torch.randn(4, 48, 16, generator=draw).cumsum(1) / 4
    batch = {
        "frames": frames * inside(lengths.tolist(), 48)[..., None],
        "frame_lengths": lengths,
        "tokens": torch.randint(1, 20, (4, 6), generator=draw) * inside(counts.tolist(), 6),
        "token_lengths": counts,
    }
    return remade(Transducer, batch, transducer_loss, partial(trained_adamw, lr=2e-3))


# ------------------------------------------------------------------------------------------------ retrieval


class BertLayer(nn.Module):
    def __init__(self, dim: int, heads: int):
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value = (nn.Linear(dim, dim) for _ in range(3))
        self.attn_out, self.attn_norm = nn.Linear(dim, dim), nn.LayerNorm(dim, eps=1e-12)
        self.wide, self.narrow = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)
        self.out_norm = nn.LayerNorm(dim, eps=1e-12)

    def forward(self, x: Tensor, seen: Tensor) -> Tensor:
        parts = (self.query(x), self.key(x), self.value(x))
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=seen[:, None, None])
        x = self.attn_norm(x + self.attn_out(y.transpose(1, 2).flatten(2)))
        return self.out_norm(x + self.narrow(F.gelu(self.wide(x))))


class Bert(nn.Module):
    """A Post-LN encoder of texts that are padded on the right."""

    def __init__(self, dim: int = 48, layers: int = 2):
        super().__init__()
        self.word_embeddings, self.position_embeddings = nn.Embedding(VOCAB, dim), nn.Embedding(40, dim)
        self.norm = nn.LayerNorm(dim, eps=1e-12)
        self.layer = nn.ModuleList(BertLayer(dim, 4) for _ in range(layers))
        self.apply(draw_weights)

    def forward(self, ids: Tensor, seen: Tensor) -> Tensor:
        x = self.norm(self.word_embeddings(ids) + self.position_embeddings.weight[: ids.shape[1]])
        for layer in self.layer:
            x = layer(x, seen)
        return x


class LateInteraction(nn.Module):
    """ColBERT: a short vector for each token of a query and of a document."""

    def __init__(self, dim: int = 48, width: int = 16):
        super().__init__()
        self.bert, self.linear = Bert(dim), nn.Linear(dim, width, bias=False)
        draw_weights(self.linear)

    def forward(self, ids: Tensor, seen: Tensor) -> Tensor:
        return F.normalize(self.linear(self.bert(ids, seen)), dim=-1)


def best_matches_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Return the loss of finding each query's document by the best match of each of its tokens."""
    queries, real = batch["queries"], batch["documents"] != PAD
    query_vectors = model(queries, torch.ones_like(queries, dtype=torch.bool))
    document_vectors = model(batch["documents"], real)
    similarity = torch.einsum("iqc,jdc->ijqd", query_vectors, document_vectors)
    similarity = similarity.masked_fill(~real[None, :, None], -torch.inf)
    scores = similarity.amax(-1).sum(-1)
    return F.cross_entropy(scores, torch.arange(len(scores), device=scores.device))


@sound("retrieval")
def best_match_of_each_token() -> Arguments:
    """ColBERT: queries are filled up with masks that count; each token looks for its best match."""
    queries, real = padded_text((6, 9, 7, 5, 8, 6), seed=439)
    documents, _ = padded_text((17, 12, 20, 15, 18, 11), seed=440)
    batch = {"queries": queries.masked_fill(real == 0, MASK), "documents": documents}
    return setup(LateInteraction, batch, best_matches_loss, partial(decayed_adamw, lr=5e-4))


class SparseWords(nn.Module):
    """SPLADE: a weight for each word of the vocabulary, by the head of masked words."""

    def __init__(self, dim: int = 48):
        super().__init__()
        self.bert = Bert(dim)
        self.transform, self.norm = nn.Linear(dim, dim), nn.LayerNorm(dim, eps=1e-12)
        self.decoder = nn.Linear(dim, VOCAB)
        draw_weights(self.transform)
        nn.init.zeros_(self.decoder.bias)
        self.decoder.weight = self.bert.word_embeddings.weight

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        logits = self.decoder(self.norm(F.gelu(self.transform(self.bert(ids, mask.bool())))))
        weights = F.relu(logits).log1p() * mask[..., None]
        return weights.amax(1)


def sparse_loss(model: nn.Module, batch: Batch, *, cost: float = 3e-3) -> Tensor:
    """Return the loss of finding documents, and the cost of words that are used in many texts."""
    queries = model(batch["query_ids"], batch["query_mask"])
    documents = model(batch["document_ids"], batch["document_mask"])
    found = F.cross_entropy(queries @ documents.T, torch.arange(len(queries), device=queries.device))
    used = [texts.mean(0).square().sum() for texts in (queries, documents)]
    return found + cost * (used[0] + used[1])


@sound("retrieval")
def weights_of_words() -> Arguments:
    """SPLADE: sparse weights of words by a tied head and the maximum over tokens; their use has a cost."""
    batch: Batch = {}
    batch["query_ids"], batch["query_mask"] = padded_text((5, 8, 6, 9, 7), seed=441)
    batch["document_ids"], batch["document_mask"] = padded_text((16, 12, 19, 14, 17), seed=442)
    declare = {"pad_id": PAD, "tied": True}
    return setup(SparseWords, batch, sparse_loss, partial(decayed_adamw, lr=5e-4), declare=declare)


# -------------------------------------------------------------------------------- preferences and policies


def unpaired(policy: nn.Module, seed: int) -> Batch:
    """Return answers, good and bad ones, and others of the same prompts; the reference has scored both."""
    batch: Batch = {"desirable": torch.tensor([1, 0, 1, 1, 0, 0], dtype=torch.bool)}
    lengths = torch.tensor((20, 14, 17, 12, 22, 15))
    for name, order in (("answers", torch.arange(6)), ("others", torch.arange(6).roll(1))):
        ids, real = padded_text(lengths[order].tolist(), seed=seed)
        words = text(6, 22, seed=seed + 1)[order]
        ids = torch.where((real == 1) & (ids != EOS), words, ids)
        ids[:, :4] = text(6, 4, seed=seed + 2)
        answered_tokens = real[:, 1:].clone()
        answered_tokens[:, :3] = 0
        with torch.no_grad():
            scored = (logps_of_next(policy(ids), ids) * answered_tokens).sum(-1)
        batch |= {f"{name}_ids": ids, f"{name}_mask": answered_tokens, f"{name}_reference": scored}
    return batch


def kto_loss(model: nn.Module, batch: Batch, beta: float = 0.1) -> Tensor:
    """Return the loss of single answers against the divergence that answers of other rows show."""

    def ratio(name: str) -> Tensor:
        ids = batch[f"{name}_ids"]
        logps = (logps_of_next(model(ids), ids) * batch[f"{name}_mask"]).sum(-1)
        return logps - batch[f"{name}_reference"]

    with torch.no_grad():
        divergence = ratio("others").mean().clamp(min=0)
    gain = beta * (ratio("answers") - divergence)
    return (1 - torch.where(batch["desirable"], gain, -gain).sigmoid()).mean()


@sound("preference training")
def answers_without_pairs() -> Arguments:
    """KTO: good and bad answers without pairs, against a divergence that is measured on mismatched ones."""
    torch.manual_seed(0)
    policy = Llama()
    return {
        "model": policy,
        "batch": unpaired(policy, 443),
        "loss": kto_loss,
        "optimizer": trained_adamw(policy, lr=5e-4),
        "declare": {"pad_id": PAD},
    }


class ActorCritic(nn.Module):
    """A decoder with a value beside the logits of each token."""

    def __init__(self, dim: int = 48):
        super().__init__()
        self.embed_tokens, self.model = nn.Embedding(VOCAB, dim), Trunk(dim)
        self.lm_head, self.v_head = nn.Linear(dim, VOCAB, bias=False), nn.Linear(dim, 1)
        self.apply(draw_weights)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        states = self.model(self.embed_tokens(ids))
        return self.lm_head(states), self.v_head(states).squeeze(-1)


def advantages_of(
    rewards: Tensor, values: Tensor, mask: Tensor, gamma: float = 1.0, lam: float = 0.95
) -> Tensor:
    """Return generalized advantages `[B, T]` of answers, which end where the mask does."""
    following = F.pad(values * mask, (0, 1))[:, 1:]
    deltas = (rewards + gamma * following - values) * mask
    running, columns = torch.zeros(len(rewards)), []
    for t in reversed(range(rewards.shape[1])):
        running = deltas[:, t] + gamma * lam * running * mask[:, t]
        columns.append(running)
    return torch.stack(columns[::-1], dim=1)


def rollouts(policy: nn.Module, seed: int) -> Batch:
    """Return answers with the policy's log-probabilities and values when they were drawn, and advantages."""
    lengths = (20, 15, 18, 12, 22, 16)
    ids, real = padded_text(lengths, seed=seed)
    mask = real[:, 1:].float()
    mask[:, :4] = 0
    with torch.no_grad():
        logits, values = policy(ids)
    old_logps, old_values = logps_of_next(logits, ids), values[:, :-1] * mask
    rewards = torch.zeros_like(mask)
    rewards[torch.arange(6), torch.tensor(lengths) - 2] = torch.tensor([1.0, 0.0, 0.6, -0.5, 0.2, 1.0])
    advantages = advantages_of(rewards, old_values, mask)
    return {
        "input_ids": ids,
        "mask": mask,
        "old_logps": old_logps,
        "old_values": old_values,
        "advantages": advantages,
        "returns": advantages + old_values,
    }


def actor_critic_loss(model: nn.Module, batch: Batch, *, clip: float = 0.2, share: float = 0.1) -> Tensor:
    mask, advantages = batch["mask"], batch["advantages"]
    mean = masked_mean(advantages, mask)
    spread = masked_mean((advantages - mean).square(), mask).sqrt()
    advantages = (advantages - mean) / (spread + 1e-8)
    logits, values = model(batch["input_ids"])
    ratio = (logps_of_next(logits, batch["input_ids"]) - batch["old_logps"]).exp()
    policy = torch.maximum(-ratio * advantages, -ratio.clamp(1 - clip, 1 + clip) * advantages)
    values, old = values[:, :-1], batch["old_values"]
    near = old + (values - old).clamp(-clip, clip)
    errors = torch.maximum((values - batch["returns"]).square(), (near - batch["returns"]).square())
    return masked_mean(policy + share * 0.5 * errors, mask)


@sound("policy gradients")
def values_beside_the_policy() -> Arguments:
    """PPO with a value head on the policy: both clipped, advantages whitened over the tokens of answers."""
    torch.manual_seed(0)
    policy = ActorCritic()
    return {
        "model": policy,
        "batch": rollouts(policy, 444),
        "loss": actor_critic_loss,
        "optimizer": trained_adamw(policy, lr=5e-4),
        "declare": {"pad_id": PAD},
    }


class DecisionTransformer(nn.Module):
    """Returns to go, states and actions by turns, of which actions are predicted from the states."""

    def __init__(self, state: int = 6, action: int = 3, dim: int = 48, longest: int = 32):
        super().__init__()
        self.embed_timestep = nn.Embedding(longest, dim)
        self.embed_return, self.embed_state = nn.Linear(1, dim), nn.Linear(state, dim)
        self.embed_action, self.embed_ln = nn.Linear(action, dim), nn.LayerNorm(dim)
        make_layer = partial(
            nn.TransformerEncoderLayer, dim, 4, 4 * dim, 0.0, "gelu", batch_first=True, norm_first=True
        )
        self.h = nn.ModuleList(make_layer() for _ in range(2))
        self.ln_f, self.predict_action = nn.LayerNorm(dim), nn.Linear(dim, action)

    def forward(self, batch: Batch) -> Tensor:
        time = self.embed_timestep(batch["timesteps"])
        parts = (
            self.embed_return(batch["returns_to_go"]),
            self.embed_state(batch["states"]),
            self.embed_action(batch["actions"]),
        )
        x = self.embed_ln(torch.stack([part + time for part in parts], dim=2).flatten(1, 2))
        real = batch["mask"].repeat_interleave(3, dim=1)
        itself = torch.eye(x.shape[1], dtype=torch.bool, device=x.device)
        seen = (causal_mask(x.shape[1], x.device) & real[:, None]) | itself
        hidden = (~seen).repeat_interleave(4, dim=0)  # rows come before heads
        for layer in self.h:
            x = layer(x, src_mask=hidden)
        return self.predict_action(self.ln_f(x)[:, 1::3]).tanh()


def imitation_loss(model: nn.Module, batch: Batch) -> Tensor:
    error = (model(batch) - batch["actions"]).square().mean(-1)
    return masked_mean(error, batch["mask"])


def trajectories(seed: int, rows: int = 6, steps: int = 8) -> Batch:
    """Return the last steps of trajectories, filled up on the left."""
    draw = generator(seed)
    mask = inside((8, 6, 8, 5, 7, 8)[:rows], steps).flip(1)
    rewards = torch.rand(rows, steps, generator=draw) * mask
    started = torch.randint(0, 20, (rows, 1), generator=draw)
    return {
        "states": torch.randn(rows, steps, 6, generator=draw) * mask[..., None],
        "actions": torch.randn(rows, steps, 3, generator=draw).tanh() * mask[..., None],
        "returns_to_go": (rewards.flip(1).cumsum(1).flip(1) * mask)[..., None],
        "timesteps": ((mask.cumsum(1) - 1 + started) * mask).long(),
        "mask": mask,
    }


@sound("decisions")
def returns_states_actions() -> Arguments:
    """A decision Transformer: returns, states and actions by turns, padded on the left, actions imitated."""
    return remade(DecisionTransformer, trajectories(445), imitation_loss, decayed_adamw)


# -------------------------------------------------------------------------------------- graphs and tables


class GraphLayer(nn.Module):
    """Attention of nodes with a bias by their distance."""

    def __init__(self, dim: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        x = x + self.proj(y.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class Graphormer(nn.Module):
    """Nodes with degrees and distances, and one more node that stands for the graph."""

    def __init__(self, kinds: int = 12, dim: int = 48, heads: int = 4, farthest: int = 6):
        super().__init__()
        self.kind, self.degree = nn.Embedding(kinds, dim, padding_idx=0), nn.Embedding(8, dim)
        self.graph_node = nn.Parameter(0.02 * torch.randn(dim))
        self.distance = nn.Embedding(farthest + 2, heads)
        self.layers = nn.ModuleList(GraphLayer(dim, heads) for _ in range(2))
        self.norm, self.out = nn.LayerNorm(dim), nn.Linear(dim, 1)
        self.to_graph = farthest + 1
        self.apply(draw_weights)
        nn.init.zeros_(self.kind.weight[0])

    def forward(self, kinds: Tensor, distances: Tensor, degrees: Tensor) -> Tensor:
        nodes = self.kind(kinds) + self.degree(degrees)
        x = torch.cat((self.graph_node.expand(len(kinds), 1, -1), nodes), dim=1)
        far = F.pad(distances, (1, 0, 1, 0), value=self.to_graph)
        bias = self.distance(far).permute(0, 3, 1, 2)
        real = F.pad(kinds != 0, (1, 0), value=True)
        bias = bias.masked_fill(~real[:, None, None], -torch.inf)
        for layer in self.layers:
            x = layer(x, bias)
        return self.out(self.norm(x[:, 0])).squeeze(-1)


def property_loss(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    kinds, distances, degrees, wanted = batch
    return F.l1_loss(model(kinds, distances, degrees), wanted)


def molecules(seed: int, rows: int = 8, atoms: int = 10, farthest: int = 6) -> tuple[Tensor, ...]:
    """Return trees of atoms with a few rings, the distances and degrees in them, and a property of each."""
    draw = generator(seed)
    counts = torch.randint(5, atoms + 1, (rows,), generator=draw)
    counts[0] = atoms
    bonds = torch.zeros(rows, atoms, atoms, dtype=torch.bool)
    for row, count in enumerate(counts.tolist()):
        for atom in range(1, count):
            other = int(torch.randint(max(0, atom - 3), atom, (1,), generator=draw))
            bonds[row, atom, other] = bonds[row, other, atom] = True
        bonds[row, 0, count - 1] = bonds[row, count - 1, 0] = True
    reached = torch.eye(atoms, dtype=torch.bool).expand(rows, -1, -1)
    distances = torch.full((rows, atoms, atoms), farthest).masked_fill(reached, 0)
    for steps in range(1, farthest):
        further = (reached.float() @ bonds.float()) > 0
        distances = distances.masked_fill(further & ~reached & (distances == farthest), steps)
        reached = reached | further
    kinds = torch.randint(1, 12, (rows, atoms), generator=draw) * inside(counts.tolist(), atoms)
    return kinds, distances, bonds.sum(-1).clamp(max=7), torch.randn(rows, generator=draw)


@sound("graphs")
def distances_in_molecules() -> Arguments:
    """Graphormer: atoms attend by their distances along bonds, and a further node tells a property."""
    return remade(Graphormer, molecules(446), property_loss, decayed_adamw, declare={"positions": False})


class TablesInContext(nn.Module):
    """Rows of a table as tokens, of which those with a label are seen by all, the others by themselves."""

    def __init__(self, features: int = 5, classes: int = 3, dim: int = 48, layers: int = 3):
        super().__init__()
        self.encoder, self.label_encoder = nn.Linear(features, dim), nn.Embedding(classes, dim)
        self.blocks = nn.ModuleList(GraphLayer(dim, 4) for _ in range(layers))
        self.norm, self.decoder = nn.LayerNorm(dim), nn.Linear(dim, classes)

    def forward(self, rows: Tensor, labels: Tensor) -> Tensor:
        """Return the logits of rows behind those that have a label."""
        known = labels.shape[1]
        center, spread = rows[:, :known].mean(1, keepdim=True), rows[:, :known].std(1, keepdim=True)
        x = self.encoder((rows - center) / (spread + 1e-6))
        x = torch.cat((x[:, :known] + self.label_encoder(labels), x[:, known:]), dim=1)
        seen = torch.eye(rows.shape[1], dtype=torch.bool, device=rows.device)
        seen[:, :known] = True
        for block in self.blocks:
            x = block(x, seen)
        return self.decoder(self.norm(x[:, known:]))


def table_loss(model: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    rows, labels, wanted = batch
    return F.cross_entropy(model(rows, labels).flatten(0, 1), wanted.flatten())


@sound("tables")
def tables_in_context() -> Arguments:
    """TabPFN: drawn tables, whose labelled rows are the context in which the other rows are classified."""
    draw = generator(447)
    rows = torch.randn(8, 20, 5, generator=draw)
    truth = torch.einsum("bnf,bfc->bnc", rows, torch.randn(8, 5, 3, generator=draw)).argmax(-1)
    batch = (rows, truth[:, :14], truth[:, 14:])
    return remade(TablesInContext, batch, table_loss, decayed_adamw, declare={"positions": False})
