"""The flight recorder: faults that are planted, and what it may not change."""

import json
import math
import shutil
import threading
from dataclasses import replace

import pytest
import torch

from normlab.store import RunFolder
from normlab.tasks.translation import Translation
from normlab.training.callbacks.flight import RING, Trigger
from normlab.training.replay import examine
from normlab.training.train import train
from normlab.training.trainer import Loop
from training.tiny import tiny

FROM = 14
BRANCH = "decoder.sublayers.2.f"
LAYER = "encoder.sublayers.1"


@pytest.fixture(scope="module")
def prepared(text, tmp_path_factory):
    return Translation.prepare(text, tmp_path_factory.mktemp("prepared"))


def loop_of(prepared, folder, *, checkpoint=10, **train):
    data, corpus = prepared
    config = tiny(data, **{"steps": 24, "validate_every_steps": 24, **train})
    machine = replace(config.machine, checkpoint_every_steps=checkpoint, probes="", log_every_steps=2)
    config = replace(config, machine=machine)
    return Loop(
        Translation(config, corpus, torch.device("cpu")), RunFolder.create(folder, config), lambda row: None
    )


def flown(loop):
    loop.run(threading.Event())
    return loop.folder.flights()


def nan_at(loop, step, *, often=True):
    """Not a number in one weight as a step begins; again in a replay if ``often``."""
    whole, left = loop.task.batch, [1]

    def batch(index):
        if index == step - 1 and (often or left):
            left.clear()
            with torch.no_grad():
                loop.model.get_submodule(f"{BRANCH}.inner").weight[3, 5] = torch.nan
        return whole(index)

    loop.task.batch = batch


def asked(loop, **more):
    step = loop.progress.step
    return loop.recorder.report(Trigger("asked", step, step, "asked for"), watched=step, most=step, **more)


# ---------------------------------------------------------------------------------------- planted faults


def test_a_nan_in_a_weight_is_found_by_its_module(prepared, tmp_path):
    loop = loop_of(prepared, tmp_path)
    nan_at(loop, FROM)
    (report,) = flown(loop)
    assert report["verdict"]["module"] == f"{BRANCH}.inner"
    assert report["verdict"]["sentence"].endswith(f"in step {FROM}: its weight is not finite")
    assert report["trigger"]["step"] == FROM
    assert report["replay"] == {"from_step": 10, "checkpoint": True, "agrees": True}
    assert loop.outcome.state == "diverged"


def test_without_a_checkpoint_the_replay_begins_at_the_start(prepared, tmp_path):
    loop = loop_of(prepared, tmp_path, checkpoint=100)
    nan_at(loop, FROM)
    (report,) = flown(loop)
    assert report["verdict"]["module"] == f"{BRANCH}.inner"
    assert report["replay"] == {"from_step": 0, "checkpoint": False, "agrees": True}


def test_a_layer_with_a_thousandfold_rate_is_found(prepared, tmp_path):
    loop = loop_of(prepared, tmp_path)
    (group,) = loop.optimiser.param_groups
    own = list(loop.model.get_submodule(LAYER).parameters())
    group["params"] = [p for p in group["params"] if all(p is not q for q in own)]
    fast = {**group, "params": own, "lr": group["lr"].clone()}
    loop.optimiser.param_groups.append(fast)

    def faster(*_):
        fast["lr"].mul_(1000)

    loop.optimiser.register_step_pre_hook(faster)
    for _ in range(6):
        loop.step()
    report = asked(loop)
    assert report["verdict"].rule == "range"
    assert report["verdict"].module.startswith(LAYER)
    assert report["verdict"].step == 2


def test_a_branch_that_becomes_loud_is_found(prepared, tmp_path):
    loop = loop_of(prepared, tmp_path)

    def louder(module, args, output):
        return output * 100 if module.training and loop.progress.step >= FROM else output

    loop.model.get_submodule(BRANCH).register_forward_hook(louder)
    for _ in range(FROM + 2):
        loop.step()
    verdict = asked(loop)["verdict"]
    assert (verdict.rule, verdict.module, verdict.step) == ("range", BRANCH, FROM)


def test_a_loss_that_jumps_and_stays_is_a_spike_and_no_module_is_blamed(prepared, tmp_path):
    loop = loop_of(prepared, tmp_path, checkpoint=30, steps=60, stop_early=False)
    whole = loop.task.loss

    def loss(model, batch):
        sums = whole(model, batch)
        shift = 2.0 * batch.tokens if loop.progress.step >= 40 else 0.0
        return replace(sums, loss=sums.loss + shift) if shift else sums

    loop.task.loss = loss
    reports = flown(loop)
    assert [r["trigger"]["kind"] for r in reports] == ["spike"]
    assert reports[0]["trigger"]["step"] == 40
    assert reports[0]["verdict"]["sentence"].startswith("no module left its range: look at the data")


# ------------------------------------------------------------------------------------ what is not found


def test_a_fault_that_does_not_come_again_is_none_of_the_configuration(prepared, tmp_path):
    loop = loop_of(prepared, tmp_path)
    nan_at(loop, FROM, often=False)
    (report,) = flown(loop)
    assert report["verdict"]["rule"] == "none"
    assert report["verdict"]["sentence"].startswith(f"done again, step {FROM} comes out otherwise")
    assert report["replay"]["agrees"] is False
    assert "nan then" in report["verdict"]["evidence"][0]


def test_a_checkpoint_that_holds_the_fault_says_which_parameter(prepared, tmp_path):
    loop = loop_of(prepared, tmp_path)
    for _ in range(3):
        loop.step()
    with torch.no_grad():
        loop.model.get_submodule(f"{BRANCH}.outer").bias[0] = torch.inf
    loop.checkpoint("running")
    loop.step()
    report = loop.recorder.report(Trigger("not finite", 4, 4, "loss"))
    assert report["verdict"].sentence == (
        f"the checkpoint of step 3 already holds the fault: {BRANCH}.outer.bias is not finite"
    )
    assert (report["verdict"].rule, report["verdict"].module) == ("weight", f"{BRANCH}.outer")


def test_a_bad_step_far_before_the_checkpoint_is_not_done_again(prepared, tmp_path):
    loop = loop_of(prepared, tmp_path, checkpoint=3)
    for _ in range(6):
        loop.step()
    loop.checkpoint("running")
    report = loop.recorder.report(Trigger("spike", 5, 5, "loss"))
    assert report["verdict"].sentence.startswith("step 5 lies before the last checkpoint")


def test_a_replay_that_fails_ends_no_training(prepared, tmp_path, monkeypatch):
    loop = loop_of(prepared, tmp_path)
    loop.step()
    whole = loop.step

    def broken():
        raise RuntimeError("out of memory")

    monkeypatch.setattr(loop, "step", broken)
    assert asked(loop)["verdict"].sentence == "the replay failed: RuntimeError: out of memory"
    monkeypatch.setattr(loop, "step", whole)
    loop.step()
    assert loop.progress.step == 2


def test_a_sound_run_has_no_report(prepared, tmp_path):
    loop = loop_of(prepared, tmp_path)
    assert flown(loop) == []
    assert not (tmp_path / "flight.json").exists()


# --------------------------------------------------------------------------------- what it may not change


def test_a_report_in_the_middle_changes_nothing_of_the_training(prepared, tmp_path):
    loops = [
        loop_of(prepared, tmp_path / name, grad_accum_steps=2, checkpoint=4) for name in ("alone", "asked")
    ]
    for loop in loops:
        for _ in range(4):
            loop.step()
        loop.checkpoint("running")
        loop.step()
        loop.step()
    asked(loops[1])
    for loop in loops:
        loop.step()
        loop.flush()
    alone, other = loops
    for a, b in zip(alone.model.parameters(), other.model.parameters(), strict=True):
        assert torch.equal(a, b)
        for key, value in alone.optimiser.state[a].items():
            assert torch.equal(value, other.optimiser.state[b][key])
    metrics = [[{k: v for k, v in r.items() if k != "seconds"} for r in x.folder.metrics()] for x in loops]
    assert metrics[0] == metrics[1]
    assert [len(x.folder.flights()) for x in loops] == [0, 1]


def test_the_ring_holds_the_last_steps_and_is_written_as_json(prepared, tmp_path):
    loop = loop_of(prepared, tmp_path, steps=60)
    for _ in range(RING + 5):
        loop.step()
    names = dict(loop.model.named_parameters())
    asked(loop)
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


def test_a_finished_run_can_be_asked_and_keeps_all_else(text, tmp_path):
    config = tiny(text)
    folder = train(replace(config, machine=replace(config.machine, checkpoint_every_steps=5)), tmp_path)
    before = {p: p.read_bytes() for p in folder.path.rglob("*") if p.is_file()}
    report = examine(folder.path, 7)
    assert report["verdict"].rule == "none"
    assert report["replay"]["from_step"] == 0, "the last checkpoint is that of step 12"
    (written,) = folder.flights()
    assert (written["step"], written["trigger"]["kind"]) == (7, "asked")
    after = {p: p.read_bytes() for p in folder.path.rglob("*") if p.is_file()}
    assert {p: after[p] for p in before} == before
    assert {p.name for p in after.keys() - before.keys()} == {"flight.json"}
    with pytest.raises(ValueError, match=r"step is 13, and the run .* has made 12; give one from 1 to 12"):
        examine(folder.path, 13)
    shutil.rmtree(folder.last)
    folder.previous.rename(folder.last)
    asked = examine(folder.path)
    assert asked["replay"] == {"from_step": 10, "checkpoint": True, "agrees": True}


def test_a_damaged_file_is_named(tmp_path):
    (tmp_path / "flight.json").write_text('{"reports": [1]}')
    with pytest.raises(ValueError, match=r"flight\.json holds no flight reports; delete that file"):
        RunFolder(tmp_path).flights()
