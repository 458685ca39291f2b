"""A script goes on for the batches of later steps, and neither its weights nor its rates change."""

from __future__ import annotations

import re

import pytest
import torch

from normlab.errors import UserError
from normlab.setups.script import setup_from_script
from normlab.trials.training import first_steps
from setups.doors import script


def harvested(name, *arguments, batches=5, **how):
    with setup_from_script(script(name), arguments, batches=batches, **how) as named:
        return named


def test_as_many_batches_as_are_wanted_have_one_form():
    setup = harvested("door_sized").setup
    assert len(setup.batches) == 5
    assert {tuple(batch) for batch in setup.batches} == {tuple(setup.batches[0])}
    assert len({batch["ids"].sum().item() for batch in setup.batches}) > 1


def test_the_setup_is_that_of_the_first_step():
    alone, several = harvested("door_sized", batches=1).setup, harvested("door_sized", batches=9).setup
    assert torch.equal(alone.batch["ids"], several.batch["ids"])
    assert all(map(torch.equal, alone.model.parameters(), several.model.parameters()))
    assert several.scheduler.last_epoch == alone.scheduler.last_epoch == 1
    assert [g["lr"] for g in several.optimizer.param_groups] == [
        g["lr"] for g in alone.optimizer.param_groups
    ]
    assert not several.optimizer.state


@pytest.mark.slow
def test_the_rows_of_all_micro_batches_are_one_batch():
    batches = harvested("accumulating").setup.batches
    assert [batch["ids"].shape for batch in batches] == [(12, 13)] * 5


def test_an_epoch_that_ends_short_gives_a_short_batch():
    rows = [len(batch["ids"]) for batch in harvested("door_sized", "--rows", "20").setup.batches]
    assert rows == [8, 8, 4, 8, 8]


@pytest.mark.parametrize("name", ["translating", "scaled", "own_function", "plain", "door_early"])
def test_batches_are_trained_on(name):
    setup = harvested(name, batches=4).setup
    seen = first_steps(setup, setup.batches, seed=0, groups={}, limit_s=60)
    assert len(seen.losses) == 4


@pytest.mark.parametrize("arguments", [("--steps", "3"), ("--fail-at", "3")])
def test_a_script_that_ends_earlier_gives_what_it_gave(arguments):
    named = harvested("door_sized", *arguments)
    assert len(named.setup.batches) == 3
    assert re.search(r"\b5\b", named.facts["batches"])


def test_time_may_be_bounded():
    assert len(harvested("door_sized", seconds=0.0).setup.batches) == 2


def test_a_script_that_raises_before_its_second_step_is_refused():
    with pytest.raises(UserError, match=r"ValueError: .*door_sized\.py:\d+"):
        harvested("door_sized", "--fail-at", "1", batches=1)


def test_a_script_that_refuses_its_arguments_is_refused():
    with pytest.raises(UserError, match="--depht"):
        harvested("door_sized", "--depht", "1", batches=1)


def test_a_script_that_is_not_there_is_refused():
    with pytest.raises(UserError, match=r"nowhere\.py"), setup_from_script("nowhere.py"):
        pass
