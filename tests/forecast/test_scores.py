"""Scores of forecasts, against numbers that are worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from normlab.forecast.scores import auroc, brier, ece, interval, log_loss, reliability, risk_coverage

P, Y = np.array([0.1, 0.4, 0.4, 0.8]), np.array([0.0, 0.0, 1.0, 1.0])


def test_scores_of_four_forecasts():
    assert auroc(P, Y) == pytest.approx(3.5 / 4)  # one tie among four pairs
    assert brier(P, Y) == pytest.approx((0.01 + 0.16 + 0.36 + 0.04) / 4)
    assert log_loss(P, Y) == pytest.approx(
        -(math.log(0.9) + math.log(0.6) + math.log(0.4) + math.log(0.8)) / 4
    )
    assert ece(P, Y) == pytest.approx((0.1 + 2 * 0.1 + 0.2) / 4)
    assert [(row.count, row.happened) for row in reliability(P, Y)] == [(1, 0.0), (2, 0.5), (1, 1.0)]


def test_a_ranking_of_one_kind_alone_has_no_score():
    assert math.isnan(auroc(P, np.ones(4)))


def test_a_sure_miss_costs_much_and_not_everything():
    assert 13 < log_loss(np.array([1.0]), np.array([0.0])) < 14


def test_the_surest_are_answered_first():
    found = risk_coverage(np.array([0.5, 0.95, 0.2]), np.array([1.0, 1.0, 1.0]))
    assert [answered for answered, _ in found] == pytest.approx([1 / 3, 2 / 3, 1.0])
    assert [wrong for _, wrong in found] == pytest.approx([0.0, 0.5, 2 / 3])


def test_an_interval_over_groups_is_wider_than_over_runs():
    rng = np.random.default_rng(0)
    p = np.repeat(rng.uniform(size=10), 20)
    happened = (rng.uniform(size=200) < p).astype(float)
    models, runs = [str(i // 20) for i in range(200)], [str(i) for i in range(200)]
    (low, high), (inner_low, inner_high) = (interval(brier, p, happened, groups) for groups in (models, runs))
    assert high - low > inner_high - inner_low
    assert inner_low < brier(p, happened) < inner_high
