"""Padding is read off masks and ids."""

from __future__ import annotations

import pytest
import torch

from normlab.trace.facts import Unknown
from normlab.trace.facts.padding import real_tokens

from .reader import Reader, facts, ids, next_token


def padded(side, pad=0):
    batch, real = ids(), torch.ones(4, 12, dtype=torch.bool)
    for row, length in enumerate((12, 8, 5, 10)):
        real[row, slice(length, None) if side == "right" else slice(0, 12 - length)] = False
    return batch.masked_fill(~real, pad), real


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("kind", ["bool", "long", "float", "hidden", "additive", "wide"])
def test_a_mask_of_any_kind_is_read(side, kind):
    batch, real = padded(side)
    mask = {
        "bool": real,
        "long": real.long(),
        "float": real.float(),
        "hidden": ~real,
        "additive": torch.zeros(4, 12).masked_fill(~real, -1e4),
        "wide": real[:, None, None],
    }[kind]

    def loss(model, batch):
        return next_token(model, {"ids": batch["ids"]})

    read = facts({"ids": batch, "mask": mask}, loss=loss)
    assert torch.equal(read.padding.real, real)
    assert (read.padding.side, read.padding.pad_id, read.padding.mask) == (side, 0, ("mask",))


def test_what_hides_other_ids_is_no_padding():
    chosen = torch.zeros(4, 12, dtype=torch.bool)
    chosen[:, :3] = True  # a prompt whose loss is left out
    with pytest.raises(Unknown):
        _ = facts({"ids": ids(), "mask": chosen}).padding


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_is_read_off_the_ids(side):
    batch, real = padded(side)
    assert torch.equal(facts(batch, pad_id=0).padding.real, real)
    assert torch.equal(facts(batch, model=Reader(padding_idx=0)).padding.real, real)
    assert facts(batch).padding.source == "runs"


def test_the_first_of_padding_that_is_also_the_end_is_real():
    batch, real = padded("right", pad=2)
    read = facts(batch, pad_id=2, eos_id=2).padding.real
    assert int((read & ~real).sum()) == 3
    assert torch.equal(real_tokens(batch, 2, ends=True), read)


def test_a_start_with_the_padding_id_is_no_padding():
    batch, real = padded("right")
    batch[:, 0] = 0
    assert torch.equal(facts(batch, pad_id=0).padding.real, real)
