"""Sealed folders without torch: what is written counts as a whole or not at all."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path

import pytest

from normlab.lab.runs import manifest
from normlab.lab.runs.manifest import CheckpointError, commit, committed, read_state, recover


def write(folder: Path, text: str, **more) -> None:
    with commit(folder, {"text": text}, **more) as new:
        (new / "a.txt").write_text(text)


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "run" / "kept"
    write(folder, "one", run="it")
    return folder


def test_what_was_written_is_read(folder):
    assert read_state(folder, run="it") == read_state(folder) == {"text": "one"}
    manifest = json.loads((folder / "state.json").read_text())["manifest"]
    assert manifest["run"] == "it"
    assert manifest["files"]["a.txt"] == {
        "bytes": 3,
        "sha256": "7692c3ad3540bb803c020b3aee66cd8887123234ea0c6e7143c0add73ff431ed",
    }


def test_a_writer_that_fails_changes_nothing(folder):
    with suppress(ZeroDivisionError), commit(folder, {"text": "two"}) as new:
        (new / "a.txt").write_text("two")
        _ = 1 / 0
    assert read_state(folder) == {"text": "one"}
    assert [p.name for p in folder.parent.iterdir()] == ["kept"]


def test_a_new_one_counts_from_its_state_on(folder):
    new = folder.with_name("kept.new")
    new.mkdir()
    (new / "a.txt").write_text("two")
    assert committed(folder) == folder
    write(folder.with_name("other"), "two", run="it")
    (folder.with_name("other") / "state.json").rename(new / "state.json")
    assert committed(folder) == new
    recover(folder, keep=folder.with_name("before"))
    assert read_state(folder, run="it") == {"text": "two"}
    assert read_state(folder.with_name("before"), run="it") == {"text": "one"}


def test_everything_is_on_the_disk_before_it_is_relied_on(folder, monkeypatch):
    """Files come before the state that vouches for them, the names of the folders last."""
    synced, wait = [], os.fsync

    def fsync(descriptor: int) -> None:
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        synced.append((path.name, sorted(p.name for p in folder.parent.iterdir())))
        wait(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    write(folder, "two", keep=folder.with_name("before"))
    names = [name for name, _ in synced]
    written = next(name for name in names if name.startswith(".state.json."))
    assert names == ["a.txt", "kept.new", written, "kept.new", "run", "run"]
    assert [there for name, there in synced if name == "run"] == [["kept", "kept.new"], ["before", "kept"]]


def refusal(folder: Path, run: str = "") -> str:
    with pytest.raises(CheckpointError) as error:
        read_state(folder, run=run)
    assert str(error.value) == f"{error.value.why}; {error.value.todo}"
    return error.value.why.replace(str(folder), "FOLDER")


def test_what_is_wrong_is_named(folder):
    assert refusal(folder, "other") == "FOLDER belongs to the run it, and this is other"
    path = folder / "a.txt"
    for text, why in {
        "onf": "was edited: it no longer has the SHA-256 that state.json gives",
        "on": "is shorter than it was written: cut off, or another file",
        "ones": "was edited: it no longer has the SHA-256 that state.json gives",
    }.items():
        path.write_text(text)
        assert refusal(folder) == f"FOLDER/a.txt {why}"
    path.unlink()
    assert refusal(folder) == "FOLDER/a.txt is missing"


def test_tensors_that_were_put_there_later_are_named(folder):
    (folder / "notes.txt").write_text("nobody loads it")
    assert read_state(folder) == {"text": "one"}
    (folder / "extra.safetensors").write_bytes(b"")
    assert refusal(folder) == ("FOLDER/extra.safetensors was added later: state.json does not name it")


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (3, "manifest must be an object, got 3"),
        ({"run": "it", "files": {}}, "manifest lacks state; add what is missing"),
        ({"run": "it", "files": [], "state": ""}, "manifest.files must be an object, got []"),
        (
            {"run": "it", "files": {"a.txt": {"bytes": "3", "sha256": ""}}, "state": ""},
            "manifest.files.a.txt.bytes must be a whole number, got '3'",
        ),
    ],
)
def test_a_manifest_of_another_kind_is_named(folder, content, why):
    path = folder / "state.json"
    if isinstance(content, dict) and "state" in content:
        content["state"] = manifest._digest({"text": "one"}, content)
    path.write_text(json.dumps({"text": "one", "manifest": content}))
    assert refusal(folder) == f"FOLDER/state.json is damaged ({why})"


@pytest.mark.parametrize("key", ["text", "run", "files", "state"])
def test_every_part_of_the_state_is_under_the_manifest(folder, key):
    path = folder / "state.json"
    content = json.loads(path.read_text())
    place = content if key in content else content["manifest"]
    place[key] = {} if key == "files" else "another"
    path.write_text(json.dumps(content))
    assert refusal(folder) == "FOLDER/state.json was edited: it no longer has the SHA-256 of its manifest"
