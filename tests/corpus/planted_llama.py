"""Faults planted in Llama of Hugging Face."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Adam, AdamW
from torch.utils.checkpoint import checkpoint
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaDecoderLayer,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
    eager_attention_forward,
)

from normlab.nn import PAD

from .case import Case
from .places import OPTIMIZER, within
from .planted_models import DEPTH_SCALED, DEVIATION, LAYERS, Training, becomes, llama, padded_words, planting

PLANTED: dict[str, Case] = {}
fault = planting(llama, PLANTED)
HERE = Path(__file__).parent
EOS = 2
"""Token id of the end of a text, as in Llama's config."""
FIRST_ATTENTION = f"model.layers.0|{within('model.layers.0.self_attn')}"
POSITIONS = f"model|{within('model.rotary_emb')}|{FIRST_ATTENTION}"
NORMS = "optimizer|model.norm*|model.layers.*norm*"
LABELS = "loss|labels|input_ids|lm_head"

# ------------------------------------------------------------------------------------- positions, attention


class OtherLayout(LlamaAttention):
    """Attention of queries, keys and values that a subclass lays out and rotates."""

    def laid_out(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values `[B, H, T, w]` of hidden states `[B, T, D]`."""
        raise NotImplementedError

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        q, k, v = self.laid_out(hidden_states, *position_embeddings)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
        )
        y, weights = attend(self, q, k, v, attention_mask, scaling=self.scaling, **kwargs)
        return self.o_proj(y.flatten(2)), weights


class KeysNotRotated(OtherLayout):
    def laid_out(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        maps = self.q_proj, self.k_proj, self.v_proj
        q, k, v = (f(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for f in maps)
        return apply_rotary_pos_emb(q, k, cos, sin)[0], k, v


@fault("order", place=POSITIONS)
def keys_not_rotated(training: Training) -> None:
    """The rotary embedding turns the queries and not the keys: scores depend on absolute positions."""
    for layer in training.model.model.layers:
        becomes(layer.self_attn, KeysNotRotated)


class RotatedByHead(OtherLayout):
    """Attention that hands `[B, T, H, w]` to a rotation which takes the axis before the last for time."""

    def laid_out(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        maps = self.q_proj, self.k_proj, self.v_proj
        q, k, v = (f(x).unflatten(-1, (-1, self.head_dim)) for f in maps)
        q, k = (apply_rotary_pos_emb(y, y, *(z[:, : y.shape[2]] for z in (cos, sin)))[0] for y in (q, k))
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)


@fault("order", place=POSITIONS)
def rotary_over_the_heads(training: Training) -> None:
    """RoPE goes over the axis of heads, not of time: all tokens are rotated alike, and order is lost."""
    for layer in training.model.model.layers:
        becomes(layer.self_attn, RotatedByHead)


class HeadsByView(OtherLayout):
    """Attention that views `[B, T, H w]` as `[B, H, T, w]` without transposing time and heads."""

    def laid_out(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        rows, length, _ = x.shape
        maps = self.q_proj, self.k_proj, self.v_proj
        q, k, v = (f(x).reshape(rows, -1, length, self.head_dim) for f in maps)
        return *apply_rotary_pos_emb(q, k, cos, sin), v


@fault("causality", place=FIRST_ATTENTION)
def heads_split_by_view(training: Training) -> None:
    """The heads are split by a view alone, without the transpose: a head gets parts of many tokens."""
    for layer in training.model.model.layers:
        becomes(layer.self_attn, HeadsByView)


class InterleavedAngles(LlamaRotaryEmbedding):
    """Angles of neighbours (2i, 2i + 1), for a model that rotates pairs (i, i + w/2) of the two halves."""

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = (y.chunk(2, -1)[0] for y in super().forward(x, position_ids))
        return cos.repeat_interleave(2, -1), sin.repeat_interleave(2, -1)


@fault("order", place=POSITIONS)
def angles_interleaved_for_halves(training: Training) -> None:
    """The angles are laid out for interleaved pairs, and rotate_half pairs the halves of a head."""
    becomes(training.model.model.rotary_emb, InterleavedAngles)


@fault("buffers", "order", place=POSITIONS)
def rotary_buffer_of_zeros(training: Training) -> None:
    """After to_empty nobody filled the frequencies of the rotary embedding: all are 0."""
    training.model.model.rotary_emb.inv_freq.zero_()


# --------------------------------------------------------------------------------------------------- norms


class WithoutRoot(LlamaRMSNorm):
    """A norm that divides by the mean square."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        square = hidden_states.pow(2).mean(-1, keepdim=True)
        return self.weight * hidden_states / (square + self.variance_epsilon)


@fault("norms", "siblings", place=within("model.layers.9"))
def mean_square_without_its_root(training: Training) -> None:
    """The first norm of layer 9, counted from 0, divides by the mean square, not by its root."""
    becomes(training.model.model.layers[9].input_layernorm, WithoutRoot)


@fault("norms", place=f"{within('model.layers.0')}|{NORMS}")
def epsilon_of_the_wrong_sign(training: Training) -> None:
    """The epsilon of every RMSNorm is 1e5 where 1e-5 was meant, so that all branches are silent."""
    for module in training.model.modules():
        if hasattr(module, "variance_epsilon"):
            module.variance_epsilon = 1e5


# ----------------------------------------------------------------------------------------------- gradients


@fault("gradients", "derivative", "residual", place=within("model.layers.[0-7]", "model.embed_tokens"))
def detach_in_mid_model(training: Training) -> None:
    """A hook that collected features detaches the output of layer 6, counted from 0."""
    training.model.model.layers[6].register_forward_hook(lambda module, args, output: output.detach())


class InferenceCache:
    """A cache of keys and values as it is written for generation, which keeps no graph."""

    def update(self, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Return the keys and values that are kept."""
        return key.detach(), value.detach()


class AttentionFromCache(LlamaAttention):
    """Attention that reads its keys and values from the cache in training, too."""

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        return super().forward(*args, **kwargs | {"past_key_values": InferenceCache()})


@fault("gradients", "derivative", place=FIRST_ATTENTION)
def keys_and_values_from_the_cache(training: Training) -> None:
    """Training reads keys and values from the cache of generation, so that their matrices get no gradient."""
    for layer in training.model.model.layers:
        becomes(layer.self_attn, AttentionFromCache)


class Checkpointed(LlamaDecoderLayer):
    """A layer under the older, reentrant checkpointing, which sees its positional arguments alone."""

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        return checkpoint(partial(super().forward, **kwargs), hidden_states, use_reentrant=True)


@fault("gradients", "derivative", place=f"|model|model.norm|{within('model.layers')}")
def checkpoints_behind_a_frozen_embedding(training: Training) -> None:
    """The embedding is frozen, and reentrant checkpoints give no gradient if their input requires none."""
    training.model.model.embed_tokens.requires_grad_(False)
    for layer in training.model.model.layers:
        becomes(layer, Checkpointed)


@fault("gradients", "start", place=within("model.embed_tokens"))
@torch.no_grad()
def padding_index_of_minus_one(training: Training) -> None:
    """A padding_idx of -1, for "none", is the last word to torch: its row is zero and gets no gradient."""
    embedding = training.model.model.embed_tokens
    embedding.padding_idx = embedding.num_embeddings - 1
    embedding.weight[embedding.padding_idx].zero_()


# ------------------------------------------------------------------------------------------- starts, layers


@fault("ties", "seeds", place=f"model|{within('model.layers')}")
def one_layer_twelve_times(training: Training) -> None:
    """The list of layers holds one layer twelve times, as [layer] * 12 gives it.

    Unlike a list in a class of one's own, it differs from what this class and configuration construct.
    """
    training.model.model.layers = nn.ModuleList([training.model.model.layers[0]] * LAYERS)


@fault("start", place=within("model.layers.7"))
@torch.no_grad()
def layer_times_thirty(training: Training) -> None:
    """All matrices of layer 7, counted from 0, are 30 times too large."""
    for p in training.model.model.layers[7].parameters():
        if p.ndim == 2:
            p.mul_(30)


@fault("start", place=within("model.layers.*.mlp.up_proj", "model.layers.*.mlp.down_proj"))
@torch.no_grad()
def depth_scale_on_the_wrong_matrix(training: Training) -> None:
    """The depth scaling of the feed-forward went to its inner matrix up_proj instead of down_proj."""
    for layer in training.model.model.layers:
        layer.self_attn.o_proj.weight.normal_(0.0, DEPTH_SCALED)
        layer.mlp.up_proj.weight.normal_(0.0, DEPTH_SCALED)
    training.declare["init"] = str(HERE / "llama_scaled.toml")


@fault("start", place=within("model.layers.*.mlp"))
@torch.no_grad()
def truncation_at_100_deviations(training: Training) -> None:
    """trunc_normal_ got bounds in deviations, so that the feed-forward is cut at 100 deviations."""
    for path, p in training.model.named_parameters():
        if p.ndim == 2:
            bound = 2.0 if ".mlp." in path else 3 * DEVIATION
            nn.init.trunc_normal_(p, std=DEVIATION, a=-bound, b=bound)
    training.declare["init"] = str(HERE / "llama_truncated.toml")


@fault("start", place=f"model.layers.0|{within('model.layers.*.self_attn')}")
@torch.no_grad()
def attention_drawn_by_randn(training: Training) -> None:
    """The matrices of attention are drawn by torch.randn, with a deviation of 1.0 where 0.02 is usual."""
    for layer in training.model.model.layers:
        for p in layer.self_attn.parameters():
            p.normal_(0.0, 1.0)


# ------------------------------------------------------------------------------------------------- targets


@fault("targets", place=LABELS)
def labels_shifted_twice(training: Training) -> None:
    """The labels are shifted in the batch and once more in the model, which skips the next token."""
    training.batch["labels"] = F.pad(training.batch["input_ids"][:, 1:], (0, 1), value=-100)


@fault("counted", place=LABELS)
def end_of_text_taken_for_padding(training: Training) -> None:
    """Padding has the id of the end of a text, so that -100 for padding removes every end of a text, too."""
    words = padded_words()
    text = words != PAD
    ends = text & ~F.pad(text[:, 1:], (0, 1))
    ids = words.masked_fill(~text | ends, EOS)
    training.model.config.pad_token_id = training.model.config.eos_token_id
    labels = ids.masked_fill(ids == EOS, -100)
    training.batch = {"input_ids": ids, "attention_mask": text.long(), "labels": labels}


@fault("counted", place=LABELS)
def padding_among_the_labels(training: Training) -> None:
    """The labels are a clone of the padded ids without -100, so that the model learns to predict padding."""
    ids = padded_words()
    training.model.config.pad_token_id = PAD
    training.batch = {"input_ids": ids, "attention_mask": (ids != PAD).long(), "labels": ids.clone()}


@fault("finite", "counted", "targets", place=f"|{LABELS}")
def every_label_ignored(training: Training) -> None:
    """The collator did not find the answer's template and set all labels to -100: the loss is 0 / 0."""
    training.batch["labels"] = torch.full_like(training.batch["labels"], -100)


# ----------------------------------------------------------------------------------------------- optimizer


@fault("optimizer_coverage", place=NORMS)
def norms_not_in_the_optimizer(training: Training) -> None:
    """The optimizer got the matrices alone: the norms, a group without weight decay, were forgotten."""

    def of_matrices(parameters: list[nn.Parameter]) -> AdamW:
        return AdamW([p for p in parameters if p.ndim >= 2], lr=training.lr, weight_decay=0.1)

    training.optimizer = of_matrices


@fault("update", "groups", place=OPTIMIZER)
def decay_of_adamw_given_to_adam(training: Training) -> None:
    """Adam got the weight decay of 0.1 of AdamW, which it adds to the gradients, where it outweighs them."""
    training.optimizer = partial(Adam, lr=training.lr, betas=(0.9, 0.95), weight_decay=0.1)


@fault("overfit", "update", place="")
def rate_of_sgd_given_to_adamw(training: Training) -> None:
    """AdamW has the rate of 0.1 of a recipe for SGD, so that one step moves a weight by 5 deviations."""
    training.lr = 0.1
    training.optimizer = partial(AdamW, lr=training.lr, betas=(0.9, 0.95), weight_decay=0.1)


@fault("update", place="")
def updates_lost_in_bf16(training: Training) -> None:
    """Weights and optimizer are bfloat16 and the rate is 1e-5, so that most updates round to nothing."""
    training.model.to(torch.bfloat16)
    training.optimizer, training.lr = partial(AdamW, lr=1e-5), 1e-5


@fault("update", "finite", "overfit", place="")
def adam_in_half_precision(training: Training) -> None:
    """Weights and optimizer are float16, in which Adam's epsilon of 1e-8 is 0: it divides 0 by 0."""
    training.model.half()
