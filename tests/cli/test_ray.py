"""Comparisons on a Ray cluster of two nodes, one of which is lost with all its processes while it trains.

    python -m pytest -m long -s tests/cli/test_ray.py

trains sixty small runs so, and the same sixty on this machine alone: twenty minutes on two busy cores.
"""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

import pytest

from cli.test_soak import descendants, timeless_page
from cli.typed import NORMLAB, TINY, normlab
from normlab.lab.runs import Runs

pytestmark = pytest.mark.skipif(find_spec("ray") is None, reason="needs Ray: pip install 'normlab[cluster]'")
LONGER = [*TINY, "--steps", "100", "--checkpoint-every-steps", "5", "--exchanges", "100"]
FEW = ["--recipes", "pre", "post+warmup", "--lrs", "1e-3", "--seeds", "2", *LONGER]
SIXTY = [
    *("--recipes", "post", "post+warmup", "pre", "admin", "pre+fixnorm+scalenorm"),
    *("--lrs", "5e-4", "1e-3", "2e-3", "--seeds", "9"),
    *(*LONGER, "--steps", "40", "--validate-every-steps", "20"),
]


@pytest.fixture
def second_node(loopback, monkeypatch):
    """The process of the second node of a cluster of two, from which all others of that node come."""
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setenv("RAY_worker_niceness", "0")  # Ray's 15 would starve on a busy machine
    command = [sys.executable, Path(__file__).with_name("ray_nodes.py")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as nodes:
        assert nodes.stdout is not None
        address, process = json.loads(nodes.stdout.readline())
        monkeypatch.setenv("RAY_ADDRESS", address)
        yield process
        nodes.communicate()


def run_on(node: int, root: Path):
    """The run that has a checkpoint and is in training on a node; None if there is none."""
    for run in Runs(root):
        with suppress(OSError, ValueError):
            _, process = (run.path / "lock").read_text().split()
            if int(process) in descendants(node) and (run.last / "state.json").exists():
                return run
    return None


def lose(node: int, root: Path):
    """Kill a node in mid-run, as if its machine were switched off; return the run."""
    until = time.monotonic() + 300
    while not (run := run_on(node, root)):
        assert time.monotonic() < until, "nothing trains on that node"
        time.sleep(0.02)
    for process in (node, *descendants(node)):
        os.kill(process, signal.SIGKILL)
    return run


def typed(arguments, cwd):
    return subprocess.Popen(
        [*NORMLAB, *arguments], cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def same_with_a_node_lost(arguments, number, node, tmp_path, skip=0):
    """Compare here, and on a cluster that loses a node once ``skip`` runs are done."""
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    begun = time.monotonic()
    local = normlab("compare", *arguments, "--jobs", "2", cwd=here)
    assert local.returncode == 0, local.stderr
    middle = time.monotonic()
    process = typed(["compare", *arguments, "--on", "ray"], there)
    while sum(run.status().state == "done" for run in Runs(there / "runs")) < skip:
        assert process.poll() is None
        time.sleep(0.5)
    lost = lose(node, there / "runs")
    said, noise = process.communicate()
    assert process.returncode == 0, noise
    assert lost.status().state == "done"
    for folder in (here, there):
        assert [run.status().state for run in Runs(folder / "runs")] == ["done"] * number
    assert "(raylet)" not in noise
    assert "page: " in said
    assert timeless_page(there).replace(" --on ray", "") == timeless_page(here).replace(" --jobs 2", "")
    took = f"{middle - begun:.0f} s here, {time.monotonic() - middle:.0f} s on the cluster"
    sys.stdout.write(f"\n{number} runs, {took}, the node lost in {lost.path.name}\n")


@pytest.mark.wide
def test_a_comparison_is_the_same_although_a_node_is_lost(second_node, tmp_path):
    same_with_a_node_lost(FEW, 4, second_node, tmp_path)


@pytest.mark.long
def test_sixty_runs_are_whole_and_the_page_is_the_same_although_a_node_is_lost(second_node, tmp_path):
    same_with_a_node_lost(SIXTY, 60, second_node, tmp_path, skip=40)


@pytest.mark.wide
def test_a_stop_saves_the_runs_on_every_node_and_they_go_on_here(second_node, tmp_path):
    arguments = ["compare", *FEW, "--seeds", "1", "--steps", "600", "--validate-every-steps", "300"]
    process = typed([*arguments, "--on", "ray"], tmp_path)
    until = time.monotonic() + 300
    while len([run for run in Runs(tmp_path / "runs") if len(run.metrics()) > 2]) < 2:
        assert process.poll() is None
        assert time.monotonic() < until
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    _, noise = process.communicate()
    assert process.returncode == 130, noise
    assert "same command" in noise
    states = [(run.status().state, (run.last / "state.json").exists()) for run in Runs(tmp_path / "runs")]
    assert states == [("interrupted", True)] * 2
    steps = {run.path: run.status().step for run in Runs(tmp_path / "runs")}
    again = normlab(*arguments, cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    for run in Runs(tmp_path / "runs"):
        assert run.status().state == "done"
        times = [row["step"] for row in run.metrics() if row["kind"] == "train"]
        assert len(times) == len(set(times)), f"{run.path}, which was stopped at {steps.get(run.path)}"
    assert len(list(Runs(tmp_path / "runs"))) == 2


@pytest.mark.wide
def test_an_address_without_a_cluster_is_refused(tmp_path, loopback):
    environment = {**os.environ, "RAY_ADDRESS": "127.0.0.1:1"}
    refused = normlab("compare", *TINY, "--on", "ray", cwd=tmp_path, env=environment)
    assert refused.returncode == 2
    assert "127.0.0.1:1" in refused.stderr
    assert "start --head" in refused.stderr
    assert "Traceback" not in refused.stderr
