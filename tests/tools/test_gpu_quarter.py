"""Every part of the GPU's ten minutes runs on a CPU at a tiny size, and what a part leaves is kept."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from checkout import HOME
from gpu_quarter import DONE, FAILED, INTERRUPTED, PARTS, ROWS, Part, Place, ended, finished, kept, run_part

CPU = torch.device("cpu")
SLEEP = """
import json, pathlib, sys, time
print("ready", flush=True)
try:
    time.sleep(60)
except KeyboardInterrupt:
    with open(sys.argv[1], "a") as file:
        file.write(json.dumps({"part": "sleep", "state": "interrupted"}) + "\\n")
"""


@pytest.fixture
def place(tmp_path):
    """A CPU, at a tiny size."""
    return Place(CPU, tiny=True, runs=tmp_path / "runs")


def test_the_parts_take_ten_minutes_and_each_at_most_four():
    *first, last = (part.limit_s for part in PARTS)
    assert max(*first, last) <= 240
    assert sum(first) < 600 - 30


def test_a_part_that_raises_keeps_its_rows_and_its_error(place, tmp_path):
    def rows(_: Place):
        yield {"what": "first"}
        raise RuntimeError("out of memory")

    run_part(Part("breaks", 1, rows), place, tmp_path, "abc")
    first, last = kept(tmp_path)
    assert (first["what"], first["commit"], first["tiny"]) == ("first", "abc", True)
    assert (last["state"], last["error"]) == (FAILED, "RuntimeError: out of memory")
    assert not finished(tmp_path, CPU, tiny=True)


def test_an_interrupted_part_is_not_done(place, tmp_path):
    def rows(_: Place):
        yield {"what": "first"}
        raise KeyboardInterrupt

    run_part(Part("waits", 1, rows), place, tmp_path, "abc")
    assert [row.get("state") for row in kept(tmp_path)] == [None, INTERRUPTED]
    assert not finished(tmp_path, CPU, tiny=True)


def test_a_part_is_done_on_one_kind_of_device_and_at_one_size(place, tmp_path):
    run_part(Part("holds", 1, lambda _: iter([{"what": "first"}])), place, tmp_path, "abc")
    assert finished(tmp_path, CPU, tiny=True) == {"holds"}
    assert not finished(tmp_path, CPU, tiny=False)
    assert not finished(tmp_path, torch.device("cuda"), tiny=True)


def test_a_line_that_was_cut_off_is_no_row(tmp_path):
    (tmp_path / ROWS).write_text('{"part": "step"}\n{"part": "no', encoding="utf-8")
    assert kept(tmp_path) == [{"part": "step"}]


@pytest.mark.slow
def test_a_part_is_interrupted_at_its_limit(tmp_path):
    command = [sys.executable, "-c", SLEEP, str(tmp_path / ROWS)]
    assert INTERRUPTED in ended(command, 5.0, tmp_path)


@pytest.mark.long
def test_every_part_runs_at_a_tiny_size_and_once(tmp_path):
    source = os.pathsep.join([str(HOME / "src"), os.environ.get("PYTHONPATH", "")])
    out = tmp_path / "out"
    places = ["--device", "cpu", "--tiny", "--out", str(out), "--runs", str(tmp_path / "runs")]

    def run() -> str:
        command = [sys.executable, str(HOME / "tools/gpu_quarter.py"), *places]
        environment = os.environ | {"PYTHONPATH": source}
        return subprocess.run(command, check=True, env=environment, stdout=subprocess.PIPE, text=True).stdout

    run()
    rows = kept(out)
    assert {row["part"]: row["state"] for row in rows if "state" in row} == {p.name: DONE for p in PARTS}
    for name in ("decoder", "torch", "normlab"):
        check, watch, _ = (row for row in rows if row["part"] == name)
        assert check["verdict"] != "fails"
        assert (watch["losses"], watch["notes"]) == (watch["steps"], [])
    for name in ("rezero", "fixup", "looklinear", "gl-en"):
        run_row, _ = (row for row in rows if row["part"] == name)
        assert run_row["step"] == 4
    assert run() == ""
    assert kept(out) == rows
