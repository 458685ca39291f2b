"""Training scripts are recorded unchanged, and their steps are computed again to rounding."""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

import normlab
from normlab.cli.main import main
from normlab.errors import UserError
from normlab.setups.flow import NotRepeatableError
from normlab.setups.patches import PATCHES
from normlab.setups.script import setup_from_script

SCRIPTS = Path(__file__).with_name("scripts")


def setup_of(name: str, *arguments: str) -> normlab.Setup:
    """The setup that one of the scripts shows."""
    with setup_from_script(str(SCRIPTS / f"{name}.py"), arguments) as named:
        return named.setup


def failures(name: str, *arguments: str) -> list[tuple[str, str]]:
    """The properties that fail in one of the scripts, each with its place."""
    report = normlab.check(setup_of(name, *arguments))
    return [(failure.property, failure.module) for failure in report.failures]


def test_a_loop_shows_its_model_batch_optimizer_and_schedule():
    setup = setup_of("plain", "--dim", "24")
    assert type(setup.model).__name__ == "Decoder"
    assert setup.model.words.weight.shape[1] == 24
    assert {name: tuple(x.shape) for name, x in setup.batches.items()} == {"ids": (6, 13)}
    assert isinstance(setup.optimizer, torch.optim.AdamW)
    assert isinstance(setup.scheduler, LRScheduler)


def test_the_batch_is_what_the_slices_of_a_step_are_computed_from():
    setup = setup_of("plain")
    ids = setup.batches["ids"]
    shifted = {"ids": ids.roll(1, dims=1)}
    want = nn.functional.cross_entropy(
        setup.model(shifted["ids"][:, :-1]).flatten(0, 1), shifted["ids"][:, 1:].flatten()
    )
    assert torch.equal(setup.loss(setup.model, shifted), want)


@pytest.mark.parametrize("name", ["plain", "accumulating", "scaled", "translating", "own_function"])
def test_a_sound_script_has_no_failure(name):
    assert failures(name) == []


@pytest.mark.parametrize(
    ("name", "argument", "failure"),
    [
        ("accumulating", "--undivided", ("step", "step")),
        ("scaled", "--clip-scaled", ("step", "step")),
        ("own_function", "--halved", ("derivative", "head.weight")),
    ],
)
def test_a_mistake_in_a_script_is_named_first(name, argument, failure):
    assert failures(name, argument)[0] == failure


def test_micro_batches_are_one_batch_where_they_have_one_shape():
    assert setup_of("accumulating").batches["ids"].shape == (12, 13)


def test_modules_that_no_module_holds_have_the_names_of_the_script():
    names = {name for name, _ in setup_of("translating").model.named_children()}
    assert names == {"encoder", "decoder", "head"}


def test_a_step_that_cannot_be_computed_again_names_the_call():
    with pytest.raises(NotRepeatableError, match=r"Counting in counting\.py:\d+"):
        setup_of("counting")


def test_a_script_without_a_step_is_refused():
    with pytest.raises(UserError, match="without a step of an optimizer"):
        setup_of("untrained")


def test_a_script_ends_with_its_own_finally(tmp_path):
    setup_of("plain", "--marker", str(tmp_path / "marker"))
    assert (tmp_path / "marker").read_text() == "cleaned up"


def test_nothing_stays_changed():
    before = [vars(owner)[name] for owner, name, _ in PATCHES]
    state, path, argv, environment = torch.get_rng_state(), list(sys.path), list(sys.argv), dict(os.environ)
    draws = random.getstate(), np.random.get_state()[1].tolist()  # noqa: NPY002
    setup = setup_of("plain")
    assert [vars(owner)[name] for owner, name, _ in PATCHES] == before
    assert clip_grad._clip_grads_with_norm_.__module__ == "torch.nn.utils.clip_grad"
    assert torch.equal(torch.get_rng_state(), state)
    assert (random.getstate(), np.random.get_state()[1].tolist()) == draws  # noqa: NPY002
    assert (sys.path, sys.argv, dict(os.environ)) == (path, argv, environment)
    assert isinstance(setup.optimizer, Optimizer)
    before_step = [p.detach().clone() for p in setup.model.parameters()]
    setup.optimizer.step()
    assert not all(map(torch.equal, before_step, setup.model.parameters()))


def test_a_weight_is_never_changed():
    torch.manual_seed(0)
    with setup_from_script(str(SCRIPTS / "plain.py"), ()) as named:
        setup = named.setup
    assert not setup.optimizer.state


def test_the_command_takes_a_script_with_its_own_arguments(capsys):
    script = str(SCRIPTS / "accumulating.py")
    assert main(["check", script]) == 0
    assert "recorded 4 micro-batches" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="3"):
        main(["check", script, "--", "--undivided"])
    assert "✗ step at step" in capsys.readouterr().out


def test_arguments_of_a_script_need_a_script(capsys):
    assert main(["check", "--recipe", "pre", "--", "--lr", "3"]) == 2
    assert "only a script takes" in capsys.readouterr().err
