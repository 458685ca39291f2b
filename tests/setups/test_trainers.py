"""Trainers of other libraries are accepted where a ``Setup`` is, and are as they were afterwards."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import normlab
from normlab.setups.given import setup_in
from normlab.setups.script import setup_from_script
from setups.doors import hashes, imported, script

QUIET = pytest.mark.filterwarnings("ignore")  # the libraries warn of one another


@pytest.fixture
def trainer(tmp_path, monkeypatch):
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    return imported("door_trainer", monkeypatch).make_trainer(str(tmp_path))


@pytest.fixture
def pair(monkeypatch):
    pytest.importorskip("lightning")
    return imported("door_lightning", monkeypatch).make_pair()


@pytest.mark.slow
def test_a_trainer_of_transformers_is_checked(trainer, tmp_path):
    weights = [p.detach().clone() for p in trainer.model.parameters()]
    report = normlab.check(trainer)
    assert report.ok
    assert report.model == "LlamaForCausalLM"
    assert all(map(torch.equal, weights, trainer.model.parameters()))
    assert trainer.optimizer is None
    assert trainer.state.global_step == 0
    assert not hashes(tmp_path)


@pytest.mark.slow
def test_a_trainer_trains_afterwards_as_it_would_have(tmp_path, monkeypatch):
    pytest.importorskip("transformers")
    make_trainer = imported("door_trainer", monkeypatch).make_trainer
    losses = []
    for looked_at in (False, True):
        trainer = make_trainer(str(tmp_path / str(looked_at)), steps=3)
        if looked_at:
            normlab.check(trainer)
        losses.append(trainer.train().training_loss)
    assert losses[0] == losses[1]


@pytest.mark.slow
def test_a_trainer_is_tried_and_diagnosed(trainer, tmp_path):
    trials = normlab.trial(trainer, steps=16, rates=(1e-3,), budget_s=60)
    assert [trial.rate for trial in trials.rates] == [1e-3]
    assert normlab.diagnose(trainer, preset="cheap").model == "LlamaForCausalLM"
    assert not hashes(tmp_path)


def test_a_trainer_is_watched(trainer, tmp_path):
    with normlab.watch(trainer, out=tmp_path / "watch") as watch:
        trainer.train()
    assert watch.page.is_file()
    assert watch._recorder.curve.count == 6


@pytest.mark.slow
@QUIET
def test_a_pair_of_lightning_is_checked_and_tried(pair, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    module, _ = pair
    weights = [p.detach().clone() for p in module.parameters()]
    assert normlab.check(pair).model == "Decoder"
    assert normlab.trial(pair, steps=16, rates=(1e-3,), budget_s=60).rates
    assert all(map(torch.equal, weights, module.parameters()))
    assert not hashes(tmp_path)


class Titan:
    """A trainer with the attributes that torchtitan's has."""

    def __init__(self, models):
        torch.manual_seed(0)
        self.model_parts = [models.Decoder()]
        self.optimizers = torch.optim.AdamW(self.model_parts[0].parameters(), lr=1e-3)
        self.step, self.models = 0, models

    def train(self):
        for self.step in range(1, 10):
            ids = self.models.text(6, seed=self.step)
            self.optimizers.zero_grad()
            self.models.next_token_loss(self.model_parts[0](ids[:, :-1]), ids).backward()
            self.optimizers.step()


@pytest.mark.slow
def test_a_trainer_of_model_parts_is_checked(monkeypatch):
    trainer = Titan(imported("models", monkeypatch))
    assert normlab.check(trainer).ok
    assert trainer.step == 0


@pytest.mark.slow
def test_a_function_may_return_a_trainer(monkeypatch):
    trainer = Titan(imported("models", monkeypatch))
    assert setup_in(trainer).model is trainer.model_parts[0]


def test_a_model_is_no_trainer():
    with pytest.raises(normlab.UserError):
        normlab.watch(nn.Linear(2, 2))


@pytest.mark.slow
@QUIET
@pytest.mark.parametrize("name", ["door_trainer", "door_lightning"])
@pytest.mark.parametrize("batches", [1, 5])
def test_a_script_with_a_trainer_writes_nothing(name, batches, tmp_path, monkeypatch):
    pytest.importorskip({"door_trainer": "transformers", "door_lightning": "lightning"}[name])
    monkeypatch.chdir(tmp_path)
    with setup_from_script(script(name), [str(tmp_path)], batches=batches) as named:
        assert named.facts["withheld"]
        assert batches == 1 or len(named.setup.batches) == batches
    assert not hashes(tmp_path)
