"""Runs of True in masks over the rows of a batch, such as those of padding."""

from __future__ import annotations

from torch import Tensor


def runs_at_ends(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return where the rows of a mask `[B, T]` are True from the left end on, and up to the right end."""
    return x.long().cumprod(1).bool(), x.flip(1).long().cumprod(1).flip(1).bool()
