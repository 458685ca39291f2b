"""Files that would execute code if they were loaded as PyTorch and NumPy can load files: they are refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from bad_input.damage import TRANSLATE, Payload, pickled
from bad_input.prompt import refused

EXECUTED = Path("executed")


def test_the_payload_is_dangerous(place):
    """Or the tests below would show nothing."""
    torch.save({"a": Payload()}, "bad.pt")
    assert not EXECUTED.exists()
    torch.load("bad.pt", weights_only=False)["a"].close()
    assert EXECUTED.exists()
    EXECUTED.unlink()
    np.save("bad.npy", np.array([Payload()], dtype=object), allow_pickle=True)
    np.load("bad.npy", allow_pickle=True)[0].close()
    assert EXECUTED.exists()


@pytest.mark.parametrize(
    ("name", "start"),
    [("tokenizer.json", "is not a tokenizer ("), ("config.json", "is not UTF-8 text: byte ")],
)
def test_text_that_is_a_pickle(run, capsys, name, start):
    pickled(name)(run)
    said = refused([word.replace("{run}", str(run)) for word in TRANSLATE], capsys)
    assert said.startswith(f"{run / name} {start}")
    assert not EXECUTED.exists()


@pytest.fixture
def masked(run):
    """A run whose ``target_vocab.npy`` is read."""
    config = json.loads((run / "config.json").read_text())
    config["config"]["data"]["target_vocab_mask"] = True
    (run / "config.json").write_text(json.dumps(config))
    return run


def objects(path: Path) -> None:
    np.save(path, np.array([Payload()], dtype=object), allow_pickle=True)


def whole_file(path: Path) -> None:
    torch.save({"a": Payload()}, path)


def bare(path: Path) -> None:
    np.array([Payload()], dtype=object).dump(path)


@pytest.mark.parametrize(
    ("write", "why"),
    [
        (objects, "Object arrays cannot be loaded when allow_pickle=False"),
        (bare, "This file contains pickled (object) data."),
        (whole_file, "it is not an array of 100 truth values"),
        (lambda path: path.write_bytes(b""), "No data left in file"),
        (lambda path: np.save(path, np.ones(7, dtype=bool)), "it is not an array of 100 truth values"),
    ],
    ids=["array of objects", "bare pickle", "saved by torch", "empty", "of another vocabulary"],
)
def test_target_vocab_that_are_no_truth_values(masked, capsys, write, why):
    path = masked / "target_vocab.npy"
    write(path)
    said = refused([word.replace("{run}", str(masked)) for word in TRANSLATE], capsys)
    assert said.startswith(f"{path} is damaged ({why}")
    assert said.endswith("); bring back the file that the model was trained with")
    assert not EXECUTED.exists()
