"""Runs that end before their last step although nothing went wrong."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cases import each
from lab.training.test_train import files, interrupt_at, without_seconds
from lab.training.tiny import PowerCutError, tiny
from normlab.lab.config import Config, OptimConfig, TrainConfig
from normlab.lab.recipes.grammar import resolve
from normlab.lab.tasks.translation import Translation
from normlab.lab.training.outcome import why_stop
from normlab.lab.training.train import train


def config(*, patience=0, stop_lr=0.0, warmup_steps=0):
    return Config(
        train=TrainConfig(early_stopping_patience=patience),
        optim=OptimConfig(stop_lr=stop_lr, warmup_steps=warmup_steps),
    )


@each(
    ("given", "step", "waited", "next_lr", "why"),
    [
        ({}, 5, 99, 0.0, ""),
        ({"patience": 3}, 5, 2, 1.0, ""),
        ({"patience": 3}, 5, 3, 1.0, "3 validations in a row brought no new best dev score"),
        ({"stop_lr": 1e-6}, 5, 0, 1e-6, ""),
        ({"stop_lr": 1e-6}, 5, 0, 9.5e-7, "the learning rate fell to 9.5e-07, below 1e-06"),
        ({"stop_lr": 1e-6, "warmup_steps": 6}, 5, 0, 9.5e-7, ""),
        (
            {"stop_lr": 1e-6, "warmup_steps": 5},
            5,
            0,
            9.5e-7,
            "the learning rate fell to 9.5e-07, below 1e-06",
        ),
    ],
)
def test_why_a_run_ends(given, step, waited, next_lr, why):
    assert why_stop(config(**given), step=step, waited=waited, next_lr=next_lr) == why


@pytest.mark.slow
def test_a_run_ends_when_its_patience_does(text, tmp_path, monkeypatch):
    bleus = iter([1.0, 5.0, 4.0, 5.0, 3.0, 2.0])
    nlls = iter([3.0, 2.0, 1.9, 2.1, 2.2, 2.3])
    monkeypatch.setattr(Translation, "dev_bleu", lambda self, model: next(bleus))
    monkeypatch.setattr(Translation, "dev_nlls", lambda self, model: (next(nlls), 1.0))
    given = tiny(text, steps=100, validate_every_steps=3, early_stopping_patience=2)
    folder = train(given, tmp_path)
    status = folder.status()
    assert (status.state, status.step, status.best_step) == ("done", 12, 6)
    assert status.stopped == "2 validations in a row brought no new best dev score"
    assert status.outcome is not None, "judged as final"
    assert [row["step"] for row in folder.metrics() if row["kind"] == "train"] == [1, 2, 4, 6, 8, 10, 12]
    assert folder.scores.exists()
    assert train(given, tmp_path).status() == status, "done"


@pytest.mark.slow
def test_patience_goes_on_where_a_run_was_interrupted(text, tmp_path, monkeypatch):
    monkeypatch.setattr(Translation, "dev_bleu", lambda self, model: 0.0)
    monkeypatch.setattr(Translation, "dev_nlls", lambda self, model: (3.0, 1.0))
    given = tiny(text, steps=100, validate_every_steps=2, early_stopping_patience=3)
    interrupt_at(monkeypatch, 5)
    with pytest.raises(KeyboardInterrupt):
        train(given, tmp_path)
    assert train(given, tmp_path).status().step == 8


@pytest.mark.slow
def test_the_outcome_of_a_stopped_run_is_judged_by_its_own_length(text, tmp_path, monkeypatch):
    """A window of a tenth of 3000 steps would be the whole run, whose middle is above what it learnt."""
    monkeypatch.setattr(Translation, "dev_bleu", lambda self, model: 0.0)
    monkeypatch.setattr(Translation, "dev_nlls", lambda self, model: (3.0, 1.0))
    stopped = train(tiny(text, steps=3000, validate_every_steps=20, early_stopping_patience=2), tmp_path)
    whole = train(tiny(text, steps=60, validate_every_steps=20), tmp_path)
    assert stopped.status().step == 60
    assert stopped.status().outcome == whole.status().outcome


def test_a_run_ends_when_its_rate_is_too_low(text, tmp_path, monkeypatch):
    monkeypatch.setattr(Translation, "dev_bleu", lambda self, model: 0.0)
    monkeypatch.setattr(Translation, "dev_nlls", lambda self, model: (3.0, 1.0))
    given = tiny(text, "pre+val_decay", steps=1000, validate_every_steps=2, lr=0.01)
    optim = replace(given.optim, stop_lr=0.006, decay_factor=0.75, decay_patience=1)
    folder = train(replace(given, optim=optim), tmp_path)
    status = folder.status()
    assert status.stopped == "the learning rate fell to 0.00562, below 0.006"
    assert status.step == folder.metrics()[-1]["step"] == 6, (
        "the second decay is that of the third validation"
    )
    rates = [row["lr"] for row in folder.metrics() if row["kind"] == "train"]
    assert rates == pytest.approx([0.01, 0.01, 0.01, 0.0075])


def test_a_run_that_ends_between_validations_is_validated(text, tmp_path):
    given = tiny(text, "pre+linear", steps=20, validate_every_steps=9)
    given = replace(given, optim=replace(given.optim, stop_lr=given.optim.lr / 4))
    folder = train(given, tmp_path)
    status = folder.status()
    assert status.stopped == "the learning rate fell to 0.001, below 0.00125"
    assert status.step == 15
    assert [row["step"] for row in folder.metrics() if row["kind"] == "dev"] == [9, 15]
    assert [row["step"] for row in folder.metrics() if row["kind"] == "train"][-2:] == [14, 15]


def too_slow(text):
    """Its rate falls below the least after step 15, between two validations and two rows."""
    given = tiny(text, "pre+linear", steps=20, validate_every_steps=9)
    return replace(given, optim=replace(given.optim, stop_lr=given.optim.lr / 4))


def too_fast(text):
    """It has diverged by step 16, before its first validation."""
    return tiny(text, steps=32, lr=300.0, validate_every_steps=30)


@pytest.mark.slow
@pytest.mark.parametrize(("given", "every"), [(too_slow, 5), (too_fast, 2)])
def test_a_run_that_is_killed_at_its_early_end_writes_no_row_twice(text, tmp_path, given, every):
    """Its last checkpoint but one would be of its last step, too."""
    config = given(text)
    config = replace(config, machine=replace(config.machine, checkpoint_every_steps=every))
    whole = train(config, tmp_path / "whole")
    status, rows = whole.status(), whole.metrics()
    assert status.step % every == 0
    assert (rows[-2]["kind"], rows[-1]["kind"]) == ("train", "dev")
    for number in (1, 2):
        left = [len(rows) - number]

        def cut(row, left=left) -> None:
            left[0] -= 1
            if left[0] < 0:
                raise PowerCutError

        root = tmp_path / str(number)
        with pytest.raises(PowerCutError):
            train(config, root, cut)
        parts = train(config, root)
        assert without_seconds(parts) == without_seconds(whole)
        assert files(parts) == files(whole)
        assert parts.flights() == whole.flights()
        assert replace(parts.status(), train_seconds=0.0) == replace(status, train_seconds=0.0)


@pytest.mark.slow
def test_a_validation_that_is_not_finite_ends_a_run_where_a_resumed_one_ends(text, tmp_path, monkeypatch):
    """The validation is between two rows of training."""
    monkeypatch.setattr(Translation, "dev_nlls", lambda self, model: (float("nan"), 1.0))
    config = tiny(text, steps=40, validate_every_steps=5)
    config = replace(config, machine=replace(config.machine, log_every_steps=4, checkpoint_every_steps=5))
    whole = train(config, tmp_path)
    assert whole.status().step == 5
    assert whole.status().outcome is not None
    assert [row["step"] for row in whole.metrics()] == [1, 4, 5, 5]


def test_no_warmup_of_the_paper_is_a_recipe_without_warm_up():
    """Nguyen and Salazar 2019, Section 3.3: validation-based decay from the first step on."""
    base = Config(optim=OptimConfig(warmup_steps=8000, decay_patience=3))
    without = resolve("pre+fixnorm+scalenorm+smallinit+val_decay", base).optim
    warmed = resolve("pre+fixnorm+scalenorm+smallinit+warmup+val_decay", base).optim
    assert (without.schedule, without.warmup_steps) == ("val_decay", 0)
    assert (warmed.schedule, warmed.warmup_steps) == ("val_decay", 8000)
