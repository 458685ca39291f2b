"""Training scripts are recorded unchanged, and their steps are computed again to rounding."""

from __future__ import annotations

import math
import os
import random
import re
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

import normlab
from cases import few, mostly_slow, slow
from normlab.cli.main import main
from normlab.errors import NoStepError, UserError
from normlab.private_torch import clip_by_norm
from normlab.setups.patches import PATCHES
from normlab.setups.script import setup_from_script
from script_runs import run_to_first_step

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


@pytest.mark.parametrize(
    "name",
    mostly_slow(
        ["plain", "accumulating", "scaled", "translating", "own_function", "drawing", "functional_gradients"],
        quick=["plain"],
    ),
)
def test_a_sound_script_has_no_failure(name):
    assert failures(name) == []


@pytest.mark.parametrize(
    ("name", "argument", "failure"),
    [
        ("accumulating", "--undivided", ("step", "step")),
        slow("scaled", "--clip-scaled", ("step", "step")),
        slow("own_function", "--halved", ("derivative", "head.weight")),
        slow("functional_gradients", "--undivided", ("step", "step")),
        slow("functional_gradients", "--gains-forgotten", ("step", "step")),
        slow("functional_gradients", "--unshifted", ("targets", "loss")),
    ],
)
def test_a_mistake_in_a_script_is_named_first(name, argument, failure):
    assert failures(name, argument)[0] == failure


@pytest.mark.slow
def test_micro_batches_are_one_batch_where_they_have_one_shape():
    assert setup_of("accumulating").batches["ids"].shape == (12, 13)


def test_modules_that_no_module_holds_have_the_names_of_the_script():
    names = {name for name, _ in setup_of("translating").model.named_children()}
    assert names == {"encoder", "decoder", "head"}


@pytest.mark.slow
def test_of_a_step_that_cannot_be_computed_again_only_what_needs_no_pass_is_tested():
    setup = setup_of("counting")
    assert re.search(r"Counting in counting\.py:\d+", setup.cannot["loss"])
    report = normlab.check(setup)
    assert report.ok
    assert {"groups", "start"} <= {*report.holds}
    assert {name for name, why in report.untestable.items() if why == setup.cannot["loss"]} >= {
        "finite",
        "causality",
        "derivative",
        "step",
    }
    with pytest.raises(UserError, match="Counting"):
        normlab.trial(setup)


@pytest.mark.slow
def test_a_number_that_leaves_torch_is_computed_again():
    setup = setup_of("counting_targets", "--of-each", "--by", "item")
    ids = setup.batch["window"][:, :-3]  # the last two columns are not counted
    mean = nn.functional.cross_entropy(setup.model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
    assert not setup.cannot
    assert setup.loss(setup.model, {"window": ids}).item() == pytest.approx(mean.item() / 4)


@pytest.mark.slow
@pytest.mark.parametrize("by", few(["item", "float", "int"], 1))
def test_micro_batches_of_several_shapes_are_held_to_the_mean_over_all_their_targets(by):
    assert failures("counting_targets", "--by", by) == []
    assert failures("counting_targets", "--of-each", "--by", by)[0] == ("step", "step")


@pytest.mark.slow
@pytest.mark.parametrize("arguments", few([["--dynamic", "--bf16"], [], ["--dynamic"], ["--bf16"]], 1))
def test_a_count_of_the_window_is_one_number_in_any_shape_and_precision(arguments):
    assert failures("counting_before", *arguments) == []
    assert failures("counting_before", "--of-each", *arguments)[0] == ("step", "step")


@pytest.mark.slow
def test_the_loss_of_joined_micro_batches_is_the_mean_over_all_their_targets():
    setup = setup_of("counting_before")
    ids = setup.batch["window"]
    mean = nn.functional.cross_entropy(
        setup.model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten(), ignore_index=0
    )
    assert ids.shape == (12, 15)
    assert setup.loss(setup.model, setup.batch).item() == pytest.approx(mean.item())


@pytest.mark.slow
def test_what_comes_back_from_numpy_keeps_other_batches_from_being_tested():
    setup = setup_of("counting_targets", "--by", "numpy")
    assert {*setup.cannot} == {"batch"}
    report = normlab.check(setup)
    assert report.ok
    assert "derivative" in report.holds
    assert report.untestable["causality"] == setup.cannot["batch"]


ADDING = {"--unshifted": "targets", "--counting": "counted", "--detached": "derivative"}


@pytest.mark.slow
@pytest.mark.parametrize("mistake", few(["", "--weighed", *ADDING], 3))
def test_a_mistake_in_the_second_of_two_losses_that_are_added_is_named_first(mistake):
    setup = replace(setup_of("adding", mistake), declare={"pad_id": 0})
    assert len(setup.added) == 2
    failures = normlab.check(setup).failures
    assert [failure.property for failure in failures][:1] == [ADDING[x] for x in (mistake,) if x in ADDING]


def test_losses_that_share_a_pass_are_one():
    assert setup_of("smoothed").added == []
    assert setup_of("plain").added == []


@pytest.mark.slow
def test_detached_weights_get_the_gradients_of_those_that_they_were_detached_from():
    setup = setup_of("functional_gradients", "--detached")
    assert not setup.cannot
    ids, parameters = setup.batches["ids"], list(setup.model.parameters())
    logits = setup.model(ids[:, :-1])
    of_the_model = nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
    wanted = torch.autograd.grad(of_the_model, parameters)
    gradients = torch.autograd.grad(setup.loss(setup.model, setup.batches), parameters)
    torch.testing.assert_close(gradients, wanted)


def test_gradients_by_row_are_refused_and_the_command_says_what_to_type_instead(capsys):
    script = str(SCRIPTS / "functional_gradients.py")
    with pytest.raises(NoStepError, match="backward pass"):
        setup_of("functional_gradients", "--by-row")
    assert main(["check", script, "--", "--by-row"]) == 2
    assert f" {script}:setup" in capsys.readouterr().err


def test_a_script_without_a_step_is_refused():
    with pytest.raises(UserError, match="optimizer"):
        setup_of("untrained")


def test_a_script_ends_with_its_own_finally(tmp_path):
    setup_of("plain", "--marker", str(tmp_path / "marker"))
    assert (tmp_path / "marker").read_text() == "cleaned up"


def test_nothing_stays_changed():
    before, clip = [vars(owner)[name] for owner, name, _ in PATCHES], clip_by_norm()
    state, path, argv, environment = torch.get_rng_state(), list(sys.path), list(sys.argv), dict(os.environ)
    draws = random.getstate(), np.random.get_state()[1].tolist()  # noqa: NPY002
    setup = setup_of("plain")
    assert [vars(owner)[name] for owner, name, _ in PATCHES] == before
    assert clip_by_norm() is clip
    assert torch.equal(torch.get_rng_state(), state)
    assert (random.getstate(), np.random.get_state()[1].tolist()) == draws  # noqa: NPY002
    assert (sys.path, sys.argv, dict(os.environ)) == (path, argv, environment)
    assert isinstance(setup.optimizer, Optimizer)
    before_step = [p.detach().clone() for p in setup.model.parameters()]
    setup.optimizer.step()
    assert not all(map(torch.equal, before_step, setup.model.parameters()))


@pytest.mark.slow
def test_what_a_recorded_step_reaches_is_put_back():
    setup = setup_of("drawing")
    model = setup.model
    assert model.monitor.calls == 2  # those of the script: computing the step again is not counted

    def state():
        weights = {name: x.clone() for name, x in model.state_dict().items()}
        drawn = model.torch.get_state(), str(model.numpy.bit_generator.state)
        return model.monitor.calls, list(model.monitor.sizes), *drawn, weights

    before = state()
    assert normlab.check(setup).ok
    normlab.diagnose(setup, preset="cheap")
    after = state()
    assert before[:2] == after[:2]
    assert torch.equal(before[2], after[2])
    assert before[3] == after[3]
    assert all(torch.equal(before[4][name], x) for name, x in after[4].items())


def test_a_weight_is_never_changed():
    drawn = run_to_first_step(SCRIPTS / "plain.py").param_groups[0]["params"]
    setup = setup_of("plain")
    torch.testing.assert_close(list(setup.model.parameters()), drawn, rtol=0, atol=0)
    assert not setup.optimizer.state


@pytest.mark.slow
def test_the_command_takes_a_script_with_its_own_arguments(capsys):
    script = str(SCRIPTS / "accumulating.py")
    assert main(["check", script]) == 0
    assert "recorded 4 micro-batches" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="3"):
        main(["check", script, "--", "--undivided"])
    assert re.search(r"^✗ step\b", capsys.readouterr().out, re.MULTILINE)


def test_arguments_of_a_script_need_a_script(capsys):
    assert main(["check", "--recipe", "pre", "--", "--lr", "3"]) == 2
    assert "train.py -- --lr" in capsys.readouterr().err


def test_looking_for_names_runs_no_code_of_the_script(tmp_path):
    script = tmp_path / "lazy.py"
    script.write_text(
        "from collections import OrderedDict\n"
        "class Lazy(OrderedDict):\n"
        "    def items(self):\n"
        "        raise ImportError('loaded too early')\n"
        "lazy = Lazy(a=1)\n" + (SCRIPTS / "plain.py").read_text()
    )
    (tmp_path / "models.py").write_text((SCRIPTS / "models.py").read_text())
    with setup_from_script(str(script)) as named:
        assert list(named.setup.batch) == ["ids"]


@pytest.mark.slow
def test_clipping_by_the_code_of_a_script_is_clipping():
    assert failures("own_clip", "0.5") == []
    assert failures("own_clip", "0.5", "--undivided")[0] == ("step", "step")


@pytest.mark.parametrize("bound", ["1e9", "0.5"])
def test_a_clip_by_a_norm_that_the_script_computed_is_a_clip_of_the_step(bound):
    operations = setup_of("clip_by_known_norm", bound).step.operations
    (clip,) = [operation for operation in operations if operation.kind == "clip"]
    assert clip.largest_norm == float(bound)


@pytest.mark.slow
def test_a_clip_by_the_largest_entry_is_repeated_as_one():
    setup = setup_of("clip_by_known_norm", "0.01", "--by-entries")
    (clip,) = [operation for operation in setup.step.operations if operation.kind == "clip"]
    assert (clip.largest_norm, clip.norm_type) == (0.01, math.inf)
    assert failures("clip_by_known_norm", "0.01", "--by-entries") == []


@pytest.mark.slow
def test_a_clip_of_part_after_part_by_the_norm_of_all_is_one_of_all():
    setup = setup_of("clip_by_known_norm", "0.5", "--by-part")
    (clip,) = [operation for operation in setup.step.operations if operation.kind == "clip"]
    assert {*clip.parameters} == {name for name, _ in setup.model.named_parameters()}
    assert clip.largest_norm == pytest.approx(0.5, rel=1e-4)
    assert failures("clip_by_known_norm", "0.5", "--by-part") == []


@pytest.mark.slow
@pytest.mark.parametrize(("mistake", "failing"), [("", []), ("--early", [("step", "step")])])
def test_a_clip_by_a_known_norm_before_the_last_backward_is_named(mistake, failing):
    assert failures("clip_by_known_norm", "0.5", *mistake.split())[:1] == failing


@pytest.mark.slow
def test_a_schedule_that_is_made_of_others_is_one_schedule():
    setup = setup_of("chained_schedules")
    assert type(setup.scheduler).__name__ == "SequentialLR"
    assert [operation.kind for operation in setup.step.operations].count("schedule") == 1
    assert failures("chained_schedules") == []
