"""Which rate a scan tries next, and which trials it ends."""

import math

import pytest

from normlab.trials.search import FARTHEST, highest_usable, hopeless, next_octave


def scanned(loss, reference: float) -> dict[int, float]:
    scores: dict[int, float] = {}
    while (octave := next_octave(scores, reference)) is not None:
        assert octave not in scores
        scores[octave] = loss(octave)
    return scores


@pytest.mark.parametrize("best", [-9, -3, 0, 1, 6])
def test_a_scan_finds_the_best_rate_and_both_its_sides(best: int):
    scores = scanned(lambda k: 1 + 0.1 * (k - best) ** 2, 3.0)
    assert min(scores, key=scores.get) == best
    assert {best - 1, best + 1} <= scores.keys()


@pytest.mark.parametrize("edge", [0, 1, 2, 5, 7])
def test_a_scan_finds_the_upper_edge_to_an_octave(edge: int):
    scores = scanned(lambda k: 1 + 0.001 * abs(k) if k <= edge else math.inf, 3.0)
    assert highest_usable(scores, 3.0) == edge
    assert edge + 1 in scores


def test_a_scan_goes_down_where_nothing_trains_and_ends():
    scores = scanned(lambda k: math.inf, 3.0)
    assert max(scores) == 0
    assert min(scores) == -FARTHEST
    assert min(s for s in scanned(lambda k: math.inf if k > -5 else 1.0 - k / 9, 3.0)) < -5


def test_a_scan_goes_up_where_nothing_changes():
    scores = scanned(lambda k: 3.0 if k < 7 else 2.0, 3.0)
    assert min(scores, key=scores.get) >= 7


def test_a_scan_ends_where_every_rate_is_usable():
    assert max(scanned(lambda k: 1.0, 3.0)) <= FARTHEST + 1


def test_a_trial_ends_by_three_rules_and_by_no_other():
    fine = [3.0 - 0.01 * i for i in range(100)]
    assert hopeless([3.0, math.nan], 100, (), 1.0)
    assert hopeless([3.0, math.inf], 100, fine, 1.0)
    high = [3.0, *[3.6] * 30]
    assert not hopeless(high[:24], 100, (), 1.0)
    assert hopeless(high, 100, (), 1.0)
    assert not hopeless(high, 100, (), 2.0)  # where a target's nat is worth two
    behind = [3.0 - 0.005 * i for i in range(100)]
    assert not hopeless(behind[:49], 100, fine, 1.0)
    assert hopeless(behind[:50], 100, fine, 1.0)
    assert not any(hopeless(fine[:i], 100, fine, 1.0) for i in range(1, 101))
    assert not any(hopeless(behind[:i], 100, behind, 1.0) for i in range(1, 101))


def test_one_loss_among_many_ends_no_trial():
    fine = [3.0 - 0.01 * i for i in range(100)]
    for place in range(1, 100):
        spiky = [*fine[:place], fine[place] + 1.0]
        assert not hopeless(spiky, 100, (), 1.0)


def test_what_a_usable_rate_may_lose_is_a_share_of_what_the_best_learns():
    assert highest_usable({0: 2.0, 1: 2.04, 2: 2.06}, 3.0) == 1
    assert highest_usable({0: 2.0, 1: 2.04, 2: 2.06}, 4.0) == 2
    assert highest_usable({0: 2.0, 1: 2.04, 2: 2.06}, 2.0) == 0


def test_a_rate_is_worse_only_by_more_than_the_noise_of_its_batches():
    scores = {-2: 2.2, -1: 2.1, 0: 2.0, 1: 2.06, 2: 2.1}  # the limit is 2.05
    assert highest_usable(scores, 3.0) == 0
    assert highest_usable(scores, 3.0, {1: 0.006, 2: 0.006}) == 1
    assert next_octave(scores, 3.0, {1: 0.006, 2: 0.026}) == 4
