"""Every command takes a training script as it is; none but watch changes a file."""

from __future__ import annotations

import json
import shutil
import sys
import warnings
from pathlib import Path

import pytest

from cases import each
from normlab.cli.main import main
from normlab.cli.watch import _warnings_as_sentences
from normlab.watching.watcher import WatchWarning
from setups.doors import SCRIPTS, hashes


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """A copy of the scripts, as the current folder."""
    monkeypatch.chdir(tmp_path)
    for name in ("door_sized", "models", "untrained"):
        shutil.copy(SCRIPTS / f"{name}.py", tmp_path)
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path


def test_check(folder, capsys):
    before = hashes(folder)
    assert main(["check", "door_sized.py", "--json", "--", "--width", "8"]) == 0
    assert json.loads(capsys.readouterr().out)["model"] == "Decoder"
    assert hashes(folder) == before


@pytest.mark.slow
def test_trial(folder, capsys):
    before = hashes(folder)
    typed = ["--steps", "16", "--rates", "3e-3", "--json"]
    assert main(["trial", "door_sized.py", *typed, "--", "--steps", "12"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert [one["rate"] for one in answer["trials"]] == [3e-3]
    assert answer["facts"]["batches"].startswith("12 of the script's")
    assert hashes(folder) == before


@pytest.mark.slow
def test_trial_of_a_module(folder, capsys):
    assert main(["trial", "-m", "door_sized", "--steps", "16", "--rates", "3e-3", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["trials"]


@pytest.mark.slow
def test_diagnose(folder, capsys, tmp_path_factory):
    before, out = hashes(folder), tmp_path_factory.mktemp("out")
    assert main(["diagnose", "door_sized.py", "--preset", "cheap", "--out", str(out), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["title"] == "Decoder of door_sized.py"
    assert hashes(folder) == before


@pytest.mark.slow
def test_transfer(folder, capsys):
    before = hashes(folder)
    typed = ["--widths", "8", "16", "--steps", "16", "--seeds", "2", "--rates", *map(str, RATES), "--json"]
    script = ["--", "--width={width}", "--seed={seed}"]
    assert main(["transfer", "door_sized.py", *typed, *script]) in (0, 3)
    answer = json.loads(capsys.readouterr().out)
    assert (answer["axis"], answer["sizes"]) == ("width", [8, 16])
    assert [model["parameters"] for model in answer["models"]] == sorted(
        {model["parameters"] for model in answer["models"]}
    )
    assert hashes(folder) == before


RATES = (1e-3, 2e-3, 4e-3, 8e-3, 16e-3)


@pytest.mark.slow
def test_transfer_over_depths(folder, capsys):
    typed = ["--depths", "1", "2", "--steps", "16", "--seeds", "2", "--rates", *map(str, RATES), "--json"]
    script = ["--", "--depth", "{depth}", "--seed", "{seed}"]
    assert main(["transfer", "door_sized.py", *typed, *script]) in (0, 3)
    assert json.loads(capsys.readouterr().out)["axis"] == "depth"


def rows(file: Path, signal: str) -> dict[int, float]:
    """By step, the values of a signal of the whole model."""
    lines = map(json.loads, file.read_text().splitlines())
    return {row["step"]: row["value"] for row in lines if row["signal"] == signal and not row["module"]}


def test_watch_trains_to_the_end_and_writes_a_page(folder, capsys):
    typed = ["--every-steps", "3", "--out", "seen"]
    assert main(["watch", "door_sized.py", *typed, "--", "--steps", "10"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == (
        "watched 10 steps of door_sized.py: nothing went wrong; page: seen/watch.html"
    )
    assert (folder / "seen" / "watch.html").is_file()
    losses = rows(folder / "seen" / "watch.jsonl", "loss")
    assert list(losses) == [0, 3, 6, 9]
    assert losses[9] < losses[0]


@pytest.mark.slow
def test_watch_of_a_module(folder, capsys):
    assert main(["watch", "-m", "door_sized", "--", "--steps", "4"]) == 0
    assert (folder / "watch" / "watch.html").is_file()


def test_a_warning_of_the_watch_is_printed_as_its_sentence():
    place = ("watcher.py", 12, "warnings.warn(sentence)")
    with _warnings_as_sentences():
        assert (
            warnings.formatwarning(WatchWarning("the loss rises"), WatchWarning, *place) == "the loss rises\n"
        )
        assert "watcher.py" in warnings.formatwarning(UserWarning("other"), UserWarning, *place)


@pytest.mark.slow
def test_watch_ends_with_what_went_wrong_first(folder, capsys):
    file = folder / "door_sized.py"
    file.write_text(file.read_text().replace("lr=3e-3", "lr=1e30"))
    with pytest.warns(UserWarning, match="flight recorder"):
        assert main(["watch", "door_sized.py", "--", "--steps", "6"]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    flight = json.loads((folder / "watch" / "watch.flight.json").read_text())
    assert flight["steps"] == 6
    assert flight["reports"][0]["trigger"]["words"] in last
    assert last.endswith("page: watch/watch.html")


@pytest.mark.slow
def test_watch_writes_the_page_of_a_script_that_raises(folder, capsys):
    assert main(["watch", "door_sized.py", "--", "--fail-at", "4"]) == 2
    said = capsys.readouterr()
    assert "page: watch/watch.html" in said.out
    assert "ValueError" in said.err


REFUSED = {
    "arguments without a script": (["trial", "--recipe", "pre", "--", "--lr", "3"], "only a script takes"),
    "arguments of a function": (["check", "door_sized.py:setup", "--", "--lr", "3"], "only a script takes"),
    "arguments alone": (["check", "--", "--lr", "3"], "only a script takes"),
    "two scripts": (["check", "door_sized.py", "-m", "door_sized"], "two scripts"),
    "two watched scripts": (["watch", "door_sized.py", "-m", "door_sized"], "two scripts"),
    "a command that runs none": (["recipes", "--", "x"], "runs no script"),
    "no place for a width": (["transfer", "door_sized.py", "--widths", "8", "16"], "{width}"),
    "a width without widths": (
        ["transfer", "door_sized.py", "--depths", "1", "2", "--", "--width={width}", "--depth={depth}"],
        "--widths",
    ),
    "sizes of no axis": (["transfer", "door_sized.py", "--", "--width={width}"], "widths or depths"),
    "no seed": (
        ["transfer", "door_sized.py", "--widths", "8", "16", "--steps", "16", "--", "--width={width}"],
        "{seed}",
    ),
    "a script that never trains": (["check", "untrained.py"], "without a step"),
    "a tried script that never trains": (["trial", "untrained.py"], "without a step"),
    "a watched script that never trains": (["watch", "untrained.py"], "nothing was watched"),
    "no training script": (["watch", "door_sized.py:setup"], "not a training script"),
    "nothing": (["watch", "--every-steps", "5"], "normlab watch train.py"),
    "no such file": (["watch", "nowhere.py"], "no file nowhere.py"),
}


@pytest.mark.slow
@each("arguments, words", REFUSED.values(), ids=REFUSED)
def test_what_is_typed_wrongly_is_named(arguments, words, folder, capsys):
    assert main(arguments) == 2
    assert words in capsys.readouterr().err
