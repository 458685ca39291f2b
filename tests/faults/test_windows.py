"""A save that is killed before each of its operations, and in the midst of each that writes."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from faults.runs import Server, serving
from normlab.lab.training.checkpoint import load_checkpoint, resume
from zoo import Scalar

KILLED = 9


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with serving(tmp_path_factory.mktemp("server") / "said.txt") as server:
        yield server


@pytest.fixture
def saved(server, tmp_path):
    """A run's folder with the checkpoints of steps 1 and 2."""
    run = tmp_path / "saved"
    run.mkdir()
    for step in (1, 2):
        assert server.do("save", here=True, root=str(run), step=step) == 0
    return run


def resumed(run: Path) -> float:
    """The step that a run goes on from, without a word about anything that is wrong."""
    model = Scalar(0)
    found: list[int] = []

    def load(checkpoint: Path) -> int:
        found.append(load_checkpoint(checkpoint, model, run="it").progress().step)
        return found[-1]

    assert resume(run / "last", run / "previous", load) == ""
    assert found == [model.x.item()], "weights and state are of one step"
    return found[0]


def operations(server: Server, saved: Path) -> list[str]:
    run, log = saved.with_name("whole"), saved.with_name("log")
    shutil.copytree(saved, run)
    assert server.do("save", root=str(run), step=3, watch=str(run), log=str(log)) == 0
    assert resumed(run) == 3
    return log.read_text().splitlines()


@pytest.mark.slow
@pytest.mark.parametrize("torn", [-1.0, 0.0, 0.5])
def test_every_window_leaves_a_whole_checkpoint(server, saved, tmp_path, torn):
    steps = []
    count = len(operations(server, saved))
    assert count > 15
    for at in range(count):
        run = tmp_path / str(at)
        shutil.copytree(saved, run)
        assert server.do("save", root=str(run), step=3, watch=str(run), at=at, torn=torn) == KILLED
        model = Scalar(0)
        read = load_checkpoint(run / "last", model, run="it").progress().step
        assert model.x.item() == read, "and so does a reader"
        steps.append(resumed(run))
        assert steps[-1] == read
        assert server.do("save", root=str(run), step=4) == 0
        assert resumed(run) == 4
        assert sorted(p.name for p in run.iterdir()) == ["last", "previous"]
    assert steps == sorted(steps), "from one moment on it is the new one"
    assert set(steps) == {2, 3}
