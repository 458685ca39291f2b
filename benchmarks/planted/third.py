"""Ten more mistakes of Transformer code, invented without knowledge of the rules that look for them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Adam
from transformers.models.llama.modeling_llama import LlamaAttention

from normlab.nn import PAD
from normlab.nn.position import Sinusoidal

from .fault import BATCH, LOSS, OPTIMISER, Faults, becomes, within
from .known import LEAK
from .models import DEVIATION, HEADS, Attention, Case

THIRD = Faults()
LABELS = ("label", "target", "shift", "predict", "copy", "copies", "same", "identical", "itself", "its own")
"""Words for labels that are not the words to be predicted."""

# ------------------------------------------------------------------------------------------------ GPT-2


class HeadsAsTheyLie(Attention):
    """Attention that views `[B, H, T, w]` as `[B, T, D]` without transposing heads and time first."""

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        q, k, v = (y.unflatten(2, (HEADS, -1)).transpose(1, 2) for y in self.c_attn(x).chunk(3, -1))
        scores = (q @ k.transpose(-2, -1)) * self.scale
        y = self.weights(scores.masked_fill(~self.mask[:length, :length], float("-inf"))) @ v
        return self.dropout(self.c_proj(y.contiguous().view(x.shape)))


@THIRD.add(
    "gpt2",
    "h",
    "h.0",
    *within("h.*.attn"),
    words=(
        *(*LEAK, "transpos", "view", "reshape", "scrambl", "mix", "head"),
        *("wrong position", "other position", "wrong token", "other token"),
    ),
)
def heads_merged_without_transpose(case: Case) -> None:
    """The heads are merged by a view alone, without the transpose, which scatters a token over others."""
    for block in case.model.h:
        becomes(block.attn, HeadsAsTheyLie)


@THIRD.add("gpt2", "", LOSS, BATCH, *within("lm_head"), words=(*LABELS, "next token", "input"))
def targets_not_shifted(case: Case) -> None:
    """The targets are the input itself, not shifted by one, so that the model learns to copy."""
    case.batch["targets"] = case.batch["idx"].clone()


# ------------------------------------------------------------------------------------------------- BERT


@THIRD.add("bert", "", LOSS, BATCH, *within("cls"), words=(*LABELS, "mask", "constant", "one token", "input"))
def labels_taken_after_masking(case: Case) -> None:
    """The labels were copied from the ids after the masking, so that every label is the mask's id."""
    case.batch["labels"] = case.batch["input_ids"].masked_fill(case.batch["labels"] == -100, -100)


@THIRD.add("bert", *within("*.LayerNorm"))
@torch.no_grad()
def norms_drawn_like_matrices(case: Case) -> None:
    """The loop that initialises all parameters draws the norms' gains and biases with deviation 0.02 too."""
    for module in case.model.modules():
        if isinstance(module, nn.LayerNorm):
            module.weight.normal_(0.0, DEVIATION)
            module.bias.normal_(0.0, DEVIATION)


@THIRD.add(
    "bert",
    "",
    BATCH,
    "bert",
    "bert.encoder",
    "bert.encoder.layer.0",
    *within("bert.embeddings.token_type_embeddings", "bert.encoder.layer.*.attention"),
    words=(
        *("mask", "pad", "segment", "token_type", "token type", "attend", "hide", "hidden from", "context"),
        *("other token", "another token", "no token", "other word", "another word", "no word"),
    ),
)
def mask_and_segments_exchanged(case: Case) -> None:
    """A tuple is unpacked in the wrong order: the segments are the mask, and the mask is the segments."""
    mask = case.batch["attention_mask"]
    case.batch |= {"attention_mask": torch.zeros_like(mask), "token_type_ids": mask}


# ------------------------------------------------------------------------------------------------ Llama


class InferenceCache:
    """A cache of keys and values as it is written for generation, which keeps no graph."""

    def update(self, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Return the keys and values that are kept."""
        return key.detach(), value.detach()


class AttentionFromCache(LlamaAttention):
    """Attention that reads its keys and values from the cache in training too."""

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        return super().forward(*args, **kwargs | {"past_key_values": InferenceCache()})


@THIRD.add(
    "llama", *within("model.layers.*.self_attn"), words=("gradient", "detach", "graph", "learn", "train")
)
def keys_and_values_from_the_cache(case: Case) -> None:
    """Training reads keys and values from the cache of generation, so that their matrices get no gradient."""
    for layer in case.model.model.layers:
        becomes(layer.self_attn, AttentionFromCache)


@THIRD.add("llama", OPTIMISER, words=("decay", "decoupl", "coupl", "L2", "regulari", "shrink"))
def decay_of_adamw_given_to_adam(case: Case) -> None:
    """Adam got the weight decay of 0.1 of AdamW, which it adds to the gradients, where it outweighs them."""
    case.optimiser = partial(Adam, lr=case.lr, betas=(0.9, 0.95), weight_decay=0.1)


@THIRD.add(
    "llama",
    "",
    OPTIMISER,
    *within("model", "lm_head"),
    words=("fp16", "float16", "half", "eps", "underflow", "nan", "finite", "infinit"),
)
def adam_in_half_precision(case: Case) -> None:
    """Weights and optimiser are float16, in which Adam's epsilon of 1e-8 is 0: it divides 0 by 0."""
    case.model.half()


# ------------------------------------------------------------------------- encoder-decoder of normlab


class PositionOfTheRow(Sinusoidal):
    """Sinusoids for inputs `[T, B, D]`, as in PyTorch's tutorial, which models with `[B, T, D]` copy."""

    def forward(self, x: Tensor, decode_index: int | None = None) -> Tensor:
        return x + self.table[: x.shape[0], None]


@THIRD.add(
    "translation",
    "",
    "embedding",
    "encoder",
    "encoder.sublayers.0",
    *within("position_encoding"),
    words=("position", "order", "permut", "row", "batch", "sequence"),
)
def positions_over_the_batch(case: Case) -> None:
    """The position encoding counts along the batch, so that all tokens of a row have the same position."""
    becomes(case.model.position_encoding, PositionOfTheRow)


def loss_of_a_view(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """Return the loss of logits that were reshaped to `[B, V, T]`, not transposed."""
    logits, labels = model(**batch)[:, :-1], batch["target_in"][:, 1:]
    rows, length, vocab = logits.shape
    return F.cross_entropy(logits.reshape(rows, vocab, length), labels, ignore_index=PAD)


@THIRD.add(
    "translation",
    "",
    LOSS,
    "embedding",
    words=(
        *(*LEAK, "label", "target", "transpos", "permut", "reshape", "view", "scrambl", "mix"),
        *("axis", "axes", "align", "position", "order", "other token", "another token", "pad"),
    ),
)
def vocabulary_axis_by_reshape(case: Case) -> None:
    """The vocabulary is moved to axis 1 by a reshape, not a transpose, so that the loss mixes the tokens."""
    case.loss = loss_of_a_view
