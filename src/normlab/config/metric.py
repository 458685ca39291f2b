"""Scores of a task as data: how one is called, in which unit, and which of two values is better."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from normlab.errors import UserError, nearest


@dataclass(frozen=True)
class Metric:
    """A score of a task, with its unit and direction."""

    name: str
    """The key under which scores hold it, such as ``nll``."""
    label: str
    """What people call it, such as ``NLL``."""
    unit: str = ""
    """Such as ``nats per token``; empty for a plain number."""
    higher_is_better: bool = True
    digits: int = 1
    """Decimals that are shown."""
    least: float | None = None
    most: float | None = None
    """The ends of its scale, where it has any."""
    on_dev: bool = True
    """Whether validations compute it; only such a metric can decide which checkpoint is best."""

    def merit(self, value: float | None) -> float:
        """The value such that more is better; none and NaN are worse than everything."""
        if value is None or math.isnan(value):
            return -math.inf
        return value if self.higher_is_better else -value

    def better(self, a: float | None, b: float | None) -> bool:
        """Whether ``a`` is better than ``b``; any value is better than none and than NaN."""
        return self.merit(a) > self.merit(b)

    @property
    def margin(self) -> float:
        """The smallest difference that matters where nobody says otherwise: ten units of the last digit
        shown.
        """
        return 10.0 ** (1 - self.digits)

    def bounded(self, value: float) -> float:
        """The value, or the nearest end of the scale where it lies beyond."""
        low = value if self.least is None else max(self.least, value)
        return low if self.most is None else min(self.most, low)

    def shown(self, value: float | None) -> str:
        """The value as a number; empty for none."""
        return "" if value is None else f"{value:z,.{self.digits}f}"

    def signed(self, value: float) -> str:
        """A difference with its sign, ``+1.3``; ``0.0`` where it rounds to nothing."""
        text = f"{value:+,.{self.digits}f}"
        return text if float(text.replace(",", "")) else text[1:]

    def amount(self, value: float) -> str:
        """``1.3 points``, without a sign, and never rounded to nothing."""
        size = abs(value)
        small = size < 0.5 * 10.0**-self.digits
        return f"{size:.1g} {self.label}" if small and size else f"{self.shown(size)} {self.label}"

    def said(self, value: float | None) -> str:
        """``NLL 3.125``; empty for no value."""
        return "" if value is None else f"{self.label} {self.shown(value)}"

    @property
    def title(self) -> str:
        """The label with its unit: ``NLL, nats per token``."""
        return f"{self.label}, {self.unit}" if self.unit else self.label


NLL = Metric("nll", "NLL", "nats per token", higher_is_better=False, digits=3, least=0.0)
"""Negative log-likelihood of what is predicted; every task has it on dev."""


def named(name: str, metrics: Sequence[Metric], owner: str) -> Metric:
    """The metric of that name. Raises UserError with the nearest name, saying whose metrics they are."""
    by_name = {metric.name: metric for metric in metrics}
    if name not in by_name:
        raise UserError(f"{owner} has no metric {name!r}{nearest(name, by_name)}")
    return by_name[name]


def deciding(metrics: Sequence[Metric], best_by: str) -> Metric:
    """The metric called ``best_by``, or the headline where that is empty or none of these."""
    return next((metric for metric in metrics if metric.name == best_by), metrics[0])


def in_words(metrics: Sequence[Metric], scores: Mapping[str, object]) -> str:
    """Those metrics that ``scores`` holds, in the order of the metrics: ``NLL 3.125, perplexity 22.8``."""
    found = ((metric, scores.get(metric.name)) for metric in metrics)
    return ", ".join(metric.said(value) for metric, value in found if isinstance(value, int | float))
