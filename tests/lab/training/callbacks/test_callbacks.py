"""Observers see a run and cannot change its numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from lab.training.test_train import files, without_seconds
from lab.training.tiny import PowerCutError, run_of, tiny
from normlab.lab.training.parts import RunPart
from normlab.lab.training.ranks import Ranks
from normlab.lab.training.train import train

WEIGHTS = ("last/model.safetensors", "last/optimizer.safetensors", "best/model.safetensors")


class Noted(RunPart):
    """Keeps what it is told."""

    def __init__(self):
        self.told, self.rows, self.probes, self.closed = [], [], [], 0

    def on_start(self, run):
        self.run = run
        self.tell("started")

    def tell(self, what):
        self.told.append((self.run.progress.step, what))

    def on_step(self, record):
        assert record.step == self.run.progress.step

    def on_row(self, row):
        self.rows.append(row)
        self.tell("row")

    def on_probes(self, rows):
        self.probes += rows

    def on_validation(self, row):
        self.rows.append(row)
        self.tell("validated")

    def on_checkpoint(self, step):
        assert step == self.run.progress.step
        self.tell("saved")

    def on_end(self):
        self.tell("ended")

    def close(self):
        self.closed += 1


class Vandal(RunPart):
    """Writes to everything that it is given, and draws random numbers."""

    def on_start(self, run):
        self.trainer = run.trainer
        self.vandalise()

    def vandalise(self, *rows):
        torch.manual_seed(0)
        torch.rand(7)
        model = self.trainer.snapshot()
        for p in model.parameters():
            p.data.fill_(torch.nan)
        model.register_forward_hook(lambda *_: pytest.fail("the run computes with the copy"))
        model.eval()
        for row in rows:
            row.clear()

    def on_step(self, record):
        self.vandalise()
        with pytest.raises(AttributeError):
            record.step = 0

    def on_row(self, row):
        self.vandalise(row)

    def on_probes(self, rows):
        self.vandalise(*rows)

    def on_validation(self, row):
        self.vandalise(row)

    def on_checkpoint(self, step):
        self.vandalise()

    def on_end(self):
        self.vandalise()


@pytest.mark.slow
def test_weights_and_metrics_are_bit_identical_with_all_observers_and_with_none(text, tmp_path):
    config = tiny(text, validate_every_steps=4)
    bare = replace(config, machine=replace(config.machine, probes="", checkpoint_every_steps=5))
    run = run_of(bare, tmp_path / "none", name="run")
    run.train()
    machine = replace(bare.machine, probes="full", probe_every_steps=3, tensorboard=True)
    whole = train(replace(config, machine=machine), tmp_path / "all", callbacks=[Vandal(), Noted()])
    assert without_seconds(whole) == without_seconds(run.folder)
    for name in WEIGHTS:
        assert (whole.path / name).read_bytes() == (run.folder.path / name).read_bytes(), name
    assert whole.probes()
    alone = train(bare, tmp_path / "alone")
    assert files(whole) == files(alone), "what it wrote on the test text, too"


def test_observers_are_told_what_happened_in_order(text, tmp_path):
    config, noted = tiny(text, steps=6, validate_every_steps=3), Noted()
    machine = replace(config.machine, probe_every_steps=2, checkpoint_every_steps=4)
    folder = train(replace(config, machine=machine), tmp_path, callbacks=[noted])
    assert noted.closed == 1
    assert noted.told == [
        (0, "started"),
        (1, "row"),
        (2, "row"),
        (3, "validated"),
        (4, "row"),
        (4, "saved"),
        (6, "row"),
        (6, "validated"),
        (6, "saved"),
        (6, "ended"),
    ]
    assert noted.rows == folder.metrics()
    assert noted.probes == folder.probes() != []


def test_a_snapshot_has_the_weights_of_that_moment(text, tmp_path):
    norms = []

    class Norms(RunPart):
        def on_start(self, run):
            self.run = run

        def on_row(self, row):
            copy = self.run.trainer.snapshot()
            norms.append(sum(float(p.detach().norm()) for p in copy.parameters()))

    train(tiny(text, steps=4), tmp_path, callbacks=[Norms()])
    assert len(norms) == len(set(norms)) == 3


def test_an_observer_that_fails_ends_the_run_and_all_are_closed(text, tmp_path):
    class Broken(RunPart):
        def on_row(self, row):
            if row["step"] == 2:
                raise error

    error, noted = RuntimeError("no more room"), Noted()
    with pytest.raises(RuntimeError) as raised:
        train(tiny(text), tmp_path, callbacks=[noted, Broken()])
    assert raised.value is error
    assert noted.closed == 1
    assert noted.told[-1] == (2, "row")


def test_a_part_with_a_key_goes_on_from_its_own_state(text, tmp_path):
    class Counting(RunPart):
        key, steps = "counting", 0

        def on_step(self, record):
            self.steps += 1

        def state_dict(self):
            return {"steps": self.steps}

        def load_state_dict(self, state):
            self.steps = state["steps"]

    def cut(row):
        if row["step"] == 8:
            raise PowerCutError

    config = tiny(text)
    config = replace(config, machine=replace(config.machine, checkpoint_every_steps=5))
    with pytest.raises(PowerCutError):
        train(config, tmp_path, cut, callbacks=[Counting()])
    counting = Counting()
    train(config, tmp_path, callbacks=[counting])
    assert counting.steps == 12


def test_no_process_of_a_sharded_run_has_the_model(text, tmp_path, monkeypatch):
    config = tiny(text)
    run = run_of(replace(config, machine=replace(config.machine, shard=True)), tmp_path)
    assert isinstance(run.trainer.snapshot(), torch.nn.Module), "one process shards nothing"
    monkeypatch.setattr(run.trainer, "ranks", Ranks(0, 2))
    with pytest.raises(RuntimeError, match="without --shard"):
        run.trainer.snapshot()
