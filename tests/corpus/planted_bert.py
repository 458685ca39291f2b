"""Faults planted in BERT of Hugging Face."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import transformers as tf
from torch import Tensor, nn
from torch.optim import SGD, AdamW
from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions
from transformers.models.bert.modeling_bert import (
    BertEncoder,
    BertLayer,
    BertLMPredictionHead,
    BertModel,
    BertOutput,
)

from normlab.nn import PAD

from .case import Case
from .places import OPTIMIZER, within
from .planted_models import DEVIATION, MASK_ID, Training, becomes, bert, generator, padded_words, planting

PLANTED: dict[str, Case] = {}
fault = planting(bert, PLANTED)
ENTRANCE = f"|bert|bert.encoder|{within('bert.encoder.layer.0')}|attention_mask"
"""Where a mask of all layers goes wrong."""
LABELS = f"loss|labels|input_ids|{within('cls')}"
NEW_TOKENS = 20
"""Tokens by which a vocabulary was enlarged."""

# ------------------------------------------------------------------------------------------- masks, positions


@fault("padding", "inputs", place=ENTRANCE)
def padding_leak(training: Training) -> None:
    """The attention mask is not passed on, so that words attend to padding."""

    def without_mask(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return args, kwargs | {"attention_mask": None}

    training.model.bert.register_forward_pre_hook(without_mask, with_kwargs=True)


class AddsItsMask(BertModel):
    """A model that lays its mask out for the scores and forgets to turn 0 into a large negative number."""

    def _create_attention_masks(
        self, attention_mask: Tensor | None, embedding_output: Tensor, **others: Any
    ) -> tuple[Tensor | None, None]:
        if attention_mask is None:
            return None, None
        return attention_mask[:, None, None, :].to(embedding_output.dtype), None


@fault("padding", place=ENTRANCE)
def mask_added_as_zeros_and_ones(training: Training) -> None:
    """The mask of 0 and 1 is added to the scores as it is, without (1 - mask) * -10000: padding is read."""
    becomes(training.model.bert, AddsItsMask)


@fault("padding", "reach", "inputs", place=f"{ENTRANCE}|token_type_ids|{within('bert.embeddings')}")
def mask_and_segments_exchanged(training: Training) -> None:
    """A tuple is unpacked in the wrong order: the segments are the mask, and the mask is the segments."""
    mask = training.batch["attention_mask"]
    training.batch |= {"attention_mask": torch.zeros_like(mask), "token_type_ids": mask}


@fault("reach", "causality", "inputs", place=ENTRANCE)
def encoder_built_as_a_decoder(training: Training) -> None:
    """A config with is_decoder=True makes attention causal: a masked word sees only the words before it."""
    config = training.model.config
    config.is_decoder, config.use_cache = True, False
    training.model = tf.BertForMaskedLM(config)
    training.declare["causal"] = False


@fault("order", "buffers", place=f"bert|{within('bert.embeddings')}")
def constant_position_ids(training: Training) -> None:
    """After to_empty nobody filled the buffer of positions, so that every token is at position 0."""
    embeddings = training.model.bert.embeddings
    embeddings.position_ids = torch.zeros_like(embeddings.position_ids)


# ---------------------------------------------------------------------------------------- structure, modes


class FeedForwardOfTheInput(BertLayer):
    """A layer whose feed-forward reads the layer's input, so that its attention is computed for nothing."""

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, *args: Any, **kw: Any
    ) -> Tensor:
        self.attention(hidden_states, attention_mask)
        return self.feed_forward_chunk(hidden_states)


@fault("gradients", "residual", place=within("bert.encoder.layer.6"))
def attention_never_used(training: Training) -> None:
    """In layer 6, counted from 0, the feed-forward reads the layer's input, and attention is lost."""
    becomes(training.model.bert.encoder.layer[6], FeedForwardOfTheInput)


class SumBehindNorm(BertOutput):
    """The end of a layer with the sum on the wrong side of the norm."""

    def forward(self, hidden_states: Tensor, input_tensor: Tensor) -> Tensor:
        return self.LayerNorm(self.dropout(self.dense(hidden_states))) + input_tensor


@fault("residual", "siblings", place=within("bert.encoder.layer.8"))
def residual_behind_the_norm(training: Training) -> None:
    """In layer 8, counted from 0, the residual is added behind the norm, unlike in all others."""
    becomes(training.model.bert.encoder.layer[8].output, SumBehindNorm)


class EachLayerOfTheInput(BertEncoder):
    """An encoder whose loop gives every layer the same input and keeps the last output."""

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, *args: Any, **kwargs: Any
    ) -> BaseModelOutputWithPastAndCrossAttentions:
        output = hidden_states
        for layer in self.layer:
            output = layer(hidden_states, attention_mask)
        return BaseModelOutputWithPastAndCrossAttentions(last_hidden_state=output)


@fault("gradients", "residual", place=f"bert.encoder|{within('bert.encoder.layer')}")
def layers_not_chained(training: Training) -> None:
    """The loop over the layers gives each the encoder's input, so that only the last layer has an effect."""
    becomes(training.model.bert.encoder, EachLayerOfTheInput)


@fault("nonlinear", place=within("bert.encoder.layer.0"))
def no_activation(training: Training) -> None:
    """The feed-forwards have no activation, so that their two matrices are one linear map."""
    for layer in training.model.bert.encoder.layer:
        layer.intermediate.intermediate_act_fn = nn.Identity()


@fault("finite", "gradients", "overfit", place=f"|{within('bert')}")
def dropout_of_one(training: Training) -> None:
    """All hidden dropouts are 1.0, so that nothing is left in training."""
    for path, module in training.model.named_modules():
        if path.endswith((".output.dropout", "embeddings.dropout")):
            module.p = 1.0


@fault("frozen", "siblings", place=within("bert.encoder.layer.4"))
def frozen_layer(training: Training) -> None:
    """Layer 4, counted from 0, is frozen."""
    training.model.bert.encoder.layer[4].requires_grad_(False)


# ------------------------------------------------------------------------------------------- starts, ties


@fault("start", place=within("bert.encoder.layer.2.intermediate"))
def matrix_at_torch_default(training: Training) -> None:
    """One matrix of layer 2 keeps the default initialisation of nn.Linear."""
    training.model.bert.encoder.layer[2].intermediate.dense.reset_parameters()


@fault("start", "norms", place="*LayerNorm*")
@torch.no_grad()
def norms_drawn_like_matrices(training: Training) -> None:
    """The loop that initialises all parameters draws the norms' gains and biases with deviation 0.02, too."""
    for module in training.model.modules():
        if isinstance(module, nn.LayerNorm):
            module.weight.normal_(0.0, DEVIATION)
            module.bias.normal_(0.0, DEVIATION)


@fault("seeds", "start", place=within("bert.encoder.layer"))
def layers_are_deep_copies(training: Training) -> None:
    """The layers are deep copies of one, as in nn.TransformerEncoder, and start with the same weights."""
    first, *others = training.model.bert.encoder.layer
    for layer in others:
        layer.load_state_dict(first.state_dict())


@fault("start", "initial_loss", place=f"loss|{within('bert.embeddings.word_embeddings', 'cls')}")
@torch.no_grad()
def new_tokens_at_torch_default(training: Training) -> None:
    """The vocabulary was enlarged by hand: its 20 new rows have torch's deviation of 1.0, not 0.02."""
    training.model.bert.embeddings.word_embeddings.weight[-NEW_TOKENS:].normal_(0.0, 1.0)


@fault("ties", "seeds", place=within("bert.embeddings.word_embeddings", "cls.predictions.decoder"))
def broken_tie(training: Training) -> None:
    """A copy for the optimizer broke the tie between embedding and head."""
    head = training.model.cls.predictions.decoder
    head.weight = nn.Parameter(head.weight.detach().clone())
    training.declare["tied"] = True


# ------------------------------------------------------------------------------------------ targets, losses


class Probabilities(BertLMPredictionHead):
    """A head that returns probabilities."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        return super().forward(hidden_states).softmax(-1)


@fault("explained", place=f"|loss|{within('cls')}")
def softmax_before_the_loss(training: Training) -> None:
    """The head ends with a softmax, and the loss takes its probabilities for logits."""
    becomes(training.model.cls.predictions, Probabilities)


@fault("targets", place=LABELS)
def labels_taken_after_masking(training: Training) -> None:
    """The labels were copied from the ids after the masking, so that every label is the mask's id."""
    batch = training.batch
    batch["labels"] = batch["input_ids"].masked_fill(batch["labels"] == -100, -100)


@fault("targets", "counted", place=LABELS)
def words_masked_but_for_15_percent(training: Training) -> None:
    """The comparison is the wrong way round: 85% of the words are masked, and 15% are left to read."""
    ids = padded_words()
    predicted = (torch.rand(ids.shape, generator=generator()) >= 0.15) & (ids != PAD)
    training.batch["input_ids"] = ids.masked_fill(predicted, MASK_ID)
    training.batch["labels"] = ids.masked_fill(~predicted, -100)


@fault("targets", place=LABELS)
def every_word_is_a_label(training: Training) -> None:
    """Nobody set the labels of unmasked words to -100, so that most of the loss is for copying the input."""
    ids = padded_words()
    training.batch["labels"] = ids.masked_fill(ids == PAD, -100)


# ----------------------------------------------------------------------------------------------- optimizer


@fault("update", "groups", place=OPTIMIZER)
def betas_exchanged(training: Training) -> None:
    """Adam's betas are exchanged: gradients are averaged over 1000 steps, and their squares over 10."""
    training.optimizer = partial(AdamW, lr=training.lr, betas=(0.999, 0.9), weight_decay=0.01)


@fault("groups", "schedule", place="optimizer|scheduler|*.bias|*LayerNorm*")
def rate_and_decay_exchanged(training: Training) -> None:
    """The group of biases and norms has its rate and its weight decay exchanged: it learns at 0.01."""

    def in_groups(parameters: list[nn.Parameter]) -> AdamW:
        matrices = {"params": [p for p in parameters if p.ndim >= 2], "lr": training.lr, "weight_decay": 0.01}
        vectors = {"params": [p for p in parameters if p.ndim < 2], "lr": 0.01, "weight_decay": training.lr}
        return AdamW([matrices, vectors])

    training.optimizer = in_groups


@fault("overfit", "update", "groups", place="")
def sgd_at_the_rate_of_adam(training: Training) -> None:
    """SGD took the place of AdamW and kept its rate of 1e-4, so that a step hardly moves a weight."""
    training.optimizer = partial(SGD, lr=training.lr)


@fault("optimizer_coverage", place=f"optimizer|{within('bert')}")
def optimizer_built_while_frozen(training: Training) -> None:
    """The optimizer was built while all but the head was frozen, and what was freed later is not in it."""
    inside = sum(1 for _ in training.model.bert.parameters())

    def of_the_head(parameters: list[nn.Parameter]) -> AdamW:
        return AdamW(parameters[inside:], lr=training.lr, weight_decay=0.01)

    training.optimizer = of_the_head
