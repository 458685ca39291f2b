"""Faults that ``precision`` names: numbers that need more digits than they get."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from corpus.batches import text, tokens
from corpus.case import LATER, PLANTED_1, UNSEEN, Arguments, fault, twins
from corpus.models.llama import Attention, Llama, Rotary, Rotations, llama_of, rotate
from corpus.training import adamw, changed, labelled, loss_setup


class LowRotation(nn.Module):
    """A rotation that computes its angles in the precision of its input."""

    def forward(self, x: Tensor) -> Tensor:
        length, width = x.shape[-2:]
        rates = (10000.0 ** (-torch.arange(0, width, 2).float() / width)).to(x.dtype)
        angles = torch.arange(length, dtype=x.dtype)[:, None] * rates
        return rotate(x, angles.cos(), angles.sin())


class LowAttention(Attention):
    def __init__(self, dim: int):
        super().__init__(dim)
        self.rotation = LowRotation()

    def place(self, q: Tensor, k: Tensor, rotations: Rotations) -> tuple[Tensor, Tensor]:
        return self.rotation(q), self.rotation(k)


@fault("precision", place="blocks.0*", origin=PLANTED_1)
def bf16_positions() -> Arguments:
    """The angles of 256 positions are computed in bfloat16, which has 8 bits."""
    make = changed(lambda model: model.to(torch.bfloat16), llama_of(LowAttention))
    ids = tokens(2, 257)
    return loss_setup(make, (ids[:, :-1], ids[:, 1:]), None, adamw, remade=False)


class MatrixRotary(Rotary):
    """The angles as a matrix product, which autocast computes in bfloat16."""

    def angles(self, positions: Tensor) -> Tensor:
        return positions[:, None].float() @ self.rates[None].float()


class ExactRotary(MatrixRotary):
    def angles(self, positions: Tensor) -> Tensor:
        with torch.autocast(positions.device.type, enabled=False):
            return super().angles(positions)


def rotated_by(kind: type[Rotary]) -> Callable[[], nn.Module]:
    """Return a maker of a decoder with these rotations."""
    return changed(lambda model: setattr(model, "rotary", kind(16)), partial(Llama, layers=3))


@twins("precision", place="rotary*|blocks.*.attn*|blocks.?", origin=UNSEEN)
def rotary_angles_under_autocast(*, faulty: bool) -> Arguments:
    """Autocast takes the product of positions and rates in bfloat16, and angles lose their digits."""

    def loss(model: nn.Module, ids: Tensor) -> Tensor:
        with torch.autocast(ids.device.type, dtype=torch.bfloat16):
            logits = model(ids[:, :-1])
        return labelled(logits.float(), ids[:, 1:])

    return loss_setup(rotated_by(MatrixRotary if faulty else ExactRotary), text(length=64, seed=21), loss)


@twins("precision", place="rotary*|", origin=LATER)
def angles_under_autocast(*, faulty: bool) -> Arguments:
    """Autocast rounds the rotary angles to bfloat16, by hundredths of a radian at the end of the row."""

    def loss(model: nn.Module, ids: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(ids)
        logits = logits if logits.dtype == torch.float64 else logits.float()
        return labelled(logits[:, :-1], ids[:, 1:])

    make = rotated_by(MatrixRotary if faulty else ExactRotary)
    return loss_setup(make, text(length=64, seed=29), loss, seed=29)
