"""A checkpoint's state, where a valid manifest can stand over anything; the clock; the end of a run."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from cases import each
from normlab.errors import nearest
from normlab.lab.runs.folder import RunFolder, Status
from normlab.lab.runs.manifest import STATE, CheckpointError, train_anew
from normlab.lab.training.checkpoint import FORMAT, Checkpoint, open_checkpoint, save_checkpoint
from normlab.lab.training.devices import Scaling
from normlab.lab.training.progress import RunProgress, TrainingClock, mark
from normlab.lab.training.recording import MetricRows
from normlab.optim import ValDecay

PLACE = Path("run/last")
PROGRESS = RunProgress(step=4, tokens=9, best_step=2, best_dev={"nll": 1.5}, val_decay=ValDecay(decays=1))
SCALE = {
    "scale": 2.0,
    "growth_factor": 2.0,
    "backoff_factor": 0.5,
    "growth_interval": 2000,
    "_growth_tracker": 3,
    "skipped_steps": 1,
}
STATE_OF = {
    "progress": PROGRESS.state_dict(),
    "scaling": SCALE,
    "rows": {"pending": [[1e-3, [0.5, float("nan"), 1]]], "sizes": {"metrics.jsonl": 80}},
}


def parts():
    scaler = torch.amp.GradScaler("cpu", enabled=True)
    rows = MetricRows(SimpleNamespace(trainer=SimpleNamespace(device=torch.device("cpu"))))
    return {"progress": RunProgress(), "scaling": Scaling(scaler, torch.device("cpu")), "rows": rows}


def loaded(state):
    """The parts, after a checkpoint with this state was loaded."""
    parts_after = parts()
    with Checkpoint(PLACE, state).loading():
        for name, part in parts_after.items():
            part.load_state_dict(state.get(name, {}))
    return parts_after


def test_a_state_reads_back():
    read_back = loaded(STATE_OF)
    assert read_back["progress"] == PROGRESS
    assert read_back["scaling"].state_dict() == SCALE
    ((lr, values),) = read_back["rows"].pending
    assert (lr, str(values.tolist())) == (1e-3, "[0.5, nan, 1.0]")
    assert read_back["rows"].sizes == {"metrics.jsonl": 80}
    assert loaded({"progress": {"step": 4}})["progress"] == RunProgress(4)
    assert Checkpoint(PLACE, {"average": {"steps": [4, 6]}}).averaged() == (4, 6)


GARBAGE = [
    ("progress", {"step": -1}, "progress.step must be at least 0, got -1"),
    ("progress", {"step": True}, "progress.step must be a whole number, got True"),
    ("progress", {"val_decay": 3}, "progress.val_decay must be an object, got 3"),
    ("progress", {"tokns": 3}, f"unknown key 'progress.tokns'{nearest('tokns', vars(RunProgress()))}"),
    ("rows", {"pending": 1}, "rows.pending must be a list, got 1"),
    ("rows", {"pending": [[1.0]]}, "rows.pending[0] lacks [1]; add what is missing"),
    ("rows", {"pending": [[1.0, [1, 2]]]}, "rows.pending[0][1] lacks [2]; add what is missing"),
    ("rows", {"pending": [["a", [1, 2, 3]]]}, "rows.pending[0][0] must be a number, got 'a'"),
    ("rows", {"sizes": {"a": "80"}}, "rows.sizes.a must be a whole number, got '80'"),
    ("scaling", {"more": 1}, f"scaling has {', '.join(SCALE)}, got {', '.join([*SCALE, 'more'])}"),
    ("scaling", {"skipped_steps": "1"}, "scaling.skipped_steps must be a whole number, got '1'"),
]


@each(("part", "changed", "why"), GARBAGE, ids=[why for *_, why in GARBAGE])
def test_anything_else_is_refused(part, changed, why):
    state = STATE_OF | {part: STATE_OF[part] | changed}
    with pytest.raises(CheckpointError) as refused:
        loaded(state)
    assert refused.value.why == f"{PLACE}/{STATE}: {why}"
    assert refused.value.todo == train_anew(PLACE)


@pytest.mark.parametrize(
    ("state", "why"),
    [
        ({"dev": {"nll": 1.0}}, "progress.step is missing"),
        ({"progress": {"step": 4}, "average": {"steps": 4}}, "average.steps must be a list, got 4"),
    ],
)
def test_weights_whose_steps_are_damaged_are_refused(state, why):
    checkpoint = Checkpoint(PLACE, state)
    with pytest.raises(CheckpointError) as refused:
        _ = checkpoint.progress(), checkpoint.averaged()
    assert refused.value.why == f"{PLACE}/{STATE}: {why}"
    assert refused.value.todo == train_anew(PLACE)


def test_a_checkpoint_of_another_format_is_refused(tmp_path, monkeypatch):
    state = {"model": {"x": torch.zeros(1)}, "progress": {"step": 1}}
    save_checkpoint(tmp_path / "last", state)
    assert open_checkpoint(tmp_path / "last").progress().step == 1
    monkeypatch.setattr("normlab.lab.training.checkpoint.FORMAT", FORMAT + 1)
    with pytest.raises(CheckpointError, match=f"format {FORMAT}, .* reads {FORMAT + 1}"):
        open_checkpoint(tmp_path / "last")


def test_a_stopped_process_does_not_train(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("normlab.lab.training.progress.time", SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr("normlab.lab.training.progress._BEAT_SECONDS", 1000.0)
    clock = TrainingClock(before=5.0)
    now[0] += 60.0
    assert clock.seconds() == 65.0, "nobody has looked meanwhile, so that it may have been a long step"
    with clock.watched():
        for _ in range(3):
            now[0] += 9.0
            assert clock.seconds() <= 92.0
        now[0] += 600.0
        assert clock.seconds() == 92.0
        now[0] += 2.0
        with clock.stopped():
            now[0] += 8.0
        assert clock.seconds() == 94.0
    now[0] += 60.0
    assert clock.seconds() == 154.0


def test_a_run_ends_without_the_error_and_the_phase_of_before(tmp_path):
    folder = RunFolder(tmp_path)
    folder.set_status(Status("running", 3, error="of an earlier try", phase="testing", phase_done=0.5))
    mark(folder, "interrupted")
    assert folder.status() == Status("interrupted", 3)
    mark(folder, "failed", "RuntimeError: out of memory")
    assert folder.status() == Status("failed", 3, error="RuntimeError: out of memory")
    (tmp_path / "status.json").write_text("{", encoding="utf-8")
    mark(folder, "failed", "what is to be shown")  # no error about the damaged file
