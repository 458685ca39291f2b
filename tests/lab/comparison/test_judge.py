"""Conclusions from run folders: answers, sentences, and how often recipes train."""

import math
import re
from dataclasses import replace

import numpy as np
import pytest

from normlab.base.files import write_json_atomic
from normlab.base.metric import NLL, Cost, Metric, Outcome
from normlab.lab.comparison.compare import judge
from normlab.lab.comparison.result import Comparison, RecipeResult, SweepRun
from normlab.lab.config import Config
from normlab.lab.runs import RunFolder, Status
from normlab.lab.runs.examples import write_examples
from normlab.lab.tasks.translation import Translation

BLEU = Translation.metrics[0]


@pytest.fixture
def judged(tmp_path):
    """Judge recipes by the scores of their seeds; a word instead of a score is the outcome of a run without
    one.
    """

    def judged(metrics=(BLEU,), margin=1.0, **recipes):
        results = tuple(planted(tmp_path, name, ends, metrics) for name, ends in recipes.items())
        comparison = Comparison(
            title="t",
            command="",
            date="",
            machine="",
            task="translation",
            metrics=metrics,
            best_by=metrics[0].name,
            data={},
            seeds=tuple(range(1, 1 + max((len(ends) for ends in recipes.values()), default=0))),
            lrs=(1e-3, 2e-3),
            recipes=results,
            samples=(),
            margin=margin,
        )
        return judge(comparison, tmp_path, exchanges=100)

    return judged


def planted(root, name, ends, metrics):
    runs = []
    for seed, end in enumerate(ends):
        state, score = (end, None) if isinstance(end, str) else ("trained", end)
        folder = RunFolder.create(root / f"{name}-{seed}", Config(recipe=name), metrics)
        folder.set_status(Status("done", 10, Outcome(state, 10, ""), train_seconds=60.0))
        if score is not None:
            write_json_atomic(folder.scores, {metrics[0].name: score})
        runs.append(folder.path.name)
    return RecipeResult(name, "", (SweepRun(1e-3, runs[0], {}, ""),), 1e-3, tuple(runs))


CLEAR = {"pre": (35.1, 35.3, 35.5, 35.2, 35.4), "post": (22.1, 22.3, 21.8, 22.0, 22.2)}


def test_a_clear_difference_has_a_least_size(judged):
    comparison = judged(**CLEAR)
    (d,) = comparison.differences
    assert (d.a, d.b, d.answer, d.seeds) == ("pre", "post", "better", 5)
    assert d.p < 0.05 < 12 < d.delta.low < d.delta.value < d.delta.high < 15
    assert d.sentence.startswith(
        f"pre is better than post by at least {d.delta.low:.1f} BLEU (difference +13.2, "
    )
    least = f"better than post by at least {d.delta.low:.1f} BLEU"
    assert comparison.sentences == (f"pre reaches 35.3 BLEU, the mean of 5 seeds; it is {least}",)


def test_the_difference_shown_is_that_of_the_means_shown(judged):
    comparison = judged(pre=(89.0, 86.0, 55.0), post=(10.0, 2.0, 30.0))
    pre, post = (r.value(BLEU) for r in comparison.ranked)
    assert comparison.differences[0].delta.value == pytest.approx(pre - post)


def test_no_interval_leaves_the_range_of_the_score(judged):
    comparison = judged(pre=(89.0, 86.0, 55.0), post=(0.0, 15.0, 9.0))
    for interval in (*(r.means["bleu"] for r in comparison.recipes), comparison.differences[0].delta):
        assert -100 < interval.low < interval.value < interval.high < 100
    assert comparison.recipes[0].means["bleu"].low > 0


def test_a_difference_that_does_not_matter(judged):
    comparison = judged(pre=(35.1, 34.3, 36.5, 35.2, 35.9), post=(35.2, 34.1, 36.5, 35.3, 36.0))
    (d,) = comparison.differences
    assert d.answer == "equal"
    assert d.delta.largest < 1
    assert d.sentence.startswith(f"no difference larger than {d.delta.largest:.1f} BLEU between")
    assert f" {d.delta.largest:.1f} BLEU" in comparison.sentences[0]


def test_a_score_that_is_not_finite_is_a_number_too(judged):
    (pre,) = judged(pre=(35.1, math.nan, math.inf, 35.3)).recipes
    assert pre.by_seed(BLEU) == "35.1, nan, inf, 35.3"
    assert not pre.means


def test_an_open_difference_says_how_many_seeds_would_do(judged):
    comparison = judged(pre=(35.1, 36.3, 35.5), post=(32.1, 35.9, 35.0))
    (d,) = comparison.differences
    assert d.answer == "open"
    assert d.effect == pytest.approx(d.delta.value)
    assert d.seeds_needed > 3
    assert f"{d.seeds_needed} seeds" in d.sentence
    assert d.sentence.startswith("Three seeds cannot tell pre from post")
    assert comparison.sentences[1].startswith(f"About {d.seeds_needed} seeds for each recipe would settle")
    small = judged(pre=(35.1, 36.3, 35.5), post=(36.9, 35.5, 34.0)).differences[0]
    assert small.effect == 1.0, "the margin, where the difference seen is smaller"


def test_two_seeds_cannot_tell_and_one_even_less(judged):
    two = judged(pre=(35.1, 35.3), post=(22.1, 22.9), admin=(31.0, 30.8))
    assert [d.answer for d in two.differences] == ["open"] * 3
    assert two.sentences[0].endswith("two seeds cannot tell it from admin and post")
    one = judged(pre=(35.1,), post=(22.1,))
    assert (one.differences[0].delta, one.differences[0].p) == (None, None)
    assert one.differences[0].answer == "open"
    assert one.differences[0].sentence.startswith("One seed cannot ")
    assert one.recipes[0].means["bleu"].low is None


def test_how_often_and_how_good_are_two_questions(judged):
    comparison = judged(pre=(35.1, 35.3, 35.5), post=(36.1, "stuck", 36.5))
    pre, post = comparison.recipes
    assert (post.trained, post.ended, post.states) == (2, 3, "trained (2), stuck (1)")
    assert (post.trains.value, post.trains.low, post.trains.high) == pytest.approx(
        (2 / 3, 0.094, 0.992), abs=1e-3
    )
    assert post.value(BLEU) == pytest.approx(36.3, abs=0.01), "of those that trained"
    assert post.by_seed(BLEU) == "36.1, (–), 36.5"
    assert comparison.ranked[0] is pre, "it trained at every seed"
    (d,) = comparison.differences
    assert (d.seeds, d.p_trains) == (2, 1.0)
    assert re.search(r"^3 of 3 .*\b2 of 3 .*\bpre .*\bpost\b", d.trains_sentence)
    assert re.search(r"\b2 recipes .*\bwith 4 ", comparison.sentences[-1])


def test_five_of_five_against_none_is_a_difference(judged):
    comparison = judged(pre=CLEAR["pre"], post=("stuck",) * 4 + ("diverged",))
    (d,) = comparison.differences
    assert d.p_trains == pytest.approx(2 / 252)
    assert d.trains_sentence == "pre trains more often than post: 5 of 5 seeds against 0 of 5 (p = 0.008)"
    assert comparison.sentences == (
        "pre reaches 35.3 BLEU, the mean of 5 seeds; it trains more often than post",
    )


def test_a_run_that_failed_by_an_error_says_nothing_of_its_recipe(judged, tmp_path):
    comparison = judged(pre=CLEAR["pre"], post=CLEAR["post"])
    RunFolder(tmp_path / "post-0").set_status(Status("failed", error="out of memory"))
    post = judge(comparison, tmp_path).recipes[1]
    assert (post.trained, post.ended, post.states) == (4, 4, "failed (1), trained (4)")


def test_nobody_trained_and_nobody_is_there(judged):
    assert judged(pre=("stuck",), post=("diverged",)).sentences == (
        "None of the 2 recipes trained at any of the learning rates",
    )
    assert judged().sentences == ("No recipe is finished yet",)
    assert judged(pre=("stuck",)).sentences == ("The recipe did not train at any of the learning rates",)


def test_less_is_better_where_the_metric_says_so(judged):
    comparison = judged(
        metrics=(NLL,), margin=NLL.margin, pre=(2.01, 2.03, 2.02, 2.01), post=(2.51, 2.55, 2.52, 2.54)
    )
    (d,) = comparison.differences
    assert (d.a, d.answer) == ("pre", "better")
    assert d.delta.high < 0
    assert d.sentence.startswith(
        f"pre is better than post by at least {-d.delta.high:.3f} NLL (difference -0.51"
    )


def test_scores_without_bounds_and_small_ones(judged):
    gain = Metric("gain", "gain", digits=2)
    comparison = judged(metrics=(gain,), margin=gain.margin, pre=(3.0, 4.0, 5.5), post=(-1.0, 0.0, -2.0))
    assert comparison.recipes[0].value(gain) == pytest.approx(np.mean([3.0, 4.0, 5.5]))
    assert comparison.differences[0].delta.value == pytest.approx(np.mean([3.0, 4.0, 5.5]) + 1)


def test_many_recipes_are_counted_where_they_would_be_a_long_list(judged):
    comparison = judged(**dict.fromkeys("abcdefg", (30.0, 31.0, 30.5)))
    assert "6 others" in comparison.sentences[0]


def test_the_very_models_are_compared_apart(judged, tmp_path):
    comparison = judged(**CLEAR)
    assert comparison.differences[0].models is None, "no statistics were kept"
    random = np.random.default_rng(0)
    for recipe, right in (("pre", 9), ("post", 6)):
        for seed in range(5):
            counts = random.binomial(10, right / 10, (40, 4))
            rows = np.concatenate([np.full((40, 2), 10), counts, np.full((40, 4), 10)], axis=1)
            write_examples(
                tmp_path / f"{recipe}-{seed}" / "test.examples.safetensors", {"bleu": rows.astype(float)}
            )
    (d,) = judge(comparison, tmp_path, exchanges=100).differences
    assert d.models > 10
    assert d.p_models == pytest.approx(1 / 101)
    assert (d.delta, d.p, d.sentence) == (
        comparison.differences[0].delta,
        comparison.differences[0].p,
        comparison.differences[0].sentence,
    )


def test_judging_twice_changes_nothing(judged, tmp_path):
    comparison = judged(pre=(35.1, 36.3, "stuck"), post=(33.1, 35.9, 35.0))
    assert judge(comparison, tmp_path) == comparison
    moved = judge(replace(comparison, margin=10.0), tmp_path)
    assert moved.differences[0].effect == 10.0


def test_a_mean_is_of_all_seeds_that_trained_or_there_is_none(tmp_path):
    result = planted(tmp_path, "pre", (30.0, 31.0), (BLEU, NLL))
    folders = [RunFolder(tmp_path / run) for run in result.runs]
    for number, folder in enumerate(folders):
        scores = {"bleu": 30.0 + number, "signatures": {"bleu": f"tok:{number}"}}
        write_json_atomic(folder.scores, scores | ({"nll": 2.0} if number else {}))
    comparison = Comparison(
        title="t", command="", date="", machine="", task="translation", metrics=(BLEU, NLL), best_by="bleu",
        data={}, seeds=(1, 2), lrs=(1e-3,), recipes=(result,), samples=(), margin=1.0,
    )  # fmt: skip
    judgement = judge(comparison, tmp_path, exchanges=100)
    (recipe,) = judgement.recipes
    assert recipe.scores["nll"] == (None, 2.0)
    assert recipe.means.keys() == {"bleu"}
    assert judgement.signatures == {"bleu": "tok:0 or tok:1"}, "runs that were scored otherwise are seen"


def test_the_noise_floor_is_what_two_seeds_of_one_recipe_differ_by(judged):
    plain = Metric("points", "points", digits=2)
    comparison = judged((plain,), a=(1.0, 3.0, "stuck"), b=(5.0, 5.4, 5.8), c=("stuck", 2.0, "stuck"))
    pairs = [(1.0 - 3.0) ** 2] + [(x - y) ** 2 for x, y in ((5.0, 5.4), (5.0, 5.8), (5.4, 5.8))]
    pooled = (pairs[0] / 2 + sum(pairs[1:]) / 3) / 3  # variances with one and two degrees of freedom
    assert comparison.noise == pytest.approx((2 * pooled) ** 0.5)
    assert (
        comparison.noise_floor
        == f"Two seeds of the same recipe differ by {comparison.noise:.2f} points (root mean square)"
    )
    assert judged(a=(1.0,), b=(2.0,)).noise_floor == ""


def test_parameters_and_flops_stand_beside_a_difference(judged, tmp_path):
    comparison = judged(**CLEAR)
    costs = {"pre": Cost(1100, 900, 5000), "post": Cost(1000, 800, 5000)}
    counted = replace(comparison, recipes=tuple(replace(r, cost=costs[r.name]) for r in comparison.recipes))
    assert comparison.differences[0].costs == ""
    assert judge(counted, tmp_path).differences[0].costs == "pre against post: parameters +10%, FLOPs equal"
