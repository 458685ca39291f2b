"""Critical values that make up for the looks, and decisions seed by seed."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

import normlab
from cases import each
from normlab.errors import UserError
from normlab.judging.boundary import FIRST, Boundary, boundary, spent
from normlab.judging.sequential import MOST_SEEDS, OF_TRAINING, critical, streak
from normlab.judging.statistics import POWER

NAN = math.nan


def statistics_of(gains):
    """t after each number of seeds, ``[draws, seeds]``; the slow, obvious form."""
    draws, seeds = gains.shape
    found = np.full((draws, seeds), -np.inf)
    for number in range(2, seeds + 1):
        found[:, number - 1] = stats.ttest_1samp(gains[:, :number], 0, axis=1).statistic
    return found


def test_the_first_critical_value_is_that_of_a_plain_t_test():
    assert boundary(0.05).critical(FIRST) == pytest.approx(stats.t.isf(0.05 * spent(FIRST), FIRST - 1))
    assert boundary(0.05).critical(FIRST - 1) == math.inf


@each("level", [0.2, 0.05])
def test_the_question_of_training_has_a_share_of_the_level(level):
    left = (1 - OF_TRAINING) * level
    assert critical(level, FIRST) == pytest.approx(stats.t.isf(left * spent(FIRST), FIRST - 1))


@each("level", [0.2, 0.05])
def test_chances_are_spent_as_they_should_be(level):
    draws = 20_000
    t = statistics_of(np.random.default_rng(1).standard_normal((draws, 8)))
    values = np.array([boundary(level).critical(number) for number in range(1, 9)])
    crossed = np.logical_or.accumulate(t > values, axis=1).mean(axis=0)
    for number in range(FIRST, 9):
        expected = level * spent(number)
        error = math.sqrt(expected * (1 - expected) / draws)
        assert crossed[number - 1] == pytest.approx(expected, abs=4 * error)


@pytest.mark.slow
def test_more_cells_change_no_critical_value_by_a_hundredth(monkeypatch):
    coarse = [boundary(0.045).critical(number) for number in range(FIRST, MOST_SEEDS + 1)]
    monkeypatch.setattr("normlab.judging.boundary.CELLS", 720)
    fine = Boundary(0.045)
    values = [fine.critical(number) for number in range(FIRST, MOST_SEEDS + 1)]
    assert values == pytest.approx(coarse, rel=1e-2)


def test_a_lower_level_asks_for_more():
    for number in range(FIRST, 8):
        values = [critical(level, number) for level in (0.05, 0.01, 1e-3, 1e-5)]
        assert values == sorted(values)


def judged(pairs, **how):
    """The last decision, and after how many seeds it was made."""
    judge = normlab.Judge(**how)
    for seed, (baseline, candidate) in enumerate(pairs):
        if judge.add(seed, baseline, candidate).decided:
            break
    return judge.decision


GAINS = [(3.31, 3.21), (3.29, 3.18), (3.30, 3.20), (3.32, 3.23), (3.30, 3.21)]


@each(
    ("pairs", "how", "verdict"),
    [
        (GAINS, {}, "keep"),
        (GAINS, {"higher_is_better": True}, "discard"),
        ([(b, a) for a, b in GAINS], {}, "discard"),
        (GAINS, {"margin": 0.05}, "keep"),
        (GAINS, {"margin": 0.2}, "discard"),
        (GAINS, {"margin": 0.098}, "undecided"),
        (GAINS[:2], {}, "undecided"),
        ([(1.0, 1.0)] * 3, {}, "discard"),
        ([(1.0, 0.9)] * 5, {}, "undecided"),
        ([(1.0, NAN)] * 8, {}, "discard"),
        ([(1.0, None)] * 8, {}, "discard"),
        ([(NAN, 1.0)] * 8, {}, "keep"),
        ([(1.0, NAN)] * 7, {}, "undecided"),
        ([(NAN, NAN)] * 12, {}, "undecided"),
        ([*GAINS[:2], (3.3, NAN), *GAINS[2:]], {}, "undecided"),
        ([*GAINS[:2], (NAN, 3.2), *GAINS[2:]], {}, "keep"),
    ],
)
def test_a_verdict_follows_from_the_pairs(pairs, how, verdict):
    assert judged(pairs, **how).verdict == verdict


def test_the_interval_is_that_of_t_with_the_critical_value():
    decision = judged(GAINS, margin=0.098)
    gains = np.array([a - b for a, b in GAINS])
    reach = critical(0.05, 5) * gains.std(ddof=1) / math.sqrt(5)
    assert decision.gain.low == pytest.approx(gains.mean() - reach)
    assert decision.gain.high == pytest.approx(gains.mean() + reach)


def test_a_lower_level_keeps_later_and_discards_as_soon():
    assert judged(GAINS, level=1e-4).seeds > judged(GAINS).seeds
    assert judged([(b, a) for a, b in GAINS], level=1e-4).seeds == judged([(b, a) for a, b in GAINS]).seeds


def test_a_lower_level_keeps_later_what_trains_more_often_and_discards_as_soon_what_does_not():
    cured, broken = [(NAN, 1.0)] * 30, [(1.0, NAN)] * 30
    assert judged(cured, level=1e-4).seeds > judged(cured).seeds
    assert judged(broken, level=1e-4).seeds == judged(broken).seeds


def test_what_more_seeds_would_do_is_what_they_do():
    random = np.random.default_rng(0)
    pairs = [(score + 0.01, score) for score in random.normal(3.0, 0.01, size=4)]
    noisy = [(a + e, b) for (a, b), e in zip(pairs, (0.01, -0.01, 0.008, -0.007), strict=True)]
    decision = judged(noisy)
    assert decision.verdict == "undecided"
    assert decision.more_seeds is not None
    again = noisy * 10
    assert judged([(a, b) for a, b in again[: 4 + decision.more_seeds]]).verdict == "keep"


def test_a_gain_near_nothing_is_hopeless_and_a_large_one_is_not():
    nothing = [(3.0, 3.01), (3.0, 2.99), (3.0, 3.011), (3.0, 2.99), (3.0, 3.001)]
    assert judged(nothing).hopeless
    assert not judged(GAINS[:3], margin=0.098).decided
    assert not judged([(3.0, 2.99), (3.0, 2.96), (3.0, 2.98)]).hopeless


def test_no_number_of_seeds_is_promised_where_only_how_often_it_trains_is_open():
    decision = judged([*GAINS[:2], (3.3, NAN), *GAINS[2:]])
    assert decision.gain.low > 0
    assert (decision.only_baseline, decision.more_seeds, decision.hopeless) == (1, None, False)


def test_more_seeds_decide_in_four_of_five_cases():
    gains = np.array([0.02, 0.0, 0.018, 0.003])
    decision = judged([(3.0 + gain, 3.0) for gain in gains])
    effect, enough = gains.mean() / gains.std(ddof=1), len(gains) + decision.more_seeds

    def excess(seeds):
        return effect * math.sqrt(seeds) - critical(0.05, seeds) - stats.norm.ppf(POWER)

    assert excess(enough - 1) < 0 <= excess(enough)


@each("sign", [1, -1])
def test_a_gain_that_an_error_more_would_decide_is_not_hopeless(sign):
    gains = [0.6 + deviation for deviation in (-1.25, -0.5, 0.0, 0.5, 1.25)]
    decision = judged([(3.0 + sign * 0.01 * gain, 3.0) for gain in gains])
    assert not decision.decided
    assert not decision.hopeless


def test_a_streak_decides_with_the_chance_of_its_level():
    assert 2.0 ** -streak(0.05) <= 0.1 * 0.05 < 2.0 ** -(streak(0.05) - 1)


def test_a_seed_counts_once_and_a_decision_stands():
    judge = normlab.Judge()
    judge.add(1, 3.0, 2.9)
    with pytest.raises(UserError, match="added before"):
        judge.add(1, 3.0, 2.9)
    for seed, pair in enumerate(GAINS, start=2):
        if judge.add(seed, *pair).decided:
            break
    with pytest.raises(UserError, match="decided"):
        judge.add(99, 3.0, 2.9)


@each("score", ["low", [3.0], {}])
def test_what_is_no_score_is_refused(score):
    with pytest.raises(UserError, match="number"):
        normlab.Judge().add(1, 3.0, score)


@each("how", [{"margin": -1.0}, {"level": 0.0}, {"level": 1.0}, {"max_seeds": 0}, {"levle": 0.1}])
def test_wrong_options_are_refused(how):
    with pytest.raises(UserError):
        normlab.Judge(**how)
