"""Schedules at the steps where they turn."""

from __future__ import annotations

import pytest

from normlab.optim import SCHEDULES, schedule_factor

CORNERS = [
    ("constant", 0, {1: 1.0, 10: 1.0}),
    ("constant", 4, {1: 0.25, 3: 0.75, 4: 1.0, 5: 1.0, 10: 1.0}),
    ("inverse_sqrt", 0, {1: 1.0, 4: 0.5, 100: 0.1}),
    ("inverse_sqrt", 1, {1: 1.0, 4: 0.5, 100: 0.1}),
    ("inverse_sqrt", 4, {1: 0.25, 4: 1.0, 16: 0.5, 64: 0.25}),
    ("linear", 0, {1: 0.9, 5: 0.5, 10: 0.0, 11: 0.0}),
    ("linear", 4, {2: 0.5, 4: 1.0, 7: 0.5, 10: 0.0, 12: 0.0}),
    ("linear", 10, {5: 0.5, 10: 1.0, 11: 0.0}),
]


@pytest.mark.parametrize(("name", "warmup", "expected"), CORNERS)
def test_corner_steps(name, warmup, expected):
    found = {n: schedule_factor(name, n, warmup_steps=warmup, total_steps=10) for n in expected}
    assert found == pytest.approx(expected)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("warmup", [0, 1, 50])
def test_every_schedule_peaks_at_one_where_the_warmup_ends_and_never_rises_again(name, warmup):
    factors = [schedule_factor(name, n, warmup_steps=warmup, total_steps=200) for n in range(1, 201)]
    assert 0.99 < max(factors) <= 1.0
    assert factors.index(max(factors)) == max(0, warmup - 1)
    after = factors[warmup:]
    assert after == sorted(after, reverse=True)
    assert min(factors) >= 0.0
