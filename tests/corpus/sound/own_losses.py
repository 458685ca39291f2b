"""Decoders whose losses, steps or trained parts are unusual."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from corpus.batches import LENGTH, VOCAB, shifted_tokens, tokens
from corpus.case import OWN_3, Arguments, sound
from corpus.models.gpt import Gpt, untied
from corpus.models.parts import draw
from corpus.training import adamw_of_trained, advance, changed, full_setup, halves, loss_setup

# ---------------------------------------------------------------------------------------------------- losses


def long_tokens() -> Tensor:
    """Return token ids of which the last is a target alone."""
    return tokens(length=LENGTH + 1)


def logits_of(model: nn.Module, ids: Tensor) -> Tensor:
    """Return the logits `[B, V, T]` for all tokens but the first."""
    return model(ids[:, :-1]).transpose(1, 2)


@sound(origin=OWN_3)
def smooth() -> Arguments:
    """A loss with label smoothing."""

    def loss(model: nn.Module, ids: Tensor) -> Tensor:
        return F.cross_entropy(logits_of(model, ids), ids[:, 1:], label_smoothing=0.1)

    return loss_setup(Gpt, long_tokens(), loss, remade=False)


@sound(origin=OWN_3)
def zloss() -> Arguments:
    """A penalty keeps the softmax's normaliser near 1."""

    def loss(model: nn.Module, ids: Tensor) -> Tensor:
        logits = logits_of(model, ids)
        return F.cross_entropy(logits, ids[:, 1:]) + 1e-2 * logits.logsumexp(1).pow(2).mean()

    return loss_setup(Gpt, long_tokens(), loss, remade=False)


class TwoAhead(Gpt):
    """A second head predicts the token after the next, and comes first in the output."""

    def __init__(self):
        super().__init__()
        self.second = nn.Linear(64, VOCAB, bias=False)
        draw(self.second)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        x = self.norm(self.run(self.embed(ids)))
        return self.second(x), self.head(x)


@sound(origin=OWN_3)
def mtp() -> Arguments:
    """Several tokens are predicted at once."""

    def loss(model: nn.Module, ids: Tensor) -> Tensor:
        second, first = (y.transpose(1, 2) for y in model(ids[:, :-1]))
        further = F.cross_entropy(second[..., :-1], ids[:, 2:])
        return F.cross_entropy(first, ids[:, 1:]) + 0.3 * further

    return loss_setup(TwoAhead, long_tokens(), loss, remade=False)


@sound(origin=OWN_3)
def distil() -> Arguments:
    """The targets are another model's probabilities."""

    def loss(model: nn.Module, ids: Tensor) -> Tensor:
        with torch.no_grad():
            targets = teacher(ids).softmax(-1)
        predicted = model(ids).log_softmax(-1)
        return F.kl_div(predicted.flatten(0, 1), targets.flatten(0, 1), reduction="batchmean")

    arguments = loss_setup(Gpt, tokens(), loss, remade=False)
    teacher = Gpt().eval()
    return arguments


@sound(origin=OWN_3)
def compiled_closure() -> Arguments:
    """The loss runs the model that it closes over, not the one that it gets."""

    def loss(_: nn.Module, ids: Tensor) -> Tensor:
        return F.cross_entropy(logits_of(arguments["model"], ids), ids[:, 1:])

    arguments = loss_setup(Gpt, long_tokens(), loss, remade=False)
    return arguments


# ----------------------------------------------------------------------------------------------------- steps


@sound(origin=OWN_3)
def noaccum_clip() -> Arguments:
    """Micro-batches are weighed by the labels that they count, and gradients clipped hard."""

    def step(
        model: nn.Module, batch: tuple[Tensor, ...], optimizer: Optimizer, scheduler: LRScheduler | None
    ) -> Tensor:
        counted = (batch[1] != -100).sum()
        total = torch.zeros(())
        model.train()
        optimizer.zero_grad()
        for ids, labels in halves(batch):
            logits = model(ids).flatten(0, 1)
            loss = F.cross_entropy(logits, labels.flatten(), reduction="sum") / counted
            loss.backward()
            total += loss.detach()
        clip_grad_norm_(model.parameters(), 0.1)
        advance(optimizer, scheduler)
        return total

    ids, labels = shifted_tokens()
    labels = labels.clone()
    labels[2:, 4:] = -100
    return full_setup(step=step, batch=(ids, labels))


@sound(origin=OWN_3)
def trained() -> Arguments:
    """The model has been trained for 60 steps."""
    arguments = full_setup()
    model, optimizer = arguments["model"], arguments["optimizer"]
    for _ in range(60):
        optimizer.zero_grad()
        model(*arguments["batch"])[1].backward()
        optimizer.step()
    return arguments


# --------------------------------------------------------------------------------------------- trained parts


@sound(origin=OWN_3)
def head_only() -> Arguments:
    """Only the head and the norm before it are trained."""

    def freeze(model: Gpt) -> None:
        model.requires_grad_(False)
        model.head.requires_grad_(True)
        model.norm.requires_grad_(True)

    return full_setup(changed(freeze, untied), optimizer=adamw_of_trained)


@sound(origin=OWN_3)
def top_layers() -> Arguments:
    """The embeddings and the first two layers are frozen."""

    def freeze(model: Gpt) -> None:
        for part in (model.tokens, model.positions, model.blocks[0], model.blocks[1]):
            part.requires_grad_(False)

    return full_setup(changed(freeze, untied), optimizer=adamw_of_trained)
