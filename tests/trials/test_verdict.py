"""What a trial's losses say: their mean and its error, and whether they still fall."""

from __future__ import annotations

import math
from statistics import fmean, stdev

import pytest

from normlab.trials.scale import Scale
from normlab.trials.verdict import Trial, Trials


def trial(losses: list[float], rate: float = 1e-3) -> Trial:
    return Trial(rate, len(losses), tuple(losses))


def noisy(number: int, *, by_step: float = 0.0) -> list[float]:
    """Losses that change by so much in each step, and swing by 0.1 around that."""
    return [3.0 + by_step * i + 0.1 * (-1) ** i for i in range(number)]


@pytest.mark.parametrize(("steps", "counted"), [(16, 8), (80, 8), (200, 20)])
def test_the_last_tenth_counts_but_at_least_eight(steps: int, counted: int):
    losses = [float(i) for i in range(steps)]
    assert trial(losses).last == tuple(losses[-counted:])
    assert trial(losses).loss == fmean(losses[-counted:])


def test_an_error_is_that_of_the_mean_and_a_difference_is_paired():
    losses = noisy(16)
    assert trial(losses).error() == pytest.approx(stdev(losses[-8:]) / 8**0.5)
    assert trial(losses).error(trial([loss + 1 for loss in losses])) == pytest.approx(0.0, abs=1e-12)
    assert trial(losses).error(trial([3.0] * 16)) == pytest.approx(trial(losses).error())


@pytest.mark.parametrize(
    ("by_step", "falls"), [(0.0, False), (0.001, False), (-0.001, False), (-0.002, True), (-0.01, True)]
)
def test_a_loss_falls_by_more_than_the_error_of_its_quarters(by_step: float, *, falls: bool):
    assert trial(noisy(160, by_step=by_step)).falls is falls


def test_losses_and_their_errors_are_in_nats():
    trials = (trial(noisy(16)), trial([2.0] * 16, rate=1e-2))
    scale = Scale(start=3.0, unigram=3.0, uniform=3.1, weight=4.0, rest=1.0)
    found = Trials("model", 16, 1e-3, scale, trials)
    assert found.losses[1e-2] == pytest.approx((2.0 - 1.0) / 4)
    assert found.errors[1e-3] == pytest.approx(trials[0].error(trials[1]) / 4)
    assert not math.isclose(found.errors[1e-3], 0.0)
