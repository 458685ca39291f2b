"""Setups of one's own that are made anew from a seed: a change of the code behind them is noticed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from normlab.lab.training.own_setups import opened_setup
from normlab.setups.function import SOURCES

PLUGIN = """
import torch
from torch import nn

from normlab import Setup
from normlab.setups.function import setup_source


class Tiny(nn.Sequential):
    pass


def loss(model, ids):
    return nn.functional.cross_entropy(model(ids[:, :-1]).transpose(1, 2), ids[:, 1:])


@setup_source("tiny")
def tiny(name, seed=0):
    torch.manual_seed(seed)
    model = Tiny(nn.Embedding(9, 4), nn.Linear(4, 9))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Setup(model, torch.randint(9, (2, 5)), loss, optimizer=optimizer)
"""


@pytest.fixture
def plugin(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    file = tmp_path / "plugin_of_this_test.py"
    file.write_text(PLUGIN)
    yield file
    SOURCES.pop("tiny", None)


def digest_of(plugin: Path) -> str:
    """Import the plugin as ``--import`` does, before its setup is opened, and return the code's digest."""
    SOURCES.pop("tiny", None)
    sys.modules.pop(plugin.stem, None)
    __import__(plugin.stem)
    with opened_setup({"tiny:1": "tiny:1"}, "tiny:1", seed=1) as opened:
        return opened.code


def test_a_change_of_an_imported_source_is_noticed(plugin):
    first, again = digest_of(plugin), digest_of(plugin)
    plugin.write_text(PLUGIN.replace("lr=0.1", "lr=0.25"))
    assert first == again != digest_of(plugin)
