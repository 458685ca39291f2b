"""Downsampling of lines that keeps their spikes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import polars as pl

POINTS: Final = 400
"""Points a line may have in a chart; the full table lies beside the page as CSV."""


def downsample(
    frame: pl.DataFrame, x: str, y: str, by: Sequence[str], points: int = POINTS, *, keep: Sequence[str] = ()
) -> pl.DataFrame:
    """Cut the range of ``x`` into ``points`` equal bins and summarise ``y`` in each, by group.

    Returns columns ``by``, ``x`` (the bin's last value), ``mean``, ``low``, ``high`` (minimum and maximum),
    sorted by group and ``x``, and the bin's last value of each column in ``keep``. The bins are the same
    for all groups, so that lines can be averaged. Values that are null or not finite are left out: a gap
    stays a gap. When every ``x`` has its own bin, nothing changes but the column names.
    """
    groups = list(by)
    data = frame.filter(pl.col(y).is_finite()).select(*groups, x, y, *keep)
    distinct = data[x].unique().sort()
    if len(distinct) <= points:
        binned = data.with_columns(_bin=pl.col(x).cast(pl.Float64))
    else:
        first, last = float(distinct[0]), float(distinct[-1])
        position = (data[x].cast(pl.Float64).to_numpy() - first) / (last - first) * points
        binned = data.with_columns(_bin=pl.Series(np.minimum(np.floor(position), points - 1)))
    summary = (
        binned.sort(x)
        .group_by([*groups, "_bin"])
        .agg(
            pl.col(x).max(),
            *[pl.col(name).last() for name in keep],
            mean=pl.col(y).mean(),
            low=pl.col(y).min(),
            high=pl.col(y).max(),
        )
    )
    if len(distinct) > points:  # one x a bin, shared by all groups: its last
        summary = summary.with_columns(pl.col(x).max().over("_bin"))
    return summary.sort([*groups, x]).drop("_bin")


def spread(
    frame: pl.DataFrame, x: str, y: str, by: Sequence[str], points: int = POINTS, *, extremes: bool = False
) -> pl.DataFrame:
    """Return the mean of ``y`` over runs and the band between the lowest and the highest run, by group.

    Each run is first brought to ``points`` bins. The band joins the runs' bin means, or with ``extremes``
    the smallest and largest single value, for curves whose spikes matter. Columns ``by``, ``x``,
    ``mean``, ``low``, ``high``, ``runs`` (how many runs reached this far).
    """
    groups = list(by)
    one = downsample(frame, x, y, [*groups, "run"], points)
    low, high = ("low", "high") if extremes else ("mean", "mean")
    return (
        one.group_by([*groups, x])
        .agg(mean=pl.col("mean").mean(), low=pl.col(low).min(), high=pl.col(high).max(), runs=pl.len())
        .sort([*groups, x])
    )
