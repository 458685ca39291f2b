"""Scores of a task, outcomes of a run and costs of a model as data: names, units, which value is better."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

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
    """The ends of its scale, if it has any."""
    on_dev: bool = True
    """Whether validations compute it; only such a metric can decide which checkpoint is best."""

    def sort_key(self, value: float | None) -> float:
        """Return a number that is larger for a better value; None and NaN sort below everything."""
        if value is None or math.isnan(value):
            return -math.inf
        return value if self.higher_is_better else -value

    def better(self, a: float | None, b: float | None) -> bool:
        """Whether ``a`` is better than ``b``; any value is better than None or NaN."""
        return self.sort_key(a) > self.sort_key(b)

    @property
    def margin(self) -> float:
        """The default smallest difference worth reporting: ten units in the last displayed digit."""
        return 10.0 ** (1 - self.digits)

    def bounded(self, value: float) -> float:
        """Return the value, or the nearest end of the scale if it lies beyond."""
        low = value if self.least is None else max(self.least, value)
        return low if self.most is None else min(self.most, low)

    def shown(self, value: float | None) -> str:
        """Return the value as text; empty for None."""
        return "" if value is None else f"{value:z,.{self.digits}f}"

    def listed(self, values: Iterable[float | None], trained: Iterable[bool]) -> str:
        """Return the values of several runs, in brackets if a run did not train: ``33.1, (0.4), 33.3``."""
        texts = list[str]()
        for value, has_trained in zip(values, trained, strict=True):
            text = self.shown(value) or "–"
            texts.append(text if has_trained else f"({text})")
        return ", ".join(texts)

    def signed(self, value: float) -> str:
        """Return a difference with its sign, ``+1.3``; ``0.0`` if it rounds to zero."""
        text = f"{value:+,.{self.digits}f}"
        return text if float(text.replace(",", "")) else text[1:]

    def amount(self, value: float) -> str:
        """Return ``1.3 points``, without a sign and never rounded to zero."""
        size = abs(value)
        rounds_to_zero = size < 0.5 * 10.0**-self.digits
        text = f"{size:.1g}" if size and rounds_to_zero else self.shown(size)
        return f"{text} {self.label}"

    def with_label(self, value: float | None) -> str:
        """``NLL 3.125``; empty for no value."""
        return "" if value is None else f"{self.label} {self.shown(value)}"

    @property
    def title(self) -> str:
        """The label with its unit: ``NLL, nats per token``."""
        return f"{self.label}, {self.unit}" if self.unit else self.label


NLL = Metric("nll", "NLL", "nats per token", higher_is_better=False, digits=3, least=0.0)
"""Negative log-likelihood of what is predicted; every task has it on dev."""


def metric_named(name: str, metrics: Sequence[Metric], owner: str) -> Metric:
    """Return the metric with that name. Raises UserError with the nearest name and the metrics' owner."""
    by_name = {metric.name: metric for metric in metrics}
    if name not in by_name:
        raise UserError(f"{owner} has no metric {name!r}{nearest(name, by_name)}")
    return by_name[name]


def selection_metric(metrics: Sequence[Metric], best_by: str) -> Metric:
    """Return the metric called ``best_by``, or the headline if that is empty or not one of these."""
    return next((metric for metric in metrics if metric.name == best_by), metrics[0])


def in_words(metrics: Sequence[Metric], scores: Mapping[str, object]) -> str:
    """Return those metrics that ``scores`` holds, in their order: ``NLL 3.125, perplexity 22.8``."""
    values = ((metric, scores.get(metric.name)) for metric in metrics)
    return ", ".join(metric.with_label(value) for metric, value in values if isinstance(value, int | float))


IGNORES_SOURCE: Final = "ignores its source"
MOSTLY: Final = 0.5
"""A run ignores its source if a single output makes up more than this share of its outputs."""


@dataclass(frozen=True)
class Outcome:
    """How a run ended: ``normlab.lab.training.outcome`` decides it, everything else reads it."""

    state: str
    """``trained``, ``stuck`` (at the unigram entropy), ``diverged`` (not finite, or above its start) or
    ``ignores its source`` (the outputs hardly depend on the inputs).
    """
    step: int
    """The step at which it became clear."""
    evidence: str
    """The numbers behind it, in a sentence without a full stop."""


@dataclass(frozen=True)
class Cost:
    """Parameters of a model, and the multiplications and additions of matrix products in training.

    ``flops`` are those of the forward and backward pass of one batch, in which ``tokens`` are predicted.
    """

    parameters: int
    without_embeddings: int
    """Parameters outside the embeddings and without tied heads."""
    flops: int
    tokens: int = 0
    """0 if not known."""

    @property
    def flops_per_token(self) -> float | None:
        """FLOPs for each predicted token; None if the tokens are not known."""
        return self.flops / self.tokens if self.tokens else None


def amount(number: float) -> str:
    """Return a large number in three digits: ``12.6M``, ``1.04e+15``."""
    number = float(f"{number:.3g}")  # 999,600 is 1M, and not 1,000k
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if size <= number < 1000 * size:
            return f"{number / size:.3g}{letter}"
    return f"{number:.3g}"


def ratio(a: float, b: float) -> str:
    """Return how ``a`` compares with ``b``: ``+3.1%``, ``+120%``, ``equal``."""
    if a == b:
        return "equal"
    if not b:
        return "more than none"
    percent = 100 * (a - b) / b
    return f"{percent:+,.0f}%" if abs(percent) >= 10 else f"{percent:+.2g}%"
