"""The package's own recipes and tasks pass ``check``, every pair of their parts included."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cases import few
from checks.design import BASE, TASKS, config_of, design, label
from lab.tasks.test_classification import write_pairs
from lab.training.tiny import write_plain, write_text
from normlab import check
from normlab.checks.property import PROPERTIES
from normlab.lab.config import DataConfig
from normlab.lab.recipes.grammar import resolve
from normlab.lab.setups import setup_from_config
from normlab.lab.training.train import train
from normlab.nn import Placement

POSITIONS = 256
SILENT = "uniformattention"
"""The scheme that, by its source, keeps queries and keys at 0 for ever."""
TESTED = ("targets", "rows", "padding", "reduction", "derivative", "residual", "start", "update", "schedule")


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("recipes")


@pytest.fixture(scope="module")
def data(root):
    """The text of each task."""
    running_text = replace(write_plain(root / "plain"), block_len=32)
    pairs = DataConfig(**write_pairs(root), tokenizer="bpe", vocab_size=80, block_len=32)
    texts = (write_text(root / "text"), running_text, running_text, pairs)
    return dict(zip((*TASKS, "classification"), texts, strict=True))


def report_of(config, root):
    return check(setup_from_config(config, root, tokens=POSITIONS).setup, budget_s=600)


def meant(config):
    """The properties that a recipe lacks by its source."""
    model = config.model
    silent = {"gradients"} if model.scheme == SILENT else set()
    # a gradient that is stopped is not the slope, and weights are scaled beside the optimizer's step
    silent |= {"derivative"} if model.encoder_placement == "gpas" else set()
    silent |= {"step"} if model.weight_constraint != "freeweights" else set()
    # a step that is proportional to a small gradient is rounded away
    small_steps = config.optim.optimiser in ("sgd", "radam_sgd")
    silent |= {"update"} if small_steps else set()
    # the first step scales the weights, which raises the loss by more than 40 small steps win back
    silent |= {"overfit"} if small_steps and model.weight_constraint != "freeweights" else set()
    return silent | (set() if Placement.registry[model.encoder_placement].normed else {"norms"})


ROWS = list(design())


@pytest.mark.slow
@pytest.mark.parametrize("row", few(ROWS, 12), ids=[label(row) for row in ROWS])
def test_every_pair_of_parts_passes(row, data, root):
    config = config_of(row)
    report = report_of(replace(config, data=data[config.task]), root)
    failures = {f.property for f in report.failures}
    assert failures <= meant(config), report
    explained = {name for failure in failures for name in PROPERTIES[failure].explains}
    tested = {*TESTED, "step", "overfit", "state_dict", "meta"} - meant(config) - explained
    assert tested <= {*report.holds} | failures, report


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["enc:post/dec:pre", "subln", "pre+looklinear+scalarbias"])
def test_recipes_whose_blocks_differ_or_whose_start_is_mirrored_pass(recipe, data, root):
    config = resolve(recipe, replace(BASE, data=data["translation"]))
    report = report_of(config, root)
    assert report.ok, report


@pytest.mark.slow
def test_a_classification_passes_from_scratch(data, root):
    config = config_of({"task": "bert_pretraining"})
    report = report_of(replace(config, task="classification", data=data["classification"]), root)
    assert report.ok, report


@pytest.mark.slow
@pytest.mark.parametrize("task", ["bert_pretraining", "classification"])
def test_a_warm_start_passes(task, data, root):
    config = replace(config_of({"task": "bert_pretraining"}), data=data["bert_pretraining"])
    config = replace(
        config, train=replace(config.train, steps=4, max_tokens=POSITIONS, validate_every_steps=4)
    )
    start = replace(config.train, init_from=str(train(config, root / "runs").path))
    texts = data[task] if task == config.task else replace(data[task], tokenizer="")
    report = report_of(replace(config, task=task, data=texts, train=start), root)
    assert report.ok, report
