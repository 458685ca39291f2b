"""Optimizers and schedules inside a run: its rates, and that an interruption leaves no trace."""

import json
from dataclasses import replace

import pytest

from lab.training.test_train import files, interrupt_at, without_seconds
from lab.training.tiny import tiny
from normlab.lab.runs import RunFolder
from normlab.lab.tasks.translation import Translation
from normlab.lab.training.train import train
from normlab.optim import OPTIMIZERS

VAL_DECAY = [0.25, 0.5, 0.75, 1, 1, 1, 0.8, 0.8, 0.64, 0.64, 0.512, 0.512]
"""Four steps of warm-up, then a decay after every second validation, with a validation at each step."""


def every_step_logged(config, **optim):
    machine = replace(config.machine, log_every_steps=1)
    return replace(config, optim=replace(config.optim, **optim), machine=machine)


def rates(folder):
    return [row["lr"] for row in folder.metrics() if row["kind"] == "train"]


@pytest.fixture
def unlearning(monkeypatch):
    """Dev scores that are the model's own, and worse the better it is: only the first is a best one."""
    whole = Translation.dev_nlls
    monkeypatch.setattr(Translation, "dev_nlls", lambda self, model: (10 - whole(self, model)[0], 1.0))
    monkeypatch.setattr(Translation, "dev_bleu", lambda self, model: 0.0)


def by_validation(text, steps=12):
    config = tiny(text, "pre+warmup+val_decay", lr=0.01, steps=steps, validate_every_steps=1, best_by="nll")
    return every_step_logged(config, decay_patience=2)


def test_dev_scores_lower_the_rate(text, tmp_path, unlearning):
    folder = train(by_validation(text), tmp_path)
    assert folder.status().best_step == 1
    assert rates(folder) == pytest.approx([0.01 * f for f in VAL_DECAY])
    kept = json.loads((folder.last / "state.json").read_text())
    assert kept["progress"]["val_decay"] == {"decays": 4, "waited": 0}


@pytest.mark.slow
@pytest.mark.parametrize(("best_by", "lowered"), [("bleu", True), ("nll", False)])
def test_the_score_that_counts_is_the_one_of_best_by(text, tmp_path, monkeypatch, best_by, lowered):
    """BLEU falls while the likelihood gets better at every validation."""
    bleus, nlls = iter(range(6, 0, -1)), iter(range(6, 0, -1))
    monkeypatch.setattr(Translation, "dev_bleu", lambda self, model: float(next(bleus)))
    monkeypatch.setattr(Translation, "dev_nlls", lambda self, model: (float(next(nlls)), 1.0))
    config = tiny(text, "pre+val_decay", steps=6, validate_every_steps=1, best_by=best_by)
    folder = train(every_step_logged(config), tmp_path)
    assert rates(folder) == pytest.approx([5e-3] * 4 + [4e-3 if lowered else 5e-3] * 2)


@pytest.mark.slow
def test_dev_scores_leave_other_schedules_alone(text, tmp_path, unlearning):
    config = tiny(text, "pre+step_decay", steps=6, best_by="nll")
    often = replace(config, train=replace(config.train, validate_every_steps=1))
    seldom, often = (
        train(every_step_logged(c, decay_step=4, decay_patience=1), tmp_path) for c in (config, often)
    )
    assert seldom.path != often.path
    assert rates(seldom) == rates(often)


# --------------------------------------------------------------------------------- interrupt and resume


def assert_no_trace(config, step, tmp_path, monkeypatch):
    whole = train(config, tmp_path / "whole")
    interrupt_at(monkeypatch, step)
    with pytest.raises(KeyboardInterrupt):
        train(config, tmp_path / "parts")
    parts = RunFolder(tmp_path / "parts" / whole.path.name)
    assert parts.status().step == step
    train(config, tmp_path / "parts")
    assert without_seconds(parts) == without_seconds(whole)
    assert files(parts) == files(whole)


@pytest.mark.slow
@pytest.mark.parametrize("step", [3, 7, 8])
def test_an_interrupted_decay_by_validation_goes_on_as_if_nothing_had_been(
    text, tmp_path, monkeypatch, unlearning, step
):
    """In the warm-up, half way to the next decay, and right at one."""
    assert_no_trace(by_validation(text), step, tmp_path, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "momentum"), [*((name, 0.0) for name in OPTIMIZERS), ("sgd", 0.9)])
def test_an_interrupted_optimizer_goes_on_as_if_nothing_had_been(text, tmp_path, monkeypatch, name, momentum):
    config = tiny(text, "pre+step_decay_inverse_sqrt", lr=0.05)
    config = every_step_logged(config, optimiser=name, momentum=momentum, weight_decay=0.01, decay_step=5)
    assert_no_trace(config, 7, tmp_path, monkeypatch)
