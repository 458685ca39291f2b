"""Callbacks see a run and cannot change its numbers."""

from __future__ import annotations

import threading
from dataclasses import FrozenInstanceError, replace

import pytest
import torch

from normlab.training.callbacks.base import Callback
from normlab.training.ranks import Ranks
from normlab.training.train import train
from training.test_train import files, without_seconds
from training.tiny import run_of, tiny

WEIGHTS = ("last/model.safetensors", "last/optimiser.safetensors", "best/model.safetensors")


class Noted(Callback):
    """Keeps every event."""

    def __init__(self):
        self.events, self.closed = [], 0

    def on_event(self, event):
        self.events.append(event)

    def close(self):
        self.closed += 1


class Vandal(Callback):
    """Writes to everything that it is given, and draws random numbers."""

    def on_event(self, event):
        torch.manual_seed(0)
        torch.rand(7)
        for p in event.model.parameters():
            p.data.fill_(torch.nan)
        event.model.register_forward_hook(lambda *_: pytest.fail("the run computes with the copy"))
        event.model.eval()
        for row in (*event.rows, *event.probes):
            row.clear()
        with pytest.raises(FrozenInstanceError):
            event.step = 0


def test_weights_and_metrics_are_bit_identical_with_all_callbacks_and_with_none(text, tmp_path):
    config = tiny(text, validate_every_steps=4)
    bare = replace(config, machine=replace(config.machine, probes="", checkpoint_every_steps=5))
    run = run_of(bare, tmp_path / "none", name="run")
    run.run(threading.Event())
    machine = replace(bare.machine, probes="full", probe_every_steps=3, tensorboard=True)
    whole = train(replace(config, machine=machine), tmp_path / "all", callbacks=[Vandal(), Noted()])
    assert without_seconds(whole) == without_seconds(run.folder)
    for name in WEIGHTS:
        assert (whole.path / name).read_bytes() == (run.folder.path / name).read_bytes(), name
    assert whole.probes()
    alone = train(bare, tmp_path / "alone")
    assert files(whole) == files(alone), "what it wrote on the test text, too"


def test_events_tell_what_happened_in_order(text, tmp_path):
    config, noted = tiny(text, steps=6, validate_every_steps=3), Noted()
    machine = replace(config.machine, probe_every_steps=2, checkpoint_every_steps=4)
    folder = train(replace(config, machine=machine), tmp_path, callbacks=[noted])
    assert noted.closed == 1
    flags = ("began", "validated", "saved", "ended")
    told = [(e.step, *(name for name in flags if getattr(e, name))) for e in noted.events if not e.probes]
    assert told == [
        (0, "began"),
        (1,),
        (2,),
        (3, "validated"),
        (4,),
        (4, "saved"),
        (6,),
        (6, "validated"),
        (6, "saved"),
        (6, "ended"),
    ]
    assert [row for event in noted.events for row in event.rows] == folder.metrics()
    assert [row for event in noted.events for row in event.probes] == folder.probes()


def test_the_model_of_an_event_has_the_weights_of_that_moment(text, tmp_path):
    norms = []

    class Norms(Callback):
        def on_event(self, event):
            if event.rows and not event.validated:
                norms.append(sum(float(p.detach().norm()) for p in event.model.parameters()))

    train(tiny(text, steps=4), tmp_path, callbacks=[Norms()])
    assert len(norms) == len(set(norms)) == 3


def test_a_callback_that_fails_ends_the_run_and_all_are_closed(text, tmp_path):
    class Broken(Callback):
        def on_event(self, event):
            if event.step == 2:
                raise RuntimeError("no more room")

    noted = Noted()
    with pytest.raises(RuntimeError, match="no more room"):
        train(tiny(text), tmp_path, callbacks=[noted, Broken()])
    assert noted.closed == 1
    assert noted.events[-1].step == 2


def test_no_process_of_a_sharded_run_has_the_model(text, tmp_path, monkeypatch):
    config = tiny(text)
    run = run_of(replace(config, machine=replace(config.machine, shard=True)), tmp_path)
    assert isinstance(run.trainer.snapshot(), torch.nn.Module), "one process shards nothing"
    monkeypatch.setattr(run.trainer, "ranks", Ranks(0, 2))
    with pytest.raises(RuntimeError, match="without --shard"):
        run.trainer.snapshot()
