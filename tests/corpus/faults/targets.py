"""Faults that ``targets`` names: what a model is asked for is not what its author meant."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from corpus.batches import EOS, LENGTH, PAD, VOCAB, generator, image_batch, padded_text, text, tokens
from corpus.case import DEEP, LATER, PLANTED_1, PLANTED_2, PLANTED_3, PUBLIC, UNSEEN, Arguments, fault, twins
from corpus.models.deep import (
    MASK_ID,
    SEED,
    Training,
    deep_bert,
    deep_gpt2,
    deep_llama,
    deep_translation,
    padded_words,
    planted,
)
from corpus.models.encoders import Tagger
from corpus.models.gpt import Gpt
from corpus.models.library import IMAGES, library
from corpus.models.llama import Llama
from corpus.models.translators import TorchTranslator, Translator, translation_loss
from corpus.places import BERT_LABELS, LLAMA_LABELS, TARGETS, TRANSLATION_LOSS
from corpus.training import full_setup, labelled, loss_setup

# ------------------------------------------------------------------------------------------- the shift by one


@fault("targets", place=TARGETS, origin=PLANTED_1)
def no_shift() -> Arguments:
    """The target of each token is the token itself."""
    ids = tokens()
    return loss_setup(Gpt, (ids, ids), None, remade=False)


@fault("targets", place=TARGETS, origin=DEEP)
@planted(deep_gpt2)
def targets_not_shifted(training: Training) -> None:
    """The targets are the input itself, not shifted by one, so that the model learns to copy."""
    training.batch["targets"] = training.batch["ids"].clone()


@fault("targets", place=TARGETS, origin=PLANTED_3)
def rolled_labels() -> Arguments:
    """Labels are rolled, so that the last token is to predict the first."""
    ids = tokens()
    return full_setup(batch=(ids, ids.roll(-1, 1)), step=None)


@fault("targets", place=TARGETS, origin=PLANTED_1)
def shifted_in_batch_and_loss() -> Arguments:
    """Targets are shifted in the batch and again in the loss."""

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch[0])[:, :-1].transpose(1, 2), batch[1][:, 1:])

    ids = tokens(length=LENGTH + 2)
    return loss_setup(Gpt, (ids[:, :-2], ids[:, 1:-1]), loss, remade=False)


@fault("targets", place=LLAMA_LABELS, origin=DEEP)
@planted(deep_llama)
def labels_shifted_twice(training: Training) -> None:
    """The labels are shifted in the batch and once more in the model, which skips the next token."""
    training.batch["labels"] = F.pad(training.batch["input_ids"][:, 1:], (0, 1), value=-100)


class Captioner(Llama):
    """A decoder with eight positions of an image before the text."""

    def __init__(self):
        super().__init__()
        self.image = nn.Parameter(torch.randn(1, 8, 64) * 0.02)

    def forward(self, ids: Tensor) -> Tensor:
        x = torch.cat((self.image.expand(len(ids), -1, -1), self.tokens(ids)), 1)
        rotations = self.rotary(torch.arange(x.shape[1], device=ids.device))
        return self.head(self.norm(self.run(x, rotations, None)))


def library_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Return a loss that shifts the labels itself, as the losses of transformers do."""
    return F.cross_entropy(logits.flatten(0, -2), F.pad(labels, (0, 1), value=-100)[..., 1:].flatten())


@twins("targets", place="loss|head|ids|labels", origin=PUBLIC, thread="transformers#47395")
def double_shift(*, faulty: bool) -> Arguments:
    """Labels are shifted and flattened by hand, then given to a loss that shifts them again."""

    def loss(model: nn.Module, ids: Tensor) -> Tensor:
        return library_loss(model(ids)[:, 8:], ids)

    def shifted_loss(model: nn.Module, ids: Tensor) -> Tensor:
        return library_loss(model(ids)[:, 8:-1].flatten(0, 1), ids[:, 1:].flatten())

    return loss_setup(Captioner, text(8, 64), shifted_loss if faulty else loss, remade=False)


def loss_of_the_previous_token(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """Return the mean loss of the target token before each position."""
    logits, labels = model(**batch)[:, 1:], batch["target_in"][:, :-1]
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=PAD)


@fault("targets", place=TRANSLATION_LOSS, origin=DEEP)
@planted(deep_translation)
def shifted_the_wrong_way(training: Training) -> None:
    """Logits and labels are shifted the wrong way, so that the model learns to repeat the previous token."""
    training.loss = loss_of_the_previous_token


# ------------------------------------------------------------------------------------------- encoder-decoders


@fault("targets", "causality", place="loss|head|target|[01]|batch*", origin=PLANTED_2)
def seq2seq_unshifted() -> Arguments:
    """The decoder reads the token that it predicts."""

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(model(*batch).flatten(0, 1), batch[1].flatten())

    return loss_setup(TorchTranslator, (tokens(), tokens(length=14, seed=4)), loss, remade=False)


class ReadsTheTarget(Translator):
    def read(self, target: Tensor) -> Tensor:
        return target


@twins("targets", "causality", origin=UNSEEN)
def decoder_input_not_shifted(*, faulty: bool) -> Arguments:
    """The decoder reads the target itself, not the target shifted by a start token."""
    source, _ = padded_text([20, 14, 17, 9], seed=5)
    target, _ = padded_text([12, 24, 19, 15], seed=6)
    batch, declare = {"source": source, "target": target}, {"pad_id": PAD, "eos_id": EOS}
    make = ReadsTheTarget if faulty else Translator
    return loss_setup(make, batch, translation_loss, declare=declare)


def loss_of_a_view(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """Return the loss of logits that were reshaped to `[B, V, T]`, not transposed."""
    logits, labels = model(**batch)[:, :-1], batch["target_in"][:, 1:]
    rows, length, vocab = logits.shape
    return F.cross_entropy(logits.reshape(rows, vocab, length), labels, ignore_index=PAD)


@fault("targets", "explained", "causality", place=TRANSLATION_LOSS, origin=DEEP)
@planted(deep_translation)
def vocabulary_axis_by_reshape(training: Training) -> None:
    """The vocabulary is moved to axis 1 by a reshape, not a transpose, so that the loss mixes the tokens."""
    training.loss = loss_of_a_view


def smoothed_loss(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """Return the loss of the next target token, with confidence and smoothing exchanged."""
    logits, labels = model(**batch)[:, :-1], batch["target_in"][:, 1:]
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=PAD, label_smoothing=0.9)


@fault(
    "targets",
    "explained",
    place=TRANSLATION_LOSS,
    origin=DEEP,
    not_right="a label smoothing of 0.9 is allowed",
)
@planted(deep_translation)
def smoothing_is_the_confidence(training: Training) -> None:
    """The label smoothing is 0.9, which was to be the confidence: the target has 10% of the weight."""
    training.loss = smoothed_loss


# ----------------------------------------------------------------------------------- masked words and classes


@fault("targets", place=BERT_LABELS, origin=DEEP)
@planted(deep_bert)
def labels_taken_after_masking(training: Training) -> None:
    """The labels were copied from the ids after the masking, so that every label is the mask's id."""
    batch = training.batch
    batch["labels"] = batch["input_ids"].masked_fill(batch["labels"] == -100, -100)


@fault(
    "targets",
    "counted",
    place=BERT_LABELS,
    origin=DEEP,
    not_right="nothing says what share of the words is to be masked",
)
@planted(deep_bert)
def words_masked_but_for_15_percent(training: Training) -> None:
    """The comparison is the wrong way round: 85% of the words are masked, and 15% are left to read."""
    ids = padded_words()
    predicted = (torch.rand(ids.shape, generator=generator(SEED)) >= 0.15) & (ids != PAD)
    training.batch["input_ids"] = ids.masked_fill(predicted, MASK_ID)
    training.batch["labels"] = ids.masked_fill(~predicted, -100)


@fault("targets", place=BERT_LABELS, origin=DEEP)
@planted(deep_bert)
def every_word_is_a_label(training: Training) -> None:
    """Nobody set the labels of unmasked words to -100, so that most of the loss is for copying the input."""
    ids = padded_words()
    training.batch["labels"] = ids.masked_fill(ids == PAD, -100)


MASKED = VOCAB - 1


def masked_words(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """Return the loss of the masked words."""
    inputs = batch["ids"].masked_fill(batch["hidden"], MASKED)
    return labelled(model(inputs, batch["mask"]), batch["ids"].masked_fill(~batch["hidden"], -100))


def masked_in_place(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """Write the mask into the ids before the labels are taken from them."""
    inputs = batch["ids"].masked_fill_(batch["hidden"], MASKED)
    return labelled(model(inputs, batch["mask"]), batch["ids"].masked_fill(~batch["hidden"], -100))


@twins("targets", "repeats", place="loss|ids|hidden|step|", origin=LATER)
def labels_hold_the_mask(*, faulty: bool) -> Arguments:
    """The batch is masked in place, so that every label is the mask itself."""
    ids, mask = padded_text([24, 18, 21, 15], vocab=MASKED, seed=12)
    hidden = (torch.rand(ids.shape, generator=generator(12)) < 0.2) & mask.bool()
    batch = {"ids": ids, "mask": mask, "hidden": hidden}
    loss = masked_in_place if faulty else masked_words
    return loss_setup(partial(Tagger, VOCAB), batch, loss, declare={"pad_id": PAD, "causal": False})


@fault("targets", place="loss|labels|classifier", origin=PLANTED_2)
def labels_rolled() -> Arguments:
    """Each image has the label of the one before it."""

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(model(pixel_values=batch["pixel_values"]).logits, batch["labels"].roll(1))

    options = {**IMAGES, "num_labels": 10}
    return library("ViTForImageClassification", options, image_batch()) | {"loss": loss}
