"""Ten more mistakes of Transformer code, invented without knowledge of the rules that look for them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import AdamW
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.bert.modeling_bert import BertLayer, BertLMPredictionHead
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaRMSNorm,
    apply_rotary_pos_emb,
    eager_attention_forward,
)

from .fault import BATCH, LOSS, OPTIMISER, Faults, becomes, within
from .models import Attention, Case

SECOND = Faults()

# ------------------------------------------------------------------------------------------------ GPT-2


class TimeFirst(Attention):
    """Attention for inputs `[T, B, D]`, as nn.MultiheadAttention is without batch_first."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.transpose(0, 1)).transpose(0, 1)


@SECOND.add(
    "gpt2",
    "h",
    "h.0",
    *within("h.*.attn"),
    words=(
        *(
            "row",
            "sequences",
            "other sequence",
            "another sequence",
            "sentences",
            "examples",
            "another example",
        ),
        *("samples", "batch axis", "batch_first", "across the batch", "over the batch", "earlier", "context"),
    ),
)
def attention_over_the_batch(case: Case) -> None:
    """Attention expects time on the first axis, so that it goes over the rows of a batch, not over tokens."""
    for block in case.model.h:
        becomes(block.attn, TimeFirst)


@SECOND.add("gpt2", *within("h.7.attn"))
def window_of_one_token(case: Case) -> None:
    """The local window of layer 7, counted from 0, is 1 wide: each token attends to itself alone."""
    attention = case.model.h[7].attn
    attention.mask = attention.mask & torch.ones_like(attention.mask).triu()


# ------------------------------------------------------------------------------------------------- BERT


class Probabilities(BertLMPredictionHead):
    """A head that returns probabilities."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        return super().forward(hidden_states).softmax(-1)


@SECOND.add("bert", "", LOSS, *within("cls"), words=("softmax", "probabilit", "sum to", "twice"))
def softmax_before_the_loss(case: Case) -> None:
    """The head ends with a softmax, and the loss takes its probabilities for logits."""
    becomes(case.model.cls.predictions, Probabilities)


class FeedForwardOfTheInput(BertLayer):
    """A layer whose feed-forward reads the layer's input, so that its attention is computed for nothing."""

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, *args: Any, **kw: Any
    ) -> Tensor:
        self.attention(hidden_states, attention_mask)
        return self.feed_forward_chunk(hidden_states)


@SECOND.add("bert", "bert.encoder.layer.6", *within("bert.encoder.layer.6.attention"))
def attention_never_used(case: Case) -> None:
    """In layer 6, counted from 0, the feed-forward reads the layer's input, and attention is lost."""
    becomes(case.model.bert.encoder.layer[6], FeedForwardOfTheInput)


@SECOND.add(
    "bert",
    OPTIMISER,
    *("*.bias", "*.LayerNorm", "*.LayerNorm.weight"),
    words=("rate", "lr", "group", "updat", "move"),
)
def rate_and_decay_exchanged(case: Case) -> None:
    """The group of biases and norms has its rate and its weight decay exchanged: it learns at 0.01."""

    def in_groups(parameters: list[nn.Parameter]) -> AdamW:
        matrices = {"params": [p for p in parameters if p.ndim >= 2], "lr": case.lr, "weight_decay": 0.01}
        vectors = {"params": [p for p in parameters if p.ndim < 2], "lr": 0.01, "weight_decay": case.lr}
        return AdamW([matrices, vectors])

    case.optimiser = in_groups


# ------------------------------------------------------------------------------------------------ Llama


@SECOND.add(
    "llama", "", LOSS, BATCH, "lm_head", words=("shift", "label", "target", "next token", "two tokens")
)
def labels_shifted_twice(case: Case) -> None:
    """The labels are shifted in the batch and once more in the model, which skips the next token."""
    case.batch["labels"] = F.pad(case.batch["input_ids"][:, 1:], (0, 1), value=-100)


class WithoutRoot(LlamaRMSNorm):
    """A norm that divides by the mean square."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        square = hidden_states.pow(2).mean(-1, keepdim=True)
        return self.weight * hidden_states / (square + self.variance_epsilon)


@SECOND.add("llama", *within("model.layers.9.input_layernorm"))
def mean_square_without_its_root(case: Case) -> None:
    """The first norm of layer 9, counted from 0, divides by the mean square, not by its root."""
    becomes(case.model.model.layers[9].input_layernorm, WithoutRoot)


class KeysNotRotated(LlamaAttention):
    """Attention that rotates its queries and not its keys."""

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        maps = self.q_proj, self.k_proj, self.v_proj
        q, k, v = (f(hidden_states).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for f in maps)
        q, _ = apply_rotary_pos_emb(q, k, *position_embeddings)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
        )
        y, weights = attend(self, q, k, v, attention_mask, scaling=self.scaling, **kwargs)
        return self.o_proj(y.flatten(2)), weights


@SECOND.add(
    "llama",
    "model.layers.0",
    *within("model.rotary_emb", "model.layers.*.self_attn"),
    words=("rotar", "rotat", "RoPE", "position", "relative"),
)
def keys_not_rotated(case: Case) -> None:
    """The rotary embedding turns the queries and not the keys: scores depend on absolute positions."""
    for layer in case.model.model.layers:
        becomes(layer.self_attn, KeysNotRotated)


# ------------------------------------------------------------------------- encoder-decoder of normlab


def padded_loss(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """Return the mean loss of the next target token, padding among them."""
    logits, labels = model(**batch)[:, :-1], batch["target_in"][:, 1:]
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


@SECOND.add("translation", "", LOSS, BATCH, *within("embedding"), words=("pad", "ignore"))
def padding_in_the_loss(case: Case) -> None:
    """The loss is a mean over padding too, which the model learns to predict."""
    case.loss = padded_loss


@SECOND.add("translation", *within("position_encoding"))
def frequencies_by_integer_division(case: Case) -> None:
    """The exponents of the sinusoids are divided as integers: all are 0, and all frequencies are 1."""
    table = case.model.position_encoding.table
    length, width = table.shape
    exponents = torch.arange(0, width, 2) // width
    angles = torch.arange(length)[:, None] / 10_000**exponents
    table.copy_(torch.stack((angles.sin(), angles.cos()), -1).flatten(1))
