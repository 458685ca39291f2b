"""Tables of trained runs and measures of their weights, from run folders that hold planted scores."""

import math
from dataclasses import fields, replace
from functools import cache

import numpy as np
import pytest
from safetensors.numpy import save_file

from cases import each
from normlab.base.files import write_json_atomic
from normlab.base.metric import Outcome
from normlab.errors import UserError
from normlab.lab.config import Config, run_id
from normlab.lab.recipes import grammar
from normlab.lab.runs import RunFolder, Status
from normlab.lab.tasks.translation import Translation
from normlab.papers import ARTEFACTS
from normlab.papers.lab import Lab
from normlab.papers.measures import ROLES, ScaleGrowth, ScaleRatio
from normlab.papers.studies.trained import Trained, trainings
from normlab.papers.studies.trained_models import TrainedModel

METRICS = Translation.metrics


@pytest.fixture
def runs(tmp_path):
    """Plant runs by cell: for each seed the curve of dev NLL and BLEU, whose last BLEU is that of the test; a
    word in place of a curve is the outcome of a run without scores.
    """

    def planted(**cells):
        found = {}
        for cell, seeds in cells.items():
            found[cell] = []
            for seed, curve in enumerate(seeds):
                folder = RunFolder.create(tmp_path / f"{cell}-{seed}", Config(), METRICS)
                state = curve if isinstance(curve, str) else "trained"
                folder.set_status(Status("done", 100, Outcome(state, 100, ""), train_seconds=1.0))
                folder.append_metrics({"kind": "dev", "step": 1, "nll": 8.0, "bleu": 0.0})
                for step, (nll, bleu) in [] if isinstance(curve, str) else enumerate(curve, 1):
                    folder.append_metrics({"kind": "dev", "step": 10 * step, "nll": nll, "bleu": bleu})
                if not isinstance(curve, str):
                    write_json_atomic(folder.scores, {"bleu": curve[-1][1], "nll": curve[-1][0]})
                found[cell].append(folder)
        return Trained(found)

    return planted


def test_the_study_shows_every_seed_beside_the_mean(runs, tmp_path):
    both = runs(a=[[(1.0, 90.0)], "stuck"])
    found = trainings(Lab(tmp_path, runs=both.cells))
    (cell,) = found.tables["cells"]
    assert (cell["seeds"], cell["trained"]) == ("90.0, (0.0)", "1 of 2")
    assert [row["outcome"] for row in found.tables["runs"]] == ["trained", "stuck"]
    assert found.measures == {}
    assert np.isfinite(cell["low"])
    assert "gradients" not in found.tables


def test_gradient_norms_are_kept_where_a_study_asks_for_them(runs, tmp_path):
    both = runs(a=[[(1.0, 90.0)]])
    both.cells["a"][0].append_metrics({"kind": "train", "step": 10, "grad_norm_l2": 2.5})
    found = trainings(Lab(tmp_path, runs=both.cells), gradients=True)
    assert found.tables["gradients"] == [{"cell": "a", "seed": 1, "step": 10, "grad_norm_l2": 2.5}]


def on_cpu(config):
    """A configuration with a precision, so that it has an id."""
    return replace(config, train=replace(config.train, precision="fp32"))


@pytest.fixture
def once_a_size(monkeypatch):
    """Cells that differ in their training alone build no model again to know that its sizes fit."""
    monkeypatch.setattr(grammar, "_require_sizes", cache(grammar._require_sizes))


@pytest.mark.slow
@each("artefact", [a for a in ARTEFACTS.values() if a.trainings], ids=lambda artefact: artefact.id)
def test_every_cell_of_an_artefact_can_be_trained_and_measures_read_cells(artefact, once_a_size):
    for trainings_ in artefact.trainings.values():
        resolved = [grammar.resolve(c.recipe, on_cpu(c), force=True) for _, _, c in trainings_.configs()]
        ids = {run_id(c) for c in resolved}
        assert len(ids) == len(trainings_.cells) * trainings_.seeds
        assert trainings_.differs.strip().endswith(".")
    for measure in artefact.settings.get("measures", {}).values():
        read = {f.name: getattr(measure, f.name) for f in fields(measure)}
        cells = {value for name, value in read.items() if name in ("a", "b", "cell")}
        assert all(cells <= {*trainings_.cells} for trainings_ in artefact.trainings.values())
        assert read.get("role", next(iter(ROLES))) in ROLES


def test_learned_scales_are_read_from_the_weights(runs):

    both = runs(a=[[(1.0, 1.0)]] * 2, b=[[(1.0, 1.0)]] * 2)
    with pytest.raises(UserError, match="weights"):
        _ = TrainedModel(both.cells["a"][0]).scales
    for cell, slope in (("a", 1.0), ("b", -1.0)):
        for folder in both.cells[cell]:
            g = {f"encoder.sublayers.{i}.place.norm.g": 8 + slope * i for i in range(6)}
            g |= {f"decoder.sublayers.{i}.place.norm.g": 20 - slope * i for i in range(12)}
            g |= {"decoder.end.g": 30.0 + slope}
            folder.best.mkdir()
            save_file(
                {name: np.array([v], np.float32) for name, v in g.items()}, folder.best / "model.safetensors"
            )
    assert TrainedModel(both.cells["a"][0]).by_layer("encoder feed-forward").tolist() == [9, 11, 13]
    assert TrainedModel(both.cells["a"][0]).by_layer("decoder-encoder attention").tolist() == [19, 16, 13, 10]
    assert ScaleGrowth("a", "encoder attention").measure(both).value == pytest.approx(math.log(12 / 8) / 2)
    assert all(ScaleGrowth("b", r).measure(both).value > 0 for r in ROLES if r.startswith("decoder"))
    assert ScaleRatio("a", "b", "output").measure(both).value == pytest.approx(31 / 29)
    assert ScaleRatio("a", "b", "late").measure(both).value == pytest.approx((20 - 9.5) / (20 + 9.5))
