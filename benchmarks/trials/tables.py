"""Counts and means with their intervals, and tables of Markdown."""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Sequence
from statistics import fmean
from typing import Final

from scipy.stats import binomtest

RESAMPLED: Final = 2000


def share(hits: Sequence[bool]) -> str:
    """How many of them, with the 95% Wilson interval of the share in percent."""
    if not hits:
        return "–"
    low, high = binomtest(sum(hits), len(hits)).proportion_ci(method="wilson")
    return f"{sum(hits)} of {len(hits)} ({100 * low:.0f} to {100 * high:.0f}%)"


def mean(values: Sequence[float], digits: int = 2) -> str:
    """Their mean, with the 95% interval over resampled models."""
    if not values:
        return "–"
    draw = random.Random(0)
    again = sorted(fmean(draw.choices(values, k=len(values))) for _ in range(RESAMPLED))
    low, high = again[RESAMPLED // 40], again[-RESAMPLED // 40]
    return f"{fmean(values):.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def short(rate: float | None) -> str:
    """A rate in two digits, as people type it."""
    if rate is None:
        return "–"
    return f"{rate:.2g}" if rate >= 0.1 else re.sub(r"e-0?", "e-", f"{rate:.1e}").replace(".0e", "e")


def table(head: Sequence[str], body: Iterable[Sequence[str]]) -> str:
    """A table of Markdown."""
    lines = [head, ["---"] * len(head), *body]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
