"""The flight recorder: faults that are planted, and what it may not change."""

import json
import math
import re
import shutil
from dataclasses import replace

import pytest
import torch

from lab.training.tiny import tiny
from normlab.lab.runs import RunFolder
from normlab.lab.tasks.translation import Translation
from normlab.lab.training import recording
from normlab.lab.training import trainer as module
from normlab.lab.training.replay import examine
from normlab.lab.training.run import Run
from normlab.lab.training.train import train
from normlab.lab.training.trainer import Trainer
from normlab.watching.fault import NOTHING
from normlab.watching.flight import Trigger
from normlab.watching.recorder import RING

FROM = 14
BRANCH = "decoder.sublayers.2.f"
LAYER = "encoder.sublayers.1"


@pytest.fixture(scope="module")
def prepared(text, tmp_path_factory):
    return Translation.prepare(text, tmp_path_factory.mktemp("prepared"))


def started(prepared, folder, *, plant=lambda task: None, checkpoint=10, **train):
    """A run at its start, whose task had a fault planted in it."""
    data, corpus = prepared
    config = tiny(data, **{"steps": 24, "validate_every_steps": 24, **train})
    machine = replace(config.machine, checkpoint_every_steps=checkpoint, probes="", log_every_steps=2)
    config = replace(config, machine=machine)
    task = Translation(config, corpus, torch.device("cpu"))
    plant(task)
    return Run(Trainer(task), RunFolder.create(folder, config)).resume()


def flown(run):
    run.train()
    return run.folder.flights()


def planted_in_loss(change):
    """A fault in the task: ``change`` is given the step, the model and what computes the loss."""

    def plant(task):
        batch, loss, steps = task.batch, task.loss, []

        def noted(index):
            steps[:] = [index + 1]
            return batch(index)

        task.batch = noted
        task.loss = lambda model, given: change(steps[0], model, lambda: loss(model, given))

    return plant


def nan_at(step, *, often=True):
    """Not a number in one weight as a step begins; again in a replay if ``often``."""
    left = [1]

    def change(now, model, loss):
        if now == step and (often or left):
            left.clear()
            with torch.no_grad():
                model.get_submodule(f"{BRANCH}.inner").weight[3, 5] = torch.nan
        return loss()

    return planted_in_loss(change)


def asked(run):
    step = run.progress.step
    run.recorder.report(step, Trigger("asked", step, step, "asked for"))
    return run.folder.flights()[-1]


# ---------------------------------------------------------------------------------------- planted faults


def test_a_nan_in_a_weight_is_found_by_its_module(prepared, tmp_path):
    run = started(prepared, tmp_path, plant=nan_at(FROM))
    (report,) = flown(run)
    assert report["verdict"]["module"] == f"{BRANCH}.inner"
    assert report["verdict"]["sentence"].endswith(f"in step {FROM}: its weight is not finite")
    assert report["trigger"]["step"] == FROM
    assert report["replay"] == {"from_step": 10, "checkpoint": True, "agrees": True}
    assert run.stopping.outcome.state == "diverged"


@pytest.mark.slow
def test_without_a_checkpoint_the_replay_begins_at_the_start(prepared, tmp_path):
    (report,) = flown(started(prepared, tmp_path, plant=nan_at(FROM), checkpoint=100))
    assert report["verdict"]["module"] == f"{BRANCH}.inner"
    assert report["replay"] == {"from_step": 0, "checkpoint": False, "agrees": True}


def test_a_layer_with_a_thousandfold_rate_is_found(prepared, tmp_path, monkeypatch):
    whole = module.build_optimizer

    def build(model, config):
        optimizer = whole(model, config)
        inside = {id(p) for name, p in model.named_parameters() if name.startswith(f"{LAYER}.")}
        for group in list(optimizer.param_groups):
            fast = {**group, "lr": group["lr"].clone(), "rate": 1000 * group["rate"]}
            fast["params"] = [p for p in group["params"] if id(p) in inside]
            group["params"] = [p for p in group["params"] if id(p) not in inside]
            optimizer.param_groups.append(fast)
        return optimizer

    monkeypatch.setattr(module, "build_optimizer", build)
    run = started(prepared, tmp_path / "run")
    for _ in range(6):
        run.step()
    verdict = asked(run)["verdict"]
    assert verdict["rule"] == "range"
    assert verdict["module"].startswith(LAYER)
    assert verdict["step"] == 2


@pytest.mark.slow
def test_a_branch_that_becomes_loud_is_found(prepared, tmp_path):
    now = [0]

    def noted(step, model, loss):
        now[0] = step
        return loss()

    def louder(module, args, output):
        return output * 100 if module.training and now[0] >= FROM else output

    def plant(task):
        planted_in_loss(noted)(task)
        build = task.build

        def hooked():
            model = build()
            model.get_submodule(BRANCH).register_forward_hook(louder)
            return model

        task.build = hooked

    run = started(prepared, tmp_path, plant=plant, checkpoint=100)
    for _ in range(FROM + 2):
        run.step()
    verdict = asked(run)["verdict"]
    assert (verdict["rule"], verdict["module"], verdict["step"]) == ("range", BRANCH, FROM)


@pytest.mark.slow
def test_a_loss_that_jumps_and_stays_is_a_spike_and_no_module_is_blamed(prepared, tmp_path):
    def shifted(step, model, loss):
        sums = loss()
        return replace(sums, loss=sums.loss * 2) if step >= 40 else sums

    run = started(
        prepared, tmp_path, plant=planted_in_loss(shifted), checkpoint=30, steps=60, stop_early=False
    )
    reports = flown(run)
    assert [r["trigger"]["kind"] for r in reports] == ["spike"]
    assert reports[0]["trigger"]["step"] == 40
    assert reports[0]["verdict"]["sentence"].startswith("no module left its range: look at the data")


@pytest.mark.slow
@pytest.mark.parametrize("checkpoint", [30, 100])
def test_a_spike_that_training_recovers_from_is_a_note_and_costs_no_replay(
    prepared, tmp_path, monkeypatch, checkpoint
):
    def shifted(step, model, loss):
        sums = loss()
        return replace(sums, loss=sums.loss * 2) if 40 <= step < 48 else sums

    monkeypatch.setattr(recording, "replay", pytest.fail)
    (report,) = flown(
        started(
            prepared,
            tmp_path,
            plant=planted_in_loss(shifted),
            checkpoint=checkpoint,
            steps=60,
            stop_early=False,
        )
    )
    assert (report["trigger"]["kind"], report["trigger"]["step"]) == ("recovered", 40)
    assert re.search(r"\bstep 40\b.*\brecovered\b", report["verdict"]["sentence"])
    assert (report["verdict"]["module"], report["replay"]) == ("", None)
    assert 40 in [row["step"] for row in report["ring"]["steps"]]


@pytest.mark.slow
def test_a_spike_is_replayed_before_a_checkpoint_that_would_hide_its_beginning(prepared, tmp_path):
    def shifted(step, model, loss):
        sums = loss()
        return replace(sums, loss=sums.loss * 2) if 40 <= step < 54 else sums

    (report, *_) = flown(
        started(prepared, tmp_path, plant=planted_in_loss(shifted), checkpoint=25, steps=60, stop_early=False)
    )
    assert (report["step"], report["trigger"]["kind"]) == (50, "spike")
    assert report["replay"] == {"from_step": 25, "checkpoint": True, "agrees": True}


# ------------------------------------------------------------------------------------ what is not found


def test_a_fault_that_does_not_come_again_is_none_of_the_configuration(prepared, tmp_path):
    (report,) = flown(started(prepared, tmp_path, plant=nan_at(FROM, often=False)))
    assert report["verdict"]["rule"] == "none"
    assert report["verdict"]["sentence"].startswith(f"done again, step {FROM} comes out differently")
    assert report["replay"]["agrees"] is False
    assert "nan then" in report["verdict"]["evidence"][0]


def test_a_checkpoint_that_holds_the_fault_says_which_parameter(prepared, tmp_path):
    run = started(prepared, tmp_path)
    for _ in range(3):
        run.step()
    with torch.no_grad():
        run.trainer.model.get_submodule(f"{BRANCH}.outer").bias[0] = torch.inf
    run.checkpoint("running")
    run.step()
    run.recorder.report(4, Trigger("not finite", 4, 4, "loss"))
    (report,) = run.folder.flights()
    assert report["verdict"]["sentence"] == (
        f"the checkpoint of step 3 already holds the fault: {BRANCH}.outer.bias is not finite"
    )
    assert (report["verdict"]["rule"], report["verdict"]["module"]) == ("weight", f"{BRANCH}.outer")


def test_a_bad_step_far_before_the_checkpoint_is_not_done_again(prepared, tmp_path):
    run = started(prepared, tmp_path, checkpoint=3)
    for _ in range(6):
        run.step()
    run.checkpoint("running")
    run.recorder.report(6, Trigger("spike", 5, 5, "loss"))
    (report,) = run.folder.flights()
    assert report["verdict"]["sentence"].startswith("step 5 lies before the last checkpoint")


def test_a_replay_that_fails_ends_no_training(prepared, tmp_path, monkeypatch):
    def broken(*args, **more):
        raise RuntimeError("out of memory")

    run = started(prepared, tmp_path)
    run.step()
    monkeypatch.setattr(recording, "replay", broken)
    assert asked(run)["verdict"]["sentence"] == "the replay failed: RuntimeError: out of memory"
    run.step()
    assert run.progress.step == 2


def test_a_sound_run_has_no_report(prepared, tmp_path):
    assert flown(started(prepared, tmp_path)) == []
    assert not (tmp_path / "flight.json").exists()


# --------------------------------------------------------------------------------- what it may not change


def test_a_report_in_the_middle_changes_nothing_of_the_training(prepared, tmp_path):
    alone, other = both = [
        started(prepared, tmp_path / name, grad_accum_steps=2, checkpoint=4) for name in ("alone", "asked")
    ]
    for run in both:
        for _ in range(4):
            run.step()
        run.checkpoint("running")
        run.step()
        run.step()
    asked(other)
    for run in both:
        run.step()
        run.rows.flush()
    for a, b in zip(alone.trainer.model.parameters(), other.trainer.model.parameters(), strict=True):
        assert torch.equal(a, b)
        for key, value in alone.trainer.optimizer.state[a].items():
            assert torch.equal(value, other.trainer.optimizer.state[b][key])
    assert metrics_without_seconds(alone) == metrics_without_seconds(other)
    assert [len(run.folder.flights()) for run in both] == [0, 1]


def metrics_without_seconds(run):
    rows = run.folder.metrics()
    for row in rows:
        del row["seconds"]
    return rows


def test_the_ring_holds_the_last_steps_and_is_written_as_json(prepared, tmp_path):
    run = started(prepared, tmp_path, steps=60)
    for _ in range(RING + 5):
        run.step()
    names = dict(run.trainer.model.named_parameters())
    asked(run)
    text = (tmp_path / "flight.json").read_text()
    (report,) = json.loads(text, parse_constant=pytest.fail)["reports"]
    ring = report["ring"]
    assert [row["step"] for row in ring["steps"]] == list(range(6, RING + 6))
    assert ring["parameters"] == list(names)
    last = ring["steps"][-1]
    assert len(last["gradients"]) == len(last["updates"]) == len(names)
    assert math.hypot(*last["gradients"]) == pytest.approx(last["grad_norm_l2"], rel=1e-3)


def test_a_diverged_run_has_a_report_before_its_last_checkpoint_is_written(text, tmp_path):
    folder = train(tiny(text, steps=100, lr=1e38), tmp_path)
    assert folder.status().outcome.state == "diverged"
    (report,) = folder.flights()
    assert report["verdict"]["rule"] in ("forward", "backward", "gradient", "update", "range")
    assert report["verdict"]["module"]
    assert report["replay"]["agrees"] is True
    folder.cut_rows(0)
    assert folder.flights() == []


@pytest.mark.slow
def test_a_finished_run_can_be_asked_and_keeps_all_else(text, tmp_path):
    config = tiny(text)
    folder = train(replace(config, machine=replace(config.machine, checkpoint_every_steps=5)), tmp_path)
    before = {p: p.read_bytes() for p in folder.path.rglob("*") if p.is_file()}
    report = examine(folder.path, 7)
    assert report["verdict"]["rule"] == "none"
    assert report["replay"]["from_step"] == 0, "the last checkpoint is that of step 12"
    (written,) = folder.flights()
    assert (written["step"], written["trigger"]["kind"]) == (7, "asked")
    after = {p: p.read_bytes() for p in folder.path.rglob("*") if p.is_file()}
    assert {p: after[p] for p in before} == before
    assert {p.name for p in after.keys() - before.keys()} == {"flight.json"}
    with pytest.raises(ValueError, match=r"step is 13, .*\b12\b"):
        examine(folder.path, 13)
    shutil.rmtree(folder.last)
    folder.previous.rename(folder.last)
    report = examine(folder.path)
    assert report["replay"] == {"from_step": 10, "checkpoint": True, "agrees": True}


@pytest.mark.slow
def test_of_a_run_that_trained_nothing_is_said_to_be_wrong(text, tmp_path, monkeypatch):
    folder = train(tiny(text), tmp_path)
    status = folder.status()
    trained = replace(status, outcome=replace(status.outcome, state="trained"))
    monkeypatch.setattr(RunFolder, "status", lambda _: trained)
    assert examine(folder.path)["verdict"]["sentence"] == NOTHING


def test_a_damaged_file_is_named(tmp_path):
    (tmp_path / "flight.json").write_text('{"reports": [1]}')
    with pytest.raises(ValueError, match=r"flight\.json, reports\[0\]"):
        RunFolder(tmp_path).flights()
