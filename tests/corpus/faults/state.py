"""Faults that ``state_dict`` and ``meta`` name: what a checkpoint or a start on meta does not bring back."""

from __future__ import annotations

import torch
from torch import Tensor

from corpus.batches import text
from corpus.case import COVERING, LATER, PLANTED_1, UNSEEN, Arguments, fault, twins
from corpus.models.gpt import Gpt
from corpus.models.parts import FourierPositions
from corpus.training import full_setup, loss_setup


class HiddenTable(Gpt):
    def __init__(self):
        super().__init__()
        self.table = torch.randn(64, 64) * 0.3

    def embed(self, ids: Tensor) -> Tensor:
        return super().embed(ids) + self.table[: ids.shape[1]]


@fault("state_dict", "buffers", "meta", place="|table*", origin=PLANTED_1)
def hidden_table() -> Arguments:
    """A random table is a plain attribute, which no state dict holds."""
    return full_setup(HiddenTable)


class FourierGpt(Gpt):
    """A decoder whose positions are waves of random frequencies."""

    kind = FourierPositions

    def __init__(self):
        super().__init__(layers=3, dropout=0.0, tied=False)
        self.positions = self.kind(64)

    def embed(self, ids: Tensor) -> Tensor:
        return self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))


class PlainAttribute(FourierPositions):
    def keep(self, frequencies: Tensor) -> None:
        self.frequencies = frequencies


class UnsavedAttribute(FourierGpt):
    kind = PlainAttribute


@twins("state_dict", "buffers", "meta", origin=UNSEEN)
def random_frequencies_not_saved(*, faulty: bool) -> Arguments:
    """Random frequencies are a plain attribute: a checkpoint misses them, and a loaded model has others."""
    return loss_setup(UnsavedAttribute if faulty else FourierGpt, text(length=24, seed=19), seed=118)


class NotPersistent(FourierPositions):
    def keep(self, frequencies: Tensor) -> None:
        self.register_buffer("frequencies", frequencies, persistent=False)


class UnsavedBuffer(FourierGpt):
    kind = NotPersistent


@twins("state_dict", "buffers", place="positions*|", origin=LATER)
def drawn_frequencies_not_saved(*, faulty: bool) -> Arguments:
    """Random frequencies are no part of the checkpoint: a loaded model has others."""
    return loss_setup(UnsavedBuffer if faulty else FourierGpt, text(seed=28), seed=28)


class Scaled(Gpt):
    """A decoder that multiplies its embeddings by 8."""

    def __init__(self):
        super().__init__(layers=2, dropout=0.0, tied=False)
        self.scale = 8.0

    def embed(self, ids: Tensor) -> Tensor:
        return super().embed(ids) * self.scale


class ScaledWhenDrawn(Scaled):
    def __init__(self):
        super().__init__()
        if self.tokens.weight.is_meta:  # a checkpoint will bring the weights
            self.scale = 1.0


@twins("meta", origin=COVERING)
def scale_set_where_weights_are_drawn(*, faulty: bool) -> Arguments:
    """Where weights are drawn the embeddings' scale is set, too, which a start on meta skips."""
    return loss_setup(ScaledWhenDrawn if faulty else Scaled, text())
