"""Scalars for TensorBoard, read back by its own reader."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lab.training.tiny import PowerCutError, tiny
from normlab.lab.config import run_id
from normlab.lab.training import log
from normlab.lab.training.train import train


@pytest.fixture
def config(text):
    made = tiny(text)
    machine = replace(made.machine, tensorboard=True, probe_every_steps=3, checkpoint_every_steps=4)
    return replace(made, machine=machine)


def written(folder):
    """{tag: [(step, value)]} of the events, as TensorBoard shows them."""
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = reader.EventAccumulator(str(folder.tensorboard), size_guidance={"scalars": 0})
    events.Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def expected(folder):
    """The same from the run's own files."""
    found: dict[str, list[tuple[int, float]]] = {}
    for row in folder.metrics():
        for name in row.keys() - {"kind", "step", "seconds"}:
            found.setdefault(f"{row['kind']}/{name}", []).append((row["step"], row[name]))
    for row in folder.probes():
        found.setdefault(f"{row['signal']}.{row['statistic']}/{row['module'] or 'model'}", []).append(
            (row["step"], row["value"])
        )
    return {
        tag: [(step, pytest.approx(value, rel=1e-6)) for step, value in rows] for tag, rows in found.items()
    }


def without_seconds(scalars):
    return {tag: rows for tag, rows in scalars.items() if not tag.endswith("/seconds")}


def test_metrics_and_probes_are_scalars(config, text, tmp_path):
    folder = train(config, tmp_path)
    assert folder.path == tmp_path / run_id(replace(folder.config(), machine=tiny(text).machine))
    scalars = without_seconds(written(folder))
    assert {"train/loss", "dev/bleu", "dev/nll"} < scalars.keys()
    assert scalars == expected(folder)


def test_a_resumed_run_has_each_step_once(config, tmp_path):
    """Killed in step 8, it goes on from step 4, and what was written for 5 to 7 is taken back."""

    def cut(row):
        if row["step"] == 8:
            raise PowerCutError

    with pytest.raises(PowerCutError):
        train(config, tmp_path, cut)
    folder = train(config, tmp_path)
    scalars = without_seconds(written(folder))
    assert [step for step, _ in scalars["train/loss"]] == [1, 2, 4, 6, 8, 10, 12]
    assert scalars == expected(folder)


def test_without_the_package_a_sentence_says_what_to_type(config, tmp_path, monkeypatch):
    monkeypatch.setattr(log, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="tensorboard") as told:
        train(config, tmp_path)
    assert str(told.value) == (
        "--tensorboard needs the package tensorboard, which is not installed; type: pip install "
        "'normlab[tensorboard]', or leave --tensorboard out"
    )
    assert not list(tmp_path.iterdir()), "before anything is done"
