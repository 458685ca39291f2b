"""Faults in the loss and in the gradients."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from corpus.case import Arguments, Case
from corpus.later_parts import Encoder, Experts, MixtureLm, next_token_and_balance, pairs, seeded
from corpus.unseen_parts import PAD, Block, Gpt, adamw, next_token, padded, text

CASES: dict[str, Case] = {}
planted = pairs(CASES)


def answers_only(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """Return the mean cross entropy of the tokens of the answers."""
    ids, answer = batch["ids"], batch["answer"]
    losses = F.cross_entropy(model(ids)[:, :-1].transpose(1, 2), ids[:, 1:], reduction="none")
    counted = answer[:, 1:]
    return (losses * counted).sum() / counted.sum()


def answers_one_late(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """Count by the token that is read, not by the one that is to come."""
    ids, answer = batch["ids"], batch["answer"]
    losses = F.cross_entropy(model(ids)[:, :-1].transpose(1, 2), ids[:, 1:], reduction="none")
    counted = answer[:, :-1]
    return (losses * counted).sum() / counted.sum()


@planted("counted", "targets", place="loss|answer|ids|")
def answer_mask_not_shifted(*, faulty: bool) -> Arguments:
    """The mask of the answers lags: their first token is not learnt, the padding after their EOS is."""
    ids, real = padded([28, 19, 23, 16], 28, 200, seed=11)
    prompts = torch.tensor([9, 6, 12, 5])[:, None]
    answer = real * (torch.arange(28)[None] >= prompts)
    return {
        "model": seeded(Gpt, 11),
        "batch": {"ids": ids, "answer": answer},
        "loss": answers_one_late if faulty else answers_only,
        "optimizer": adamw(3e-4),
        "make": Gpt,
        "declare": {"pad_id": PAD},
    }


VOCABULARY = 160
MASK = VOCABULARY - 1


def masked_words(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """Return the cross entropy of the masked words."""
    labels, hidden = batch["ids"].clone(), batch["hidden"]
    inputs = batch["ids"].clone()
    inputs[hidden] = MASK
    labels[~hidden] = -100
    logits = model(inputs, batch["mask"])
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)


def masked_in_place(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """Write the mask into the ids before the labels are taken from them."""
    inputs, hidden = batch["ids"], batch["hidden"]
    inputs[hidden] = MASK
    labels = batch["ids"].clone()
    labels[~hidden] = -100
    logits = model(inputs, batch["mask"])
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)


@planted("targets", "repeats", place="loss|ids|hidden|step|")
def labels_hold_the_mask(*, faulty: bool) -> Arguments:
    """The batch is masked in place, so that every label is the mask itself."""

    def make() -> nn.Module:
        return Encoder(VOCABULARY, VOCABULARY)

    ids, mask = padded([24, 18, 21, 15], 24, VOCABULARY - 1, seed=12)
    drawn = torch.rand(ids.shape, generator=torch.Generator().manual_seed(12))
    return {
        "model": seeded(make, 12),
        "batch": {"ids": ids, "mask": mask, "hidden": (drawn < 0.2) & mask.bool()},
        "loss": masked_in_place if faulty else masked_words,
        "optimizer": adamw(5e-4, 0.01),
        "make": make,
        "declare": {"pad_id": PAD, "causal": False},
    }


class NumberedBalance(MixtureLm):
    """Add up the unevenness of the loads as a number."""

    def forward(self, ids: Tensor) -> tuple[Tensor, float]:
        x, rotations, total = self.embed(ids), self.rotary(ids.shape[1]), 0.0
        for block in self.blocks:
            x, uneven = block(x, rotations)
            total = total + uneven.detach().item()
        return self.head(self.norm(x)), total / len(self.blocks)


@planted("explained", "derivative", place="loss|blocks.?|blocks.?.moe*|")
def balance_is_a_number(*, faulty: bool) -> Arguments:
    """The term that balances the experts' loads is in the loss, but has no gradient."""
    kind = NumberedBalance if faulty else MixtureLm

    def make() -> nn.Module:
        return kind(Experts)

    return {
        "model": seeded(make, 13),
        "batch": text(4, 32, 220, seed=13),
        "loss": next_token_and_balance,
        "optimizer": adamw(6e-4),
        "make": make,
    }


def next_token_alone(model: nn.Module, ids: Tensor) -> Tensor:
    """Return the cross entropy of the next token."""
    logits, _ = model(ids)
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


@planted("gradients", place="blocks.?.moe|blocks.?.moe.router*")
def one_expert_weighs_one(*, faulty: bool) -> Arguments:
    """Shares that sum to one are constant where a token takes one expert: the routers learn nothing."""

    def make() -> nn.Module:
        return MixtureLm(lambda d: Experts(d, best=1, shares_sum_to_one=faulty))

    return {
        "model": seeded(make, 14),
        "batch": text(4, 40, 220, seed=14),
        "loss": next_token_alone,
        "optimizer": adamw(6e-4),
        "make": make,
    }


class SequentialBlock(Block):
    """A block whose feed-forward is a Sequential, so that its layers are numbered."""

    def __init__(self, d: int, heads: int, dropout: float = 0.0) -> None:
        super().__init__(d, heads, dropout)
        self.mlp = nn.Sequential(nn.Linear(d, 4 * d), nn.GELU(), nn.Linear(4 * d, d))


class SequentialGpt(Gpt):
    block = SequentialBlock

    def __init__(self) -> None:
        super().__init__(depth=4)
        self.lm_head = nn.Linear(64, 200, bias=False)
        nn.init.normal_(self.lm_head.weight, std=0.02)


@planted("frozen", "siblings", place="blocks.[123]|blocks.[123].mlp*")
def frozen_by_a_part_of_the_name(*, faulty: bool) -> Arguments:
    """The first block is frozen by ".0.", which the first layer of each feed-forward has in its name."""
    model = seeded(SequentialGpt, 15)
    for name, parameter in model.named_parameters():
        first = ".0." in name if faulty else name.startswith("blocks.0.")
        if first or name.startswith(("wte.", "wpe.")):
            parameter.requires_grad_(False)
    return {
        "model": model,
        "batch": text(4, 24, 200, seed=15),
        "loss": next_token,
        "optimizer": adamw(2e-4),
        "make": SequentialGpt,
        "declare": {"frozen": ["wte*", "wpe*", "blocks.0.*"]},
    }
