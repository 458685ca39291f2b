"""Measures of trained runs, from run folders that hold planted scores."""

import math
from dataclasses import replace
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
from normlab.lab.tasks import TASKS
from normlab.lab.tasks.translation import Translation
from normlab.papers import ARTEFACTS
from normlab.papers.claim import Measure, at_least
from normlab.papers.lab import Lab
from normlab.papers.measures import (
    BestDifference,
    BestOnDev,
    BestScore,
    DevAt,
    Difference,
    DifferenceOfTrained,
    DisorderedPairs,
    GradientRatio,
    PairsBetter,
    RiseRatio,
    ScaleGrowth,
    ScaleRatio,
    Score,
    ShareBetter,
    ShareGap,
    SharePastBest,
    ShareTrained,
    ShareTrainedToTheEnd,
    SpikesDifference,
    StepsRatio,
)
from normlab.papers.studies.trained import Trained, trainings
from normlab.papers.studies.trained_models import ROLES, TrainedModel
from normlab.papers.trainings import at_factor, side_of

METRICS = Translation.metrics
NAMES = {metric.name for task in TASKS.values() for metric in task.metrics}


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


def test_a_difference_is_one_within_seeds_and_stays_within_the_range(runs):
    both = runs(a=[[(1.0, 90.0)], [(1.0, 60.0)]], b=[[(1.0, 89.0)], [(1.0, 58.0)]])
    found = Difference("bleu", "a", "b").measure(both)
    assert found.runs == 2
    assert 1.0 < found.value < 3.0
    assert -100 < found.low < found.value < found.high < 100
    apart = Score("bleu", "a").measure(both)
    assert 60 < apart.value < 90
    assert 0 < apart.low < apart.high < 100


def test_a_rise_is_compared_with_another_within_seeds(runs):
    nll = {"a": (2.0, 3.0), "high_a": (3.0, 4.5), "b": (2.0, 2.0), "high_b": (4.0, 4.0)}
    cells = runs(**{cell: [[(value, 0.0)] for value in seeds] for cell, seeds in nll.items()})
    found = RiseRatio("nll", ("high_a", "a"), ("high_b", "b")).measure(cells)
    assert (found.value, found.low, found.high) == pytest.approx((0.75,) * 3)


def test_a_run_without_a_score_has_the_worst_one(runs):
    both = runs(a=[[(2.0, 30.0)], [(2.0, 31.0)]], b=["diverged", "diverged"])
    assert Score("bleu", "b").measure(both).value < 0.1
    assert Difference("bleu", "a", "b").measure(both).value == pytest.approx(30.5, abs=0.6)
    assert both.scores("nll", "b") == pytest.approx([8.0, 8.0])


def test_shares_have_exact_intervals(runs):
    found = ShareTrained(("a", "b")).measure(runs(a=["stuck"] * 3, b=["diverged"] * 3))
    assert (found.value, found.low, found.runs) == (0.0, 0.0, 6)
    assert found.high == pytest.approx(1 - 0.025 ** (1 / 6))


def test_the_better_of_several_cells_is_taken_within_a_seed(runs):
    three = runs(a=[[(1.0, 10.0)], [(1.0, 40.0)]], b=[[(1.0, 30.0)], [(1.0, 20.0)]], c=[[(1.0, 5.0)]] * 2)
    best = BestScore("bleu", ("a", "b")).measure(three)
    assert 30 < best.value < 40
    assert BestDifference("bleu", ("a", "b"), ("c",)).measure(three).low < best.value
    assert PairsBetter("bleu", (("a", "b"), ("a", "c"))).measure(three).value == pytest.approx(0.75)


def test_placements_are_compared_where_both_train(runs):
    two = runs(a=[[(1.0, 10.0)], "stuck"], b=[[(1.0, 5.0)], [(1.0, 5.0)]], c=["stuck"] * 2)
    assert PairsBetter("bleu", (("a", "b"),)).measure(two).runs == 1
    nothing = PairsBetter("bleu", (("a", "c"),)).measure(two)
    assert (nothing.low, nothing.high) == (0.0, 1.0)
    gap = ShareGap(("b", "b"), ("a", "c")).measure(two)
    assert (gap.value, gap.runs) == (0.75, 4)
    assert gap.low < 0.5, "four pairs are too few for that"
    alike = ShareGap(("b", "b"), ("b", "b")).measure(two)
    assert (alike.value, alike.low) == (0.0, pytest.approx(-alike.high)), "equal shares decide no order"
    assert alike.high == pytest.approx(1 - 0.025 ** (1 / 4))


@pytest.fixture
def ends(runs):
    """Plant runs by cell that are all trained by their best checkpoint: BLEU, and whether each lasts."""

    def planted(**cells):
        found = runs(**{cell: [[(1.0, bleu)] for bleu, _ in seeds] for cell, seeds in cells.items()})
        for cell, seeds in cells.items():
            for folder, (_, lasts) in zip(found.cells[cell], seeds, strict=True):
                row = {"kind": "dev", "step": 90, "nll": 4.0, "nll_exchanged": 4.0 + lasts, "bleu": 0.0}
                folder.append_metrics({**row, "repeated_share": 0.0})
        return found

    return planted


def test_a_run_that_collapsed_later_has_not_trained_to_the_end(ends):
    some = ends(a=[(50.0, True), (50.0, False)])
    assert ShareTrained(("a",)).measure(some).value == 1.0
    assert ShareTrainedToTheEnd(("a",)).measure(some).value == 0.5


def test_a_score_may_have_to_be_a_multiple_of_the_other(ends):
    some = ends(a=[(50.0, True), (50.0, True), (0.0, True)], b=[(10.0, True), (11.0, True), (0.0, True)])
    assert ShareBetter("bleu", "a", "b", times=4.9).measure(some).value == 1 / 3, "0 is no multiple of 0"
    assert ShareBetter("bleu", "a", "b").measure(some).value == 2 / 3


def test_a_failed_run_is_worse_than_any_that_trains_and_in_no_mean(ends):
    some = ends(
        a=[(1.0, True), (50.0, True), (9.0, False), (60.0, True)],
        b=[(90.0, False), (40.0, True), (2.0, False), (50.0, True)],
    )
    found = ShareBetter("bleu", "a", "b").measure(some)
    assert (found.value, found.runs, found.share) == (0.75, 4, True)
    assert ShareBetter("nll", "b", "a").measure(some).value == 0.0, "equal losses are no better ones"
    assert DifferenceOfTrained("bleu", "a", "b").measure(some).value == pytest.approx(10.0, abs=0.2)
    failed = DifferenceOfTrained("bleu", "a", "b").measure(ends(a=[(1.0, False)], b=[(1.0, True)]))
    assert (failed.low, failed.high) == (-math.inf, math.inf)
    assert at_least("m", 0.0).verdict({"m": failed}) == "undecided"


def test_steps_to_the_other_s_best_loss(runs):
    fast = [(3.0, 1.0), (2.0, 2.0), (1.0, 3.0), (0.9, 3.0)]
    slow = [(4.0, 1.0), (3.0, 2.0), (2.5, 3.0), (2.0, 3.0)]
    both = runs(fast=[fast, fast], slow=[slow, slow])
    assert StepsRatio("fast", "slow").measure(both).value == pytest.approx(0.5)
    never = StepsRatio("slow", "fast").measure(both)
    assert (never.value, never.high) == (pytest.approx(1.0), math.inf), "it never gets there"
    assert DevAt("nll", "slow", "fast", 0.5).measure(both).value == pytest.approx(1.0)


def test_spikes_of_the_gradient_norm_after_the_warm_up(runs):
    both = runs(calm=[[(1.0, 1.0)]], wild=[[(1.0, 1.0)]])
    first = both.cells["calm"][0].config().optim.warmup_steps
    for cell, every in (("calm", 10**9), ("wild", 20)):
        for step in range(-50, 101):
            spike = step <= 0 or step % every == every // 2
            norm = 10.0 if spike else 1.0 + 0.1 * math.sin(step)
            row = {"kind": "train", "step": first + step, "grad_norm_l2": norm}
            both.cells[cell][0].append_metrics(row)
    assert both.spikes("calm") == [0.0]
    assert SpikesDifference("wild", "calm").measure(both).value == pytest.approx(5.0)
    assert GradientRatio("wild", "calm").measure(both).value == pytest.approx(1.0, rel=0.05)
    none = SpikesDifference("calm", "calm").measure(both)
    assert at_least("m", 0.0).verdict({"m": none}) == "undecided", "nobody spikes, so nothing is said"


def test_the_best_validation_may_come_before_the_end(runs):
    past, rising = [(3.0, 5.0), (2.0, 9.0), (2.5, 8.0)], [(3.0, 4.0), (2.0, 6.0), (1.9, 7.0)]
    some = runs(past=[past, past], rising=[rising, past])
    assert BestOnDev("bleu", "past", "rising").measure(some).value == pytest.approx(1.0)
    assert BestOnDev("nll", "past", "rising").measure(some).value == pytest.approx(0.05)
    assert SharePastBest(("past",)).measure(some) == Measure.exact(1.0)
    assert SharePastBest(("past", "rising")).measure(some).value == 0.75


def test_pairs_whose_better_loss_has_the_worse_score(runs):
    some = runs(a=[[(3.0, 1.0)]], b=[[(4.0, 2.0)]], good=[[(1.0, 80.0)]])
    assert DisorderedPairs(10.0).measure(some).value == 1
    assert DisorderedPairs(1.5).measure(some).value == 0


def test_the_study_shows_every_seed_beside_the_mean(runs, tmp_path):
    both = runs(a=[[(1.0, 90.0)], "stuck"])
    names = {"measures": "m", "gpu": "n", "paper": "o"}
    wanted = {scale: {name: ShareTrained(("a",))} for scale, name in names.items()}
    for scale, measured in (("gpu", {"m", "n"}), ("paper", {"m", "n", "o"}), ("laptop", {"m"})):
        found = trainings(Lab(tmp_path, runs=both.cells, scale=scale), **wanted)
        assert found.measures.keys() == measured
    (cell,) = found.tables["cells"]
    assert (cell["seeds"], cell["trained"]) == ("90.0, (0.0)", "1 of 2")
    assert [row["outcome"] for row in found.tables["runs"]] == ["trained", "stuck"]
    assert found.measures["m"].value == 0.5
    assert np.isfinite(cell["low"])


def on_cpu(config):
    """A configuration with a precision, so that it has an id."""
    return replace(config, train=replace(config.train, precision="fp32"))


@pytest.fixture
def once_a_size(monkeypatch):
    """Cells that differ in their training alone build no model again to know that its sizes fit."""
    monkeypatch.setattr(grammar, "_require_sizes", cache(grammar._require_sizes))


@pytest.mark.slow
@each("artefact", [a for a in ARTEFACTS.values() if a.trainings], ids=lambda artefact: artefact.id)
def test_every_cell_of_an_artefact_can_be_trained_and_every_measure_reads_cells(artefact, once_a_size):
    for trainings_ in artefact.trainings.values():
        resolved = [grammar.resolve(c.recipe, on_cpu(c), force=True) for _, _, c in trainings_.configs()]
        ids = {run_id(c) for c in resolved}
        assert len(ids) == len(trainings_.cells) * trainings_.seeds
        assert trainings_.differs.strip().endswith(".")
    larger = {**artefact.settings.get("gpu", {}), **artefact.settings.get("paper", {})}
    measures = {**artefact.settings.get("measures", artefact.settings.get("training", {})), **larger}
    claims = {claim.measure: claim for claim in artefact.claims}
    assert {*measures} <= {*claims}
    assert {*measures} == {*claims} or artefact.study_name not in ("trainings", "learned_scales")
    assert {name for name, claim in claims.items() if claim.needs} == {*larger}
    for name, measure in measures.items():
        on_paper = name in artefact.settings.get("paper", {})
        scales = {"paper"} if on_paper else {*artefact.trainings} - ({"laptop"} if name in larger else set())
        cells = set.intersection(*(set(artefact.trainings[scale].cells) for scale in scales))
        factors = artefact.settings.get("factors", (1,))
        cells |= {at_factor(side_of(cell), k) for cell in cells for k in factors}
        cells |= {f"{task} {cell}" for task in artefact.settings.get("tasks", ()) for cell in cells}
        assert measure.reads() <= cells, f"{artefact.id}: {measure.reads() - cells}"
        assert getattr(measure, "metric", "") in {*NAMES, ""}
        assert getattr(measure, "role", ROLES) in (ROLES, *ROLES)


def test_learned_scales_are_read_from_the_weights(runs):

    both = runs(a=[[(1.0, 1.0)]] * 2, b=[[(1.0, 1.0)]] * 2)
    with pytest.raises(UserError, match="keeps no weights"):
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
