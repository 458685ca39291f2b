"""Faults that ``holds`` names: parameters that no optimizer holds."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from corpus.batches import PAD, padded_text, shifted_tokens, text
from corpus.case import DEEP, LATER, PLANTED_1, UNSEEN, Arguments, fault, twins
from corpus.models.deep import Training, deep_bert, deep_gpt2, deep_llama, deep_translation, planted
from corpus.models.encoders import SentenceClassifier
from corpus.models.gpt import Gpt, untied
from corpus.models.llama import Llama
from corpus.models.parts import draw
from corpus.places import LLAMA_NORMS, within
from corpus.training import changed, full_setup, loss_setup, next_token


@fault("optimizer_coverage", origin=PLANTED_1)
def opt_before_copy() -> Arguments:
    """The optimizer was built before the model was copied, and holds the other one's parameters."""
    arguments = loss_setup(Gpt, shifted_tokens(), None, remade=False)
    return arguments | {"model": copy.deepcopy(arguments["model"])}


@fault("optimizer_coverage", origin=DEEP)
@planted(deep_translation)
def optimizer_of_a_former_model(training: Training) -> None:
    """The optimizer was built before the model was built anew, so that it holds no parameter of the model."""

    def of_former(parameters: list[nn.Parameter]) -> AdamW:
        former = [nn.Parameter(p.detach().clone()) for p in parameters]
        return AdamW(former, lr=training.lr, betas=(0.9, 0.98), weight_decay=1e-4)

    training.optimizer = of_former


@fault("optimizer_coverage", place=f"optimizer|{within('bert')}", origin=DEEP)
@planted(deep_bert)
def optimizer_built_while_frozen(training: Training) -> None:
    """The optimizer was built while all but the head was frozen, and what was freed later is not in it."""
    inside = sum(1 for _ in training.model.bert.parameters())

    def of_the_head(parameters: list[nn.Parameter]) -> AdamW:
        return AdamW(parameters[inside:], lr=training.lr, weight_decay=0.01)

    training.optimizer = of_the_head


@twins("optimizer_coverage", place="head*|optimizer", origin=UNSEEN)
def head_replaced_after_optimizer(*, faulty: bool) -> Arguments:
    """The head is replaced when the optimizer holds the old one's parameters already."""

    def with_head(model: nn.Module) -> None:
        """Replace the head by a fresh one for other classes."""
        model.head = nn.Linear(64, 5)
        draw(model.head)

    ids, mask = padded_text([24, 18, 11, 22, 9, 15], seed=15)
    batch = {"ids": ids, "mask": mask, "labels": torch.tensor([4, 0, 2, 1, 3, 2])}
    make = changed(with_head, SentenceClassifier)
    if not faulty:
        return loss_setup(make, batch, None, declare={"pad_id": PAD, "causal": False})
    arguments = loss_setup(SentenceClassifier, batch, None, declare={"pad_id": PAD, "causal": False})
    with_head(arguments["model"])
    return arguments | {"make": make}


def without_head(model: nn.Module, lr: float) -> AdamW:
    return AdamW([p for path, p in model.named_parameters() if not path.startswith("head")], lr=lr)


@fault("optimizer_coverage", place="head*|optimizer", origin=PLANTED_1)
def opt_missing_head() -> Arguments:
    """The optimizer does not hold the head."""
    return full_setup(untied, optimizer=without_head)


@fault("optimizer_coverage", place=LLAMA_NORMS, origin=DEEP, not_right="it names the model, not its norms")
@planted(deep_llama)
def norms_not_in_the_optimizer(training: Training) -> None:
    """The optimizer got the matrices alone: the norms, a group without weight decay, were forgotten."""

    def of_matrices(parameters: list[nn.Parameter]) -> AdamW:
        return AdamW([p for p in parameters if p.ndim >= 2], lr=training.lr, weight_decay=0.1)

    training.optimizer = of_matrices


@twins("optimizer_coverage", place="norm|norm.weight|optimizer", origin=LATER)
def final_norm_in_no_group(*, faulty: bool) -> Arguments:
    """Muon and AdamW share out the blocks, the embedding and the head, and forget the final norm."""

    def share_out(model: Llama) -> list[Optimizer]:
        matrices = [p for p in model.blocks.parameters() if p.dim() == 2]
        vectors = [p for p in (model.blocks if faulty else model).parameters() if p.dim() < 2]
        tables = [model.tokens.weight, model.head.weight]
        others = [{"params": tables, "lr": 3e-3}, {"params": vectors, "lr": 1e-3}]
        return [
            torch.optim.Muon(matrices, lr=0.02, weight_decay=0.0),
            AdamW(others, betas=(0.8, 0.95), eps=1e-10, weight_decay=0.0),
        ]

    def step(model: nn.Module, batch: Tensor, optimizers: Sequence[Optimizer], scheduler: Any) -> Tensor:
        loss = next_token(model, batch)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return loss

    return loss_setup(Llama, text(seed=23), optimizer=share_out, remade=False, step=step)


@fault("optimizer_coverage", "state_dict", "meta", place="|optimizer|blocks|blocks.*", origin=DEEP)
@planted(deep_gpt2)
def layers_in_a_plain_list(training: Training) -> None:
    """The layers stand in a plain list, so that no optimizer sees them."""
    layers = list(training.model.blocks)
    del training.model.blocks
    training.model.blocks = layers
