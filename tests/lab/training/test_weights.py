"""Averages of weights and kept weights: against sums written out, and across interruptions."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from bad_input.damage import foreign
from cases import each
from lab.training.test_train import interrupt_at, without_seconds
from lab.training.tiny import PowerCutError, run_of, tiny
from normlab.lab.config import OptimConfig, TrainConfig, run_id
from normlab.lab.runs import RunFolder
from normlab.lab.training.train import train
from normlab.lab.training.weights import Ema, checkpoint_of, kept_steps, weights_of
from normlab.optim import OPTIMIZERS, build_optimizer
from normlab.watching.flight import Trigger


def keeping(config, keep, *, checkpoint_every_steps=5):
    machine = replace(
        config.machine, keep_checkpoints=keep, checkpoint_every_steps=checkpoint_every_steps, probes=""
    )
    return replace(config, machine=machine)


def contents(folder):
    """Every file of weights, by its path; which checkpoint was the one before the last does not count."""
    found = {str(p.relative_to(folder.path)): p.read_bytes() for p in folder.path.rglob("*.safetensors")}
    return {path: content for path, content in found.items() if not path.startswith("previous/")}


def weights(path):
    return load_file(path / "model.safetensors")


# ------------------------------------------------------------------------------------- moving averages


@each("name", OPTIMIZERS)
def test_the_moving_average_is_the_one_of_the_equation(name):
    torch.manual_seed(0)
    model, late = nn.Linear(3, 2), nn.Parameter(torch.ones(2))
    config = OptimConfig(optimiser=name, schedule="constant", lr=0.1)
    always = list(model.parameters())
    model.register_parameter("late", late)
    optimizer = build_optimizer(model, config)
    ema = Ema(optimizer, 0.75)
    expected: dict[nn.Parameter, torch.Tensor] = {}
    for step in range(9):  # radam holds a group for its first 5
        loss = model(torch.randn(5, 3)).square().sum() + (late.sum() if step >= 2 else 0)
        loss.backward()
        for group in optimizer.param_groups:
            group["lr"].fill_(0.1)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        for p in (*always, *([late] if step >= 2 else [])):
            now = p.detach().double()
            expected[p] = 0.75 * expected[p] + 0.25 * now if p in expected else now
    own = {p: p.detach().clone() for p in expected}
    with ema.in_place():
        for p, mean in expected.items():
            torch.testing.assert_close(p.detach().double(), mean, rtol=1e-6, atol=1e-7)
            assert not torch.equal(p, own[p])
    assert all(torch.equal(p, before) for p, before in own.items()), "the exchange is exact"


@pytest.mark.slow
def test_validations_and_the_best_weights_are_the_moving_averages(text, tmp_path):
    plain = train(keeping(tiny(text), "all"), tmp_path)
    folder = train(keeping(tiny(text, ema_decay=0.5), "all"), tmp_path)
    assert weights_of(folder, 6).description == "the moving average of the weights after step 6"
    assert weights_of(folder, "last").description == "the weights after step 12"
    assert folder.path != plain.path
    for name in ("loss", "nll", "lr"):
        assert [row[name] for row in folder.metrics() if row["kind"] == "train"] == [
            row[name] for row in plain.metrics() if row["kind"] == "train"
        ], "training is that of the weights themselves"
    dev, bare = ([r["nll"] for r in f.metrics() if r["kind"] == "dev"] for f in (folder, plain))
    assert dev != bare
    best, kept = weights(folder.best), weights(folder.steps / str(folder.status().best_step))
    assert all(torch.equal(best[name], kept[name]) for name in best)
    state = load_file(folder.last / "optimizer.safetensors")
    last = weights(folder.steps / "12")
    assert all(torch.equal(last[name], state[f"{name}/ema"]) for name in last)
    assert all(torch.equal(w, weights(folder.last)[n]) for n, w in weights(plain.last).items())


@pytest.mark.slow
def test_steps_that_are_done_again_leave_the_moving_average_alone(text, tmp_path):
    config = keeping(tiny(text, ema_decay=0.5), "", checkpoint_every_steps=8)
    run = run_of(config, tmp_path)
    for _ in range(6):
        run.step()
    run.rows.flush()
    states = run.trainer.optimizer.state.values()
    before = [state["ema"].clone() for state in states]
    run.recorder.report(6, Trigger("asked", 6, 6, "asked about step 6"))
    (report,) = run.folder.flights()
    assert report["replay"] == {"from_step": 0, "checkpoint": False, "agrees": True}
    assert before
    assert all(torch.equal(a, state["ema"]) for a, state in zip(before, states, strict=True))


# ----------------------------------------------------------------------------------- average of the last


@pytest.mark.slow
def test_the_average_is_the_mean_of_the_last_validations_and_is_tested_beside_the_best(text, tmp_path):
    config = tiny(text, steps=8, validate_every_steps=2)
    every = train(keeping(config, "all"), tmp_path)
    folder = train(keeping(replace(config, train=replace(config.train, average_last=3)), ""), tmp_path)
    assert not kept_steps(folder), "what only the average needed is gone"
    three = [weights(every.steps / str(step)) for step in (4, 6, 8)]
    for name, mean in weights(folder.average).items():
        expected = sum(w[name].double() for w in three) / 3
        torch.testing.assert_close(mean.double(), expected, rtol=1e-6, atol=1e-8)
    state = json.loads((folder.average / "state.json").read_text())
    assert (state["progress"], state["average"]) == ({"step": 8}, {"steps": [4, 6, 8]})
    assert state["dev"].keys() == {"nll", "bleu", "nll_exchanged", "repeated_share"}
    for name in ("scores", "outputs"):
        assert getattr(folder, f"best_{name}").read_bytes() == getattr(every, name).read_bytes()
    tested, best = (json.loads(p.read_text()) for p in (folder.scores, folder.best_scores))
    assert tested.keys() == best.keys()
    assert tested["nll"] != best["nll"]
    assert checkpoint_of(folder) == folder.average
    assert weights_of(folder).description == "the average of the weights after steps 4, 6, 8"
    assert weights_of(every).description == f"the best weights on dev, after step {every.status().best_step}"


@pytest.mark.slow
def test_fewer_validations_than_asked_for_are_all_averaged(text, tmp_path):
    folder = train(tiny(text, average_last=50), tmp_path)
    assert json.loads((folder.average / "state.json").read_text())["average"]["steps"] == [6, 12]


@pytest.mark.slow
def test_weights_of_another_run_are_not_averaged(text, tmp_path, monkeypatch):
    config = keeping(tiny(text, validate_every_steps=4, average_last=2), "")
    interrupt_at(monkeypatch, 9)
    with pytest.raises(KeyboardInterrupt):
        train(config, tmp_path)
    (place,) = tmp_path.glob("*/config.json")
    foreign("steps/8")(place.parent)
    with pytest.raises(ValueError, match=r"steps/8 .*0123456789ab"):
        train(config, tmp_path)


def test_two_kinds_of_averages_are_refused():
    with pytest.raises(ValueError, match=r"average_last .*5 .*ema_decay 0\.9"):
        TrainConfig(average_last=5, ema_decay=0.9)


# -------------------------------------------------------------------------------------------- kept weights


@pytest.mark.slow
@pytest.mark.parametrize(
    ("keep", "steps"),
    [("", []), ("all", [5, 10, 12]), ("log", [0, 1, 2, 4, 8, 12]), ("7,12,20", [7, 12])],
    ids=["none", "all", "log", "steps"],
)
def test_which_weights_are_kept(text, tmp_path, keep, steps):
    config = keeping(tiny(text, validate_every_steps=5), keep)
    folder = train(config, tmp_path)
    assert kept_steps(folder) == steps
    assert folder.path == tmp_path / run_id(replace(folder.config(), machine=tiny(text).machine))
    if steps:
        last, kept = weights(folder.last), weights(folder.steps / "12")
        assert all(torch.equal(last[name], kept[name]) for name in last)
        assert not (folder.steps / "12" / "optimizer.safetensors").exists()


@pytest.mark.parametrize(
    ("keep", "options"),
    [
        ("log", {"average_last": 2}),
        ("log", {"ema_decay": 0.6}),
        pytest.param("", {"average_last": 3}, marks=pytest.mark.slow),
        pytest.param("all", {"early_stopping_patience": 2}, marks=pytest.mark.slow),
    ],
    ids=["average and log", "moving average", "average", "patience"],
)
@pytest.mark.parametrize("step", [7, pytest.param(12, marks=pytest.mark.slow)])
def test_an_interrupted_run_ends_with_the_same_weights(text, tmp_path, monkeypatch, keep, options, step):
    config = keeping(tiny(text, validate_every_steps=2, dev_decode_sentences=2, **options), keep)
    whole = train(config, tmp_path / "whole")
    interrupt_at(monkeypatch, step)
    with pytest.raises(KeyboardInterrupt):
        train(config, tmp_path / "parts")
    parts = train(config, tmp_path / "parts")
    assert without_seconds(parts) == without_seconds(whole)
    assert contents(parts) == contents(whole)
    assert replace(parts.status(), train_seconds=0.0) == replace(whole.status(), train_seconds=0.0)


@pytest.mark.parametrize("step", [8, *(pytest.param(step, marks=pytest.mark.slow) for step in (4, 6, 12))])
def test_a_killed_run_keeps_what_its_average_needs_and_writes_nothing_twice(text, tmp_path, step):
    """Validations after the last checkpoint are done again."""
    config = tiny(text, validate_every_steps=2, dev_decode_sentences=2, average_last=4)
    config = keeping(config, "log", checkpoint_every_steps=3)
    whole = train(config, tmp_path / "whole")
    assert kept_steps(whole) == [0, 1, 2, 4, 8, 12], "what only the average needed is gone"

    def cut(row):
        if row["step"] == step:
            raise PowerCutError

    with pytest.raises(PowerCutError):
        train(config, tmp_path / "parts", cut)
    parts = RunFolder(tmp_path / "parts" / whole.path.name)
    before = {p: p.stat().st_mtime_ns for p in parts.steps.rglob("*.safetensors")}
    train(config, tmp_path / "parts")
    assert contents(parts) == contents(whole)
    assert before
    assert all(p.stat().st_mtime_ns == written for p, written in before.items() if p.exists())


def test_what_the_checkpoint_before_the_last_can_ask_for_is_kept(text, tmp_path):
    config = tiny(text, validate_every_steps=2, dev_decode_sentences=2, average_last=1)

    def cut(row):
        if row["step"] == 10:
            raise PowerCutError

    with pytest.raises(PowerCutError):
        train(keeping(config, "", checkpoint_every_steps=4), tmp_path, cut)
    (path,) = (path.parent for path in tmp_path.glob("*/config.json"))
    assert kept_steps(RunFolder(path)) == [4, 6, 8]


def test_what_cannot_be_chosen_is_said(text, tmp_path):
    folder = train(keeping(tiny(text, steps=4), "log"), tmp_path)
    assert checkpoint_of(folder, 0) == folder.steps / "0"
    assert weights_of(folder, 2).description == "the weights after step 2"
    with pytest.raises(FileNotFoundError) as told:
        checkpoint_of(folder, 3)
    assert str(told.value) == (
        f"the run {folder.path} keeps no weights of step 3; there are steps 0, 1, 2, 4; train one with "
        "--keep-checkpoints log, all or 10,50, and in another --out: a run that is done is not done again"
    )
    with pytest.raises(FileNotFoundError) as told:
        checkpoint_of(folder, "average")
    assert str(told.value) == (
        f"the run {folder.path} has no average; train one with --average-last 5, or leave --weights out"
    )
