"""Steps that run through torch.compile."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from lab.training.tiny import run_of, tiny_language_model, write_plain
from normlab.errors import UserError
from normlab.lab.config import run_id
from normlab.private_torch import runs_compiled

STEPS = 4


def compiling(config):
    return replace(config, machine=replace(config.machine, compile=True))


@pytest.fixture
def config(tmp_path):
    whole = tiny_language_model(write_plain(tmp_path), "prores", steps=STEPS)
    model = replace(whole.model, dropout=0.0, residual_warmup_steps=2)
    return replace(whole, model=model, machine=replace(whole.machine, probe_every_steps=3))


def losses(run):
    for _ in range(STEPS):
        run.step()
    return torch.stack([values[0] for values in (row for _, row in run.rows.pending)])


@pytest.mark.wide
def test_compiled_steps_have_the_losses_of_others(config, tmp_path):
    plain, own = run_of(config, tmp_path, name="plain"), run_of(compiling(config), tmp_path, name="own")
    expected = losses(plain)
    torch.testing.assert_close(losses(own), expected, rtol=1e-5, atol=0)
    assert not runs_compiled(own.trainer.model)
    assert own.trainer.state_dict()["model"].keys() == plain.trainer.state_dict()["model"].keys()
    seen = [len({record.module for record in run.probes._records}) for run in (own, plain)]
    assert seen[0] == seen[1] > 0


def test_the_flag_reaches_the_trainer_and_leaves_the_id(config, tmp_path, monkeypatch):
    assert run_id(compiling(config)) == run_id(config)
    given = []
    monkeypatch.setattr(torch, "compile", lambda function, **options: given.append(options) or function)
    run = run_of(compiling(config), tmp_path)
    assert given == [{}, {"dynamic": False}]
    assert torch.isfinite(losses(run)).all()


def test_without_a_compiler_it_says_so(config, tmp_path, monkeypatch):
    def none(function, **options):
        raise RuntimeError("no C++ compiler\nand more")

    monkeypatch.setattr(torch, "compile", none)
    with pytest.raises(UserError, match=r"cpu.*C\+\+ compiler; .*--compile"):
        run_of(compiling(config), tmp_path)
