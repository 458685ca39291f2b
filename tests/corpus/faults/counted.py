"""Faults that ``counted`` names: targets that count and should not, or the other way round."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
import transformers as tf
from torch import Tensor, nn

from corpus.batches import EOS, LENGTH, LENGTHS, PAD, padded_text, tokens
from corpus.case import DEEP, LATER, PLANTED_1, PLANTED_2, PUBLIC, UNSEEN, Arguments, fault, twins
from corpus.models.deep import Training, deep_llama, deep_translation, padded_words, planted
from corpus.models.gpt import steady
from corpus.models.library import DECODER, GPT2, PADDED, library, padded_llama
from corpus.models.llama import Llama
from corpus.places import LLAMA_LABELS, TARGETS, TRANSLATION_LOSS
from corpus.training import full_setup, labelled, loss_setup

# ----------------------------------------------------------------------------------------- padding is counted


@fault("counted", place=TARGETS, origin=PLANTED_1)
def pad_counted() -> Arguments:
    """Padding is among the targets."""
    ids = tokens(length=LENGTH + 1)
    ids[1, 12:] = PAD
    ids[2, 8:] = PAD
    return full_setup(batch=(ids[:, :-1], ids[:, 1:]), step=None, declare=PADDED)


@fault("counted", place=TARGETS, origin=PLANTED_2)
def labels_not_masked() -> Arguments:
    """Padding is among the labels."""
    arguments = padded_llama()
    arguments["batch"]["labels"] = arguments["batch"]["input_ids"].clone()
    return arguments


@fault("counted", place=LLAMA_LABELS, origin=DEEP)
@planted(deep_llama)
def padding_among_the_labels(training: Training) -> None:
    """The labels are a clone of the padded ids without -100, so that the model learns to predict padding."""
    ids = padded_words()
    training.model.config.pad_token_id = PAD
    training.batch = {"input_ids": ids, "attention_mask": (ids != PAD).long(), "labels": ids.clone()}


def padded_loss(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """Return the mean loss of the next target token, padding among them."""
    logits, labels = model(**batch)[:, :-1], batch["target_in"][:, 1:]
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


@fault("counted", place=TRANSLATION_LOSS, origin=DEEP)
@planted(deep_translation)
def padding_in_the_loss(training: Training) -> None:
    """The loss is a mean over padding, too, which the model learns to predict."""
    training.loss = padded_loss


# ------------------------------------------------------------------------------ ends of texts are not counted


class WithLoss(Llama):
    """A decoder that returns its logits and their loss."""

    def forward(self, ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        logits = super().forward(ids)
        return logits, labelled(logits[:, :-1], labels[:, 1:])


def padded_by_ends(lengths: Sequence[int], *, by_id: bool, seed: int) -> dict[str, Tensor]:
    """Return rows that are padded by EOS; ``by_id`` ignores every EOS, and not only the padding."""
    ids, mask = padded_text(lengths, seed=seed)
    ids = ids.masked_fill(mask == 0, EOS)
    ignored = ids == EOS if by_id else mask == 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(ignored, -100)}


@twins("counted", place="loss|labels", origin=PUBLIC, thread="trl#976")
def pad_eos(*, faulty: bool) -> Arguments:
    """Padding is the end of a text, and the labels ignore both by their one id."""
    batch = padded_by_ends([28, 13, 21, 17], by_id=faulty, seed=0)
    batch = {"ids": batch["input_ids"], "labels": batch["labels"]}
    return loss_setup(WithLoss, batch, None, remade=False, declare={"eos_id": EOS, "pad_id": EOS})


def neox() -> nn.Module:
    """Draw a GPT-NeoX whose padding is its EOS."""
    sizes = {k: v for k, v in DECODER.items() if k != "pad_token_id"}
    return tf.GPTNeoXForCausalLM(tf.GPTNeoXConfig(**sizes, pad_token_id=EOS))


@twins("counted", place="labels|loss", origin=UNSEEN)
def end_masked_with_padding(*, faulty: bool) -> Arguments:
    """The pad token is the EOS token, and labels are ignored by id: the model never learns to end a text."""
    batch = padded_by_ends([28, 13, 21, 17], by_id=faulty, seed=7)
    return loss_setup(neox, batch, None, declare={"pad_id": EOS, "eos_id": EOS})


@fault("counted", place=TARGETS, origin=PLANTED_1)
def eos_masked() -> Arguments:
    """Padding is the end of a text, and the labels ignore both by their one id."""
    return library("GPT2LMHeadModel", GPT2, padded_by_ends(LENGTHS, by_id=True, seed=0), {"pad_id": EOS})


@fault("counted", place=LLAMA_LABELS, origin=DEEP)
@planted(deep_llama)
def end_of_text_taken_for_padding(training: Training) -> None:
    """Padding has the id of the end of a text, so that -100 for padding removes every end of a text, too."""
    words = padded_words()
    text = words != PAD
    ends = text & ~F.pad(text[:, 1:], (0, 1))
    ids = words.masked_fill(~text | ends, EOS)
    training.model.config.pad_token_id = training.model.config.eos_token_id
    labels = ids.masked_fill(ids == EOS, -100)
    training.batch = {"input_ids": ids, "attention_mask": text.long(), "labels": labels}


# ---------------------------------------------------------------------------------------------------- answers


@twins("counted", "targets", place="loss|answer|ids|", origin=LATER)
def answer_mask_not_shifted(*, faulty: bool) -> Arguments:
    """The mask of the answers lags: their first token is not learnt, the padding after their EOS is."""

    def loss(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        ids, answer = batch["ids"], batch["answer"]
        losses = F.cross_entropy(model(ids)[:, :-1].transpose(1, 2), ids[:, 1:], reduction="none")
        counted = answer[:, :-1] if faulty else answer[:, 1:]
        return (losses * counted).sum() / counted.sum()

    ids, real = padded_text([28, 19, 23, 16], seed=11)
    is_answer = torch.arange(28) >= torch.tensor([9, 6, 12, 5])[:, None]
    return loss_setup(steady, {"ids": ids, "answer": real * is_answer}, loss, declare=PADDED)


@twins("counted", place="loss", origin=PUBLIC, thread="Direct-Preference-Optimization#4")
def preferences_count_padding(*, faulty: bool) -> Arguments:
    """The log-probabilities of a row are summed over its padding, too, and preferred by their difference."""

    def logp(model: nn.Module, ids: Tensor) -> Tensor:
        counted = torch.ones_like(ids[:, 1:]) if faulty else (ids[:, 1:] != PAD).long()
        each = model(ids)[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
        return (each * counted).sum(1)

    def preferred(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return -F.logsigmoid(0.1 * (logp(model, batch["chosen"]) - logp(model, batch["rejected"]))).mean()

    chosen, _ = padded_text([20, 9, 14, 17], seed=30)
    rejected, _ = padded_text([11, 20, 8, 15], seed=31)
    batch = {"chosen": chosen, "rejected": rejected}
    return loss_setup(steady, batch, preferred, declare={"pad_id": PAD})
