"""Encoders, classifiers, retrievers and a captioner of one file."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ExponentialLR, LambdaLR, OneCycleLR

from corpus.batches import BOS, PAD, ROWS, VOCAB, generator, padded_batch, padded_text, text
from corpus.case import LATER, OWN_3, PUBLIC, UNSEEN, Arguments, sound
from corpus.models.encoders import Encoder, TorchClassifier
from corpus.models.library import PADDED
from corpus.models.llama import Llama, Rotations
from corpus.models.parts import MaskedLayer, causal, draw
from corpus.training import adamw, advance, decay_groups, loss_setup

# ----------------------------------------------------------------------------------------------- classifiers


def classified(loss: Callable[[nn.Module, Any], Tensor], targets: Tensor, classes: int) -> Arguments:
    """Return the step of a classifier, or of a regression, of padded rows."""
    batch = padded_batch()
    rows = (batch["input_ids"], batch["attention_mask"].bool(), targets)
    make = partial(TorchClassifier, classes)
    return loss_setup(make, rows, loss, adamw, remade=False, declare=PADDED)


@sound(origin=OWN_3)
def torch_cls() -> Arguments:
    """A classifier of nn.TransformerEncoder."""

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        ids, mask, labels = batch
        return F.cross_entropy(model(ids, mask), labels)

    return classified(loss, torch.tensor([0, 1, 2, 1]), 3)


@sound(origin=OWN_3)
def regression() -> Arguments:
    """A regression with nn.TransformerEncoder."""

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        ids, mask, values = batch
        return F.mse_loss(model(ids, mask).squeeze(-1), values)

    return classified(loss, torch.randn(ROWS, generator=generator(2)), 1)


class FirstTokenClassifier(Llama):
    """An encoder whose final norm reads the first token alone, as in classifiers of images."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(64, 4)
        draw(self.head)

    def seen(self, ids: Tensor) -> Tensor:
        return (ids != PAD)[:, None, None, :]

    def run(self, x: Tensor, rotations: Rotations, seen: Tensor | None) -> Tensor:
        return super().run(x, rotations, seen)[:, 0]


@sound(origin=PUBLIC)
def vit_pool_norm() -> Arguments:
    """The final norm reads the first token alone."""

    def loss(model: nn.Module, ids: Tensor) -> Tensor:
        return F.cross_entropy(model(ids), (ids != PAD).sum(1) % 4)

    ids, _ = padded_text([28, 13, 21, 17, 24, 9, 15, 26])
    return loss_setup(FirstTokenClassifier, ids, loss, remade=False)


class LatentClassifier(nn.Module):
    """Learned latents read the tokens, think, and are averaged."""

    def __init__(self, dim: int = 48, classes: int = 5):
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, dim)
        self.positions = nn.Parameter(torch.randn(64, dim) * 0.02)
        self.norm_in = nn.LayerNorm(dim)
        self.latents = nn.Parameter(torch.randn(8, dim) * 0.5)
        self.readers = nn.ModuleList(MaskedLayer(dim, crossing=True) for _ in range(2))
        self.thinkers = nn.ModuleList(MaskedLayer(dim) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, classes)
        self.apply(draw)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        memory = self.norm_in(self.tokens(ids) + self.positions[: ids.shape[1]])
        x = self.latents.expand(len(ids), -1, -1)
        real = mask.bool()[:, None, None]
        everything = torch.ones(8, 8, dtype=torch.bool, device=ids.device)
        for reader, thinker in zip(self.readers, self.thinkers, strict=True):
            x = thinker(reader(x, everything, memory, real), everything)
        return self.head(self.norm(x).mean(1))


@sound(origin=LATER)
def latents_that_classify() -> Arguments:
    """Smoothed labels and a one-cycle schedule."""

    def loss(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        logits = model(batch["ids"], batch["mask"])
        return F.cross_entropy(logits, batch["labels"], label_smoothing=0.1)

    ids, mask = padded_text([32, 21, 26, 14, 29, 18], seed=33)
    return loss_setup(
        LatentClassifier,
        {"ids": ids, "mask": mask, "labels": torch.tensor([0, 3, 1, 4, 2, 3])},
        loss,
        partial(decay_groups, lr=2e-3, decay=0.01),
        seed=33,
        scheduler=lambda optimizer: OneCycleLR(optimizer, 2e-3, total_steps=400, cycle_momentum=False),
        declare={"pad_id": PAD, "causal": False, "peak_lr": 2e-3, "steps": 400},
    )


class ConvUnit(nn.Module):
    """A residual convolution over time on normed features."""

    def __init__(self, dim: int):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.conv, self.out = nn.Conv1d(dim, 2 * dim, 3, padding=1), nn.Conv1d(2 * dim, dim, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.out(F.gelu(self.conv(self.norm(x).mT))).mT


class UNetTagger(nn.Module):
    """A tagger that halves its sequence, attends at half the length and comes back with a skip."""

    def __init__(self, dim: int = 48):
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, dim)
        self.positions = nn.Parameter(torch.zeros(64, dim))
        self.enter, self.leave = ConvUnit(dim), ConvUnit(dim)
        self.down = nn.Conv1d(dim, dim, 2, stride=2)
        self.middle = nn.ModuleList(MaskedLayer(dim) for _ in range(2))
        self.up = nn.ConvTranspose1d(dim, dim, 2, stride=2)
        self.merge = nn.Linear(2 * dim, dim)
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, 9)
        nn.init.trunc_normal_(self.positions, std=0.02)

    def forward(self, ids: Tensor) -> Tensor:
        fine = self.enter(self.tokens(ids) + self.positions[: ids.shape[1]])
        x = self.down(fine.mT).mT
        seen = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device)
        for layer in self.middle:
            x = layer(x, seen)
        x = self.merge(torch.cat((self.up(x.mT).mT, fine), dim=-1))
        return self.head(self.norm(self.leave(x)))


@sound(origin=UNSEEN)
def unet_tagger() -> Arguments:
    """A U-Net of convolutions and attention that tags each token."""

    def loss(model: nn.Module, batch: tuple[Tensor]) -> Tensor:
        (ids,) = batch
        return F.cross_entropy(model(ids).transpose(1, 2), ids % 9, label_smoothing=0.05)

    def nadam(model: nn.Module) -> Optimizer:
        return torch.optim.NAdam(model.parameters(), lr=1e-3)

    arguments = loss_setup(UNetTagger, (text(seed=32),), loss, nadam, seed=202, declare={"causal": False})
    return arguments | {"scheduler": ExponentialLR(arguments["optimizer"], gamma=0.999)}


# ------------------------------------------------------------------------------------------------ retrievers


class Tower(nn.Module):
    """An encoder of texts to unit vectors, with a learnt temperature."""

    def __init__(self):
        super().__init__()
        self.encoder = Encoder()
        self.project = nn.Linear(64, 32, bias=False)
        self.log_scale = nn.Parameter(torch.tensor(math.log(10.0)))
        draw(self.project)

    def pooled(self, x: Tensor, real: Tensor) -> Tensor:
        """Return one vector for each row."""
        return (x * real[..., None]).sum(1) / real.sum(1, keepdim=True)

    def encode(self, ids: Tensor) -> Tensor:
        """Return a unit vector for each row."""
        real = ids != PAD
        x = self.encoder(ids, real[:, None, None, :])
        return F.normalize(self.project(self.pooled(x, real)), dim=-1)

    def forward(self, queries: Tensor, passages: Tensor) -> Tensor:
        return self.log_scale.exp() * self.encode(queries) @ self.encode(passages).T


def contrast(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """Let each query find its passage in the batch, and each passage its query."""
    similar = model(batch["queries"], batch["passages"])
    itself = torch.arange(len(similar), device=similar.device)
    return (F.cross_entropy(similar, itself) + F.cross_entropy(similar.T, itself)) / 2


def pairs(seed: int) -> dict[str, Tensor]:
    """Return six queries and their passages."""
    queries, _ = padded_text([8, 12, 6, 10, 9, 12], seed=seed)
    passages, _ = padded_text([24, 15, 20, 18, 11, 22], seed=seed + 1)
    return {"queries": queries, "passages": passages}


@sound(origin=UNSEEN)
def contrastive_pairs() -> Arguments:
    """One tower for queries and passages, whose loss sets each row against the others of its batch."""

    def step(model: Tower, batch: Mapping[str, Tensor], optimizer: Optimizer, scheduler: Any) -> Tensor:
        loss = contrast(model.train(), batch)
        optimizer.zero_grad()
        loss.backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        with torch.no_grad():
            model.log_scale.clamp_(max=math.log(100.0))
        return loss.detach()

    declare = {"pad_id": PAD, "causal": False}
    optimizer = partial(decay_groups, lr=5e-4, decay=0.2)
    return loss_setup(Tower, pairs(36), contrast, optimizer, seed=206, step=step, declare=declare)


class FirstTokenTower(Tower):
    def pooled(self, x: Tensor, real: Tensor) -> Tensor:
        return x[:, 0]

    def forward(self, queries: Tensor, passages: Tensor) -> Tensor:
        scale = self.log_scale.clamp(max=math.log(100.0)).exp()
        return scale * self.encode(queries) @ self.encode(passages).T


@sound(origin=LATER)
def retriever_with_negatives_in_the_batch() -> Arguments:
    """The other rows' passages are the wrong answers."""
    batch = pairs(34)
    batch["queries"][:, 0] = batch["passages"][:, 0] = BOS
    declare = {"pad_id": PAD, "causal": False}
    return loss_setup(FirstTokenTower, batch, contrast, seed=34, declare=declare)


# ------------------------------------------------------------------------------------------------- captioner


class PatchCaptioner(nn.Module):
    """An encoder of patches, and a decoder of words that looks at them."""

    def __init__(self, dim: int = 48):
        super().__init__()
        self.patch = nn.Conv2d(3, dim, 4, stride=4)
        self.place = nn.Parameter(torch.randn(16, dim) * 0.02)
        self.encoder = nn.ModuleList(MaskedLayer(dim) for _ in range(2))
        self.norm_image = nn.LayerNorm(dim)
        self.tokens, self.positions = nn.Embedding(VOCAB, dim), nn.Embedding(40, dim)
        self.decoder = nn.ModuleList(MaskedLayer(dim, crossing=True) for _ in range(2))
        self.norm = nn.LayerNorm(dim)
        self.apply(draw)

    def forward(self, pixels: Tensor, ids: Tensor) -> Tensor:
        image = self.patch(pixels).flatten(2).transpose(1, 2) + self.place
        everything = torch.ones(1, 1, 16, 16, dtype=torch.bool, device=ids.device)
        for layer in self.encoder:
            image = layer(image, everything)
        image = self.norm_image(image)
        x = self.tokens(ids) + self.positions.weight[: ids.shape[1]]
        past = causal(ids.shape[1], ids.device)
        for layer in self.decoder:
            x = layer(x, past, image, everything[:, :, :1])
        return F.linear(self.norm(x), self.tokens.weight)


@sound(origin=LATER)
def captioner() -> Arguments:
    """Halves of unequal length are weighted by their words."""

    def summed(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        logits, targets = model(batch["pixels"], batch["ids"])[:, :-1], batch["ids"][:, 1:]
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=PAD, reduction="sum")

    def loss(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        return summed(model, batch) / (batch["ids"][:, 1:] != PAD).sum()

    def step(model: nn.Module, batch: Mapping[str, Tensor], optimizer: Optimizer, scheduler: Any) -> Tensor:
        model.train()
        optimizer.zero_grad(set_to_none=True)
        words = (batch["ids"][:, 1:] != PAD).sum()
        total = torch.zeros(())
        for half in (slice(0, 2), slice(2, 4)):
            part = summed(model, {name: entry[half] for name, entry in batch.items()}) / words
            part.backward()
            total = total + part.detach()
        clip_grad_norm_(model.parameters(), 1.0)
        advance(optimizer, scheduler)
        return total

    ids, _ = padded_text([20, 13, 17, 9], seed=31)
    ids[:, 0] = BOS
    return loss_setup(
        PatchCaptioner,
        {"pixels": torch.randn(4, 3, 16, 16, generator=generator(31)), "ids": ids},
        loss,
        seed=31,
        scheduler=lambda optimizer: LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 20)),
        step=step,
        declare={"pad_id": PAD, "tied": True},
    )
