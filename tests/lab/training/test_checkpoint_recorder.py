"""The flight recorder of a run that was killed: it still knows what was seen before the checkpoint."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lab.training.tiny import PowerCutError, tiny
from normlab.lab.runs import RunFolder
from normlab.lab.training.train import train


@pytest.fixture(scope="module")
def config(text):
    config = tiny(text, steps=100, lr=300.0)
    return replace(config, machine=replace(config.machine, checkpoint_every_steps=3))


@pytest.fixture(scope="module")
def whole(config, tmp_path_factory):
    folder = train(config, tmp_path_factory.mktemp("whole"))
    assert folder.flights(), "it went wrong"
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("before", [2, 6])
def test_reports_are_those_of_a_run_that_nobody_killed(config, whole, tmp_path, before):
    """Killed shortly before its report, or a while before it."""
    at = int(whole.flights()[0]["step"]) - before
    assert at > 3, "there is a checkpoint"

    def cut(row) -> None:
        if row["step"] == at:
            raise PowerCutError

    with pytest.raises(PowerCutError):
        train(config, tmp_path, cut)
    train(config, tmp_path)
    parts = RunFolder(tmp_path / whole.path.name)
    assert parts.flights() == whole.flights()
    assert len(parts.flights()[0]["ring"]["steps"]) > before, "also of what was before the checkpoint"
