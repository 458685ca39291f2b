"""Faults that ``gradients`` names: parameters that learn nothing."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions
from transformers.models.bert.modeling_bert import BertEncoder, BertLayer
from transformers.models.llama.modeling_llama import LlamaAttention

from corpus.batches import text
from corpus.case import DEEP, PLANTED_1, PLANTED_2, PLANTED_3, PUBLIC, Arguments, fault, twins
from corpus.models import llama
from corpus.models.deep import (
    Training,
    deep_bert,
    deep_gpt2,
    deep_llama,
    deep_translation,
    planted,
    target_loss,
)
from corpus.models.gpt import Attention, Block, Gpt
from corpus.models.llama import Rotations, llama_of
from corpus.models.parts import LoRA, becomes
from corpus.places import LLAMA_ATTENTION, within
from corpus.training import adamw_of_trained, changed, full_setup, loss_setup

# --------------------------------------------------------------------------------------------------- detached


class DetachedNorm(Block):
    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm_1(x))
        return x + self.mlp(self.norm_2(x).detach())


@fault("gradients", "derivative", place="blocks.1*", origin=PLANTED_1)
def detach_branch() -> Arguments:
    """The feed-forward of one layer reads its norm without the graph."""
    return full_setup(changed(lambda model: becomes(model.blocks[1], DetachedNorm)))


class DetachedStream(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.detach())


@fault("gradients", "derivative", "residual", place="blocks.[012]*|positions*|tokens*", origin=PLANTED_1)
def detach_stream() -> Arguments:
    """One layer reads the stream without its graph, so that nothing below it learns."""
    return full_setup(changed(lambda model: becomes(model.blocks[2], DetachedStream)))


@fault(
    "gradients",
    "derivative",
    "residual",
    place=within("model.layers.[0-7]", "model.embed_tokens"),
    origin=DEEP,
)
@planted(deep_llama)
def detach_in_mid_model(training: Training) -> None:
    """A hook that collected features detaches the output of layer 6, counted from 0."""
    training.model.model.layers[6].register_forward_hook(lambda module, args, output: output.detach())


class DetachedScores(Attention):
    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        return super().scores(q.detach(), k.detach())


@fault("gradients", "derivative", place="blocks.1*", origin=PLANTED_2)
def qk_dead() -> Arguments:
    """The queries and keys of one layer have no gradient."""
    return full_setup(changed(lambda model: becomes(model.blocks[1].attn, DetachedScores)))


class InferenceCache:
    """A cache of keys and values as it is written for generation, which keeps no graph."""

    def update(self, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Return the keys and values that are kept."""
        return key.detach(), value.detach()


class AttentionFromCache(LlamaAttention):
    """Attention that reads its keys and values from the cache in training, too."""

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        return super().forward(*args, **kwargs | {"past_key_values": InferenceCache()})


@fault("gradients", "derivative", place=LLAMA_ATTENTION, origin=DEEP)
@planted(deep_llama)
def keys_and_values_from_the_cache(training: Training) -> None:
    """Training reads keys and values from the cache of generation, so that their matrices get no gradient."""
    for layer in training.model.model.layers:
        becomes(layer.self_attn, AttentionFromCache)


class DetachedEnd(Gpt):
    def logits(self, x: Tensor) -> Tensor:
        return self.head(self.norm(x).detach())


@fault("gradients", "derivative", place="|norm*|tokens*|positions*|blocks|blocks.*", origin=PLANTED_2)
def detached_hidden() -> Arguments:
    """The head reads the final norm without its graph, so that only the head learns."""
    return full_setup(partial(DetachedEnd, tied=False))


@fault("gradients", "derivative", place=f"decoder|{within('encoder')}", origin=DEEP)
@planted(deep_translation)
def detached_memory(training: Training) -> None:
    """The decoder reads the encoder's output without its graph, so that the encoder does not learn."""
    training.model.encoder.register_forward_hook(lambda module, args, output: output.detach())


class NoGraphAtFirst(Gpt):
    def embed(self, ids: Tensor) -> Tensor:
        with torch.no_grad():
            return super().embed(ids)


@fault("gradients", "derivative", place="|tokens*|positions*", origin=PLANTED_3)
def no_grad_embed() -> Arguments:
    """The embeddings are computed without a graph."""
    return full_setup(NoGraphAtFirst)


def wrapped_loss(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """Return the value of the loss as a new tensor, which silences the error of ``backward``."""
    return torch.tensor(target_loss(model, batch).item(), requires_grad=True)


@fault("gradients", "derivative", "explained", origin=DEEP)
@planted(deep_translation)
def loss_in_a_new_tensor(training: Training) -> None:
    """The loss is wrapped in a new tensor that requires a gradient, so that no parameter gets any."""
    training.loss = wrapped_loss


# --------------------------------------------------------------------------------------------------- not used


class DropsAHead(Attention):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        y = super().attend(q, k, v)
        return torch.cat([y[:, :-1], torch.zeros_like(y[:, -1:])], 1)


@fault("gradients", place="blocks.2*", origin=PLANTED_1)
def head_dropped() -> Arguments:
    """The last head of one layer is replaced by zeros."""
    return full_setup(changed(lambda model: becomes(model.blocks[2].attn, DropsAHead)))


class SkipsTheLast(Gpt):
    def run(self, x: Tensor) -> Tensor:
        for block in self.blocks[:-1]:
            x = block(x)
        return x


@fault("gradients", "residual", place="blocks.3*", origin=PLANTED_1)
def skips_last() -> Arguments:
    """The loop over the layers stops before the last."""
    return full_setup(SkipsTheLast)


class EachReadsTheInput(Gpt):
    def run(self, x: Tensor) -> Tensor:
        y = x
        for block in self.blocks:
            y = block(x)
        return y


@fault("gradients", "residual", place="blocks|blocks.*", origin=PLANTED_1)
def same_input() -> Arguments:
    """Each layer reads the embeddings, so that only the last one counts."""
    return full_setup(EachReadsTheInput)


class EachLayerOfTheInput(BertEncoder):
    """An encoder whose loop gives every layer the same input and keeps the last output."""

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, *args: Any, **kwargs: Any
    ) -> BaseModelOutputWithPastAndCrossAttentions:
        output = hidden_states
        for layer in self.layer:
            output = layer(hidden_states, attention_mask)
        return BaseModelOutputWithPastAndCrossAttentions(last_hidden_state=output)


@fault("gradients", "residual", place=f"bert.encoder|{within('bert.encoder.layer')}", origin=DEEP)
@planted(deep_bert)
def layers_not_chained(training: Training) -> None:
    """The loop over the layers gives each the encoder's input, so that only the last layer has an effect."""
    becomes(training.model.bert.encoder, EachLayerOfTheInput)


class FeedForwardOfTheInput(BertLayer):
    """A layer whose feed-forward reads the layer's input, so that its attention is computed for nothing."""

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, *args: Any, **kw: Any
    ) -> Tensor:
        self.attention(hidden_states, attention_mask)
        return self.feed_forward_chunk(hidden_states)


@fault("gradients", "residual", place=within("bert.encoder.layer.6"), origin=DEEP)
@planted(deep_bert)
def attention_never_used(training: Training) -> None:
    """In layer 6, counted from 0, the feed-forward reads the layer's input, and attention is lost."""
    becomes(training.model.bert.encoder.layer[6], FeedForwardOfTheInput)


class SelfAlone(Attention):
    def sees(self, length: int, device: torch.device) -> Tensor:
        return torch.eye(length, dtype=torch.bool, device=device)


@fault("gradients", "buffers", "siblings", place=within("blocks.7"), origin=DEEP)
@planted(deep_gpt2)
def window_of_one_token(training: Training) -> None:
    """The local window of layer 7, counted from 0, is 1 wide: each token attends to itself alone."""
    becomes(training.model.blocks[7].attn, SelfAlone)


class QueriesAsKeys(Attention):
    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        return super().scores(q, q)


@fault("gradients", place=within("blocks.0.attn"), origin=DEEP)
@planted(deep_gpt2)
def queries_taken_for_keys(training: Training) -> None:
    """The scores are products of queries with queries: the map of the keys is never used."""
    for block in training.model.blocks:
        becomes(block.attn, QueriesAsKeys)


class PastItsNorm(Block):
    """A layer that computes the norm of its feed-forward and passes on what was there before."""

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm_1(x))
        _ = self.norm_2(x)
        return x + self.mlp(x)


@fault("gradients", "norms", place=within("blocks.0"), origin=DEEP)
@planted(deep_gpt2)
def norm_of_the_feed_forward_unused(training: Training) -> None:
    """The feed-forwards read the residual stream itself: the output of their norm is never used."""
    for block in training.model.blocks:
        becomes(block, PastItsNorm)


class ScaledHeads(llama.Attention):
    """Attention of normed queries and keys with a learned scale each."""

    scales = True

    def __init__(self, dim: int):
        super().__init__(dim, groups=4)
        self.scale_q = nn.Parameter(torch.ones(4, 1, dim // 4))
        self.scale_k = nn.Parameter(torch.ones(4, 1, dim // 4))

    def place(self, q: Tensor, k: Tensor, rotations: Rotations) -> tuple[Tensor, Tensor]:
        q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
        if self.scales:
            q, k = q * self.scale_q, k * self.scale_k
        return super().place(q, k, rotations)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=10.0)


class ForgetsItsScales(ScaledHeads):
    scales = False


@twins("gradients", place="blocks.0.attn*", origin=PUBLIC, thread="x-transformers#352")
def qk_scale(*, faulty: bool) -> Arguments:
    """Learned scales of queries and keys are made but never used in the forward pass."""
    return loss_setup(llama_of(ForgetsItsScales if faulty else ScaledHeads), text(8), remade=False)


# ----------------------------------------------------------------------------------------------------- starts


class DeadLoRA(LoRA):
    def __init__(self, frozen: nn.Linear):
        super().__init__(frozen)
        nn.init.zeros_(self.down)


@fault("gradients", "start", place="blocks.*.qkv*", origin=PLANTED_1)
def lora_zero() -> Arguments:
    """Both factors of each adapter are zero, so that neither gets a gradient."""

    def adapt(model: Gpt) -> None:
        model.requires_grad_(False)
        for block in model.blocks:
            block.attn.qkv = DeadLoRA(block.attn.qkv)

    return full_setup(changed(adapt), optimizer=adamw_of_trained)


@fault(
    "gradients",
    "start",
    place=within("model.embed_tokens"),
    origin=DEEP,
    not_right="a word without a gradient may be one that the batch does not have",
)
@planted(deep_llama)
@torch.no_grad()
def padding_index_of_minus_one(training: Training) -> None:
    """A padding_idx of -1, for "none", is the last word to torch: its row is zero and gets no gradient."""
    embedding = training.model.model.embed_tokens
    embedding.padding_idx = embedding.num_embeddings - 1
    embedding.weight[embedding.padding_idx].zero_()
