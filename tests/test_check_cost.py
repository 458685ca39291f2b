"""The table of what a check costs, and the command that makes it, which goes on where it was interrupted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from scripts import script

cost = script("check_cost")
ROW = cost.Row("modules_100", "modules", 4000, 60.0, 2.5, 2.25, 2**30, 38, 30, 1.0)


def test_the_table_is_that_of_the_results():
    document = cost.PAGE.read_text(encoding="utf-8")
    tables = {
        cost.PLACE: cost.table(list(cost.kept().values())),
        cost.PLACE_OF_MEMORY: cost.memory_table(cost.kept_memory()),
    }
    assert document == cost.with_tables(document, tables)


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The sizes that a command has measured; each gets a made-up row, so that no time is spent."""
    measured = list[str]()

    def quickly(name: str) -> Any:
        measured.append(name)
        return cost.Row(**{**vars(ROW), "name": name, "axis": cost.SIZES[name].axis})

    page = tmp_path / "check.md"
    places = (cost.PLACE, cost.PLACE_OF_MEMORY)
    page.write_text("".join(f"<!-- {p} -->\n<!-- end of {p} -->\n" for p in places), encoding="utf-8")
    monkeypatch.setattr(cost, "PAGE", page)
    monkeypatch.setattr(cost, "RESULTS", tmp_path / "results.json")
    monkeypatch.setattr(cost, "in_a_process", quickly)
    return measured


def test_what_is_measured_is_not_measured_again_while_the_source_is_the_same(
    asked: list[str], monkeypatch: pytest.MonkeyPatch
):
    cost.main(["modules_100"])
    cost.main(["modules_100", "1M"])
    assert asked == ["modules_100", "1M"]
    cost.main(["modules_100", "--again"])
    assert asked[2:] == ["modules_100"]
    monkeypatch.setattr(cost, "source_of_normlab", lambda: "other")
    cost.main(["1M"])
    assert asked[3:] == ["1M"]
    assert list(cost.kept()) == ["1M", "modules_100"]
    assert cost.PAGE.read_text(encoding="utf-8").count("| modules | 100 |") == 1


def test_an_interrupted_command_keeps_what_it_has(asked: list[str], monkeypatch: pytest.MonkeyPatch):
    quickly = cost.in_a_process

    def interrupted(name: str) -> Any:
        if name == "30M":
            raise KeyboardInterrupt
        return quickly(name)

    monkeypatch.setattr(cost, "in_a_process", interrupted)
    with pytest.raises(KeyboardInterrupt):
        cost.main(["1M", "10M", "30M"])
    assert list(cost.kept()) == ["1M", "10M"]
    monkeypatch.setattr(cost, "in_a_process", quickly)
    cost.main(["1M", "10M", "30M"])
    assert asked == ["1M", "10M", "30M"]


def test_a_process_that_is_killed_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    shot = tmp_path / "shot.py"
    shot.write_text("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n", encoding="utf-8")
    monkeypatch.setattr(cost, "__file__", str(shot))
    row = cost.in_a_process("1M")
    assert row.ended == "the process ended with -9"
    assert row.ended in cost.table([row])
