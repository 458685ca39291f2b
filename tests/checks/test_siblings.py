"""Settings of blocks that look alike, and parameters that are shared or copies."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from .tiny import DIM, VOCAB, Decoder, first, report_of


def test_blocks_that_are_built_alike_hold():
    report = report_of("siblings", "ties")
    assert set(report.holds) == {"siblings", "ties"}
    assert not report.notes


@pytest.mark.parametrize("setting", [("eps", 0.1), ("elementwise_affine", False)])
def test_a_setting_of_one_block_alone_fails(setting: tuple[str, Any]):
    model = Decoder()
    setattr(model.blocks[2].norm, *setting)
    assert first(report_of("siblings", model=model)) == ("siblings", "blocks.2.norm")


def test_a_switch_of_the_last_block_is_noted():
    model = Decoder()
    model.blocks[3].last = True
    for block in model.blocks[:3]:
        block.last = False
    report = report_of("siblings", model=model)
    assert not report.failures
    assert report.notes[0].module == "blocks.3"


def test_a_block_in_another_type_fails():
    model = Decoder()
    model.blocks[1].up.bias.data = model.blocks[1].up.bias.data.double()
    model.blocks[1].up.weight.data = model.blocks[1].up.weight.data.double()
    model.blocks[1].up.register_forward_pre_hook(lambda _, args: (args[0].double(),))
    model.blocks[1].up.register_forward_hook(lambda _, __, y: y.float())
    assert first(report_of("siblings", model=model)) == ("siblings", "blocks.1")


def test_a_dropout_in_evaluation_mode_fails():
    model = Decoder()
    model.dropout.eval()
    assert first(report_of("siblings", model=model)) == ("siblings", "dropout")
    assert not report_of("siblings", model=Decoder().eval()).failures


def tied() -> Decoder:
    model = Decoder()
    nn.init.normal_(model.embed.weight, std=0.02)
    model.head.weight = model.embed.weight
    return model


def test_a_tie_as_declared_holds():
    assert report_of("ties", model=tied(), declare={"tied": True}).holds == ("ties",)


@pytest.mark.parametrize(
    ("model", "declared"), [(Decoder, {"tied": True}), (tied, {"tied": False})], ids=["lost", "made"]
)
def test_a_tie_against_its_declaration_fails(model: Any, declared: dict[str, bool]):
    assert first(report_of("ties", model=model(), declare=declared))[0] == "ties"


def test_a_copy_of_the_table_is_a_lost_tie():
    model = Decoder()
    model.head.weight = nn.Parameter(model.embed.weight.detach().clone())
    assert first(report_of("ties", model=model)) == ("ties", "head")
    assert model.head.weight.shape == (VOCAB, DIM)


def test_a_frozen_copy_is_meant():
    model = Decoder()
    model.teacher = copy.deepcopy(model.embed).requires_grad_(False)
    assert not report_of("ties", model=model).failures
    assert torch.equal(model.teacher.weight, model.embed.weight)


def windowed() -> Decoder:
    """One block sees everything, and the others see a window."""
    model = Decoder()
    for i, block in enumerate(model.blocks):
        block.window = None if i == 2 else 4
    return model


@pytest.mark.parametrize("setup", [{"make": windowed}, {}], ids=["made", "unknown"])
def test_one_block_that_is_built_otherwise_is_noted(setup: dict[str, Any]):
    report = report_of("siblings", model=windowed(), **setup)
    assert not report.failures
    assert report.notes[0].module == "blocks.2"


def test_a_setting_that_is_changed_after_building_fails():
    model = windowed()
    model.blocks[1].window = 3
    model.blocks[2].window = 4
    assert first(report_of("siblings", model=model, make=windowed)) == ("siblings", "blocks.1")


class Dropping(Decoder):
    """One block drops more than the others."""

    def __init__(self):
        super().__init__()
        for i, block in enumerate(self.blocks):
            block.up = nn.Sequential(nn.Linear(DIM, 32), nn.Dropout(0.3 if i == 1 else 0.1))


def test_a_slip_in_the_constructor_of_a_norm_or_dropout_fails():
    def uneven() -> Decoder:
        model = Decoder()
        model.blocks[1].norm.eps = 1e-2
        return model

    assert first(report_of("siblings", model=uneven(), make=uneven)) == ("siblings", "blocks.1.norm")
    assert first(report_of("siblings", model=Dropping(), make=Dropping)) == ("siblings", "blocks.1.up.1")


def test_a_head_that_begins_as_a_copy_may_be_declared_separate():
    model = Decoder()
    model.head.weight = nn.Parameter(model.embed.weight.detach().clone())
    assert report_of("ties", model=model, declare={"tied": False}).holds == ("ties",)


class Towers(nn.Module):
    """Two towers that start from one checkpoint."""

    def __init__(self):
        super().__init__()
        self.query = nn.Embedding(VOCAB, DIM)
        self.document = copy.deepcopy(self.query)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.query(ids).mean(1) @ self.document(ids + 1).mean(1).T


def test_a_copied_tower_is_noted():
    def loss(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(model(ids), torch.arange(len(ids)))

    ids = torch.arange(20).reshape(4, 5)
    report = report_of("ties", model=Towers(), batches=ids, loss=loss)
    assert not report.failures
    assert report.notes[0].module == "document"


def sharing(parts: tuple[str, ...], blocks: tuple[int, ...] = (0, 1, 2, 3)) -> Decoder:
    """Return a decoder in which some blocks share these parts."""
    model = Decoder()
    for i in blocks:
        for part in parts:
            setattr(model.blocks[i], part, getattr(model.blocks[blocks[0]], part))
    return model


@pytest.mark.parametrize("blocks", [(0, 1, 2, 3), (1, 3)])
@pytest.mark.parametrize("parts", [("up", "down"), ("norm",)])
def test_blocks_that_share_a_part_and_own_the_rest_are_noted(parts: tuple[str, ...], blocks: tuple[int, ...]):
    report = report_of("ties", model=sharing(parts, blocks))
    assert report.holds == ("ties",)
    assert [note.module.startswith(f"blocks.{blocks[0]}") for note in report.notes] == [True]


def test_blocks_that_share_everything_or_nothing_are_not():
    for model in (sharing(()), sharing(("norm", "up", "down"))):
        report = report_of("ties", model=model)
        assert report.holds == ("ties",)
        assert not report.notes


def test_one_block_in_several_places_is_noted_once():
    looped = Decoder()
    looped.blocks = nn.ModuleList([looped.blocks[0]] * 3)
    report = report_of("ties", model=looped)
    assert report.holds == ("ties",)
    assert [note.module for note in report.notes] == ["blocks.0"]
