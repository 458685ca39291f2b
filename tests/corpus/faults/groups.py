"""Faults that ``groups`` names: parameters in a group of other kinds."""

from __future__ import annotations

from functools import partial

import torch
import transformers as tf
from torch import nn
from torch.optim import SGD, AdamW

from corpus.batches import language_batch, text
from corpus.case import DEEP, LATER, PLANTED_1, PLANTED_2, PLANTED_3, PUBLIC, UNSEEN, Arguments, fault, twins
from corpus.models.deep import Training, deep_bert, planted
from corpus.models.gpt import Gpt, steady
from corpus.models.library import GROUPED
from corpus.models.llama import Llama
from corpus.training import decayed_but, full_setup, loss_setup

# ----------------------------------------------------------------------------------------------- weight decay


def with_gains(model: nn.Module, lr: float) -> AdamW:
    """Return AdamW that decays the gains and biases of the first norms like matrices."""
    spared = [path for path, p in model.named_parameters() if p.dim() == 1 and "norm_1" not in path]
    return decayed_but(model, spared, lr)


@fault("groups", place="blocks.*norm_1*|optimizer", origin=PLANTED_1)
def groups_wrong() -> Arguments:
    """The gains of half of the norms are in the group that decays."""
    return full_setup(optimizer=with_gains)


@twins("groups", place="optimizer|*norm*", origin=PUBLIC, thread="Fast-LLM#542")
def norm_decay(*, faulty: bool) -> Arguments:
    """Groups are made by the names "LayerNorm" and "bias", so that the gains of RMSNorm are decayed."""
    spared = ("LayerNorm" if faulty else "norm", "bias")
    return loss_setup(Llama, text(8), optimizer=lambda model: decayed_but(model, spared), remade=False)


@twins("groups", place="*norm*|optimizer", origin=UNSEEN)
def norm_names_of_another_family(*, faulty: bool) -> Arguments:
    """BERT's list of names free of decay is used for a Qwen2, whose norms are called otherwise."""
    spared = ("LayerNorm.weight" if faulty else "norm.weight", "bias")

    def qwen() -> nn.Module:
        return tf.Qwen2ForCausalLM(tf.Qwen2Config(**GROUPED, tie_word_embeddings=True))

    batch, declare = language_batch(text(seed=16)), {"tied": True}
    return loss_setup(qwen, batch, None, lambda model: decayed_but(model, spared), declare=declare)


@twins("groups", place="*norm*|optimizer", origin=LATER)
def names_of_another_model_are_spared(*, faulty: bool) -> Arguments:
    """The list of what is not decayed holds BERT's names; the norms of this model are called otherwise."""
    spared = ("LayerNorm.weight" if faulty else "norm", "bias")
    return loss_setup(steady, text(length=24, seed=24), optimizer=lambda model: decayed_but(model, spared))


# ------------------------------------------------------------------------------------------------------ rates


@fault(
    "groups",
    "schedule",
    place="optimizer|scheduler|*.bias|*LayerNorm*",
    origin=DEEP,
    not_right="a rate of their own is allowed to vectors",
)
@planted(deep_bert)
def rate_and_decay_exchanged(training: Training) -> None:
    """The group of biases and norms has its rate and its weight decay exchanged: it learns at 0.01."""

    def in_groups(parameters: list[nn.Parameter]) -> AdamW:
        matrices = {"params": [p for p in parameters if p.ndim >= 2], "lr": training.lr, "weight_decay": 0.01}
        vectors = {"params": [p for p in parameters if p.ndim < 2], "lr": 0.01, "weight_decay": training.lr}
        return AdamW([matrices, vectors])

    training.optimizer = in_groups


def slow_layer(model: nn.Module, lr: float) -> AdamW:
    """Return AdamW with a hundredth of the rate for one layer."""
    slow = list(model.blocks[2].parameters())
    inside = {id(p) for p in slow}
    others = [p for p in model.parameters() if id(p) not in inside]
    return AdamW([{"params": others}, {"params": slow, "lr": lr / 100}], lr=lr)


@fault("groups", place="blocks.2*|optimizer", origin=PLANTED_3)
def one_layer_lr() -> Arguments:
    """One layer in the middle has a hundredth of the others' rate."""
    return full_setup(partial(Gpt, layers=5), optimizer=slow_layer)


class Muon(SGD):
    """Steps matrices by their gradient's nearest orthogonal matrix, and vectors by their gradient."""

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            if p.ndim == 2:
                left, _, right = torch.linalg.svd(p.grad, full_matrices=False)
                p.grad.copy_(left @ right)
        super().step()


@fault("groups", place="optimizer|tokens*|positions*|head*|norm*|blocks.0*", origin=PLANTED_2)
def muon_all() -> Arguments:
    """Muon holds embeddings, head and vectors, too."""
    return full_setup(optimizer=lambda model, lr: Muon(model.parameters(), lr=lr))
