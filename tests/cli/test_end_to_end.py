"""The commands on real training, as a user types them: small, but nothing is a stand-in."""

import json
import os
import signal
import subprocess
import time

import pytest

from cases import few
from cli.typed import NORMLAB, TINY, normlab
from normlab.lab.runs import Runs


@pytest.mark.slow
def test_compare_then_every_other_command(tmp_path):
    compare = [
        "compare",
        "--recipes",
        "pre",
        "post+warmup",
        "--lrs",
        "1e-3",
        "3e-3",
        "--seeds",
        "2",
        "--exchanges",
        "100",
        *TINY,
    ]
    first = normlab(*compare, cwd=tmp_path)
    assert first.returncode == 0, first.stderr
    assert "page: runs/comparison.html" in first.stdout
    page = (tmp_path / "runs/comparison.html").read_text()
    assert "post+warmup" in page
    assert len(page) < 5_000_000
    folders = list(Runs(tmp_path / "runs"))
    assert len(folders) == 2 * 2 + 2 * 2
    comparison = json.loads((tmp_path / "runs/comparison.json").read_text())
    assert {r["name"] for r in comparison["recipes"]} == {"pre", "post+warmup"}

    written = {f.path: (f.path / "metrics.jsonl").stat().st_mtime_ns for f in folders}
    again = normlab(*compare, cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    assert {f.path: (f.path / "metrics.jsonl").stat().st_mtime_ns for f in folders} == written

    run = folders[0].path.name
    listed = normlab("run", "list", cwd=tmp_path)
    assert listed.stdout.count("30/30") == len(folders)
    text = "seven\ntwo hundred and three\n"
    translated = normlab("run", "translate", run, "--beam", "2", cwd=tmp_path, input=text)
    assert translated.returncode == 0, translated.stderr
    assert translated.stdout.count("\n") == 2
    assert normlab("run", "report", run, cwd=tmp_path).stdout == f"page: runs/{run}/run.html\n"
    replay = normlab("train", "--config", f"runs/{run}/config.json", "--out", "elsewhere", cwd=tmp_path)
    assert replay.returncode == 0, replay.stderr
    repeated = tmp_path / "elsewhere" / run / "test.hyp.txt"
    assert repeated.read_text() == (tmp_path / "runs" / run / "test.hyp.txt").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("number", few([signal.SIGINT, signal.SIGTERM], 1))
def test_a_stopped_run_goes_on_with_the_same_command(tmp_path, number):
    train = ["train", "--recipe", "pre", *TINY, "--steps", "600", "--validate-every-steps", "600"]
    with subprocess.Popen([*NORMLAB, *train], cwd=tmp_path, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if "step " in line:
                break
        time.sleep(1)
        os.kill(process.pid, number)
        said = process.stderr.read()
        assert process.wait(timeout=60) == 130
    assert "same command" in said
    (folder,) = Runs(tmp_path / "runs")
    stopped = folder.status()
    assert stopped.state == "interrupted"
    assert 0 < stopped.step < 600
    rest = subprocess.run([*NORMLAB, *train], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert rest.returncode == 0, rest.stderr
    assert folder.status().state == "done"
    steps = [row["step"] for row in folder.metrics() if row["kind"] == "train"]
    assert steps == sorted(set(steps))


@pytest.mark.slow
def test_a_translation_is_stopped_by_a_signal(tmp_path):
    trained = normlab("train", "--recipe", "pre", *TINY, cwd=tmp_path)
    assert trained.returncode == 0, trained.stderr
    (folder,) = Runs(tmp_path / "runs")
    (tmp_path / "long.txt").write_text("ein Satz am siebten Tag\n" * 200_000)
    command = [*NORMLAB, "run", "translate", folder.path.name, "long.txt", "--output", "out.txt"]
    with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert "translating" in process.stderr.readline()
        time.sleep(2)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=20) == 130
        assert "Traceback" not in process.stderr.read()
    assert not (tmp_path / "out.txt").exists()
