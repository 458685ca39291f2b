import math

import numpy as np
import polars as pl
import pytest

from normlab.report.charts.drawing import downsample, spread


def noise(rows: int, run: str = "a", seed: int = 0) -> pl.DataFrame:
    values = np.random.default_rng(seed).normal(size=rows)
    return pl.DataFrame({"run": [run] * rows, "step": np.arange(1, rows + 1) * 10, "y": values})


def by_hand(frame: pl.DataFrame, points: int) -> list[tuple[float, float, float]]:
    steps, values = frame["step"].to_list(), frame["y"].to_list()
    first, last = min(steps), max(steps)
    bins: dict[int, list[float]] = {}
    for step, value in zip(steps, values, strict=True):
        if math.isfinite(value):
            place = min(points - 1, math.floor((step - first) / (last - first) * points))
            bins.setdefault(place, []).append(value)
    return [(sum(v) / len(v), min(v), max(v)) for _, v in sorted(bins.items())]


@pytest.mark.parametrize(("rows", "points"), [(1000, 7), (1001, 400), (401, 400), (5000, 60)])
def test_bins_agree_with_a_loop(rows: int, points: int) -> None:
    frame = noise(rows)
    found = downsample(frame, "step", "y", ["run"], points)
    expected = by_hand(frame, points)
    assert len(found) == len(expected) <= points
    np.testing.assert_allclose(found.select("mean", "low", "high").to_numpy(), expected, rtol=1e-12)


def test_a_short_line_is_left_as_it_is() -> None:
    frame = noise(400)
    found = downsample(frame, "step", "y", ["run"], 400)
    assert found["step"].to_list() == frame["step"].to_list()
    assert (
        found["mean"].to_list() == found["low"].to_list() == found["high"].to_list() == frame["y"].to_list()
    )


def test_a_single_spike_survives() -> None:
    frame = noise(10_000).with_columns(y=pl.when(pl.col("step") == 54_320).then(99.0).otherwise("y"))
    found = downsample(frame, "step", "y", ["run"], 50)
    assert found["high"].max() == 99.0
    assert found["mean"].max() < 2.0


def test_lines_of_different_length_share_their_bins() -> None:
    frame = pl.concat([noise(3000, "a"), noise(1100, "b", 1)])
    found = downsample(frame, "step", "y", ["run"], 100)
    a, b = (set(found.filter(pl.col("run") == name)["step"]) for name in "ab")
    assert b < a


def test_values_that_are_not_finite_leave_a_gap() -> None:
    values = [1.0, math.nan, math.inf, None, -math.inf, 6.0]
    frame = pl.DataFrame({"run": ["a"] * 6, "step": range(6), "y": values}, strict=False)
    assert downsample(frame, "step", "y", ["run"])["step"].to_list() == [0, 5]
    assert downsample(frame.slice(1, 4), "step", "y", ["run"]).is_empty()


def test_spread_is_over_runs_not_over_steps() -> None:
    frame = pl.concat([noise(1000, "a"), noise(1000, "b", 1)]).with_columns(recipe=pl.lit("pre"))
    calm = spread(frame, "step", "y", 20)
    wild = spread(frame, "step", "y", 20, extremes=True)
    one = downsample(frame, "step", "y", ["recipe", "run"], 20)
    first = one.filter(pl.col("step") == one["step"].min())
    assert calm["low"][0] == first["mean"].min()
    assert calm["high"][0] == first["mean"].max()
    assert wild["low"][0] == first["low"].min()
    assert wild["high"][0] == first["high"].max()
    assert set(calm["runs"]) == {2}


def test_a_run_that_ends_early_is_counted_only_so_far() -> None:
    frame = pl.concat([noise(30, "a"), noise(10, "b", 1)]).with_columns(recipe=pl.lit("pre"))
    assert spread(frame, "step", "y")["runs"].to_list() == [2] * 10 + [1] * 20
