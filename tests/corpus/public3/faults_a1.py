"""Reports of models and their data: masks, attention, positions, norms, series, tables, pairs."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from corpus.batches import BOS, EOS, PAD, VOCAB, generator, padded_text, text, tokens
from corpus.case import Arguments
from corpus.public2.blocks import remade, setup

from .case import report
from .parts_a import configure_adamw, plain_adamw, shifted_loss, token_loss

Batch = dict[str, Tensor]

# ---------------------------------------------------------------------------------------------------- masks


class EncoderBlock(nn.Module):
    """A Pre-LN encoder block; ``visible`` marks the keys that may be seen."""

    def __init__(self, dim: int, heads: int):
        super().__init__()
        self.heads = heads
        self.ln_attn, self.ln_ff = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.ff = nn.Sequential(nn.Linear(dim, 3 * dim), nn.GELU(), nn.Linear(3 * dim, dim))

    def forward(self, x: Tensor, visible: Tensor | None = None) -> Tensor:
        batch, length, dim = x.shape
        packed = self.qkv(self.ln_attn(x)).view(batch, length, 3, self.heads, dim // self.heads)
        q, k, v = packed.permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=visible)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, dim))
        return x + self.ff(self.ln_ff(x))


class LabelAttention(nn.Module):
    """One query for each label, which reads the tokens of the text."""

    def __init__(self, dim: int, labels: int, heads: int):
        super().__init__()
        self.heads = heads
        self.label_embeddings = nn.Parameter(torch.randn(labels, dim) * 0.1)
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(dim, dim) for _ in range(3))
        self.out_proj = nn.Linear(dim, dim)

    def forward(self, tokens_: Tensor, attn_mask: Tensor) -> Tensor:
        batch, _, dim = tokens_.shape
        queries = self.label_embeddings.expand(batch, -1, -1)

        def split(x: Tensor) -> Tensor:
            return x.view(batch, -1, self.heads, dim // self.heads).transpose(1, 2)

        q, k, v = split(self.q_proj(queries)), split(self.k_proj(tokens_)), split(self.v_proj(tokens_))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=attn_mask[:, None, None, :])
        return self.out_proj(y.transpose(1, 2).reshape(batch, -1, dim))


class TextClassifier(nn.Module):
    """A classifier whose labels look at the encoded text, each through a query of its own."""

    def __init__(self, dim: int = 48, labels: int = 5, *, invert: bool):
        super().__init__()
        self.invert = invert
        self.embedding, self.positions = nn.Embedding(VOCAB, dim, padding_idx=PAD), nn.Embedding(32, dim)
        self.blocks = nn.ModuleList(EncoderBlock(dim, 4) for _ in range(2))
        self.norm = nn.LayerNorm(dim)
        self.label_attention = LabelAttention(dim, labels, 4)
        self.classifier = nn.Linear(dim, 1)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        real = attention_mask.bool()
        x = self.embedding(input_ids) + self.positions.weight[: input_ids.shape[1]]
        for block in self.blocks:
            x = block(x, real[:, None, None, :])
        mask = ~real if self.invert else real
        return self.classifier(self.label_attention(self.norm(x), mask)).squeeze(-1)


def classifier_loss(model: nn.Module, batch: Batch) -> Tensor:
    logits = model(batch["input_ids"], batch["attention_mask"])
    return F.cross_entropy(logits, batch["labels"])


@report("InseeFrLab/torchTextClassifiers#92", "masks", "padding", place="*label_attention*|*blocks*|")
def label_attention_mask_inverted(*, faulty: bool) -> Arguments:
    """The labels' attention takes a mask that is true for padding, so that labels read nothing else."""
    ids, real = padded_text((20, 15, 11, 18, 9, 13), seed=300)
    ids, real = F.pad(ids, (0, 4), value=PAD), F.pad(real, (0, 4))
    batch = {"input_ids": ids, "attention_mask": real, "labels": torch.tensor([0, 3, 1, 4, 2, 0])}
    make = partial(TextClassifier, invert=faulty)
    return remade(make, batch, classifier_loss, configure_adamw, declare={"pad_id": PAD})


class QueriedClips(nn.Module):
    """Clips of a video that read a question by cross-attention, with a mask for each row and head."""

    def __init__(self, dim: int = 48, heads: int = 4, *, rows_first: bool):
        super().__init__()
        self.heads, self.rows_first = heads, rows_first
        self.video_proj = nn.Sequential(nn.Linear(20, dim), nn.LayerNorm(dim))
        self.words, self.clip_positions = nn.Embedding(VOCAB, dim), nn.Parameter(torch.randn(16, dim) * 0.02)
        self.cross = nn.ModuleList(nn.MultiheadAttention(dim, heads, batch_first=True) for _ in range(2))
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(2))
        self.blocks = nn.ModuleList(EncoderBlock(dim, heads) for _ in range(2))
        self.saliency = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 1))

    def head_masks(self, clips: int, hidden: Tensor) -> Tensor:
        """Return the pairs `[B * H, clips, words]` that are hidden."""
        pairs = hidden[:, None, :].expand(-1, clips, -1)
        if self.rows_first:
            return pairs.repeat_interleave(self.heads, dim=0)
        return pairs.repeat(self.heads, 1, 1)

    def forward(self, video: Tensor, question: Tensor, question_mask: Tensor) -> Tensor:
        x = self.video_proj(video) + self.clip_positions
        memory = self.words(question)
        mask = self.head_masks(x.shape[1], question_mask == 0)
        for cross, norm, block in zip(self.cross, self.norms, self.blocks, strict=True):
            read, _ = cross(norm(x), memory, memory, attn_mask=mask, need_weights=False)
            x = block(x + read)
        return self.saliency(x).squeeze(-1)


def saliency_loss(model: nn.Module, batch: Batch) -> Tensor:
    scores = model(batch["video"], batch["question"], batch["question_mask"])
    return F.binary_cross_entropy_with_logits(scores, batch["relevant"])


@report("line/lighthouse#77", "masks", "rows", "padding")
def head_masks_in_the_wrong_order(*, faulty: bool) -> Arguments:
    """Masks are repeated for the heads as a tile, though rows come first: heads use other rows' masks."""
    question, real = padded_text((9, 4, 7, 5), seed=301)
    draw = generator(301)
    batch = {
        "video": torch.randn(4, 16, 20, generator=draw),
        "question": question,
        "question_mask": real,
        "relevant": (torch.rand(4, 16, generator=draw) < 0.3).float(),
    }
    make = partial(QueriedClips, rows_first=not faulty)
    return setup(make, batch, saliency_loss, plain_adamw, declare={"pad_id": PAD})


# ------------------------------------------------------------------------------------------------ attention


class MoleculeVAE(nn.Module):
    """A variational autoencoder of token strings, built of PyTorch's own Transformer layers."""

    def __init__(self, vocab: int = 40, dim: int = 32, latent: int = 16, *, batch_first: bool):
        super().__init__()
        layer: dict[str, Any] = {"dim_feedforward": 64, "dropout": 0.1, "batch_first": batch_first}
        self.embedding, self.position = nn.Embedding(vocab, dim), nn.Parameter(torch.randn(24, dim) * 0.02)
        self.encoder = nn.ModuleList(nn.TransformerEncoderLayer(dim, 4, **layer) for _ in range(2))
        self.to_mean, self.to_log_var = nn.Linear(dim, latent), nn.Linear(dim, latent)
        self.from_latent = nn.Linear(latent, dim)
        self.decoder = nn.ModuleList(nn.TransformerDecoderLayer(dim, 4, **layer) for _ in range(2))
        self.to_tokens = nn.Linear(dim, vocab)

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.embedding(x) + self.position[: x.shape[1]]
        for layer in self.encoder:
            h = layer(h)
        h = h.mean(dim=1)
        return self.to_mean(h), self.to_log_var(h)

    def decode(self, z: Tensor, length: int) -> Tensor:
        memory = self.from_latent(z).unsqueeze(1).expand(-1, length, -1)
        h = memory + self.position[:length]
        for layer in self.decoder:
            h = layer(h, memory)
        return self.to_tokens(h)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, log_var = self.encode(x)
        z = mean + torch.randn_like(mean) * (0.5 * log_var).exp()
        return self.decode(z, x.shape[1]), mean, log_var


def vae_loss(model: nn.Module, x: Tensor) -> Tensor:
    logits, mean, log_var = model(x)
    reconstruction = F.cross_entropy(logits.transpose(1, 2), x)
    divergence = -0.5 * (1 + log_var - mean.square() - log_var.exp()).sum(1).mean()
    return reconstruction + 0.01 * divergence


@report("DaoyuanLi2816/Molecule-Generator#22", "attention", "rows")
def batch_taken_for_the_sequence(*, faulty: bool) -> Arguments:
    """The layers expect the sequence first but get the batch first: molecules attend to each other."""
    make = partial(MoleculeVAE, batch_first=not faulty)
    return setup(make, tokens(6, 18, vocab=40, seed=302), vae_loss, plain_adamw)


class ScratchAttention(nn.Module):
    """Multi-head attention as a blog post builds it, for encoder, decoder and what is between them."""

    def __init__(self, hidden_dim: int, num_heads: int, *, permute: bool):
        super().__init__()
        self.qkv_dim, self.num_heads, self.permute_heads = hidden_dim // num_heads, num_heads, permute
        self.q_proj = nn.Linear(hidden_dim, hidden_dim, bias=False)
        self.kv_proj = nn.Linear(hidden_dim, 2 * hidden_dim, bias=False)
        self.o_proj = nn.Linear(hidden_dim, hidden_dim, bias=False)

    def forward(self, x: Tensor, memory: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        source = x if memory is None else memory
        batch_size, length, hidden_dim = x.shape
        q = self.q_proj(x).view(batch_size, length, self.num_heads, self.qkv_dim).transpose(1, 2)
        kv = self.kv_proj(source).view(batch_size, source.shape[1], self.num_heads, 2 * self.qkv_dim)
        k, v = kv.transpose(1, 2).chunk(2, dim=-1)
        logits = q @ k.transpose(-2, -1) / math.sqrt(self.qkv_dim)
        if mask is not None:
            logits = logits.masked_fill(~mask, -torch.inf)
        values = logits.softmax(dim=-1) @ v
        if self.permute_heads:
            values = values.permute(0, 2, 1, 3)
        return self.o_proj(values.reshape(batch_size, length, hidden_dim))


class ScratchBlock(nn.Module):
    """A Post-LN block of an encoder or, with a second attention, of a decoder."""

    def __init__(self, dim: int, heads: int, *, cross: bool, permute: bool):
        super().__init__()
        self.self_mha = ScratchAttention(dim, heads, permute=permute)
        self.cross_mha = ScratchAttention(dim, heads, permute=permute) if cross else None
        self.feed_forward = nn.Sequential(nn.Linear(dim, 2 * dim), nn.ReLU(), nn.Linear(2 * dim, dim))
        self.layer_norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(3 if cross else 2))

    def forward(
        self, x: Tensor, mask: Tensor | None, memory: Tensor | None = None, memory_mask: Tensor | None = None
    ) -> Tensor:
        x = self.layer_norms[0](x + self.self_mha(x, mask=mask))
        if self.cross_mha is not None:
            x = self.layer_norms[1](x + self.cross_mha(x, memory, memory_mask))
        return self.layer_norms[-1](x + self.feed_forward(x))


def sinusoids(length: int, dim: int) -> Tensor:
    rates = torch.exp(-math.log(10_000.0) * torch.arange(0, dim, 2) / dim)
    angles = torch.arange(length)[:, None] * rates
    return torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(1)


class ScratchTransformer(nn.Module):
    """The original Transformer, with one table for both languages and the head."""

    table: Tensor

    def __init__(self, dim: int = 48, heads: int = 4, *, permute: bool):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, dim)
        nn.init.normal_(self.embed.weight, std=dim**-0.5)
        self.register_buffer("table", sinusoids(64, dim), persistent=False)
        block = partial(ScratchBlock, dim, heads, permute=permute)
        self.encoder = nn.ModuleList(block(cross=False) for _ in range(2))
        self.decoder = nn.ModuleList(block(cross=True) for _ in range(2))

    def embedded(self, ids: Tensor) -> Tensor:
        return self.embed(ids) * self.embed.embedding_dim**0.5 + self.table[: ids.shape[1]]

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        source_mask = (source != PAD)[:, None, None, :]
        length = target.shape[1]
        future_mask = torch.ones(length, length, dtype=torch.bool, device=target.device).tril()
        memory = self.embedded(source)
        for block in self.encoder:
            memory = block(memory, source_mask)
        x = self.embedded(target)
        for block in self.decoder:
            x = block(x, future_mask, memory, source_mask)
        return x @ self.embed.weight.T


def copy_loss(model: nn.Module, batch: Batch) -> Tensor:
    logits = model(batch["source"], batch["target"][:, :-1])
    labels = batch["target"][:, 1:]
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=PAD)


@report("jsbaan/transformer-from-scratch#6", "attention", "causality", "padding", place="*decoder*|*mha*|")
def heads_merged_without_permute(*, faulty: bool) -> Arguments:
    """Heads are merged by a reshape alone, which puts pieces of other tokens into each token's vector."""
    source, _ = padded_text((18, 12, 15, 9), seed=303)
    target = F.pad(source, (1, 0), value=BOS)
    make = partial(ScratchTransformer, permute=not faulty)
    declare = {"pad_id": PAD, "tied": True}
    return setup(make, {"source": source, "target": target}, copy_loss, plain_adamw, declare=declare)


# ------------------------------------------------------------------------------------------------ positions


class RotaryTable(nn.Module):
    """Rotates `[B, T, H, D]` by tables of the longest length."""

    cos: Tensor
    sin: Tensor

    def __init__(self, dim: int, longest: int, base: float = 10_000.0):
        super().__init__()
        freqs = base ** -(torch.arange(0, dim, 2) / dim)
        angles = torch.arange(longest)[:, None] * freqs
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        cos, sin = self.cos[None, : x.size(-3), None, :], self.sin[None, : x.size(-3), None, :]
        x1, x2 = x.chunk(2, dim=-1)
        return torch.cat((x1 * cos + x2 * sin, x2 * cos - x1 * sin), dim=-1)


class RotaryAttention(nn.Module):
    def __init__(self, dim: int, heads: int, *, tokens_first: bool):
        super().__init__()
        self.heads, self.tokens_first = heads, tokens_first
        self.qkv, self.o_proj = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.rotary = RotaryTable(dim // heads, 64)

    def rotate(self, x: Tensor) -> Tensor:
        if self.tokens_first:
            return self.rotary(x.transpose(1, 2)).transpose(1, 2)
        return self.rotary(x)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, dim = x.shape
        packed = self.qkv(x).view(batch, length, 3, self.heads, dim // self.heads)
        q, k, v = packed.permute(2, 0, 3, 1, 4)
        q, k = F.rms_norm(q, (q.size(-1),)), F.rms_norm(k, (k.size(-1),))
        y = F.scaled_dot_product_attention(self.rotate(q), self.rotate(k), v, is_causal=True)
        return self.o_proj(y.transpose(1, 2).reshape(batch, length, dim))


class RotaryLayer(nn.Module):
    def __init__(self, dim: int, heads: int, *, tokens_first: bool):
        super().__init__()
        self.attention = RotaryAttention(dim, heads, tokens_first=tokens_first)
        self.norm1, self.norm2 = nn.RMSNorm(dim), nn.RMSNorm(dim)
        self.up, self.down = nn.Linear(dim, 4 * dim, bias=False), nn.Linear(4 * dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.silu(self.up(self.norm2(x))))


class RotaryLM(nn.Module):
    def __init__(self, dim: int = 48, heads: int = 4, layers: int = 3, *, tokens_first: bool):
        super().__init__()
        self.token_embedding = nn.Embedding(VOCAB, dim)
        self.layers = nn.ModuleList(RotaryLayer(dim, heads, tokens_first=tokens_first) for _ in range(layers))
        self.norm, self.lm_head = nn.RMSNorm(dim), nn.Linear(dim, VOCAB, bias=False)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.token_embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(self.norm(x))


@report("vukrosic/leo-optimizer#2", "positions", "order")
def rotary_along_the_heads(*, faulty: bool) -> Arguments:
    """Queries and keys come with the heads first, so that rotations count heads instead of tokens."""
    make = partial(RotaryLM, tokens_first=not faulty)
    return remade(make, text(4, 33, seed=304), shifted_loss, configure_adamw)


# ---------------------------------------------------------------------------------------------------- norms


class CosineAttention(nn.Module):
    """Attention by the cosine of queries and keys, each of which has a learned scale by head and feature."""

    def __init__(self, dim: int, heads: int, *, scale_qk: bool):
        super().__init__()
        self.heads, self.scale_qk, dim_head = heads, scale_qk, dim // heads
        self.to_q, self.to_k = nn.Linear(dim, dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.to_v, self.to_out = nn.Linear(dim, dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.qk_norm_q_scale = nn.Parameter(torch.ones(heads, 1, dim_head))
        self.qk_norm_k_scale = nn.Parameter(torch.ones(heads, 1, dim_head))

    def split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(self.to_q(x)), self.split(self.to_k(x)), self.split(self.to_v(x))
        q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
        if self.scale_qk:
            q, k = q * self.qk_norm_q_scale, k * self.qk_norm_k_scale
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=10.0)
        return self.to_out(out.transpose(1, 2).flatten(2))


class CosineDecoder(nn.Module):
    def __init__(self, dim: int = 48, heads: int = 4, depth: int = 3, *, scale_qk: bool):
        super().__init__()
        self.token_emb, self.pos_emb = nn.Embedding(VOCAB, dim), nn.Embedding(64, dim)
        self.attn_layers = nn.ModuleList(CosineAttention(dim, heads, scale_qk=scale_qk) for _ in range(depth))
        self.ff_layers = nn.ModuleList(
            nn.Sequential(nn.Linear(dim, 3 * dim), nn.GELU(), nn.Linear(3 * dim, dim)) for _ in range(depth)
        )
        self.attn_norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(depth))
        self.ff_norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(depth))
        self.final_norm, self.to_logits = nn.LayerNorm(dim), nn.Linear(dim, VOCAB, bias=False)
        nn.init.normal_(self.token_emb.weight, std=0.02)
        nn.init.normal_(self.pos_emb.weight, std=0.02)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.token_emb(ids) + self.pos_emb(torch.arange(ids.shape[1], device=ids.device))
        for attn, ff, attn_norm, ff_norm in zip(
            self.attn_layers, self.ff_layers, self.attn_norms, self.ff_norms, strict=True
        ):
            x = x + attn(attn_norm(x))
            x = x + ff(ff_norm(x))
        return self.to_logits(self.final_norm(x))


@report("lucidrains/x-transformers#352", "norms", "gradients", place="*attn*|*qk_norm*")
def qk_scales_never_applied(*, faulty: bool) -> Arguments:
    """The scales of normed queries and keys are made for each head and feature, but nothing uses them."""
    make = partial(CosineDecoder, scale_qk=not faulty)
    return remade(make, text(4, 33, seed=305), shifted_loss, plain_adamw)


# ---------------------------------------------------------------------------------------- series and tables


class CandleForecaster(nn.Module):
    """A causal Transformer of prices and volumes, which predicts each next candle."""

    def __init__(self, features: int = 5, dim: int = 48):
        super().__init__()
        self.candle, self.time = nn.Linear(features, dim), nn.Embedding(64, dim)
        self.blocks = nn.ModuleList(EncoderBlock(dim, 4) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, features)

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        seen = torch.ones(length, length, dtype=torch.bool, device=x.device).tril()
        h = self.candle(x) + self.time(torch.arange(length, device=x.device))
        for block in self.blocks:
            h = block(h, seen)
        return self.head(self.norm(h))


class CandleDataset(torch.utils.data.Dataset[Tensor]):
    """Windows of a history and what came after it, each brought to one scale."""

    def __init__(self, candles: Tensor, lookback: int, predict: int, *, scale_by_all: bool):
        self.candles, self.lookback, self.window = candles, lookback, lookback + predict + 1
        self.scale_by_all = scale_by_all

    def __len__(self) -> int:
        return len(self.candles) - self.window + 1

    def __getitem__(self, start: int) -> Tensor:
        window = self.candles[start : start + self.window]
        known = window if self.scale_by_all else window[: self.lookback]
        scaled = (window - known.mean(0)) / (known.std(0) + 1e-5)
        return scaled.clamp(-5.0, 5.0)


def candle_loss(model: nn.Module, windows: Tensor) -> Tensor:
    return F.mse_loss(model(windows[:, :-1]), windows[:, 1:])


@report("shiyu-coder/Kronos#228", "series")
def window_scaled_with_its_future(*, faulty: bool) -> Arguments:
    """A window is scaled by the mean and deviation of all of it, what is to be predicted included."""
    walk = torch.randn(400, 5, generator=generator(306)).cumsum(0) * 0.3
    dataset = CandleDataset(walk, lookback=32, predict=8, scale_by_all=faulty)
    batch = torch.stack([dataset[start] for start in (0, 57, 120, 188, 251, 330)])
    return setup(CandleForecaster, batch, candle_loss, plain_adamw)


class EmbeddingColumns(nn.Module):
    """Maps columns of text embeddings, which lie side by side in one tensor, to tokens."""

    def __init__(self, widths: tuple[int, ...], dim: int, *, advance: bool):
        super().__init__()
        self.widths, self.advance = widths, advance
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(width, dim) * 0.1) for width in widths)
        self.biases = nn.Parameter(torch.zeros(len(widths), dim))

    def forward(self, values: Tensor) -> Tensor:
        start_idx, columns = 0, []
        for width, weight in zip(self.widths, self.weights, strict=True):
            columns.append(values[:, start_idx : start_idx + width] @ weight)
            if self.advance:
                start_idx += width
        return torch.stack(columns, dim=1) + self.biases


class TableModel(nn.Module):
    """An FT-Transformer of numbers and of texts that a language model has embedded."""

    def __init__(self, dim: int = 48, *, advance: bool):
        super().__init__()
        self.number_weight = nn.Parameter(torch.randn(6, dim) * 0.1)
        self.number_bias = nn.Parameter(torch.randn(6, dim) * 0.1)
        self.texts = EmbeddingColumns((12, 8, 10), dim, advance=advance)
        self.cls = nn.Parameter(torch.randn(1, 1, dim) * 0.1)
        self.blocks = nn.ModuleList(EncoderBlock(dim, 4) for _ in range(2))
        self.head = nn.Sequential(nn.LayerNorm(dim), nn.ReLU(), nn.Linear(dim, 3))

    def forward(self, numbers: Tensor, texts: Tensor) -> Tensor:
        numeric = numbers[..., None] * self.number_weight + self.number_bias
        x = torch.cat((self.cls.expand(len(numbers), -1, -1), numeric, self.texts(texts)), dim=1)
        for block in self.blocks:
            x = block(x)
        return self.head(x[:, 0])


def table_loss(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch["numbers"], batch["texts"]), batch["label"])


@report("pyg-team/pytorch-frame#455", "tables", "inputs")
def first_column_read_for_all(*, faulty: bool) -> Arguments:
    """The start of the next column is never moved, so that all columns of embeddings read the first."""
    draw = generator(307)
    batch = {
        "numbers": torch.randn(12, 6, generator=draw),
        "texts": torch.randn(12, 30, generator=draw),
        "label": torch.randint(3, (12,), generator=draw),
    }
    return setup(partial(TableModel, advance=not faulty), batch, table_loss, configure_adamw)


# ------------------------------------------------------------------------------------------ masked modelling


Spans = list[tuple[int, int]]


def random_spans(length: int, width: int, count: int, draw: torch.Generator) -> Spans:
    starts = torch.randint(length - width, (count,), generator=draw).tolist()
    return [(start, start + width) for start in starts]


def mask_spectrogram(
    spectrogram: Tensor, draw: torch.Generator, *, label_stale_spans: bool
) -> tuple[Tensor, Tensor]:
    """Hide spans of time and bands of frequency of `[T, F]`, and return what is asked for."""
    masked, label = spectrogram.clone(), torch.zeros_like(spectrogram)
    length, frequencies = spectrogram.shape
    spans = random_spans(length, 4, 3, draw)
    for start, end in spans:
        masked[start:end] = 0.0
        label[start:end] = 1.0
    bands = random_spans(frequencies, 3, 2, draw)
    for start, end in bands:
        masked[:, start:end] = 0.0
    for start, end in spans if label_stale_spans else bands:
        label[:, start:end] = 1.0
    return masked, label


class SpectrogramEncoder(nn.Module):
    """A BERT of spectrograms, which fills in what is hidden of them."""

    def __init__(self, bands: int = 24, dim: int = 48):
        super().__init__()
        self.in_proj, self.in_norm = nn.Linear(bands, dim), nn.LayerNorm(dim)
        self.position = nn.Parameter(torch.randn(40, dim) * 0.02)
        self.blocks = nn.ModuleList(EncoderBlock(dim, 4) for _ in range(2))
        self.head = nn.Sequential(nn.Linear(dim, dim), nn.GELU(), nn.LayerNorm(dim), nn.Linear(dim, bands))

    def forward(self, spectrogram: Tensor) -> Tensor:
        x = self.in_norm(self.in_proj(spectrogram) + self.position[: spectrogram.shape[1]])
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def filling_loss(model: nn.Module, batch: Batch) -> Tensor:
    error = (model(batch["masked"]) - batch["spectrogram"]).abs()
    return (error * batch["label"]).sum() / batch["label"].sum()


@report("czlwang/BrainBERT#15", "masked modelling")
def hidden_bands_not_asked_for(*, faulty: bool) -> Arguments:
    """Targets of frequency lie where the spans of time were, not at the bands that are hidden."""
    draw = generator(308)
    spectrogram = torch.randn(6, 40, 24, generator=draw).cumsum(1) * 0.3
    rows = [mask_spectrogram(row, draw, label_stale_spans=faulty) for row in spectrogram]
    batch = {
        "spectrogram": spectrogram,
        "masked": torch.stack([masked for masked, _ in rows]),
        "label": torch.stack([label for _, label in rows]),
    }
    return setup(SpectrogramEncoder, batch, filling_loss, plain_adamw)


# ------------------------------------------------------------------------------------------ encoder-decoder

START, LANGUAGE = 3, 4
"""The decoder's start token, and the one that names the language; BOS is another token than the first."""


class DecoderBlock(nn.Module):
    def __init__(self, dim: int, heads: int):
        super().__init__()
        self.self_attn = nn.MultiheadAttention(dim, heads, batch_first=True)
        self.encoder_attn = nn.MultiheadAttention(dim, heads, batch_first=True)
        self.fc1, self.fc2 = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(3))

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        length = x.shape[1]
        future = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        y = self.norms[0](x)
        x = x + self.self_attn(y, y, y, attn_mask=future, is_causal=True, need_weights=False)[0]
        x = x + self.encoder_attn(self.norms[1](x), memory, memory, need_weights=False)[0]
        return x + self.fc2(F.gelu(self.fc1(self.norms[2](x))))


def shift_tokens_right(labels: Tensor) -> Tensor:
    """Return the decoder's input: the start token and the labels but the last."""
    shifted = F.pad(labels[:, :-1], (1, 0), value=START)
    return shifted.masked_fill(shifted == -100, PAD)


class SpeechToText(nn.Module):
    """A small Whisper, which makes the decoder's input of the labels."""

    def __init__(self, dim: int = 48, bands: int = 16):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv1d(bands, dim, 3, padding=1), nn.Conv1d(dim, dim, 3, 2, padding=1)
        self.frame_positions = nn.Parameter(torch.randn(24, dim) * 0.02)
        self.encoder = nn.ModuleList(EncoderBlock(dim, 4) for _ in range(2))
        self.encoder_norm, self.decoder_norm = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.embed_tokens, self.embed_positions = nn.Embedding(VOCAB, dim), nn.Embedding(32, dim)
        nn.init.normal_(self.embed_tokens.weight, std=0.02)
        nn.init.normal_(self.embed_positions.weight, std=0.02)
        self.decoder = nn.ModuleList(DecoderBlock(dim, 4) for _ in range(2))

    def forward(self, input_features: Tensor, labels: Tensor) -> Batch:
        x = F.gelu(self.conv2(F.gelu(self.conv1(input_features)))).transpose(1, 2) + self.frame_positions
        for block in self.encoder:
            x = block(x)
        memory = self.encoder_norm(x)
        decoder_input_ids = shift_tokens_right(labels)
        at = torch.arange(labels.shape[1], device=labels.device)
        h = self.embed_tokens(decoder_input_ids) + self.embed_positions(at)
        for block in self.decoder:
            h = block(h, memory)
        logits = self.decoder_norm(h) @ self.embed_tokens.weight.T
        return {"loss": token_loss(logits, labels), "logits": logits}


def collate_speech(features: Tensor, transcripts: list[list[int]], start_token: int) -> Batch:
    """Pad transcripts with -100; cut the start token, which the model puts before them itself."""
    width = max(len(ids) for ids in transcripts)
    labels = torch.full((len(transcripts), width), -100)
    for row, ids in enumerate(transcripts):
        labels[row, : len(ids)] = torch.tensor(ids)
    if (labels[:, 0] == start_token).all():
        labels = labels[:, 1:]
    return {"input_features": features, "labels": labels}


def own_loss(model: nn.Module, batch: Batch) -> Tensor:
    return model(**batch)["loss"]


@report("huggingface/blog#1949", "encoder-decoder")
def start_token_twice(*, faulty: bool) -> Arguments:
    """The collator looks for another start token than the model's: decoders begin with two of them."""
    draw = generator(309)
    words = [tokens(1, length, seed=309 + length)[0].tolist() for length in (12, 7, 10, 9)]
    transcripts = [[START, LANGUAGE, *row, EOS] for row in words]
    features = torch.randn(4, 16, 48, generator=draw)
    batch = collate_speech(features, transcripts, start_token=BOS if faulty else START)
    return setup(SpeechToText, batch, own_loss, configure_adamw, declare={"tied": True})
