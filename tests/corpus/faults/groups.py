"""Faults that ``groups`` names: parameters in a group of other kinds."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
import transformers as tf
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from corpus.batches import image_batch, language_batch, text
from corpus.case import (
    DEEP,
    LATER,
    PLANTED_1,
    PLANTED_2,
    PLANTED_3,
    PUBLIC,
    UNSEEN,
    Arguments,
    fault,
    sound,
    twins,
)
from corpus.models.deep import Training, deep_bert, planted
from corpus.models.gpt import Gpt, steady
from corpus.models.images import PatchClassifier
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


# --------------------------------------------------------------------------------------- tokens of its own


class Registered(PatchClassifier):
    """The classifier with registers beside its class token."""

    def __init__(self):
        super().__init__()
        self.register_tokens = nn.Parameter(torch.randn(1, 4, 64) * 0.02)

    def forward(self, pixels: Tensor) -> Tensor:
        x = self.patch(pixels).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.expand(len(x), -1, -1), x], 1) + self.positions
        x = torch.cat([x[:, :1], self.register_tokens.expand(len(x), -1, -1), x[:, 1:]], 1)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x[:, 0]))


class Joint(Registered):
    """The same, with all its tokens put before the patches at once."""

    def forward(self, pixels: Tensor) -> Tensor:
        x = self.patch(pixels).flatten(2).transpose(1, 2) + self.positions[:, 1:]
        own = [self.cls + self.positions[:, :1], self.register_tokens]
        x = torch.cat([*(token.expand(len(x), -1, -1) for token in own), x], 1)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x[:, 0]))


@twins("groups", place="register_tokens", origin=PUBLIC, thread="pytorch-image-models#2712")
def reg_token(*, faulty: bool) -> Arguments:
    """The registers are missing from the list of tokens: they decay, and learn at the head's rate."""
    tokens = ("cls", "positions") if faulty else ("cls", "positions", "register_tokens")

    def by_layer(model: nn.Module) -> AdamW:
        """Return AdamW whose rate falls from layer to layer, down to the tokens and patches."""
        groups: dict[tuple[int, bool], dict[str, Any]] = {}
        for path, p in model.named_parameters():
            layer = int(path.split(".")[1]) + 1 if path.startswith("blocks") else 5
            layer = 0 if path.startswith(("patch", *tokens)) else layer
            decays = p.ndim > 1 and path not in tokens
            rate = 1e-3 * 0.75 ** (5 - layer)
            group = {"params": [], "lr": rate, "weight_decay": 0.05 if decays else 0.0}
            groups.setdefault((layer, decays), group)["params"].append(p)
        return AdamW(groups.values())

    return loss_setup(Joint, image_batch(), of_pixels, by_layer)


@sound(origin=PUBLIC)
def positions_decay_and_tokens_do_not() -> Arguments:
    """Tokens that are appended are spared from decay, and the table of positions is not."""
    spared = ("cls", "register_tokens", "norm", "bias")
    return loss_setup(Registered, image_batch(), of_pixels, lambda model: decayed_but(model, spared))


def of_pixels(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["pixel_values"]), batch["labels"])


class MuonAndAdam(Optimizer):
    """Steps the groups that say so by their gradients' nearest orthogonal matrices, others as Adam does."""

    def __init__(self, groups: list[dict[str, Any]]):
        super().__init__(groups, {"lr": 1e-3, "use_muon": False, "betas": (0.9, 0.95), "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                mean = state.setdefault("mean", torch.zeros_like(p)).lerp_(p.grad, 0.1)
                if group["use_muon"]:
                    left, _, right = torch.linalg.svd(mean, full_matrices=False)
                    p.add_(left @ right, alpha=-group["lr"])
                else:
                    square = state.setdefault("square", torch.zeros_like(p)).lerp_(p.grad.square(), 0.05)
                    p.addcdiv_(mean / 0.1, (square / 0.05).sqrt() + 1e-8, value=-group["lr"])


@twins("groups", place="tokens*|head*", origin=PUBLIC)
def muon_by_flag(*, faulty: bool) -> Arguments:
    """One optimizer steps groups by Muon or by Adam: embedding and head are among the matrices of Muon."""

    def in_groups(model: nn.Module) -> MuonAndAdam:
        named = list(model.named_parameters())
        by_muon = [p for n, p in named if p.ndim > 1 and (faulty or n.startswith("blocks"))]
        chosen = set(map(id, by_muon))
        others = [p for _, p in named if id(p) not in chosen]
        return MuonAndAdam(
            [{"params": by_muon, "use_muon": True, "lr": 0.02}, {"params": others, "use_muon": False}]
        )

    return loss_setup(Llama, text(seed=31), optimizer=in_groups)
