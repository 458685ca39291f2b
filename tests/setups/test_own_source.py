"""A source of setups from outside the package: a function, whose word may stand wherever a file may."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import nn

from normlab.cli.main import main
from normlab.errors import UserError
from normlab.setups.function import (
    SOURCES,
    function_from_file,
    setup_from_file,
    setup_from_function,
    setup_source,
)
from normlab.setups.setup import Setup
from normlab.testing import setup_from_source


def next_token_loss(model, ids):
    return nn.functional.cross_entropy(model(ids[:, :-1]).transpose(1, 2), ids[:, 1:])


@pytest.fixture(autouse=True)
def own_source():
    @setup_source("mlp")
    def of_layers(name, seed=0, width=8):
        if not name.isdecimal():
            raise UserError(f"mlp: takes a number of layers, as in mlp:2, got {name!r}")
        torch.manual_seed(seed)
        layers = [nn.Linear(width, width) for _ in range(int(name))]
        model = nn.Sequential(nn.Embedding(50, width), *layers, nn.Linear(width, 50))
        return Setup(model, torch.randint(50, (4, 16)), next_token_loss)

    yield
    del SOURCES["mlp"]


def test_it_is_taken_where_a_file_and_its_function_are():
    with setup_from_file("mlp:2", seed=3) as first, setup_from_file("mlp:2", seed=3) as again:
        assert len(first.setup.model) == 4
        assert first.title == "Sequential of mlp:2"
        assert torch.equal(first.setup.model[1].weight, again.setup.model[1].weight)
        assert first.setup.make is not None, "a function with a seed draws the model anew"
    with setup_from_source("mlp:1") as setup:
        assert len(setup.model) == 3


def test_it_may_take_sizes():
    with function_from_file("mlp:1", seed=0) as function:
        assert list(inspect.signature(function).parameters) == ["seed", "width"]
        assert setup_from_function(function, "mlp:1", 0, width=32).model[0].embedding_dim == 32
        with pytest.raises(UserError, match="depth"):
            setup_from_function(function, "mlp:1", 0, depth=3)


def test_a_command_takes_it(capsys):
    assert main(["check", "mlp:2", "--trace", "causality"]) == 0
    assert main(["check", "mlp:two", "--trace", "causality"]) == 2
    assert "mlp: takes" in capsys.readouterr().err


def test_a_word_that_is_taken_is_refused():
    with pytest.raises(UserError, match="'mlp'"):
        setup_source("mlp")(lambda name: None)
