"""Makes the charts of curves on the pages of runs and comparisons, from frames of curves and an axis."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import polars as pl

from normlab.base.metric import NLL, Metric
from normlab.report.charts.curves import CurveAxis, mean_curves
from normlab.report.charts.drawing import Drawn
from normlab.report.charts.theme import POINTS
from normlab.report.page import Chart

SPIKY_POINTS: Final = 60
"""Points of a curve that is mostly noise: so few that its mean is readable; the band keeps every spike."""

NLL_CAPTION: Final = "Negative log-likelihood (NLL), without label smoothing."

LOSS: Final = CurveAxis("nll", NLL.title)
NORM: Final = CurveAxis("grad_norm_l2", "L2 norm", log=True, extremes=True, number=".3g")


def dev_axis(metric: Metric) -> CurveAxis:
    """Return the axis of a dev score; it begins at zero if higher is better."""
    zero = metric.higher_is_better
    return CurveAxis(metric.name, f"dev {metric.title}", zero=zero, number=f".{metric.digits}f")


def curve_chart(
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
    """Return the chart of a frame of curves (``runs.curve_frame``), whose CSV file is the whole frame.

    ``lines`` names all series in the order of their colours, ``most`` limits the points of a line, and
    ``entropy_nats`` draws the level of the unigram entropy.
    """

    def draw(points: int) -> Drawn:
        return mean_curves(frame, lines, axis, points=min(points, most), entropy_nats=entropy_nats)

    return Chart(name, title, caption, draw, csv=frame.write_csv)
