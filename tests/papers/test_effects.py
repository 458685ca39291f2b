"""Effects on made-up runs whose answer is known, and against the statistics that they rest on."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from normlab.errors import UserError
from normlab.judging.statistics import MetricScale, contrasts
from normlab.lab.tasks import TASKS
from normlab.papers.effects import BLEU, EFFECTS, MEASURED, METRICS, UnmeasuredError
from normlab.papers.end_measures import MEASURES, UPDATES
from normlab.papers.estimate import Estimate
from normlab.papers.finding import Expectation
from normlab.papers.regimes import ChosenRate, Regime, Run, Setting

SETTING = Setting("small", "Made up.", "It is small.")


def run(cell, seed, bleu=20.0, *, outcome="trained", nll=((100, 4.0), (200, 3.0)), **more):
    dev = {"nll": list(nll), "bleu": [(step, bleu * step / 200) for step, _ in nll]}
    return Run(cell, seed, f"{cell}{seed}", outcome, {"bleu": bleu, "nll": nll[-1][1]}, dev, **more)


def regime(*runs, **more):
    empty = {"measures": {}, "tables": {}, "planned": frozenset(), "findings": frozenset(), "margins": {}}
    return Regime("made-up", SETTING, "", (), runs, **{**empty, **more})


def effect(name, rows, **arguments):
    return EFFECTS[name](rows, arguments)


def test_a_difference_is_that_of_pairs_on_the_metric_s_scale():
    a, b = np.array([30.0, 33.0, 31.0, 36.0]), np.array([22.0, 26.0, 21.0, 30.0])
    rows = regime(*(run("a", s, x) for s, x in enumerate(a)), *(run("b", s, x) for s, x in enumerate(b)))
    found = effect("difference", rows, of="a", over="b")
    scale = MetricScale(BLEU)
    first, second = scale.values(a), scale.values(b)
    moved = first - second
    half = stats.t.ppf(0.975, 3) * stats.sem(moved)
    centre = np.concatenate([first, second]).mean()
    expected = [scale.difference(centre, moved.mean() + side * half) for side in (0, -1, 1)]
    assert [found.value, found.low, found.high] == pytest.approx([float(e) for e in expected])
    assert (found.runs, found.unit) == (4, "BLEU")


def test_three_seeds_that_agree_by_luck_borrow_the_spread_of_other_pairs():
    """Three differences of 1.0, 1.1 and 0.9 alone would have an interval of a quarter of a BLEU each way."""
    bleu = {
        "a": (31.0, 34.1, 27.9),
        "b": (30.0, 33.0, 27.0),
        "c": (25.0, 21.0, 29.0),
        "d": (24.0, 29.0, 22.0),
    }
    alone = regime(*(run(c, s, x) for c in "ab" for s, x in enumerate(bleu[c])))
    beside = regime(*(run(c, s, x) for c in "abcd" for s, x in enumerate(bleu[c])))
    by_itself, moderated = (effect("difference", rows, of="a", over="b") for rows in (alone, beside))
    assert by_itself.value == pytest.approx(moderated.value)
    assert by_itself.low > 0
    assert moderated.low < 0
    scores = MetricScale(BLEU).values(np.array([bleu[c] for c in "abcd"]))
    compared = contrasts(scores)
    half = compared.error[0] * stats.t.isf(0.025, compared.freedom[0])
    assert half == pytest.approx(compared.margin_of_one[0])
    assert half < compared.margin[0]


def test_metrics_are_those_of_the_tasks():
    for name, metric in METRICS.items():
        assert any(metric in task.metrics for task in TASKS.values()), name


def test_only_seeds_that_both_cells_have_are_compared():
    rows = regime(*(run("a", s, 30.0) for s in (1, 2, 3)), *(run("b", s, 20.0) for s in (2, 3, 4)))
    assert effect("difference", rows, of="a", over="b").runs == 2


def test_a_run_without_a_score_has_the_worst_one():
    rows = regime(run("a", 1, 30.0), Run("b", 1, "b1", "diverged", {"bleu": None, "nll": None}))
    assert effect("difference", rows, of="a", over="b").value == pytest.approx(30.0, abs=0.1)


def diverged(cell, seed, dev=()):
    curves = {"nll": [(100, loss) for loss in dev]}
    return Run(cell, seed, f"{cell}{seed}", "diverged", {"bleu": None, "nll": math.nan}, curves)


def test_a_loss_has_no_worst_so_a_run_without_one_is_named():
    kept = [run(cell, seed) for cell in "ab" for seed in (1, 2, 3)]
    for name in ("difference", "dev_difference"):
        with pytest.raises(UserError, match=r"\bb4\b.* nll"):
            effect(name, regime(*kept, run("a", 4), diverged("b", 4)), of="a", over="b", metric="nll")
    with pytest.raises(UserError, match=r"\bb4\b.* nll"):
        effect("score", regime(*kept, diverged("b", 4)), of="b", metric="nll")
    on_dev = regime(*kept, run("a", 4), diverged("b", 4, dev=(7.0, 6.0)))
    found = effect("difference", on_dev, of="a", over="b", metric="nll")
    assert found.runs == 4
    assert effect("score", on_dev, of="b", metric="nll").value == pytest.approx(3**0.75 * 7**0.25)


def test_a_run_without_dev_scores_has_the_worst_one_if_it_failed():
    kept = [run("a", 1, 30.0), run("a", 2, 30.0), run("b", 1, 30.0)]
    for name in ("dev_difference", "best_on_dev"):
        found = effect(name, regime(*kept, diverged("b", 2)), of="a", over="b", metric="bleu")
        assert found.runs == 2
        assert found.value > 5, name
    assert effect("last_on_dev", regime(*kept, diverged("b", 2)), of="b").value < 5
    unkept = Run("b", 2, "b2", "stuck", {"bleu": 10.0}, {})
    for missing in (unkept, replace(unkept, outcome="trained", scores={}), replace(unkept, outcome="")):
        with pytest.raises(UserError, match=r"\bb2\b.* bleu"):
            effect("best_on_dev", regime(*kept, missing), of="a", over="b", metric="bleu")


def test_a_rate_at_which_a_run_diverges_is_the_worse_one():
    kept = [run(cell, seed, bleu) for cell, bleu in (("low", 20.0), ("other", 10.0)) for seed in (1, 2)]
    rows = regime(*kept, run("high", 1, 30.0, nll=((100, 1.0),)), diverged("high", 2))
    found = effect("tuned_difference", rows, of=["low", "high"], over=["other"])
    assert found.value == pytest.approx(10.0, abs=0.1)


@pytest.mark.parametrize("name", ["difference", "dev_difference", "best_on_dev"])
def test_another_cell_that_cannot_be_measured_lends_no_variance(name):
    pair = [run(cell, s, nll=((100, 4.0 + s * len(cell)),)) for cell in ("a", "bb") for s in (1, 2, 3)]
    sides = {"of": "a", "over": "bb", "metric": "nll"}
    empty = [diverged("c", seed) for seed in (1, 2, 3)]
    assert effect(name, regime(*pair, *empty), **sides) == effect(name, regime(*pair), **sides)


@pytest.mark.parametrize("name", ["difference", "best_difference", "dev_difference", "best_on_dev", "gains"])
def test_a_metric_that_no_run_has_is_refused(name):
    rows = regime(*(run(cell, seed) for cell in "ab" for seed in (1, 2, 3)))
    with pytest.raises(UserError, match=r"made-up has accuracy .*bleu, nll"):
        effect(name, rows, of="a", over="b", metric="accuracy")


@pytest.mark.parametrize("seeds", [1, 2])
def test_what_one_or_two_seeds_say_has_their_number_and_decides_nothing(seeds):
    curves = {"a": [(100, 2.0), (200, 2.1)], "b": [(100, 3.0), (200, 3.1)]}
    measured = [weights(0, True, [1.0, 2.0, 4.0], [1.0, 1.0, 2.0, 4.0])]
    rows = regime(
        *(
            run(cell, seed, 20.0 + seed, gradients=curves[cell], measured=measured, last_loss=9.0)
            for cell in "ab"
            for seed in range(seeds)
        )
    )
    place = {"of": "a", "measure": ["gradients", "mean_grad_l2"]}
    given = {
        **{name: arguments for name, arguments in NOTHING_YET.items() if name not in NOT_BY_SEED},
        "gradients_after": {**NOTHING_YET["gradients_after"], "step": 0},
        "matrices_ratio": {**place, "matrices": ["ffn ffn_in"], "against": ["ffn ffn_out"]},
    }
    for name, arguments in given.items():
        found = effect(name, rows, **arguments)
        assert found.runs == seeds, name
        for expected in (Expectation(above=-1e9), Expectation(within=(-1e9, 1e9))):
            assert expected.reading(found) == "open", name


def test_one_seed_of_a_sweep_or_of_a_table_decides_nothing():
    swept = regime(tables={"rates": [{"cell": "a", "rate": rate, "nll": rate} for rate in (1.0, 2.0)]})
    assert effect("swept_loss", swept, of="a", rate=2.0) == Estimate.of_too_few(1.0, 1).of_unit("nats")
    rows = regime(tables={"grads": [row for row in TABLE if row["seed"] == 0]})
    post = {"table": "grads", "y": "grad", "of": {"placement": "post"}}
    assert effect("last_over_first", rows, **post).runs == 1
    assert effect("exponent", rows, x="layer", **post).runs == 1
    assert effect("law_preference", rows, x="layer", **post).runs == 1


def test_a_quotient_has_the_runs_of_its_drawn_side():
    drawn, computed = Estimate(0.4, 0.3, 0.5, 2), Estimate.exact(0.1)
    measures = {"drawn": drawn, "computed": computed, "one": Estimate.of_too_few(0.2, 1)}
    for of, over, runs in (("drawn", "computed", 2), ("computed", "drawn", 2), ("one", "drawn", 1)):
        assert effect("quotient", regime(measures=measures), of=of, over=over).runs == runs
    assert effect("quotient", regime(measures=measures), of="one", over="drawn").value == pytest.approx(0.5)
    assert not effect("quotient", regime(measures=measures), of="one", over="drawn").has_ends


def test_two_steps_are_compared_by_their_mean():
    """ScaleNorm adds more than FixNorm if the mean of the last and the first row exceeds the middle one."""
    cells = {"first": 20, "middle": 23, "last": 24}
    rows = regime(*(run(cell, s, bleu) for s in (1, 2, 3) for cell, bleu in cells.items()))
    found = effect("difference", rows, of=["last", "first"], over="middle")
    assert found.value == pytest.approx(((24 - 23) - (23 - 20)) / 2, abs=0.1)


def test_the_best_of_several_cells_stands_for_them():
    rows = regime(*(run(c, s, x + s) for s in (1, 2, 3) for c, x in (("a", 30), ("b", 10), ("c", 20))))
    assert effect("best_difference", rows, of=["a"], over=["b", "c"]).value == pytest.approx(10, abs=0.1)


def test_the_better_rate_is_that_of_the_lower_dev_loss():
    cells = {"low": (20.0, 3.0), "high": (18.0, 2.0), "other": (10.0, 4.0)}
    rows = regime(
        *(run(c, s, x, nll=((100, 5.0), (200, nll))) for s in (1, 2, 3) for c, (x, nll) in cells.items())
    )
    found = effect("tuned_difference", rows, of=["low", "high"], over=["other"])
    assert found.value == pytest.approx(8.0, abs=0.1)


def test_a_share_has_the_exact_interval():
    rows = regime(*(run("a", s, outcome="trained" if s < 5 else "stuck") for s in range(6)))
    found = effect("trains", rows, of="a")
    exact = stats.binomtest(5, 6).proportion_ci(0.95, method="exact")
    assert (found.value, found.low, found.high) == pytest.approx((5 / 6, exact.low, exact.high))
    assert found.share


def test_steps_to_the_other_s_best_loss_and_one_that_never_arrives():
    fast = ((100, 3.5), (200, 2.9), (300, 2.5))
    slow = ((100, 4.5), (200, 3.5), (300, 3.0))
    rows = regime(*(run(c, s, nll=nll) for s in (1, 2, 3) for c, nll in (("fast", fast), ("slow", slow))))
    assert effect("steps_ratio", rows, of="fast", over="slow").value == pytest.approx(200 / 300)
    assert effect("steps_ratio", rows, of="slow", over="fast").high == math.inf


def test_dev_scores_at_a_step_and_at_a_share_of_the_training():
    rows = regime(*(run(c, s, x) for s in (1, 2, 3) for c, x in (("a", 20.0), ("b", 10.0))))
    assert effect("dev_difference", rows, of="a", over="b", metric="bleu", step=100).value == pytest.approx(
        5.0
    )
    assert effect("dev_difference", rows, of="a", over="b", metric="bleu", share=0.5).value == pytest.approx(
        5.0
    )
    assert effect("best_on_dev", rows, of="a", over="b").value == pytest.approx(10.0)


def test_the_last_validation_is_the_last_that_every_run_reached():
    long, short = ((100, 4.0), (200, 3.0), (300, 2.0)), ((100, 4.0), (200, 3.0))
    rows = regime(run("a", 1, 30.0, nll=long), run("a", 2, 10.0, nll=short))
    low, high = 30.0, 10.0  # at step 200
    middle = MetricScale(BLEU).values(np.array([low, high])).mean()
    assert effect("last_on_dev", rows, of="a").value == pytest.approx(float(MetricScale(BLEU).scores(middle)))


def test_a_loss_that_climbs_has_a_rise():
    climbing, falling = ((100, 6.0), (200, 9.0), (300, 10.0)), ((100, 4.0), (200, 3.0), (300, 2.5))
    curves = {"up": climbing, "down": falling}
    rows = regime(*(run(c, s, nll=nll) for s in (1, 2, 3) for c, nll in curves.items()))
    rises = {c: effect("dev_rise", rows, of=c) for c in curves}
    assert {c: found.value for c, found in rises.items()} == pytest.approx({"up": 4.0, "down": -1.5})
    assert {found.unit for found in rises.values()} == {"nats"}


def test_the_rise_of_a_training_loss_is_from_the_first_dev_loss():
    losses = ((100, 6.0), (200, 9.0))
    rows = regime(*(run("a", seed, nll=losses, last_loss=5.0 + seed) for seed in (1, 2, 3)), run("a", 4))
    found = effect("training_rise", rows, of="a")
    assert (found.value, found.runs, found.unit) == (pytest.approx(1.0), 3, "nats")


def test_what_a_sweep_says_of_a_rate_and_which_it_chose():
    table = [{"cell": "a", "rate": rate, "nll": nll} for rate, nll in ((1e-3, 4.2), (2e-3, 4.0), (4e-3, 4.3))]
    swept = regime(tables={"rates": table})
    assert effect("swept_loss", swept, of="a", rate=4e-3).value == pytest.approx(0.3)
    with pytest.raises(UserError, match=r"the sweep of a has no rate 0\.008; it has 0\.001, 0\.002, 0\.004"):
        effect("swept_loss", swept, of="a", rate=8e-3)
    tried = (1e-3, 3e-3, 1e-2)
    chosen = regime(rates={"a": ChosenRate(3e-3, tried), "b": ChosenRate(1e-2, tried)})
    assert effect("rate_ratio", chosen, of="a", over="b").value == pytest.approx(0.3)
    with pytest.raises(UserError, match="no sweep chose a rate for 'c'"):
        effect("rate_ratio", chosen, of="a", over="c")


def test_a_quotient_of_two_measures_is_as_uncertain_as_both():
    first, second = Estimate(0.4, 0.4 / 1.2, 0.4 * 1.2, 3), Estimate(0.01, 0.01 / 1.5, 0.01 * 1.5, 5)
    found = effect("quotient", regime(measures={"a": first, "b": second}), of="a", over="b")
    margin = math.hypot(math.log(1.2), math.log(1.5))
    ends = [40.0, 40 * math.exp(-margin), 40 * math.exp(margin)]
    assert [found.value, found.low, found.high] == pytest.approx(ends)
    assert found.runs == 3


def test_gradient_norms_and_spikes_after_the_warm_up():
    calm = [(step, 100.0 if step < 50 else 1.0) for step in range(0, 1000, 10)]
    wild = [(step, 8.0 if step == 500 else 2.0) for step in range(0, 1000, 10)]
    runs = [run(c, s, gradients=norms) for s in (1, 2, 3) for c, norms in (("calm", calm), ("wild", wild))]
    sides = {"of": "wild", "over": "calm", "after": 50}
    assert effect("gradient_ratio", regime(*runs), **sides).value == pytest.approx(2.0)
    found = effect("spikes", regime(*runs), of="wild", after=50)
    assert (found.value, found.runs, found.share) == (pytest.approx(1 / 94), 3, False)
    calm = effect("spikes", regime(*runs), of="calm", after=50)
    assert (calm.value, calm.low) == (0, 0)
    assert calm.high == pytest.approx(stats.binomtest(0, 3 * 94).proportion_ci(0.95, method="exact").high)


def test_spikes_in_one_run_of_several_are_no_independent_steps():
    wild = [(step, 50.0 if step % 200 == 0 else 1.0) for step in range(10, 2000, 10)]
    still = [(step, 1.0) for step, _ in wild]
    runs = [run("a", s, gradients=wild if s == 1 else still) for s in range(1, 5)]
    found = effect("spikes", regime(*runs), of="a", after=0)
    share = 9 / 199 / 4
    assert (found.value, found.runs) == (pytest.approx(share), 4)
    assert found.low == 0
    assert found.high == pytest.approx(share + stats.t.ppf(0.975, 3) * share)


def test_a_noisy_gradient_spreads_more_about_its_median_whatever_its_size():
    random = np.random.default_rng(0).normal(size=400)
    norms = {"calm": 10 + random, "noisy": 10 + 2 * random, "large": 100 + 10 * random}
    norms["spiked"] = np.where(np.arange(400) == 200, 500.0, norms["calm"])
    curves = {
        cell: [(10 * step, float(norm)) for step, norm in enumerate(own)] for cell, own in norms.items()
    }
    rows = regime(*(run(c, s, gradients=own) for s in (1, 2, 3) for c, own in curves.items()))
    ratios = {c: effect("spread_ratio", rows, of=c, over="calm", after=400).value for c in norms}
    assert ratios == pytest.approx({"calm": 1, "noisy": 2, "large": 1, "spiked": 1}, rel=0.05)


def test_what_a_change_costs_one_side_over_what_it_costs_the_other():
    cells = {"a": 20.0, "a, high rate": 10.0, "b": 40.0, "b, high rate": 20.0}
    rows = regime(*(run(c, s, x) for s in (1, 2, 3) for c, x in cells.items()))
    sides = {"of": ["a, high rate", "a"], "over": ["b, high rate", "b"], "metric": "bleu"}
    assert effect("penalty_ratio", rows, **sides).value == pytest.approx(0.5)
    with pytest.raises(UserError, match=r"\ba .*\ba, high rate\b.* 1"):
        effect("penalty_ratio", rows, **{**sides, "of": ["a", "a, high rate"]})


def test_the_share_of_seeds_that_gain_more_than_a_bit():
    gained = [("a", s, 20.0 + gain) for s, gain in enumerate((0.5, 2.0, 3.0, -4.0))]
    rows = regime(*(run(*one) for one in gained), *(run("b", s, 20.0) for s in range(4)))
    assert effect("gains", rows, of="a", over="b", metric="bleu", by=1.0).value == 0.5
    assert effect("gains", rows, of="a", over="b", metric="bleu").value == 0.75
    assert effect("gains", rows, of="b", over="a", metric="bleu").value == 0.25


def test_a_run_fails_by_its_outcome_or_by_its_score():
    stuck, low, high = run("a", 1, 30.0, outcome="stuck"), run("a", 2, 1.0), run("a", 3, 30.0)
    found = effect("fails", regime(stuck, low, high), of="a", least=2.0)
    assert (found.value, found.runs, found.share) == (pytest.approx(2 / 3), 3, True)


TABLE = [
    {"placement": p, "seed": s, "layer": layer, "grad": (1 + s) * layer**power}
    for p, power in (("post", 2.0), ("pre", -0.5))
    for s in range(4)
    for layer in (1, 2, 4)
]


def test_a_study_s_table_is_read_by_seed():
    rows = regime(tables={"grads": TABLE})
    post = {"placement": "post"}
    assert effect("last_over_first", rows, table="grads", y="grad", of=post).value == pytest.approx(16.0)
    assert effect("exponent", rows, table="grads", y="grad", x="layer", of=post).value == pytest.approx(2.0)
    sides = {"of": {**post, "layer": 4}, "over": {"placement": "pre", "layer": 4}}
    assert effect("row_ratio", rows, table="grads", y="grad", **sides).value == pytest.approx(32.0)
    with pytest.raises(UserError, match="rows"):
        effect("exponent", rows, table="grads", y="grad", x="layer", of={"placement": "admin"})
    with pytest.raises(UserError, match="'grads'"):
        effect("exponent", rows, table="grad", y="grad", x="layer", of=post)


def weights(step, best, layers, shares):
    return {
        "step": step,
        "best": best,
        "gradients": {"mean_grad_l2": {"decoder": {"ffn ffn_in": layers, "ffn ffn_out": [1.0, 2.0, 1.0]}}},
        "dependency": {"decoder": {"i_beta_sq": shares}},
    }


@pytest.mark.parametrize(("law", "better"), [(math.log, 1), (float, -1)])
def test_the_better_law_is_the_one_that_the_curves_were_made_by(law, better):
    noise = np.random.default_rng(1).normal(scale=0.01, size=(8, 6))
    table = [
        {"seed": seed, "depth": depth, "change": law(depth) + noise[seed, place]}
        for seed in range(8)
        for place, depth in enumerate((6, 12, 18, 24, 36, 60))
    ]
    columns = {"table": "depths", "y": "change", "x": "depth", "of": {}}
    found = effect("law_preference", regime(tables={"depths": table}), **columns)
    assert better * found.low > 0
    assert better * found.high > 0
    assert (found.runs, found.unit) == (8, "AIC")


def test_only_rows_of_seeds_that_both_sides_have_are_compared():
    table = [
        {"side": side, "seed": seed, "grad": 2.0}
        for side, seeds in (("a", 3), ("b", 5))
        for seed in range(seeds)
    ]
    sides = {"of": {"side": "a"}, "over": {"side": "b"}}
    assert effect("row_ratio", regime(tables={"t": table}), table="t", y="grad", **sides).runs == 3


def test_what_was_measured_on_trained_weights():
    start = weights(0, False, [1.0, 2.0, 4.0], [1.0, 1.0, 1.0, 1.0])
    later = weights(400, True, [0.1, 0.2, 0.4], [1.0, 1.0, 2.0, 4.0])
    refused = run("refused", 1, measured=[{"step": 0, "best": True, "refused": {}}])
    rows = regime(*(run("a", s, measured=[start, later]) for s in (1, 2, 3)), refused)
    place = {"of": "a", "stack": "decoder", "matrix": "ffn ffn_in"}
    assert effect("layers_ratio", rows, **place, step=0).value == pytest.approx(4.0)
    assert effect("layers_ratio", rows, **place).value == pytest.approx(4.0)
    assert effect("gradients_after", rows, **place, step=400).value == pytest.approx(0.1)
    both = {"of": "a", "measure": ["gradients", "mean_grad_l2"], "against": ["ffn ffn_out"]}
    ratio = effect("matrices_ratio", rows, **both, matrices=["ffn ffn_in"])
    assert (ratio.value, ratio.runs) == (pytest.approx(math.sqrt(0.1) * 4 ** (1 / 3)), 3)
    with pytest.raises(UserError, match="'ffn ffn_in'"):
        effect("matrices_ratio", rows, **both, matrices=["ffn ffn_inn"])
    with pytest.raises(UserError, match="'gradients'"):
        effect("matrices_ratio", rows, **{**both, "measure": ["gradient"]}, matrices=["ffn ffn_in"])
    for name in ("layers_ratio", "gradients_after"):
        with pytest.raises(UserError, match="'decoder'"):
            effect(name, rows, **{**place, "stack": "decodr"}, step=0)
    with pytest.raises(UserError, match="'decoder'"):
        effect("own_share", rows, of="a", stack="decodr")
    assert effect("own_share", rows, of="a", stack="decoder").value == pytest.approx(3.0)
    assert effect("own_share", rows, of="a", stack="decoder", step=0).value == pytest.approx(1.0)
    assert effect("own_share_ratio", rows, of="a", over="a", stack="decoder").value == pytest.approx(1.0)
    assert math.isnan(effect("own_share", rows, of="refused", stack="decoder").value)


def test_what_effects_read_of_weights_is_what_is_measured_of_them():
    assert set(MEASURED) == {*MEASURES, UPDATES}


NOTHING_YET = {
    "score": {"of": "a"},
    "difference": {"of": "a", "over": "b"},
    "best_difference": {"of": ["a"], "over": ["b"]},
    "tuned_difference": {"of": ["a"], "over": ["b"]},
    "trains": {"of": "a"},
    "steps_ratio": {"of": "a", "over": "b"},
    "dev_difference": {"of": "a", "over": "b"},
    "best_on_dev": {"of": "a", "over": "b"},
    "last_on_dev": {"of": "a"},
    "gradient_ratio": {"of": "a", "over": "b", "after": 1},
    "spikes": {"of": "a", "after": 1},
    "dev_rise": {"of": "a"},
    "training_rise": {"of": "a"},
    "spread_ratio": {"of": "a", "over": "b", "after": 1},
    "penalty_ratio": {"of": ["a", "b"], "over": ["b", "a"], "metric": "bleu"},
    "gains": {"of": "a", "over": "b", "metric": "bleu"},
    "fails": {"of": "a", "least": 2.0},
    "layers_ratio": {"of": "a", "stack": "decoder", "matrix": "ffn ffn_in"},
    "gradients_after": {"of": "a", "stack": "decoder", "matrix": "ffn ffn_in", "step": 1},
    "matrices_ratio": {"of": "a", "measure": ["updates"], "matrices": ["x"], "against": ["y"]},
    "own_share": {"of": "a", "stack": "decoder"},
    "own_share_ratio": {"of": "a", "over": "b", "stack": "decoder"},
}
OF_STUDIES = {
    *("measure", "measured_ratio", "quotient", "last_over_first", "row_ratio", "exponent", "law_preference"),
    *("swept_loss", "rate_ratio"),
}


NOT_BY_SEED = {"trains", "gains", "fails", "penalty_ratio"}
"""Shares have an interval for any number of runs, and no cell of the others' rows loses to another."""


def test_every_effect_of_runs_waits_for_its_rows():
    assert NOTHING_YET.keys() | OF_STUDIES == EFFECTS.keys()
    planned = frozenset({("a", 1), ("b", 1)})
    for name, arguments in NOTHING_YET.items():
        found = effect(name, regime(planned=planned), **arguments)
        assert math.isnan(found.value), name
        assert found.runs == 0
        assert found.low < found.high


@pytest.mark.parametrize(
    ("name", "arguments", "said"),
    [
        ("difference", {"of": "a"}, "difference needs over"),
        ("difference", {"of": "a", "over": "b", "metric": "blue"}, "did you mean 'bleu'"),
        ("difference", {"of": "a", "over": "b", "steps": 1}, "difference takes no 'steps'"),
        ("measure", {"of": "x"}, "has no measure 'x'"),
    ],
)
def test_what_an_effect_cannot_read_is_one_sentence(name, arguments, said):
    with pytest.raises(UserError, match=said):
        effect(name, regime(run("a", 1), run("b", 1)), **arguments)


GRADIENTS = {"gradient_ratio": {"after": 50}, "spread_ratio": {"after": 50}}


@pytest.mark.parametrize("name", GRADIENTS)
@pytest.mark.parametrize(
    "norms",
    [[(10, 2.0)], [(60, 0.0), (70, 0.0), (80, 0.0)], [(60, math.inf)]],
    ids=["none", "zero", "infinite"],
)
def test_a_run_without_gradient_norms_to_compare_leaves_no_ratio(name, norms):
    usual = [(60, 1.0), (70, 2.0), (80, 3.0)]
    rows = regime(run("a", 1, gradients=norms), run("b", 1, gradients=usual))
    for of, over in ("ab", "ba"):
        with pytest.raises(UnmeasuredError):
            effect(name, rows, of=of, over=over, **GRADIENTS[name])


def test_a_run_that_was_cut_short_neither_trains_nor_fails():
    rows = regime(run("a", 1), run("a", 2, outcome=""), run("a", 3, outcome="diverged"))
    assert effect("trains", rows, of="a").runs == 2
    failed = effect("fails", rows, of="a", least=10.0)
    assert (failed.value, failed.runs) == (0.5, 2)


@pytest.mark.parametrize(("metric", "value"), [("bleu", 0.0), ("nll", 5.0)])
def test_a_run_that_has_diverged_by_a_step_has_its_worst_score_there(metric, value):
    diverged = run("a", 1, nll=((100, 5.0), (200, 3.0)), outcome="diverged")
    ended = run("b", 1, nll=((100, 4.5), (200, 4.0), (400, 3.5)))
    rows = regime(diverged, ended)
    for place, at in (({"step": 400}, 400), ({"share": 0.8}, 200)):
        compared = effect("dev_difference", rows, of="a", over="b", metric=metric, **place)
        # a score of 0 has no place on the scale of BLEU, and counts as half a unit of its last digit
        assert compared.value == pytest.approx(value - dict(ended.dev[metric])[at], abs=0.1)
    before = effect("dev_difference", rows, of="a", over="b", metric="nll", step=200)
    assert before.value == pytest.approx(-1.0)


def test_a_table_with_several_rows_for_a_seed_is_refused():
    table = [
        {"seed": seed, "stack": stack, "layer": 1, "norm": size}
        for seed in (1, 2)
        for stack, size in (("encoder", 1.0), ("decoder", 100.0))
    ]
    rows = regime(tables={"t": table})
    both = {"table": "t", "y": "norm", "of": {"layer": 1}}
    for name, rest in (("row_ratio", {"over": {"layer": 1}}), ("last_over_first", {})):
        with pytest.raises(UserError, match="for seed 1;"):
            effect(name, rows, **both, **rest)
    table.append({"seed": 2, "stack": "encoder", "layer": 2, "norm": 1.0})
    with pytest.raises(UserError, match="differ in layer"):
        effect("exponent", rows, table="t", y="norm", x="layer", of={"stack": "encoder"})


@pytest.mark.parametrize("order", [1, -1])
def test_a_rate_that_diverged_is_not_the_best_of_a_sweep(order):
    swept = [{"cell": "a", "rate": 1e-3, "nll": 3.0}, {"cell": "a", "rate": 2e-3, "nll": math.nan}]
    rows = regime(tables={"rates": swept[::order]})
    assert effect("swept_loss", rows, of="a", rate=1e-3).value == 0.0
    none = regime(tables={"rates": [{"cell": "a", "rate": 2e-3, "nll": math.nan}]})
    assert math.isnan(effect("swept_loss", none, of="a", rate=2e-3).value)
