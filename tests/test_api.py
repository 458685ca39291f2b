"""The public names: few, callable however modules are imported, and each with an example that runs."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import normlab
from lab.training.tiny import tiny, write_text
from normlab.lab.recipes.plugins import ENVIRONMENT

NAMES = sorted(set(normlab.__all__) - {"__version__", "nn"})
SLOW = {"capture", "compare", "plan", "transfer", "trial"}
"""Their examples train, or start processes that do; the README has examples of them, too, which are run."""
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def loss(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


def sized(width: int = 8, seed: int = 0) -> normlab.Setup:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Embedding(50, width), nn.Linear(width, 50))
    ids = torch.randint(1, 50, (4, 17))
    return normlab.Setup(model, ids, loss, torch.optim.AdamW(model.parameters(), lr=0.01))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("trained")
    data = write_text(root / "text")
    given = {"steps": 2, "validate_every_steps": 2, "dev_decode_sentences": 2}
    return {
        recipe: normlab.train(tiny(data, recipe, **given), root / recipe).path for recipe in ("pre", "admin")
    }


@pytest.fixture
def given(runs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    """A decoder with its ids, loss and optimizer; a configuration; and two runs."""
    monkeypatch.setenv(ENVIRONMENT, "")  # so that what load_plugins makes of it is undone
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "my_norms.py").write_text("")
    (tmp_path / "runs").symlink_to(runs["pre"].parent)
    torch.manual_seed(0)
    model = normlab.build("pre", 50, dim=16, ffn_dim=32, heads=2, decoder_layers=2)
    config = normlab.RunFolder(runs["pre"]).config()
    return {
        "normlab": normlab,
        "torch": torch,
        "Path": Path,
        "model": model,
        "batch": torch.randint(1, 50, (4, 17)),
        "loss": loss,
        "sized": sized,
        "optimizer": torch.optim.AdamW(model.parameters(), lr=1e-3),
        "config": config,
        "run": runs["pre"],
        "admin": runs["admin"],
    }


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in NAMES]
)
def test_the_example_of_a_public_name_runs(name: str, given: dict[str, object]):
    public = getattr(normlab, name)
    tests = doctest.DocTestFinder(recurse=False).find(public, name, globs=given)
    (test,) = (one for one in tests if one.name == name)
    assert test.examples, f"the docstring of {name} has no example"
    complaints: list[str] = []
    doctest.DocTestRunner(optionflags=FLAGS).run(test, out=complaints.append)
    assert not complaints, "".join(complaints)


def test_every_public_name_is_callable_whatever_was_imported():
    for found in pkgutil.walk_packages(normlab.__path__, "normlab."):
        if found.name not in ("normlab.__main__",) and not found.name.startswith("normlab.watching."):
            importlib.import_module(found.name)
    assert [name for name in NAMES if not callable(getattr(normlab, name))] == []
    assert normlab.nn is sys.modules["normlab.nn"]


def test_none_writes_a_file_by_its_name_alone():
    assert [name for name in normlab.__all__ if name.startswith("write_")] == []
