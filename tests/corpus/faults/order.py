"""Faults that ``order`` names: layers that do not know, or know wrongly, where a token stands."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb
from transformers.models.vit.modeling_vit import ViTEmbeddings

from corpus.batches import image_batch, text
from corpus.case import DEEP, PLANTED_1, PLANTED_2, PLANTED_3, UNSEEN, Arguments, fault, twins
from corpus.models.deep import Training, deep_bert, deep_gpt2, deep_llama, deep_translation, planted
from corpus.models.gpt import Gpt
from corpus.models.library import IMAGES, LaidOut, library
from corpus.models.llama import Attention, Llama, Rotations, llama_of, rotate
from corpus.models.parts import becomes
from corpus.places import LLAMA_POSITIONS, within
from corpus.training import adamw, changed, full_setup, loss_setup, next_token
from normlab.nn.position import Sinusoidal

# ------------------------------------------------------------------------------------------ learned positions


class PositionZero(Gpt):
    def embed(self, ids: Tensor) -> Tensor:
        return self.tokens(ids) + self.positions(torch.zeros(ids.shape[1], dtype=torch.long))


@fault("order", place="|positions*|blocks.0*", origin=PLANTED_2)
def pos_zero() -> Arguments:
    """Every token is at position 0."""
    return full_setup(PositionZero)


class PositionOfTheRow(Gpt):
    def embed(self, ids: Tensor) -> Tensor:
        return self.tokens(ids) + self.positions(torch.arange(ids.shape[0]))[:, None]


@fault("order", "rows", place="|positions*|blocks.0*", origin=PLANTED_2)
def pos_on_batch() -> Arguments:
    """Positions are counted along the batch."""
    return full_setup(PositionOfTheRow)


class WithoutPositions(Gpt):
    def embed(self, ids: Tensor) -> Tensor:
        return self.drop(self.tokens(ids))


@fault("order", "gradients", place=f"|drop|{within('positions', 'blocks.0')}", origin=DEEP)
@planted(deep_gpt2)
def positions_never_added(training: Training) -> None:
    """The forward pass forgets the position vectors: layers read the words alone, and wpe is never used."""
    becomes(training.model, WithoutPositions)


class PatchesAlone(ViTEmbeddings):
    def forward(self, pixel_values: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        patches = self.patch_embeddings(pixel_values)
        return torch.cat([self.cls_token.expand(len(patches), -1, -1), patches], 1)


@fault("order", "gradients", place="vit|vit.embeddings*", origin=PLANTED_2)
def vit_no_pos() -> Arguments:
    """The positions of patches are never added."""
    arguments = library("ViTForImageClassification", {**IMAGES, "num_labels": 10}, image_batch())
    embeddings = arguments["model"].vit.embeddings
    embeddings.position_embeddings = nn.Parameter(torch.zeros_like(embeddings.position_embeddings))
    becomes(embeddings, PatchesAlone)
    return arguments | {"optimizer": adamw(arguments["model"])}


@fault("order", "buffers", place=f"bert|{within('bert.embeddings')}", origin=DEEP)
@planted(deep_bert)
def constant_position_ids(training: Training) -> None:
    """After to_empty nobody filled the buffer of positions, so that every token is at position 0."""
    embeddings = training.model.bert.embeddings
    embeddings.position_ids = torch.zeros_like(embeddings.position_ids)


class SinusoidsOfTheRow(Sinusoidal):
    """Sinusoids for inputs `[T, B, D]`, as in PyTorch's tutorial, which models with `[B, T, D]` copy."""

    def forward(self, x: Tensor, decode_index: int | None = None) -> Tensor:
        return x + self.table[: x.shape[0], None]


@fault(
    "order",
    "rows",
    place=f"|embedding|encoder|{within('encoder.sublayers.0', 'position_encoding')}",
    origin=DEEP,
    not_right="padding fails first, which is a consequence",
)
@planted(deep_translation)
def positions_over_the_batch(training: Training) -> None:
    """The position encoding counts along the batch, so that all tokens of a row have the same position."""
    becomes(training.model.position_encoding, SinusoidsOfTheRow)


# ------------------------------------------------------------------------------------------- rotary positions


class QueriesRotated(Attention):
    def place(self, q: Tensor, k: Tensor, rotations: Rotations) -> tuple[Tensor, Tensor]:
        return rotate(q, *rotations), k


@fault("order", place="blocks.0*", origin=PLANTED_1)
def rope_q_only() -> Arguments:
    """Queries are rotated, keys are not."""
    return full_setup(llama_of(QueriesRotated))


class KeysRotated(Attention):
    def place(self, q: Tensor, k: Tensor, rotations: Rotations) -> tuple[Tensor, Tensor]:
        return q, rotate(k, *rotations)


@fault("order", place="blocks.0*", origin=PLANTED_2)
def rope_k_only() -> Arguments:
    """Keys are rotated, queries are not."""
    return full_setup(llama_of(KeysRotated))


class ValuesRotated(Attention):
    """Attention whose values are rotated like queries and keys."""

    def forward(self, x: Tensor, rotations: Rotations, seen: Tensor | None = None) -> Tensor:
        self.rotations = rotations
        return super().forward(x, rotations, seen)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None) -> Tensor:
        return super().attend(q, k, rotate(v, *self.rotations), seen)


@fault("order", place="blocks.0*", origin=PLANTED_2)
def rope_on_v() -> Arguments:
    """Values are rotated like queries and keys."""
    return full_setup(llama_of(ValuesRotated))


class NotRotated(Attention):
    def place(self, q: Tensor, k: Tensor, rotations: Rotations) -> tuple[Tensor, Tensor]:
        return q, k


@fault("order", "siblings", place="blocks.2*", origin=PLANTED_2)
def rope_off_layer() -> Arguments:
    """One layer does not rotate its queries and keys."""
    return full_setup(changed(lambda model: becomes(model.blocks[2].attn, NotRotated), Llama))


class RotatedByHead(Attention):
    """Attention that rotates each head by its number, not each token by its position."""

    def place(self, q: Tensor, k: Tensor, rotations: Rotations) -> tuple[Tensor, Tensor]:
        return self.by_head(q, rotations), self.by_head(k, rotations)

    def by_head(self, x: Tensor, rotations: Rotations) -> Tensor:
        cos, sin = (part[: x.shape[1], None] for part in rotations)
        return rotate(x, cos, sin)


@fault("order", place="blocks.0*", origin=PLANTED_1)
def rope_batch_axis() -> Arguments:
    """The rotation goes along the heads, not along the tokens."""
    return full_setup(llama_of(RotatedByHead))


@twins("order", place="blocks.*", origin=UNSEEN)
def rotary_along_heads(*, faulty: bool) -> Arguments:
    """Queries and keys are transposed before the rotation, which then turns heads and not positions."""

    def loss(model: nn.Module, batch: tuple[Tensor]) -> Tensor:
        return next_token(model, batch[0])

    return loss_setup(llama_of(RotatedByHead if faulty else Attention), (text(seed=4),), loss)


class OtherPairs(Attention):
    """Attention that rotates halves by angles that are laid out for neighbours."""

    def place(self, q: Tensor, k: Tensor, rotations: Rotations) -> tuple[Tensor, Tensor]:
        return self.turned(q, rotations), self.turned(k, rotations)

    def turned(self, x: Tensor, rotations: Rotations) -> Tensor:
        cos, sin = (part.repeat_interleave(2, -1) for part in rotations)
        a, b = x.chunk(2, -1)
        return x * cos + torch.cat([-b, a], -1) * sin


@fault("order", place="blocks.0*", origin=PLANTED_3)
def rope_mismatch() -> Arguments:
    """The angles are laid out for other pairs than those that are rotated."""
    return full_setup(llama_of(OtherPairs))


class KeysNotRotated(LaidOut):
    def laid_out(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        maps = self.q_proj, self.k_proj, self.v_proj
        q, k, v = (f(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for f in maps)
        return apply_rotary_pos_emb(q, k, cos, sin)[0], k, v


@fault("order", place=LLAMA_POSITIONS, origin=DEEP)
@planted(deep_llama)
def keys_not_rotated(training: Training) -> None:
    """The rotary embedding turns the queries and not the keys: scores depend on absolute positions."""
    for layer in training.model.model.layers:
        becomes(layer.self_attn, KeysNotRotated)


class RotatedOverHeads(LaidOut):
    """Attention that hands `[B, T, H, w]` to a rotation which takes the axis before the last for time."""

    def laid_out(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        maps = self.q_proj, self.k_proj, self.v_proj
        q, k, v = (f(x).unflatten(-1, (-1, self.head_dim)) for f in maps)
        q, k = (apply_rotary_pos_emb(y, y, *(z[:, : y.shape[2]] for z in (cos, sin)))[0] for y in (q, k))
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)


@fault("order", place=LLAMA_POSITIONS, origin=DEEP)
@planted(deep_llama)
def rotary_over_the_heads(training: Training) -> None:
    """RoPE goes over the axis of heads, not of time: all tokens are rotated alike, and order is lost."""
    for layer in training.model.model.layers:
        becomes(layer.self_attn, RotatedOverHeads)


class InterleavedAngles(LlamaRotaryEmbedding):
    """Angles of neighbours (2i, 2i + 1), for a model that rotates pairs (i, i + w/2) of the two halves."""

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = (y.chunk(2, -1)[0] for y in super().forward(x, position_ids))
        return cos.repeat_interleave(2, -1), sin.repeat_interleave(2, -1)


@fault("order", place=LLAMA_POSITIONS, origin=DEEP)
@planted(deep_llama)
def angles_interleaved_for_halves(training: Training) -> None:
    """The angles are laid out for interleaved pairs, and rotate_half pairs the halves of a head."""
    becomes(training.model.model.rotary_emb, InterleavedAngles)
