"""Where the code of a module is, for code scanning."""

from __future__ import annotations

import inspect
from pathlib import Path

from torch import nn

from normlab.setups.named import sources
from normlab.setups.script import setup_from_script
from normlab.setups.setup import Setup


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(2, 2)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block()])


def test_a_module_of_torch_is_shown_where_the_one_around_it_is_defined(monkeypatch):
    folder = Path(__file__).resolve().parent
    monkeypatch.chdir(folder)
    places = sources(Setup(Model(), None), ["blocks.0.up", "blocks.0", "", "blocks.7.gone"])
    lines = {kind: inspect.getsourcelines(kind)[1] for kind in (Block, Model)}
    assert places["blocks.0.up"] == places["blocks.0"] == {"file": Path(__file__).name, "line": lines[Block]}
    assert places[""] == places["blocks.7.gone"] == {"file": Path(__file__).name, "line": lines[Model]}


def test_a_model_from_elsewhere_is_shown_as_a_file_of_its_package(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert sources(Setup(nn.Sequential(nn.Linear(2, 2)), None), ["0"]) == {
        "0": {"file": "torch/nn/modules/container.py", "line": 1}
    }


def own_loss(model, batch):
    return model(batch).sum()


def test_a_function_of_the_setup_is_shown_where_it_is_defined(monkeypatch):
    monkeypatch.chdir(Path(__file__).resolve().parent)
    places = sources(Setup(Model(), None, own_loss), ["loss", "blocks.0.up.weight", "step"])
    assert places["loss"] == {"file": Path(__file__).name, "line": inspect.getsourcelines(own_loss)[1]}
    assert places["blocks.0.up.weight"]["line"] == inspect.getsourcelines(Block)[1]
    assert places["step"]["line"] == inspect.getsourcelines(Model)[1]


SCRIPT = """import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(4, 1)

    def forward(self, x):
        return self.up(x)


model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(9):
    optimizer.zero_grad()
    model(torch.randn(3, 4)).square().mean().backward()
    optimizer.step()
"""


def test_a_class_of_a_script_is_shown_though_the_script_has_ended(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(SCRIPT)
    with setup_from_script("train.py") as named:
        places = sources(named.setup, ["up.weight", "optimizer"])
    assert places["up.weight"] == {"file": "train.py", "line": 5}
    assert places["optimizer"] == {"file": "train.py", "line": 5, "is_stand_in": True}


def test_code_outside_of_the_current_folder_is_shown_by_its_whole_path(tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    (tmp_path / "train.py").write_text(SCRIPT)
    with setup_from_script("../train.py") as named:
        places = sources(named.setup, ["up.weight"])
    assert places["up.weight"] == {"file": (tmp_path / "train.py").as_posix(), "line": 5}
