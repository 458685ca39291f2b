"""A last checkpoint that cannot be trusted: the one before it is used, and the end is the same."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from bad_input.damage import (
    ADAM,
    EDITED,
    MODEL,
    SHORT,
    STATE,
    changed,
    counted,
    cut,
    edited,
    foreign,
    gone,
    recommitted,
    states,
)
from bad_input.prompt import held as every_file
from lab.training.test_train import interrupt_at
from lab.training.tiny import PowerCutError, tiny
from normlab.base.files import row_line
from normlab.lab.runs import RunFolder
from normlab.lab.training.checkpoint import resume
from normlab.lab.training.train import train
from normlab.lab.training.trainer import Trainer
from normlab.watching.meter import StepRecord

STOP = 11


def config_of(text, **train):
    config = tiny(text, "admin+warmup", validate_every_steps=4, **train)
    return replace(
        config, machine=replace(config.machine, checkpoint_every_steps=3, probes="full", probe_every_steps=2)
    )


@pytest.fixture(scope="module")
def whole(text, tmp_path_factory):
    return train(config_of(text), tmp_path_factory.mktemp("whole"))


@pytest.fixture(scope="module")
def stopped(text, tmp_path_factory):
    """A run that died in step 11: its checkpoints are of the steps 9 and 6."""
    root = tmp_path_factory.mktemp("stopped")
    with pytest.MonkeyPatch.context() as patch:
        step = Trainer.step

        def dying(self: Trainer, *watch) -> StepRecord:
            if self.progress.step == STOP - 1:
                raise PowerCutError
            return step(self, *watch)

        patch.setattr(Trainer, "step", dying)
        with pytest.raises(PowerCutError):
            train(config_of(text), root)
    return root


@pytest.fixture
def run(stopped, tmp_path):
    shutil.copytree(stopped, tmp_path / "runs")
    (config,) = (tmp_path / "runs").glob("*/config.json")
    return RunFolder(config.parent)


def held(folder: RunFolder) -> dict[str, object]:
    names = (MODEL, ADAM, "best/model.safetensors", "probes.jsonl", "test.hyp.txt", "scores.json")
    rows = [{k: v for k, v in row.items() if k != "seconds"} for row in folder.metrics()]
    return {**{name: (folder.path / name).read_bytes() for name in names}, "rows": rows}


DAMAGED = {
    "cut off": (cut(MODEL), f"{{run}}/{MODEL} {SHORT}"),
    "a number edited": (changed(MODEL), f"{{run}}/{MODEL} {EDITED}"),
    "a moment edited": (changed(ADAM), f"{{run}}/{ADAM} {EDITED}"),
    "a file missing": (gone(ADAM), f"{{run}}/{ADAM} is missing"),
    "no state": (gone(STATE), f"{{run}}/{STATE} is missing"),
    "the state edited": (
        counted,
        f"{{run}}/{STATE} was edited: it no longer has the SHA-256 of its manifest",
    ),
    "another run's": (foreign("last"), "{run}/last belongs to the run 0123456789ab, and this is {id}"),
    "garbage under a manifest": (
        states(scaling={"scale": 1.0}),
        (
            f"{{run}}/{STATE}: scaling has scale, growth_factor, backoff_factor, growth_interval, "
            "_growth_tracker, skipped_steps, got scale"
        ),
    ),
    "last steps without their rates": (
        recommitted(edited("last/recorder.safetensors", lambda kept: kept.pop("lr"))),
        (
            f"{{run}}/{STATE}: the recorder's last steps are of another run (gradients [9, 38], "
            "losses [9, 3], step [9], updates [9, 38], values [9, 3])"
        ),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(("damage", "why"), DAMAGED.values(), ids=list(DAMAGED))
def test_the_checkpoint_before_it_is_used(text, run, whole, capsys, damage, why):
    damage(run.path)
    refused = {p.name: p.read_bytes() for p in run.last.iterdir()}
    again = []
    train(config_of(text), run.path.parent, again.append)
    why = why.format(run=run.path, id=run.path.name)
    sentence = (
        f"normlab: {why}; it is kept as {run.path}/last.refused; the run goes on from step 6, the checkpoint "
        "before it"
    )
    assert [line for line in capsys.readouterr().err.splitlines() if "goes on" in line] == [sentence]
    assert run.log.read_text().splitlines().count(sentence) == 1
    assert again[0]["step"] > 6
    assert held(run) == held(whole)
    assert {p.name: p.read_bytes() for p in (run.path / "last.refused").iterdir()} == refused


@pytest.mark.slow
def test_a_last_checkpoint_that_is_gone_is_one_that_cannot_be_used(text, run, whole, capsys):
    shutil.rmtree(run.last)
    train(config_of(text), run.path.parent)
    assert re.search(rf"{run.last} .*\bstep 6\b", capsys.readouterr().err)
    assert held(run) == held(whole)


def test_where_neither_can_be_used_both_are_named_and_nothing_is_touched(text, run):
    changed(MODEL)(run.path)
    cut("previous/optimizer.safetensors")(run.path)
    names = (MODEL, ADAM, STATE, "previous/model.safetensors", "metrics.jsonl", "probes.jsonl")
    before = {name: (run.path / name).read_bytes() for name in names}
    path = run.path
    with pytest.raises(ValueError, match=re.escape(str(path))) as error:
        train(config_of(text), path.parent)
    assert str(error.value) == (
        f"{path}/{MODEL} {EDITED}, and {path}/previous/optimizer.safetensors {SHORT}; to train it anew: "
        f"mv {path} {path}.aside && normlab train --config {path}.aside/config.json --out {path.parent}"
    )
    assert {name: (path / name).read_bytes() for name in names} == before
    assert run.status().state == "failed"


@pytest.mark.slow
def test_what_is_said_to_type_brings_the_run_back(text, run, whole, tmp_path, monkeypatch):
    from normlab.cli.main import main

    changed(MODEL)(run.path)
    changed("previous/model.safetensors")(run.path)
    with pytest.raises(ValueError, match=": mv ") as error:
        train(config_of(text), run.path.parent)
    move, retrain = str(error.value).partition("anew: ")[2].split(" && ")
    verb, source, target = move.split()
    assert verb == "mv"
    os.rename(source, target)  # noqa: PTH104 - as mv does
    assert main(retrain.split()[1:]) == 0
    assert held(run) == held(whole)


def first_row_alone(path: Path) -> None:
    path.write_text(path.read_text().partition("\n")[0] + "\n")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "lose", "why"),
    [
        ("metrics.jsonl", Path.unlink, "is missing"),
        ("probes.jsonl", first_row_alone, "is shorter than it was"),
    ],
)
def test_without_rows_that_are_gone_it_goes_on_when_somebody_says_so(text, run, name, lose, why):
    path, volatile = run.path / name, ("status.json", "lock")
    lose(path)
    before = {n: content for n, content in every_file(run.path).items() if n not in volatile}
    with pytest.raises(ValueError, match=name) as error:
        train(config_of(text), run.path.parent)
    said = [f"{path} {why}, and {c} was made after rows that it held" for c in (run.last, run.previous)]
    assert str(error.value) == (
        f"{', and '.join(said)}; bring the whole file back, or do without them: touch {run.path}/rows.lost"
    )
    now = every_file(run.path)
    assert {n: now[n] for n in now if n not in volatile} == before
    (run.path / "rows.lost").touch()
    again = []
    train(config_of(text), run.path.parent, again.append)
    assert run.status().state == "done"
    assert again[0]["step"] == 10, "from the last checkpoint on"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["metrics.jsonl", "probes.jsonl"])
def test_rows_that_are_cut_short_are_made_again_from_the_checkpoint_before(text, run, whole, capsys, name):
    rows = [json.loads(line) for line in (run.path / name).read_text().splitlines()]
    (run.path / name).write_text("".join(row_line(row) for row in rows if row["step"] <= 6))
    train(config_of(text), run.path.parent)
    assert re.search(rf"{name} .*\bshorter .*{run.last}", capsys.readouterr().err)
    assert held(run) == held(whole)


@pytest.mark.slow
def test_a_checkpoint_without_its_manifest_is_not_gone_on_with(text, run, whole, capsys):
    state = run.last / "state.json"
    content = json.loads(state.read_text())
    del content["manifest"]
    state.write_text(json.dumps(content))
    train(config_of(text), run.path.parent)
    assert re.search(r"state\.json .*\bmanifest\b", capsys.readouterr().err)
    assert held(run) == held(whole)


@pytest.mark.slow
def test_a_folder_in_the_place_of_the_state_is_not_gone_on_with(text, run, whole, capsys):
    state = run.last / "state.json"
    state.unlink()
    state.mkdir()
    train(config_of(text), run.path.parent)
    assert os.strerror(errno.EISDIR) in capsys.readouterr().err
    assert held(run) == held(whole)


def test_best_weights_of_another_run_are_not_tested(text, tmp_path, monkeypatch):
    config = tiny(text, steps=4, validate_every_steps=4)
    interrupt_at(monkeypatch, 4)
    with pytest.raises(KeyboardInterrupt):
        train(config, tmp_path)
    (place,) = tmp_path.glob("*/config.json")
    foreign("best")(place.parent)
    with pytest.raises(ValueError, match=r"best .*0123456789ab"):
        train(config, tmp_path)


def test_damaged_best_weights_are_told_before_the_training_and_not_after(text, run):
    changed("best/model.safetensors")(run.path)
    rows = run.metrics()
    with pytest.raises(ValueError, match=r"best/model\.safetensors .*: mv "):
        train(config_of(text), run.path.parent)
    assert run.metrics() == rows


def test_no_permission_to_read_is_no_reason_to_go_back(run):
    def denied(checkpoint: Path) -> int:
        raise PermissionError(13, "Permission denied", str(checkpoint / MODEL))

    with pytest.raises(PermissionError):
        resume(run.last, run.previous, denied)
    assert sorted(p.name for p in run.path.glob("*/")) == ["best", "last", "previous"]
