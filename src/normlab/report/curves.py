"""Charts of curves over the steps, as the pages of runs and of comparisons have them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import polars as pl

from normlab.base.metric import NLL, Metric
from normlab.report.charts.curves import CurveAxis, curve
from normlab.report.charts.drawing import Drawn
from normlab.report.charts.theme import POINTS
from normlab.report.page import Chart

SPIKY_POINTS: Final = 60
"""Points of a curve that is mostly noise: so few that its mean is readable; the band keeps every spike."""

LOSS: Final = CurveAxis("nll", NLL.title)
NORM: Final = CurveAxis("grad_norm_l2", "L2 norm", log=True, extremes=True, number=".3g")


def dev_axis(metric: Metric) -> CurveAxis:
    """Return the axis of a dev score; it begins at zero if higher is better."""
    zero = metric.higher_is_better
    return CurveAxis(metric.name, f"dev {metric.title}", zero=zero, number=f".{metric.digits}f")


def curves(
    name: str,
    title: str,
    caption: str,
    frame: pl.DataFrame,
    lines: Sequence[str],
    axis: CurveAxis,
    *,
    most: int = POINTS,
    entropy_nats: float | None = None,
) -> Chart:
    """Return the chart of a frame's curves, of at most so many points each; its CSV file is the frame."""

    def draw(points: int) -> Drawn:
        return curve(frame, lines, axis, points=min(points, most), entropy_nats=entropy_nats)

    return Chart(name, title, caption, draw, csv=frame.write_csv)
