"""Faults that ``reduction`` and ``explained`` name: a loss that is no mean of a cross-entropy of logits."""

from __future__ import annotations

from collections.abc import Mapping

import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.bert.modeling_bert import BertLMPredictionHead

from corpus.batches import LENGTH, shifted_tokens, text, tokens
from corpus.case import DEEP, LATER, PLANTED_2, Arguments, fault, twins
from corpus.models.deep import Training, deep_bert, deep_gpt2, planted
from corpus.models.experts import Mixture, next_token_and_balance
from corpus.models.gpt import Gpt
from corpus.models.parts import becomes
from corpus.places import within
from corpus.training import loss_setup

# -------------------------------------------------------------------------------------------------- reduction


@fault("reduction", place="loss", origin=PLANTED_2)
def loss_sum() -> Arguments:
    """The loss is a sum over tokens."""

    def loss(model: nn.Module, ids: Tensor) -> Tensor:
        return F.cross_entropy(model(ids[:, :-1]).transpose(1, 2), ids[:, 1:], reduction="sum")

    return loss_setup(Gpt, tokens(length=LENGTH + 1), loss, remade=False)


@fault("reduction", "counted", place="loss|labels|targets|1", origin=PLANTED_2)
def loss_div_all() -> Arguments:
    """The loss is divided by all labels, ignored ones among them."""

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch[0]).transpose(1, 2), batch[1], reduction="none").mean()

    ids, labels = shifted_tokens()
    labels = labels.clone()
    labels[1, 10:] = -100
    labels[2, 5:] = -100
    return loss_setup(Gpt, (ids, labels), loss, remade=False)


# -------------------------------------------------------------------------------------------------- explained


class Probabilities(Gpt):
    """A model that returns probabilities."""

    def logits(self, x: Tensor) -> Tensor:
        return super().logits(x).softmax(-1)


@fault("explained", place="|loss|head", origin=PLANTED_2)
def double_softmax() -> Arguments:
    """The loss takes the model's probabilities for logits."""

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch[0]).transpose(1, 2), batch[1])

    return loss_setup(Probabilities, shifted_tokens(), loss, remade=False)


class BertProbabilities(BertLMPredictionHead):
    """A head that returns probabilities."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        return super().forward(hidden_states).softmax(-1)


@fault("explained", place=f"|loss|{within('cls')}", origin=DEEP)
@planted(deep_bert)
def softmax_before_the_loss(training: Training) -> None:
    """The head ends with a softmax, and the loss takes its probabilities for logits."""
    becomes(training.model.cls.predictions, BertProbabilities)


def likelihood_of_logits(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """Return nll_loss of the logits, which it takes for log-probabilities."""
    return F.nll_loss(model(batch["ids"]).flatten(0, 1), batch["targets"].flatten())


@fault("explained", "targets", place="|loss|head", origin=DEEP)
@planted(deep_gpt2)
def nll_loss_of_logits(training: Training) -> None:
    """nll_loss gets logits without log_softmax, so that the loss falls without end as logits grow."""
    training.loss = likelihood_of_logits


class RectifiedLogits(Gpt):
    def logits(self, x: Tensor) -> Tensor:
        return F.relu(super().logits(x))


@fault("explained", "gradients", "initial_loss", place=f"|loss|norm|{within('head')}", origin=DEEP)
@planted(deep_gpt2)
def relu_on_the_logits(training: Training) -> None:
    """A ReLU stands behind the head: no logit is below 0, and half of them are 0 and get no gradient."""
    becomes(training.model, RectifiedLogits)


class NumberedBalance(Mixture):
    def balance(self, uneven: Tensor) -> Tensor:
        return uneven.detach()


@twins("explained", "derivative", place="loss|blocks.?|blocks.?.mlp*|", origin=LATER)
def balance_is_a_number(*, faulty: bool) -> Arguments:
    """The term that balances the experts' loads is in the loss, but has no gradient."""
    make = NumberedBalance if faulty else Mixture
    return loss_setup(make, text(seed=13), next_token_and_balance, seed=13)
