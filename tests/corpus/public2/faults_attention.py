"""Reports of masks, positions, norms and attention."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from corpus.batches import EOS, PAD, VOCAB, documents_of, documents_text, generator, padded_text, text
from corpus.case import Arguments
from corpus.models.parts import causal

from .blocks import (
    Attention,
    Cosines,
    Decoder,
    DecoderLayer,
    GatedMLP,
    RMSNorm,
    adamw,
    decaying_adamw,
    init_weights,
    inverse_frequencies,
    language_loss,
    next_token_loss,
    remade,
    rotate,
    setup,
)
from .case import report

# --------------------------------------------------------------------------------------------------- masks


class WindowedAttention(Attention):
    """Attention to the last ``window`` tokens."""

    def __init__(self, dim: int, heads: int, *, window: int, mask_while_training: bool):
        super().__init__(dim, heads)
        self.window, self.mask_while_training = window, mask_while_training

    def forward(self, x: Tensor, cosines: Cosines, mask: Tensor | None = None) -> Tensor:
        if not self.training or self.mask_while_training:
            near = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device)
            mask = near.tril().triu(1 - self.window)
        return super().forward(x, cosines, mask)


def windowed_layer(dim: int, heads: int, *, mask_while_training: bool) -> DecoderLayer:
    layer = DecoderLayer(dim, heads)
    layer.self_attn = WindowedAttention(dim, heads, window=8, mask_while_training=mask_while_training)
    return layer


@report("unslothai/unsloth#8253", "masks", "training_equals_evaluation", place="*layers*|*attn*|")
def window_lost_in_training(*, faulty: bool) -> Arguments:
    """The fast path of training drops the sliding window: each token sees the whole past."""
    layer = partial(windowed_layer, mask_while_training=not faulty)
    make = partial(Decoder, layers=3, layer=layer)
    return remade(make, text(4, 32), language_loss, decaying_adamw)


def padded_loss(model: nn.Module, batch: dict[str, Tensor], *, pass_mask: bool) -> Tensor:
    mask = batch["attention_mask"].bool()[:, None, None, :] if pass_mask else None
    return next_token_loss(model(batch["input_ids"], mask), batch["labels"])


@report("unslothai/unsloth-zoo#963", "masks", "causality", place="*layers.0*|*attn*|layers|")
def padding_mask_replaces_causality(*, faulty: bool) -> Arguments:
    """A mask that is passed replaces the causal one; the loss passes the collator's padding mask."""
    ids, real = padded_text((32, 26, 29, 20), seed=3)
    batch = {"input_ids": ids, "attention_mask": real, "labels": ids.masked_fill(real == 0, -100)}
    loss = partial(padded_loss, pass_mask=faulty)
    return setup(Decoder, batch, loss, declare={"pad_id": PAD})


# ------------------------------------------------------------------------------------------------- packing


def same_document(positions: Tensor) -> Tensor:
    """Return which pairs of packed tokens see each other, from positions that restart."""
    document = (positions == 0).cumsum(1)
    return (document[:, :, None] == document[:, None]) & causal(positions.shape[1], positions.device)


def packed_loss(model: nn.Module, batch: dict[str, Tensor], *, isolate: bool) -> Tensor:
    """Return the loss of packed rows; the two-dimensional mask of ones says nothing of documents."""
    keep = batch["attention_mask"].bool()[:, None, None, :]
    length = batch["input_ids"].shape[1]
    pairs = same_document(batch["position_ids"]) if isolate else causal(length, keep.device)
    logits = model(
        batch["input_ids"], keep & pairs[:, None] if isolate else keep & pairs, batch["position_ids"]
    )
    return next_token_loss(logits, batch["labels"])


def positions_of(documents: Tensor) -> Tensor:
    """Return the position of each token in its document."""
    at = torch.arange(documents.shape[1]).expand_as(documents)
    starts = torch.zeros_like(documents)
    new = documents[:, 1:] != documents[:, :-1]
    starts[:, 1:] = torch.where(new, at[:, 1:], 0).cummax(1).values
    return at - starts


def packed_batch() -> dict[str, Tensor]:
    ids, documents = documents_text(((9, 21), (13, 27), (7, 18, 25), (16,)), 32, seed=4)
    positions = positions_of(documents)
    labels = ids.masked_fill(positions == 0, -100)
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "position_ids": positions,
        "labels": labels,
    }


@report("axolotl-ai-cloud/axolotl#3796", "packing", "documents", place="*layers*|*attn*|")
def packing_leaks_under_sdpa(*, faulty: bool) -> Arguments:
    """Samples are packed with positions that restart, but the mask of ones is kept and hides no document."""
    batch = packed_batch()
    declare = {"documents": documents_of(batch["input_ids"]), "eos_id": EOS}
    return setup(partial(Decoder, layers=3), batch, partial(packed_loss, isolate=not faulty), declare=declare)


class GatedDelta(nn.Module):
    """A recurrence with a decay for each head behind a short causal convolution, in its quadratic form."""

    def __init__(self, dim: int, heads: int, *, isolate: bool):
        super().__init__()
        self.heads, self.isolate = heads, isolate
        self.in_proj = nn.Linear(dim, 3 * dim, bias=False)
        self.conv = nn.Parameter(torch.randn(4, 3 * dim) * 0.3)
        self.decay, self.gate = nn.Linear(dim, heads), nn.Linear(dim, dim, bias=False)
        self.norm, self.out_proj = RMSNorm(dim // heads), nn.Linear(dim, dim, bias=False)

    def forward(self, x: Tensor, together: Tensor) -> Tensor:
        """Mix tokens; ``together`` `[B, T, T]` says which pairs are in one document."""
        length = x.shape[1]
        u = self.in_proj(x)
        mixed = torch.zeros_like(u)
        for back in range(4):
            past = F.pad(u, (0, 0, back, 0))[:, :length]
            if self.isolate and back:
                reach = F.pad(together.diagonal(-back, 1, 2), (back, 0))
                past = past * reach[..., None]
            mixed = mixed + past * self.conv[back]
        q, k, v = F.silu(mixed).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        run = F.logsigmoid(self.decay(x) + 3.0).transpose(1, 2).cumsum(-1)
        seen = causal(length, x.device).expand(len(x), -1, -1)
        if self.isolate:
            seen = seen & together
        weights = (run[..., :, None] - run[..., None, :]).masked_fill(~seen[:, None], -torch.inf).exp()
        y = ((F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).transpose(-1, -2)) * weights) @ v
        return self.out_proj(self.norm(y).transpose(1, 2).flatten(2) * F.silu(self.gate(x)))


class Hybrid(nn.Module):
    """Two gated recurrences and one layer of attention, which keep documents apart by their positions."""

    def __init__(self, dim: int = 48, heads: int = 4, *, isolate: bool):
        super().__init__()
        self.embed_tokens, self.heads, self.width = nn.Embedding(VOCAB, dim), heads, dim // heads
        self.mixers = nn.ModuleList(
            [
                GatedDelta(dim, heads, isolate=isolate),
                GatedDelta(dim, heads, isolate=isolate),
                Attention(dim, heads),
            ]
        )
        self.mlps = nn.ModuleList(GatedMLP(dim) for _ in range(3))
        self.mixer_norms = nn.ModuleList(RMSNorm(dim) for _ in range(3))
        self.mlp_norms = nn.ModuleList(RMSNorm(dim) for _ in range(3))
        self.norm, self.lm_head = RMSNorm(dim), nn.Linear(dim, VOCAB, bias=False)
        self.apply(init_weights)

    def forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        pairs = same_document(positions)
        document = (positions == 0).cumsum(1)
        together = document[:, :, None] == document[:, None]
        angles = positions[..., None].float() * inverse_frequencies(self.width).to(ids.device)
        angles = torch.cat((angles, angles), -1).unsqueeze(1)
        x = self.embed_tokens(ids)
        for mixer, mixer_norm, mlp, mlp_norm in zip(
            self.mixers, self.mixer_norms, self.mlps, self.mlp_norms, strict=True
        ):
            if isinstance(mixer, Attention):
                x = x + mixer(mixer_norm(x), (angles.cos(), angles.sin()), pairs[:, None])
            else:
                x = x + mixer(mixer_norm(x), together)
            x = x + mlp(mlp_norm(x))
        return self.lm_head(self.norm(x))


def hybrid_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return next_token_loss(model(batch["input_ids"], batch["position_ids"]), batch["labels"])


@report("modelscope/ms-swift#9565", "recurrences", "documents", place="*mixers*|")
def packing_leaks_in_recurrence(*, faulty: bool) -> Arguments:
    """Attention keeps packed samples apart, the gated recurrences and their convolutions do not."""
    batch = packed_batch()
    batch.pop("attention_mask")
    declare = {"documents": documents_of(batch["input_ids"]), "eos_id": EOS}
    return remade(partial(Hybrid, isolate=not faulty), batch, hybrid_loss, declare=declare)


# ------------------------------------------------------------------------------------------ cross-attention


class CrossDecoderLayer(nn.Module):
    """A layer of an encoder-decoder as it is written for nn.MultiheadAttention."""

    def __init__(self, dim: int, heads: int, *, causal_self_attention: bool):
        super().__init__()
        self.causal_self_attention = causal_self_attention
        self.self_attn = nn.MultiheadAttention(dim, heads, batch_first=True)
        self.multihead_attn = nn.MultiheadAttention(dim, heads, batch_first=True)
        self.norm1, self.norm2, self.norm3 = nn.LayerNorm(dim), nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.linear1, self.linear2 = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        length, width = x.shape[1], memory.shape[1]
        later = ~causal(length, x.device) if self.causal_self_attention else None
        x = self.norm1(x + self.self_attn(x, x, x, attn_mask=later, need_weights=False)[0])
        beyond = None
        if not self.causal_self_attention:  # the flag of the layer went to the wrong attention
            beyond = ~torch.ones(length, width, dtype=torch.bool, device=x.device).tril()
        x = self.norm2(x + self.multihead_attn(x, memory, memory, attn_mask=beyond, need_weights=False)[0])
        return self.norm3(x + self.linear2(F.relu(self.linear1(x))))


class Translator(nn.Module):
    def __init__(self, dim: int = 48, *, causal_self_attention: bool):
        super().__init__()
        self.source, self.target = nn.Embedding(VOCAB, dim), nn.Embedding(VOCAB, dim)
        self.positions = nn.Parameter(torch.randn(64, dim) * 0.1)
        layer = nn.TransformerEncoderLayer(dim, 4, 2 * dim, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.decoder = nn.ModuleList(
            CrossDecoderLayer(dim, 4, causal_self_attention=causal_self_attention) for _ in range(2)
        )
        self.generator = nn.Linear(dim, VOCAB)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        memory = self.encoder(self.source(source) + self.positions[: source.shape[1]])
        x = self.target(target) + self.positions[: target.shape[1]]
        for layer in self.decoder:
            x = layer(x, memory)
        return self.generator(x)


def translation_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    source, target = batch
    return F.cross_entropy(model(source, target[:, :-1]).transpose(1, 2), target[:, 1:])


@report("onlybooks/llm#4", "encoder-decoder", "causality", place="*decoder*|*self_attn*|")
def causal_flag_on_cross_attention(*, faulty: bool) -> Arguments:
    """The decoder's causal flag goes to the attention to the source instead of to its own past."""
    batch = (text(4, 20, seed=1), text(4, 17, seed=2))
    make = partial(Translator, causal_self_attention=not faulty)
    return setup(make, batch, translation_loss, adamw)


# ----------------------------------------------------------------------------------------------- positions


@dataclass(frozen=True)
class RopeConfig:
    head_dim: int = 16
    partial_rotary_factor: float = 0.25
    use_mrope: bool = True


class SectionedRotary(nn.Module):
    """Rotations of three-dimensional positions (time, height, width), a section of the frequencies each."""

    inv_freq: Tensor

    def __init__(self, config: RopeConfig, *, heed_factor: bool):
        super().__init__()
        share = config.partial_rotary_factor if heed_factor else 1.0
        self.width = int(config.head_dim * share)
        self.register_buffer("inv_freq", inverse_frequencies(self.width), persistent=False)

    def forward(self, positions: Tensor) -> Cosines:
        """Return the rotations of positions `[3, B, T]`."""
        angles = positions[..., None].float() * self.inv_freq.float()
        section = torch.arange(angles.shape[-1], device=angles.device) % 3
        angles = torch.stack([angles[int(axis), ..., i] for i, axis in enumerate(section)], dim=-1)
        angles = torch.cat((angles, angles), dim=-1).unsqueeze(1)
        return angles.cos(), angles.sin()


class PartialAttention(Attention):
    def forward(self, x: Tensor, cosines: Cosines, mask: Tensor | None = None) -> Tensor:
        q, k, v = (self.split(map_(x)) for map_ in (self.q_proj, self.k_proj, self.v_proj))
        width = cosines[0].shape[-1]
        q = torch.cat((rotate(q[..., :width], cosines), q[..., width:]), dim=-1)
        k = torch.cat((rotate(k[..., :width], cosines), k[..., width:]), dim=-1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(y.transpose(1, 2).flatten(2))


class SectionedDecoder(Decoder):
    def __init__(self, config: RopeConfig, *, heed_factor: bool):
        super().__init__(dim=4 * config.head_dim, layers=2)
        for layer in self.layers:
            layer.self_attn = PartialAttention(self.dim, 4)
        self.sections = SectionedRotary(config, heed_factor=heed_factor)
        del self.rotary
        self.apply(init_weights)

    def run(self, x: Tensor, mask: Tensor | None = None, positions: Tensor | None = None) -> Tensor:
        at = torch.arange(x.shape[1], device=x.device).expand(3, len(x), -1)
        cosines = self.sections(at)
        for layer in self.layers:
            x = layer(x, cosines)
        return self.norm(x)


@report("AI-Hypercomputer/maxtext#4616", "positions")
def partial_rotary_factor_ignored(*, faulty: bool) -> Arguments:
    """With positions of several axes, all of a head is rotated although the configuration says a quarter."""
    make = partial(SectionedDecoder, RopeConfig(), heed_factor=not faulty)
    return remade(make, text(4, 32, seed=5), language_loss)


class TeachingModel(nn.Module):
    """The small decoder of a lecture, with learned positions."""

    def __init__(self, dim: int = 48, *, positions_of_rows: bool):
        super().__init__()
        self.positions_of_rows = positions_of_rows
        self.token_embedding, self.position_embedding = nn.Embedding(VOCAB, dim), nn.Embedding(64, dim)
        layers = (
            nn.TransformerEncoderLayer(dim, 4, 2 * dim, 0.0, batch_first=True, norm_first=True)
            for _ in range(2)
        )
        self.layers = nn.ModuleList(layers)
        self.ln_f, self.lm_head = nn.LayerNorm(dim), nn.Linear(dim, VOCAB, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.positions_of_rows:
            at = torch.arange(x.size(0), device=x.device).unsqueeze(1)
        else:
            at = torch.arange(x.size(1), device=x.device).unsqueeze(0)
        h = self.token_embedding(x) + self.position_embedding(at)
        later = ~causal(x.size(1), x.device)
        for layer in self.layers:
            h = layer(h, src_mask=later, is_causal=True)
        return self.lm_head(self.ln_f(h))


@report("cmu-l3/anlp-fall2025-code#1", "positions", "order", "rows")
def positions_along_rows(*, faulty: bool) -> Arguments:
    """Positions are counted along the batch: all tokens of a row get one and the same."""
    return setup(partial(TeachingModel, positions_of_rows=faulty), text(6, 24, seed=6), language_loss)


# --------------------------------------------------------------------------------------------------- norms


class SequenceRMSNorm(nn.Module):
    """Root-mean-square normalisation by the norm over tokens and features together, or of each token."""

    def __init__(self, dim: int, *, over: tuple[int, ...]):
        super().__init__()
        self.scale, self.over = nn.Parameter(torch.ones(dim)), over

    def forward(self, x: Tensor) -> Tensor:
        count = 1
        for axis in self.over:
            count *= x.shape[axis]
        size = torch.linalg.vector_norm(x, dim=self.over, keepdim=True) * count**-0.5
        return self.scale * x / (size + 1e-8)


class NormedDecoder(Decoder):
    def __init__(self, *, over: tuple[int, ...]):
        super().__init__()
        for layer in self.layers:
            layer.input_layernorm = SequenceRMSNorm(self.dim, over=over)
            layer.post_attention_layernorm = SequenceRMSNorm(self.dim, over=over)
        self.norm = SequenceRMSNorm(self.dim, over=over)


@report("bkitano/llama-from-scratch#4", "norms", "norms", "causality", place="*norm*|layers.0*|layers|")
def rms_over_the_sequence(*, faulty: bool) -> Arguments:
    """RMSNorm divides by the size of the whole sequence instead of that of each token."""
    make = partial(NormedDecoder, over=(1, 2) if faulty else (2,))
    return remade(make, text(4, 24, seed=7), language_loss, decaying_adamw)


# ----------------------------------------------------------------------------------------------- attention


class NotebookHead(nn.Module):
    """One head of a vision Transformer, as a tutorial writes it."""

    def __init__(self, dim: int, width: int, softmax_dim: int):
        super().__init__()
        self.query, self.key, self.value = nn.Linear(dim, width), nn.Linear(dim, width), nn.Linear(dim, width)
        self.softmax_dim, self.width = softmax_dim, width

    def forward(self, x: Tensor) -> Tensor:
        scores = self.query(x) @ self.key(x).transpose(1, 2) / self.width**0.5
        return scores.softmax(dim=self.softmax_dim) @ self.value(x)


class NotebookBlock(nn.Module):
    def __init__(self, dim: int, heads: int, softmax_dim: int):
        super().__init__()
        self.heads = nn.ModuleList(NotebookHead(dim, dim // heads, softmax_dim) for _ in range(heads))
        self.out = nn.Linear(dim, dim)
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        x = x + self.out(torch.cat([head(y) for head in self.heads], dim=-1))
        return x + self.mlp(self.norm2(x))


class NotebookViT(nn.Module):
    def __init__(self, dim: int = 48, *, softmax_dim: int):
        super().__init__()
        self.patch = nn.Conv2d(3, dim, 4, 4)
        self.class_token = nn.Parameter(torch.randn(1, 1, dim) * 0.02)
        self.position = nn.Parameter(torch.randn(1, 17, dim) * 0.02)
        self.blocks = nn.ModuleList(NotebookBlock(dim, 4, softmax_dim) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patch(images).flatten(2).transpose(1, 2)
        x = torch.cat((self.class_token.expand(len(x), -1, -1), x), 1) + self.position
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)[:, 0])


def images_and_classes(count: int = 8, size: int = 16) -> tuple[Tensor, Tensor]:
    draw = generator(8)
    return torch.randn(count, 3, size, size, generator=draw), torch.arange(count) % 10


def classification_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


@report("nerminnuraydogan/vision-transformer#1", "attention", "attention_scale", place="*blocks*|*heads*|")
def softmax_over_queries(*, faulty: bool) -> Arguments:
    """The softmax of the scores runs over the queries, not over the keys."""
    make = partial(NotebookViT, softmax_dim=1 if faulty else -1)
    return setup(make, images_and_classes(), classification_loss)


# ------------------------------------------------------------------------------------------------- pooling


class PooledClassifier(nn.Module):
    """A causal classifier that reads the state of each row's last token, wherever the padding is."""

    def __init__(self, dim: int = 48, *, count_tokens: bool):
        super().__init__()
        self.count_tokens = count_tokens
        self.decoder, self.score = Decoder(dim), nn.Linear(dim, 3, bias=False)
        self.decoder.lm_head = nn.Identity()
        init_weights(self.score)

    def last(self, ids: Tensor) -> Tensor:
        real = ids != PAD
        if self.count_tokens:
            return real.sum(-1) - 1
        return (torch.arange(ids.shape[1], device=ids.device) * real).argmax(-1)

    def forward(self, ids: Tensor, attention_mask: Tensor, labels: Tensor) -> dict[str, Tensor]:
        length = ids.shape[1]
        itself = torch.eye(length, dtype=torch.bool, device=ids.device)
        seen = causal(length, ids.device) & attention_mask.bool()[:, None, None, :] | itself
        states = self.decoder(ids, seen, (attention_mask.cumsum(1) - 1).clamp(min=0))
        logits = self.score(states)[torch.arange(len(ids)), self.last(ids)]
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


def own_loss(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    return model(**batch)["loss"]


@report("huggingface/transformers#46782", "pooling", "padding")
def last_token_by_count(*, faulty: bool) -> Arguments:
    """The last token is found by counting real ones, though rows are padded on the left."""
    ids, real = padded_text((24, 15, 20, 9), seed=9)
    lengths = real.sum(1)
    left = torch.stack([row.roll(24 - int(length)) for row, length in zip(ids, lengths, strict=True)])
    batch = {"ids": left, "attention_mask": (left != PAD).long(), "labels": torch.tensor([0, 1, 2, 1])}
    make = partial(PooledClassifier, count_tokens=faulty)
    return remade(make, batch, own_loss, declare={"pad_id": PAD})
