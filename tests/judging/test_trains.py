import pytest
from scipy import stats

from cases import each
from normlab.judging.statistics import fisher, seeds_for_shares, share, share_gap


@pytest.mark.parametrize(("trained", "runs"), [(0, 3), (3, 3), (2, 3), (5, 5)])
def test_a_share_has_the_exact_interval(trained, runs):
    found = share(trained, runs)
    assert found.value == trained / runs
    assert found.low == pytest.approx(
        0 if not trained else stats.beta.ppf(0.025, trained, runs - trained + 1)
    )
    assert found.high == pytest.approx(
        1 if trained == runs else stats.beta.ppf(0.975, trained + 1, runs - trained)
    )


def test_three_seeds_cannot_show_that_a_recipe_trains_more_often_and_five_can():
    assert fisher((3, 3), (0, 3)) == pytest.approx(0.1)
    assert fisher((5, 5), (0, 5)) == pytest.approx(2 / 252)
    assert seeds_for_shares((3, 3), (0, 3), pairs=1) == 4
    assert seeds_for_shares((3, 3), (0, 3), pairs=6) == 5
    assert seeds_for_shares((3, 3), (3, 3), pairs=1) is None


def test_the_interval_of_a_gap_takes_the_share_that_widens_it():
    gap = share_gap(3, 0, 6)
    assert gap.value == 0.5
    assert gap.low == pytest.approx((2 * share(3, 3).low - 1) * share(3, 6).high)  # below 0
    assert gap.high == pytest.approx(share(3, 6).high)
    assert (share_gap(0, 3, 6).low, share_gap(0, 3, 6).high) == pytest.approx((-gap.high, -gap.low))
    assert share_gap(20, 0, 20).low == pytest.approx((2 * share(20, 20).low - 1) * share(20, 20).low)


@pytest.mark.slow
@each("shares", [(0.0, 0.0), (0.3, 0.05), (0.5, 0.5), (0.9, 0.05), (0.1, 0.02)])
def test_the_interval_of_a_gap_covers_at_least_95_percent(shares):
    """Exact coverage: every outcome of 15 pairs weighed by its probability."""
    pairs, (first, second) = 15, shares
    outcomes = [(a, b) for a in range(pairs + 1) for b in range(pairs + 1 - a)]
    weights = stats.multinomial(pairs, [first, second, 1 - first - second])
    found = {outcome: share_gap(*outcome, pairs) for outcome in outcomes}
    covered = sum(
        weights.pmf([a, b, pairs - a - b])
        for (a, b), gap in found.items()
        if gap.low <= first - second <= gap.high
    )
    assert covered >= 0.95
