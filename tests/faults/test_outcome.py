"""What the kill points compare can differ: one bit, one digit or one row is enough."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from bad_input.damage import changed
from faults.runs import CASES, configuration, differences, outcome, write_text
from normlab.lab.runs import RunFolder
from normlab.lab.training.train import train


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    return train(configuration(write_text(folder / "text"), CASES[0]), folder / "runs")


@pytest.fixture(scope="module")
def of_whole(whole):
    return outcome(whole)


@pytest.fixture
def copy(whole, tmp_path):
    shutil.copytree(whole.path, tmp_path / "copy")
    return tmp_path / "copy"


def edited_row(name: str, field: str):
    """Change the last digits of one number of the second row."""

    def edit(run: Path) -> None:
        lines = (run / name).read_text().splitlines()
        row = json.loads(lines[1])
        lines[1] = json.dumps(row | {field: row[field] * (1 + 2**-50)})
        (run / name).write_text("".join(f"{line}\n" for line in lines))

    return edit


def missing_row(name: str):
    def edit(run: Path) -> None:
        (run / name).write_text("".join(f"{line}\n" for line in (run / name).read_text().splitlines()[:-1]))

    return edit


def added_row(name: str):
    """Write the last row twice."""

    def edit(run: Path) -> None:
        lines = (run / name).read_text().splitlines()
        (run / name).write_text("".join(f"{line}\n" for line in [*lines, lines[-1]]))

    return edit


def edited_state(name: str, **fields: object):
    def edit(run: Path) -> None:
        content = json.loads((run / name).read_text())
        (run / name).write_text(json.dumps(content | fields))

    return edit


EDITS = {
    "last/model.safetensors": changed("last/model.safetensors"),
    "last/optimizer.safetensors": changed("last/optimizer.safetensors"),
    "best/model.safetensors": changed("best/model.safetensors"),
    "test.hyp.txt": lambda run: (run / "test.hyp.txt").write_text("a\n"),
    "scores.json": edited_state("scores.json", bleu=1e-9),
    "flight.json": lambda run: (run / "flight.json").write_text("{}"),
    "metrics.jsonl": edited_row("metrics.jsonl", "loss"),
    "last/state.json": edited_state("last/state.json", progress={"step": 14, "tokens": 1}),
    "best/state.json": edited_state("best/state.json", progress={"step": 1}),
    "status.json": edited_state("status.json", best_step=1),
}


@pytest.mark.slow
def test_a_copy_differs_in_nothing(of_whole, copy):
    assert differences(of_whole, outcome(RunFolder(copy))) == []


@pytest.mark.slow
@pytest.mark.parametrize(("name", "edit"), EDITS.items(), ids=list(EDITS))
def test_an_edit_is_seen(of_whole, copy, name, edit):
    edit(copy)
    assert differences(of_whole, outcome(RunFolder(copy))) == [name]


@pytest.mark.parametrize(
    ("name", "edit"),
    [
        ("metrics.jsonl", missing_row("metrics.jsonl")),
        ("metrics.jsonl", added_row("metrics.jsonl")),
        ("probes.jsonl", missing_row("probes.jsonl")),
        ("probes.jsonl", added_row("probes.jsonl")),
        ("probes.jsonl", edited_row("probes.jsonl", "value")),
    ],
)
def test_a_row_less_a_row_more_and_another_number_are_seen(of_whole, copy, name, edit):
    edit(copy)
    assert differences(of_whole, outcome(RunFolder(copy))) == [name]


def test_seconds_are_not_compared(of_whole, copy):
    edited_state("status.json", train_seconds=1e3)(copy)
    edited_row("metrics.jsonl", "seconds")(copy)
    assert differences(of_whole, outcome(RunFolder(copy))) == []
