"""Faults that ``padding`` and ``padded_loss`` name: tokens that read padding, and losses that count it."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
import transformers as tf
from torch import Tensor, nn
from transformers.models.bert.modeling_bert import BertModel

from corpus.batches import (
    LENGTH,
    PAD,
    ROWS,
    classified_batch,
    left_padded_text,
    masked_batch,
    padded_text,
    tokens,
)
from corpus.case import DEEP, LATER, PLANTED_1, PLANTED_2, PUBLIC, UNSEEN, Arguments, fault, twins
from corpus.models.deep import Training, deep_bert, deep_translation, planted
from corpus.models.encoders import LastTokenClassifier, Tagger
from corpus.models.experts import Experts
from corpus.models.gpt import Gpt
from corpus.models.library import ENCODER, GPT2, PADDED, library, padded_llama
from corpus.models.parts import becomes, draw
from corpus.places import BERT_MASKS, FIRST_CROSS, within
from corpus.training import changed, labelled, loss_setup
from normlab.nn import Context, Seq2Seq

# ------------------------------------------------------------------------------------------------------ masks


class IgnoresItsMask(nn.Module):
    """BERT that is not handed the attention mask."""

    def __init__(self):
        super().__init__()
        self.m = tf.BertForMaskedLM(tf.BertConfig(**ENCODER))

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> Any:
        return self.m(input_ids=input_ids, labels=labels)


@fault(
    "padding",
    "inputs",
    place="|m|m.bert|m.bert.encoder|m.bert.encoder.layer.0*|attention_mask",
    origin=PLANTED_1,
)
def mask_ignored_bert() -> Arguments:
    """The attention mask is not passed on."""
    return loss_setup(IgnoresItsMask, masked_batch(), None, remade=False, declare=PADDED)


@fault("padding", "inputs", place=BERT_MASKS, origin=DEEP)
@planted(deep_bert)
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


@fault("padding", place=BERT_MASKS, origin=DEEP)
@planted(deep_bert)
def mask_added_as_zeros_and_ones(training: Training) -> None:
    """The mask of 0 and 1 is added to the scores as it is, without (1 - mask) * -10000: padding is read."""
    becomes(training.model.bert, AddsItsMask)


@fault(
    "padding",
    "reach",
    "inputs",
    place=f"{BERT_MASKS}|token_type_ids|{within('bert.embeddings')}",
    origin=DEEP,
)
@planted(deep_bert)
def mask_and_segments_exchanged(training: Training) -> None:
    """A tuple is unpacked in the wrong order: the segments are the mask, and the mask is the segments."""
    mask = training.batch["attention_mask"]
    training.batch |= {"attention_mask": torch.zeros_like(mask), "token_type_ids": mask}


@fault("padding", "inputs", place="attention_mask|input_ids", origin=PLANTED_2)
def mask_all_ones() -> Arguments:
    """The attention mask has ones for padding, too."""
    arguments = padded_llama()
    arguments["batch"]["attention_mask"] = torch.ones_like(arguments["batch"]["attention_mask"])
    return arguments


class MasksInWrongOrder(Tagger):
    def hidden_pairs(self, real: Tensor) -> Tensor:
        hidden = ~real.bool()[:, None].expand(-1, real.shape[1], -1)
        return hidden.repeat(4, 1, 1)


@twins("padding", "rows", place="layers.0*|", origin=LATER)
def masks_repeated_by_head(*, faulty: bool) -> Arguments:
    """nn.MultiheadAttention wants a row's heads side by side: each row gets the masks of other rows."""
    make = partial(MasksInWrongOrder if faulty else Tagger, 9)

    def loss(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        return labelled(model(batch["ids"], batch["mask"]), batch["labels"])

    ids, mask = padded_text([20, 9, 14, 17], seed=4)
    batch = {"ids": ids, "mask": mask, "labels": (ids * 7 % 9).masked_fill(mask == 0, -100)}
    declare = {"pad_id": PAD, "causal": False}
    return loss_setup(make, batch, loss, seed=4, remade=False, declare=declare)


def encode_padding(model: Seq2Seq, source: Tensor) -> tuple[Tensor, Tensor]:
    """Encode with a mask that is True where there is padding."""
    mask = source == PAD
    return model.encoder(model.embed(source), Context(padding_mask=mask)), mask


@fault("padding", place=f"|source|encoder|{within('encoder.sublayers.0')}", origin=DEEP)
@planted(deep_translation)
def inverted_mask(training: Training) -> None:
    """The mask of the source is inverted, so that tokens attend to padding."""
    training.model.encode = MethodType(encode_padding, training.model)


def decode_without_memory_mask(
    model: Seq2Seq, target_in: Tensor, memory: Tensor, memory_mask: Tensor
) -> Tensor:
    """Decode without the mask of the memory."""
    context = Context(padding_mask=target_in != PAD, memory=memory)
    return model.decoder(model.embed(target_in), context)


@fault("padding", place=FIRST_CROSS, origin=DEEP, not_right="it names padding, but the whole model")
@planted(deep_translation)
def memory_mask_forgotten(training: Training) -> None:
    """Cross-attention gets no mask of the source's padding, the forgotten memory_key_padding_mask."""
    training.model.decode = MethodType(decode_without_memory_mask, training.model)


# -------------------------------------------------------------------------------------- positions and pooling


@fault(
    "padding",
    place="|transformer|transformer.wpe|transformer.h.0*|attention_mask|input_ids|position_ids",
    origin=PLANTED_1,
)
def left_pad_gpt2() -> Arguments:
    """Rows are padded on the left, and positions are counted from the padding on."""
    ids, mask = tokens(), torch.ones(ROWS, LENGTH, dtype=torch.long)
    mask[1, :6] = 0
    mask[2, :3] = 0
    ids = ids.masked_fill(mask == 0, PAD)
    batch = {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
    return library("GPT2LMHeadModel", GPT2, batch, PADDED)


class LastByLength(LastTokenClassifier):
    def last(self, attention_mask: Tensor) -> Tensor:
        return attention_mask.sum(1) - 1


@twins("padding", "reach", "inputs", origin=UNSEEN)
def last_token_by_length_of_left_padding(*, faulty: bool) -> Arguments:
    """The last token is looked up at ``length - 1``, as for right padding, in rows padded on the left."""
    ids, mask = left_padded_text([24, 9, 17, 11, 20, 7], seed=2)
    batch = {"input_ids": ids, "attention_mask": mask, "labels": torch.tensor([0, 3, 1, 2, 3, 0])}
    make = LastByLength if faulty else LastTokenClassifier
    return loss_setup(make, batch, None, declare={"pad_id": PAD, "causal": True})


class MeanOfAll(nn.Module):
    """A classifier of BERT's mean vector."""

    def __init__(self):
        super().__init__()
        self.bert = tf.BertModel(tf.BertConfig(**ENCODER))
        self.head = nn.Linear(64, 3)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> dict[str, Tensor]:
        hidden = self.bert(input_ids, attention_mask=attention_mask).last_hidden_state
        logits = self.head(hidden.mean(1))
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


@fault("padding", place="|head|bert|attention_mask", origin=PLANTED_2)
def mean_pool_pad() -> Arguments:
    """The mean over tokens counts padding."""
    return loss_setup(MeanOfAll, classified_batch(), None, remade=False, declare=PADDED)


class CountedExperts(Experts):
    """Experts of which the best two are taken, balanced over all positions or over tokens alone."""

    everywhere = False
    real: Tensor

    def forward(self, x: Tensor) -> Tensor:
        mixed, _ = super().forward(x)
        shares = self.scores(x).softmax(-1)
        counted = torch.ones_like(self.real) if self.everywhere else self.real
        mean = shares[counted].mean(0)
        load = F.one_hot(shares.topk(self.best, -1).indices, len(mean)).sum(-2)[counted].double().mean(0)
        self.uneven = len(mean) * (load.to(mean) * mean).sum() / self.best
        return mixed


class ExpertsOfAllPositions(CountedExperts):
    everywhere = True


@twins("padded_loss", place="loss", origin=PUBLIC, thread="Megatron-LM#1984")
def aux_pad(*, faulty: bool) -> Arguments:
    """The balance of experts counts padding."""
    kind = ExpertsOfAllPositions if faulty else CountedExperts

    def mix(model: Gpt) -> None:
        for block in model.blocks:
            block.mlp = kind(64).apply(draw)

    def balanced(model: Gpt, batch: dict[str, Tensor]) -> Tensor:
        for block in model.blocks:
            block.mlp.real = batch["mask"].bool()
        scored = F.cross_entropy(model(batch["ids"])[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())
        return scored + 0.01 * sum(block.mlp.uneven for block in model.blocks)

    ids, mask = padded_text([20, 9, 14, 17], seed=26)
    batch = {"ids": ids, "mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
    return loss_setup(changed(mix, partial(Gpt, layers=2, dropout=0.0)), batch, balanced)


class Critic(LastTokenClassifier):
    """A head of values that reads the last column or, of rows padded on the right, the last token."""

    reads_column = False

    def last(self, attention_mask: Tensor) -> Tensor:
        column = torch.full_like(attention_mask[:, 0], attention_mask.shape[1] - 1)
        return column if self.reads_column else attention_mask.sum(1) - 1

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:  # type: ignore[override]
        labels = torch.zeros_like(input_ids[:, 0])
        return super().forward(input_ids, attention_mask, labels)["logits"][:, 0]


class ReadsTheLastColumn(Critic):
    reads_column = True


@twins("padding", origin=PUBLIC)
def value_of_padding(*, faulty: bool) -> Arguments:
    """The value of a row is read at its last column, which is padding in most rows."""

    def preferred(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        chosen, rejected = (model(batch[name], batch[f"{name}_mask"]) for name in ("chosen", "rejected"))
        return -F.logsigmoid(chosen - rejected).mean()

    chosen, chosen_mask = padded_text([20, 9, 14, 17], seed=28)
    rejected, rejected_mask = padded_text([11, 20, 8, 15], seed=29)
    batch = {
        "chosen": chosen,
        "chosen_mask": chosen_mask,
        "rejected": rejected,
        "rejected_mask": rejected_mask,
    }
    return loss_setup(ReadsTheLastColumn if faulty else Critic, batch, preferred)
