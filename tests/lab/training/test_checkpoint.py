"""Checkpoints: replaced as a whole, and errors that name what is wrong. Round trips are in contracts/."""

from __future__ import annotations

import errno
import json
import math
import os
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from torch import nn

from contracts.variants import CONFIG, VOCAB, perturbed
from normlab.lab.runs.manifest import CheckpointError
from normlab.lab.tasks.task import build_model
from normlab.lab.training import checkpoint
from normlab.lab.training.checkpoint import (
    FORMAT,
    Checkpoint,
    has_checkpoint,
    load_checkpoint,
    open_checkpoint,
    save_checkpoint,
    weights_state,
)
from normlab.lab.training.parallel import SingleProcess
from normlab.nn import Seq2Seq
from zoo import Scalar


@pytest.fixture
def folder(tmp_path) -> Path:
    return tmp_path / "last"


def save(folder: Path, step: int, **more) -> None:
    save_checkpoint(folder, weights_state(Scalar(step), step), **more)


def stored(folder: Path) -> tuple[float, int]:
    model = Scalar(0.0)
    checkpoint: Checkpoint = load_checkpoint(folder, model)
    return model.x.item(), checkpoint.progress().step


def test_a_new_checkpoint_takes_the_place_of_the_old_one(folder):
    assert not has_checkpoint(folder)
    for step in (1, 2):
        save(folder, step)
        assert stored(folder) == (step, step)
    assert [p.name for p in folder.parent.iterdir()] == ["last"]


def test_the_one_before_it_is_kept_where_somebody_wants_it(folder):
    previous = folder.with_name("previous")
    for step in (1, 2, 3):
        save(folder, step, previous=previous)
    assert stored(folder) == (3, 3)
    assert stored(previous) == (2, 2)
    assert sorted(p.name for p in folder.parent.iterdir()) == ["last", "previous"]


def test_a_save_that_fails_leaves_the_old_one_and_no_rubbish(folder, monkeypatch):
    save(folder, 1)

    why = os.strerror(errno.ENOSPC)

    def full(*args) -> None:
        raise SafetensorError(f"{why} (os error 28)")

    monkeypatch.setattr(checkpoint, "save_file", full)
    with pytest.raises(OSError, match=why):
        save(folder, 2)
    assert stored(folder) == (1, 1)
    assert [p.name for p in folder.parent.iterdir()] == ["last"]


def test_a_new_one_that_did_not_come_to_its_place_is_the_one_that_counts(folder):
    for step in (1, 2):
        save(folder.with_name(f"at{step}"), step)
    folder.with_name("at1").rename(folder)
    folder.with_name("at2").rename(folder.with_name("last.new"))
    assert stored(folder) == (2, 2)
    save(folder, 3, previous=folder.with_name("previous"))
    assert stored(folder) == (3, 3)
    assert stored(folder.with_name("previous")) == (2, 2)


def test_a_part_keeps_its_tensors_and_its_plain_values(folder):
    tensors = {"a": torch.arange(3.0), "b": torch.ones(2, 2, dtype=torch.float64)}
    model = Scalar(1)
    optimizer = torch.optim.Adam(model.parameters())
    whole = SingleProcess(model).state_dict(optimizer) | {"part": {**tensors, "c": 1}, "empty": {}}
    shapes = {"x": torch.Size([1])}
    save_checkpoint(folder, {name: content for name, content in whole.items() if name != "optimizer"})
    with pytest.raises(CheckpointError, match=r"optimizer\.safetensors"):
        open_checkpoint(folder).state(shapes)
    save_checkpoint(folder, whole)  # an optimizer that keeps no tensors yet
    assert open_checkpoint(folder).state(shapes)["optimizer"] == {}
    model.x.sum().backward()
    optimizer.step()
    save_checkpoint(folder, whole | SingleProcess(model).state_dict(optimizer))
    state = open_checkpoint(folder).state(shapes)
    assert state.keys() == {"model", "optimizer", "part"}
    assert state["part"].pop("c") == 1
    assert {name: t.tolist() for name, t in state["part"].items()} == {
        name: t.tolist() for name, t in tensors.items()
    }


STATES = [
    {"loss": math.nan, "bleu": -0.0, "name": "zwölf \u2028"},
    {"pending": [(0.1, [1e-320, 1.0])], "deep": {"2": None, "10": True}, "numbers": {2: "a", 10: "b"}},
]


@pytest.mark.parametrize("state", STATES)
def test_any_state_keeps_its_seal(folder, state):
    save_checkpoint(folder, {"part": state})
    wanted = {"part": json.loads(json.dumps(state))}
    assert repr(open_checkpoint(folder).values) == repr(wanted)
    assert json.loads((folder / "state.json").read_text())["format"] == FORMAT


def test_a_shared_parameter_is_stored_once(folder):
    model = perturbed(replace(CONFIG, encoder_placement="rezero"))
    save_checkpoint(folder, weights_state(model, 1))
    alphas = [name for name in open_checkpoint(folder).weights() if name.endswith("place.alpha")]
    first_of_each_layer = [f"encoder.sublayers.{number}.place.alpha" for number in (0, 2)]
    assert sorted(alphas) == first_of_each_layer
    other = build_model(Seq2Seq, replace(CONFIG, encoder_placement="rezero"), VOCAB, 1).double()
    load_checkpoint(folder, other)
    first, second = (m.encoder.sublayers[0].place.alpha for m in (model, other))
    assert torch.equal(first, second)
    assert second is other.encoder.sublayers[1].place.alpha


def refusal(folder: Path, model: nn.Module, kind: type[Exception] = ValueError) -> str:
    with pytest.raises(kind, match=re.escape(str(folder))) as error:
        load_checkpoint(folder, model)
    return str(error.value).replace(str(folder), "FOLDER")


def anew(folder: Path) -> str:
    run = folder.parent
    aside = f"{run}.aside"
    return (
        f"to train it anew: mv {run} {aside} && normlab train --config {aside}/config.json --out {run.parent}"
    )


def test_a_missing_checkpoint_is_named(folder):
    sentence = "no checkpoint in FOLDER; train the run first: normlab train"
    assert refusal(folder, Scalar(0), FileNotFoundError) == sentence
    folder.mkdir()
    assert refusal(folder, Scalar(0)) == f"FOLDER/state.json is missing; {anew(folder)}"


def test_another_model_is_named(folder):
    save_checkpoint(folder, weights_state(perturbed(CONFIG), 1))
    pre = build_model(Seq2Seq, replace(CONFIG, decoder_placement="pre"), VOCAB, 1)
    assert refusal(folder, pre) == (
        "the checkpoint FOLDER belongs to another model, which differs in 2 tensors, first decoder.end.bias; "
        "bring back the config.json and tokenizer.json that it was trained with"
    )
    larger = build_model(Seq2Seq, CONFIG, VOCAB + 1, 1)
    assert refusal(folder, larger) == (
        "the checkpoint FOLDER holds embedding.weight of shape [13, 16], the model wants [14, 16]; "
        "bring back the config.json and tokenizer.json that it was trained with"
    )


def test_nothing_in_a_checkpoint_is_a_pickle(folder):
    model = Scalar(1.0)
    optimizer = torch.optim.Adam(model.parameters())
    model.x.sum().backward()
    optimizer.step()
    save_checkpoint(folder, SingleProcess(model).state_dict(optimizer) | {"progress": {"step": 1}})
    assert sorted(p.name for p in folder.iterdir()) == [
        "model.safetensors",
        "optimizer.safetensors",
        "state.json",
    ]
    # A pickle begins with its protocol, a zip of pickles with PK.
    assert all(p.read_bytes()[:2] not in (b"\x80\x02", b"\x80\x04", b"PK") for p in folder.iterdir())
