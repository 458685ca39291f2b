"""Checkpoints: replaced as a whole, and errors that name what is wrong. Round trips are in contracts/."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from contracts.variants import SIZE, VOCAB, perturbed
from normlab.run import checkpoint
from normlab.run.checkpoint import has_checkpoint, load_checkpoint, save_checkpoint
from normlab.tasks.build import build_seq2seq


class Scalar(nn.Module):
    def __init__(self, value: float) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.full((1,), float(value)))


@pytest.fixture
def folder(tmp_path) -> Path:
    return tmp_path / "last"


def stored(folder: Path) -> tuple[float, dict]:
    model = Scalar(0.0)
    state = load_checkpoint(folder, model)
    return model.x.item(), state


def test_a_new_checkpoint_takes_the_place_of_the_old_one(folder):
    assert not has_checkpoint(folder)
    for step in (1, 2):
        save_checkpoint(folder, Scalar(step), None, {"step": step})
        assert stored(folder) == (step, {"step": step})
    assert [p.name for p in folder.parent.iterdir()] == ["last"]


@pytest.mark.parametrize("moment", ["while writing", "before renaming", "between the renames"])
def test_a_process_killed_while_saving_leaves_a_whole_checkpoint(folder, monkeypatch, moment):
    save_checkpoint(folder, Scalar(1), None, {"step": 1})

    def killed(*args) -> None:
        raise SystemExit

    if moment == "while writing":
        monkeypatch.setattr(checkpoint, "save_file", killed)
    elif moment == "before renaming":
        monkeypatch.setattr(checkpoint, "_fsync", killed)
    else:
        rename = Path.rename
        monkeypatch.setattr(Path, "rename", lambda p, to: killed() if p.suffix == ".new" else rename(p, to))
    with pytest.raises(SystemExit):
        save_checkpoint(folder, Scalar(2), None, {"step": 2})
    monkeypatch.undo()
    assert has_checkpoint(folder)
    assert stored(folder) == (1, {"step": 1})
    save_checkpoint(folder, Scalar(3), None, {"step": 3})
    assert stored(folder) == (3, {"step": 3})
    assert [p.name for p in folder.parent.iterdir()] == ["last"]


def test_a_killed_save_straight_after_another_loses_nothing(folder, monkeypatch):
    """The renames stopped half-way and the next save is killed too: the first checkpoint is still there."""
    save_checkpoint(folder, Scalar(1), None, {"step": 1})
    folder.rename(folder.with_name("last.old"))

    def killed(*args) -> None:
        raise SystemExit

    monkeypatch.setattr(checkpoint, "save_file", killed)
    with pytest.raises(SystemExit):
        save_checkpoint(folder, Scalar(2), None, {"step": 2})
    assert stored(folder) == (1, {"step": 1})


def test_a_shared_parameter_is_stored_once(folder):
    model = perturbed(replace(SIZE, encoder_placement="rezero"))
    save_checkpoint(folder, model, None, {})
    other = build_seq2seq(replace(SIZE, encoder_placement="rezero"), VOCAB, 1).double()
    load_checkpoint(folder, other)
    first, second = (m.encoder.sublayers[0].place.alpha for m in (model, other))
    assert torch.equal(first, second)
    assert second is other.encoder.sublayers[1].place.alpha


def refusal(folder: Path, model: nn.Module, kind: type[Exception] = ValueError) -> str:
    with pytest.raises(kind, match=re.escape(str(folder))) as error:
        load_checkpoint(folder, model)
    return str(error.value).replace(str(folder), "FOLDER")


def test_a_missing_checkpoint_is_named(folder):
    sentence = "no checkpoint in FOLDER; train the run first: normlab train"
    assert refusal(folder, Scalar(0), FileNotFoundError) == sentence
    folder.mkdir()
    assert refusal(folder, Scalar(0), FileNotFoundError) == sentence


def test_another_model_is_named(folder):
    save_checkpoint(folder, perturbed(SIZE), None, {})
    pre = build_seq2seq(replace(SIZE, decoder_placement="pre"), VOCAB, 1)
    assert refusal(folder, pre) == (
        "the checkpoint FOLDER belongs to another model: 2 tensors differ, first decoder.end.bias; "
        "bring back the config.json and tokenizer.json that it was trained with"
    )
    larger = build_seq2seq(SIZE, VOCAB + 1, 1)
    assert refusal(folder, larger) == (
        "the checkpoint FOLDER holds embedding.weight of shape [13, 16], the model wants [14, 16]; "
        "bring back the config.json and tokenizer.json that it was trained with"
    )


def test_nothing_in_a_checkpoint_is_a_pickle(folder):
    model = Scalar(1.0)
    optimiser = torch.optim.Adam(model.parameters())
    model.x.sum().backward()
    optimiser.step()
    save_checkpoint(folder, model, optimiser, {"step": 1})
    assert sorted(p.name for p in folder.iterdir()) == [
        "model.safetensors",
        "optimiser.safetensors",
        "state.json",
    ]
    # A pickle begins with its protocol, a zip of pickles with PK.
    assert all(p.read_bytes()[:2] not in (b"\x80\x02", b"\x80\x04", b"PK") for p in folder.iterdir())
