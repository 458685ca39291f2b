"""A start from another run's weights."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from bad_input.damage import EDITED, changed, foreign
from keep import keep_run
from lab.training.test_train import files, interrupt_at, without_seconds
from lab.training.test_weights import keeping, weights
from lab.training.tiny import tiny
from normlab.lab.config import run_id
from normlab.lab.runs import RunFolder
from normlab.lab.training.replay import examine
from normlab.lab.training.train import train
from normlab.lab.training.weights import digest, with_start


@pytest.fixture(scope="module")
def source(text, tmp_path_factory):
    """A run whose weights others start from, and the folder of the runs."""
    return train(tiny(text), tmp_path_factory.mktemp("source"))


def started(config, source, digest=""):
    return replace(config, train=replace(config.train, init_from=str(source.path), init_digest=digest))


@pytest.mark.slow
def test_a_run_starts_from_all_weights_that_fit(text, source, tmp_path):
    config = keeping(started(tiny(text, seed=2, steps=2), source), "log")
    config = replace(config, model=replace(config.model, decoder_layers=2, ffn_dim=24))
    folder = train(config, tmp_path)
    given, first = weights(source.best), weights(folder.steps / "0")
    note = json.loads(folder.start.read_text())
    assert set(note["taken"]) == {n for n, w in first.items() if n in given and w.shape == given[n].shape}
    assert all(torch.equal(first[name], given[name]) for name in note["taken"])
    assert set(note["other_shape"]) == {
        n for n, w in first.items() if n in given and w.shape != given[n].shape
    }
    assert set(note["not_there"]) == first.keys() - given.keys()
    assert set(note["left_over"]) == given.keys() - first.keys()
    assert (note["run"], note["weights"]) == (source.path.name, "best")
    assert note["other_shape"]
    assert note["not_there"]
    count = len(note["taken"])
    beginning = (
        f"starts from the best weights of {source.path.name}: {count} tensors taken; of another shape: "
    )
    assert note["sentence"].startswith(beginning)
    assert ": decoder.sublayers.3." in note["sentence"]
    assert folder.status().step == 2, "steps begin anew"


@pytest.mark.slow
def test_the_id_holds_the_weights_and_not_where_they_lie(text, source, tmp_path):
    config = tiny(text, steps=2)
    moved = tmp_path / "elsewhere"
    shutil.copytree(source.path, moved)
    here, there = (with_start(started(config, folder), tmp_path) for folder in (source, type(source)(moved)))
    assert here.train.init_digest == digest(load_file(source.best / "model.safetensors"))
    assert run_id(here) == run_id(there) != run_id(config)
    assert with_start(config, tmp_path) == config
    by_id = replace(config, train=replace(config.train, init_from=source.path.name[:8]))
    assert with_start(by_id, source.path.parent) == here


def test_the_digest_tells_names_shapes_kinds_and_contents_apart():
    zeros = torch.zeros(2, 3)
    different = [
        {"a": zeros},
        {"b": zeros},
        {"a": zeros.view(3, 2)},
        {"a": zeros.int()},
        {"a": zeros + 1},
        {"a": zeros, "b": zeros},
    ]
    assert len({digest(weights) for weights in different}) == len(different)
    assert digest({"b": zeros, "a": zeros}) == digest(different[-1]), "in any order"


@pytest.mark.slow
def test_an_interrupted_run_needs_the_other_one_no_more(text, source, tmp_path, monkeypatch):
    moved = tmp_path / "source"
    shutil.copytree(source.path, moved)
    config = with_start(started(tiny(text, seed=3, steps=8), type(source)(moved)), tmp_path)
    whole = train(config, tmp_path / "whole")
    interrupt_at(monkeypatch, 5)
    with pytest.raises(KeyboardInterrupt):
        train(config, tmp_path / "parts")
    examine(whole.path, 3)
    assert whole.flights()[-1]["replay"]["agrees"]
    shutil.rmtree(moved)
    parts = train(config, tmp_path / "parts")
    assert without_seconds(parts) == without_seconds(whole)
    assert files(parts) == files(whole)


def test_what_is_kept_for_good_names_the_run_and_no_path(text, source, tmp_path):
    folder = train(started(tiny(text, steps=1), source), tmp_path)
    assert str(source.path) in folder.log.read_text()
    keep_run(folder, tmp_path / "kept")
    kept = RunFolder(tmp_path / "kept")
    assert kept.config().train.init_from == source.path.name
    assert kept.start.read_bytes() == folder.start.read_bytes()
    assert not kept.log.exists()
    for path in kept.path.iterdir():
        assert str(source.path).encode() not in path.read_bytes(), path.name


def refused(config, root):
    with pytest.raises((ValueError, FileNotFoundError)) as told:
        train(config, root)
    return str(told.value)


def test_what_cannot_be_a_start_is_refused(text, source, tmp_path):
    config = started(tiny(text, steps=2), source)
    other = replace(config, data=replace(config.data, vocab_size=90))
    assert refused(other, tmp_path) == (
        f"{source.path} was trained with another tokenizer, so its embeddings are of other pieces; type "
        f"--tokenizer {source.tokenizer}, or leave out --init-from"
    )
    model = replace(config.model, dim=24, ffn_dim=40, encoder_layers=0)
    assert "nothing" in refused(replace(config, model=replace(model, encoder_layers=1)), tmp_path)
    edited = started(config, source, "0" * 16)
    assert refused(edited, tmp_path) == (
        f"the weights of {source.path} have the digest {digest(weights(source.best))}, and this run starts "
        f"from {'0' * 16}; bring those back, or start another run from what is there: --init-from "
        f"{source.path}"
    )
    for damage, why in (
        (changed("best/model.safetensors"), f"/best/model.safetensors {EDITED}"),
        (foreign("best"), f"/best belongs to the run 0123456789ab, and this is {source.path.name}"),
    ):
        copy = shutil.copytree(source.path, tmp_path / source.path.name)
        damage(copy)
        assert refused(started(config, RunFolder(copy)), tmp_path).startswith(f"{copy}{why}; ")
        shutil.rmtree(copy)
    nowhere = replace(config, train=replace(config.train, init_from="zzz"))
    assert refused(nowhere, source.path.parent).startswith(
        f"no run 'zzz' in {source.path.parent}, which holds"
    )
