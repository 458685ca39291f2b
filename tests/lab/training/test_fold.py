"""``normlab run fold``: a run's plain model in a run folder of its own, and what is refused."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from cases import few
from lab.training.tiny import tiny, tiny_language_model, write_plain
from normlab.base.io import from_json
from normlab.cli.main import main
from normlab.errors import UserError
from normlab.lab.config import Config
from normlab.lab.data.text import read_lines
from normlab.lab.recipes.grammar import resolve
from normlab.lab.runs import RunFolder, Runs
from normlab.lab.training import fold as module
from normlab.lab.training.checkpoint import save_checkpoint, weights_state
from normlab.lab.training.fold import BOUND, fold, measure_fold, recipe_of
from normlab.lab.training.train import train
from normlab.lab.training.translate import translate
from scripts import script

METHODS = script("fold").METHODS


def away_from_start(folder):
    """Write the run's weights again, each moved at random, so that no gain or factor is 0, 1 or its start."""
    generator, weights = torch.Generator().manual_seed(1), load_file(folder.best / "model.safetensors")
    model = torch.nn.ParameterDict({name.replace(".", "/"): weight for name, weight in weights.items()})
    with torch.no_grad():
        for parameter in model.values():
            parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
    state = {"model": {name: model[name.replace(".", "/")].detach() for name in weights}}
    save_checkpoint(folder.best, weights_state(torch.nn.Identity(), 12) | state, run=folder.id())
    return folder


@pytest.fixture(scope="module")
def run(text, tmp_path_factory):
    """An Admin run whose outputs are long and differ."""
    return away_from_start(train(tiny(text, "admin"), tmp_path_factory.mktemp("runs")))


@pytest.fixture(scope="module")
def folded(run):
    return fold(run, run.path.parent / "plain"), RunFolder(run.path.parent / "plain")


@pytest.mark.slow
def test_the_folder_is_a_run_that_gives_the_same_translations(text, run, folded):
    result, plain = folded
    assert result.float32 < BOUND * result.largest_logit
    assert result.float64 < 1e-12 * result.largest_logit
    assert (result.equal_outputs, result.outputs) == (10, 10)
    assert 1 < result.batches <= module.BATCHES
    source = read_lines(text.test_src)
    outputs = translate(plain.path, source)
    assert outputs == translate(run.path, source)
    assert len(set(outputs)) > 3
    assert plain.status() == run.status()
    assert from_json(module.FoldResult, (plain.path / "fold.json").read_text()) == result


@pytest.mark.slow
def test_the_configuration_is_a_recipe_of_plain_parts(run, folded):
    result, plain = folded
    config = plain.config()
    assert (result.before, result.after) == ("admin", config.recipe)
    resolved = resolve(config.recipe, config)
    assert replace(resolved, recipe=config.recipe) == config
    assert config.recipe.split("+")[:3] == ["post", "untied", "learned"]
    assert not plain.stale()
    assert plain.id() not in {run.id(), run.path.name}
    sizes = [sum(w.numel() for w in load_file(f.best / "model.safetensors").values()) for f in (run, plain)]
    assert sizes == [result.parameters_before, result.parameters_after]
    assert result.positions == config.model.max_positions


def test_the_folder_can_be_trained_on(run, folded, tmp_path):
    config = folded[1].config()
    again = train(replace(config, train=replace(config.train, steps=1, validate_every_steps=1)), tmp_path)
    note = json.loads(again.start.read_text())
    assert not note["other_shape"]
    assert not note["not_there"]


@pytest.mark.slow
def test_the_command_prints_what_was_measured(run, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = shutil.copytree(run.path, tmp_path / "runs" / run.path.name)
    shutil.copytree(run.path.parent / "data", tmp_path / "runs/data")
    assert main(["run", "fold", run.path.name[:6], "--max-positions", "64"]) == 0
    said = capsys.readouterr().out
    plain = RunFolder(folder.with_name(f"plain-{folder.name}"))
    result = from_json(module.FoldResult, (plain.path / "fold.json").read_text())
    assert result.positions == 64
    facts = [
        f"{result.float32:.2g} in float32",
        "10 of 10",
        f"{result.parameters_after:,}",
        str(plain.path.name),
    ]
    assert [fact for fact in facts if fact not in said] == []
    assert {run.path.name for run in Runs("runs")} == {folder.name, plain.path.name}
    for command in (
        ["run", "list"],
        ["run", "report", plain.path.name],
        ["diagnose", plain.path.name, "--preset", "cheap"],
    ):
        assert main(command) == 0, (command, capsys.readouterr().err)


@pytest.mark.slow
def test_a_language_model_is_folded(tmp_path):
    config = tiny_language_model(write_plain(tmp_path), "deepnorm", steps=2)
    result = fold(train(config, tmp_path / "runs"), tmp_path / "plain")
    assert result.float64 < 1e-12 * result.largest_logit
    assert (result.outputs, result.equal_outputs) == (0, 0)
    assert not RunFolder(tmp_path / "plain").config().model.separate_source


# ------------------------------------------------------------------------------------------------- refusals


def test_a_difference_that_is_no_rounding_is_refused_before_anything_is_written(run, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "BOUND", 0.0)
    with pytest.raises(UserError, match="float32"):
        fold(run, tmp_path / "plain")
    assert list(tmp_path.iterdir()) == []


def test_a_wrong_rewrite_is_refused(run, tmp_path, monkeypatch):
    from normlab.nn import Admin
    from normlab.nn.placement.base import Plain

    monkeypatch.setattr(Admin, "fold", lambda self: Plain("post", norm=self.norm))
    with pytest.raises(UserError, match=r"differ by"):
        fold(run, tmp_path / "plain")


def test_a_folder_that_exists_stays(run, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="exists"):
        fold(run, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("state", ["running", "interrupted", "failed"])
def test_an_unfinished_run_is_refused(run, tmp_path, state):
    folder = RunFolder(shutil.copytree(run.path, tmp_path / "run"))
    folder.set_status(replace(folder.status(), state=state, step=7))
    with pytest.raises(UserError, match=r"\b7 of 12\b.*train --config"):
        measure_fold(folder)


def test_what_is_no_run_is_refused(tmp_path, capsys):
    assert main(["run", "fold", "abc", "--runs", str(tmp_path)]) == 2
    assert str(tmp_path) in capsys.readouterr().err


@pytest.mark.parametrize(("recipe", "fact"), [("pre", "plain one already"), ("keel", "epsilon")])
def test_a_run_with_nothing_to_fold_is_refused_with_the_reason(text, tmp_path, recipe, fact):
    with pytest.raises(UserError, match=fact):
        measure_fold(train(tiny(text, recipe, steps=1), tmp_path))


def test_fewer_positions_than_the_text_has_tokens_are_refused(run):
    with pytest.raises(UserError, match="--max-positions"):
        measure_fold(run, max_positions=2)


def test_learned_positions_are_as_many_as_they_are(text, tmp_path):
    folder = train(tiny(text, "rezero+learned", steps=1), tmp_path)
    with pytest.raises(UserError, match="has learned 1024"):
        measure_fold(folder, max_positions=99)


# -------------------------------------------------------------------------------------------------- methods


@pytest.mark.parametrize("recipe", ["post", "enc:admin/dec:pre+rmsnorm", "pre+rope+swiglu+warmup"])
def test_a_config_is_named_as_a_recipe(recipe):
    base = Config(optim=replace(Config().optim, warmup_steps=4))
    config = resolve(recipe, base)
    assert resolve(recipe_of(config), base).model == config.model


@pytest.mark.slow
@pytest.mark.parametrize("recipe", few(METHODS, 5))
def test_a_trained_model_of_each_method_becomes_plain(text, tmp_path, recipe):
    folder = train(tiny(text, recipe, steps=60, lr=1e-2), tmp_path)
    result = fold(folder, tmp_path / "plain")
    assert result.float32 < BOUND * result.largest_logit
    assert result.float64 < 1e-12 * result.largest_logit
    assert result.equal_outputs == result.outputs
    assert result.after != result.before


def test_the_page_holds_the_measured_table():
    measured = script("fold")
    assert measured.PAGE.read_text(encoding="utf-8") == measured.page(), "python benchmarks/fold.py --page"
    rows = measured.kept()
    assert [row["before"] for row in rows] == list(METHODS)
    assert all(row["float32"] < BOUND * row["largest_logit"] for row in rows)
    assert all(row["float64"] < 1e-12 * row["largest_logit"] for row in rows)
    assert all(row["equal_outputs"] == row["outputs"] for row in rows)
