"""Judge forecasts on groups of runs that they were not fitted on, beside trivial forecasts."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, TypeAlias
from zlib import crc32

import numpy as np

from normlab.forecast.fit import fit
from normlab.forecast.forecaster import Array, Features, Forecaster
from normlab.forecast.scores import SCORES, interval
from normlab.forecast.table import SurveyedRun, SweptRate

Encoding: TypeAlias = Callable[[SurveyedRun], Features | None]
"""What a forecast knows of a run; None where the run was not finite any more by then."""
UNTOLD: Final = ("steps", "sharpness")
"""Features that a forecast is not made of: the budget names the text of a run, and the sharpness needs second
derivatives and adds nothing.
"""
PARTS: Final = 20
"""Parts into which models are divided by chance, of which one at a time is left out."""
NARROW: Final = math.sqrt(2) * 1.01
"""The ratio of two rates, written with four digits, that are a factor of √2 apart."""
FLAG: Final = "="
"""In the name of a feature that is 1, or 0 where it is not named."""


def measured_at(step: int) -> Encoding:
    """The features after so many steps."""

    def encoding(run: SurveyedRun) -> Features | None:
        found = run.features.get(str(step))
        return None if found is None else told(found)

    return encoding


def told(features: Features) -> Features:
    """Return the features that a forecast is made of."""
    return {name: value for name, value in features.items() if name not in UNTOLD}


def configuration(run: SurveyedRun) -> Features:
    """What the configuration says: placement, depth, width, learning rate and warm-up, and the optimiser,
    since rates of SGD and of Adam are not comparable.
    """
    c = run.choices
    return {
        f"placement={c['placement']}": 1.0,
        f"optimiser={c['optimiser']}": 1.0,
        "layers": math.log10(float(c["layers"])),
        "width": math.log10(float(c["width"])),
        "warmup": math.log10(1 + float(c["warmup"])),
        "lr": math.log10(run.lr),
    }


def learning_rate(run: SurveyedRun) -> Features:
    """The learning rate alone."""
    return {"lr": math.log10(run.lr)}


STEPS: Final = (0, 10, 50)
MEASURED: Final = "features at step 0"
CONFIGURATION: Final = "configuration"
ENCODINGS: Final[Mapping[str, Encoding]] = {
    MEASURED: measured_at(0),
    CONFIGURATION: configuration,
    "learning rate": learning_rate,
    "features after 10 steps": measured_at(10),
    "features after 50 steps": measured_at(50),
}
"""Forecasts that are compared, by name; all are fitted by the same learner."""
SPLITS: Final[Mapping[str, Callable[[SurveyedRun], str]]] = {
    "model": lambda run: f"part {crc32(run.model.encode()) % PARTS}",
    "placement": lambda run: str(run.choices["placement"]),
    "norm": lambda run: str(run.choices["norm"]),
    "depth": lambda run: f"{run.choices['layers']:g} layers",
    "text": lambda run: str(run.choices["text"]),
}
"""Groups, of which one at a time is left out."""
WIDE: Final = "width"
"""The split of wide models, of which none is fitted on."""


@dataclass(frozen=True)
class Judged:
    """Forecasts of runs, each by a forecaster that was fitted without the group of the run."""

    split: str
    forecast: str
    p: Array
    """Probabilities `[N]`."""
    happened: Array
    """1 for a run that trained, 0 for another `[N]`."""
    models: tuple[str, ...]
    """Models of the runs, whose runs are not independent of each other."""

    def scores(self) -> dict[str, tuple[float, float, float]]:
        """Return each score with its 95% interval over resampled models."""
        return {
            name: (score(self.p, self.happened), *interval(score, self.p, self.happened, self.models))
            for name, score in SCORES.items()
        }


def several(runs: Sequence[SurveyedRun]) -> list[str]:
    """Return the splits of which these runs have more than one group."""
    return [split for split, group in SPLITS.items() if len(set(map(group, runs))) > 1]


def judged(
    runs: Sequence[SurveyedRun], split: str, forecast: str, *, wide: Sequence[SurveyedRun] = ()
) -> Judged:
    """Forecast every run from those of the other groups of a split, or each wide run from all of ``runs``."""
    encoding = ENCODINGS[forecast]
    if split == WIDE:
        return _judged(split, forecast, wide, _forecasts(runs, wide, encoding))
    group = SPLITS[split]
    p = np.full(len(runs), math.nan)
    for left_out in dict.fromkeys(map(group, runs)):
        inside = [i for i, run in enumerate(runs) if group(run) == left_out]
        rest = [run for run in runs if group(run) != left_out]
        p[inside] = _forecasts(rest, [runs[i] for i in inside], encoding)
    return _judged(split, forecast, runs, p)


def _forecasts(known: Sequence[SurveyedRun], asked: Sequence[SurveyedRun], encoding: Encoding) -> Array:
    """Return the probabilities `[N]` of some runs by a forecaster of the others. Of a run that was not
    finite any more by then it is known that it fails.
    """
    p, there = np.zeros(len(asked)), [i for i, run in enumerate(asked) if encoding(run) is not None]
    if there:
        forecaster = forecaster_of(known, encoding)
        rows = [whole(encoding(asked[i]) or {}, forecaster) for i in there]
        p[there] = forecaster.probabilities(rows)
    return p


def forecaster_of(
    runs: Sequence[SurveyedRun],
    encoding: Encoding,
    *,
    feature_version: int = 0,
    card: Mapping[str, Any] | None = None,
) -> Forecaster:
    """Fit a forecaster to the runs that were finite by then."""
    there = [(row, run.trained) for run in runs if (row := encoding(run)) is not None]
    names = sorted({name for row, _ in there for name in row})
    flags = {name: 0.0 for name in names if FLAG in name}
    rows = [flags | dict(row) for row, _ in there]
    return fit(rows, [trained for _, trained in there], names, feature_version=feature_version, card=card)


def whole(row: Features, forecaster: Forecaster) -> Features:
    """The features with those that are 0 because they are not named."""
    return {name: 0.0 for name in forecaster.names if FLAG in name} | dict(row)


def _judged(split: str, forecast: str, runs: Sequence[SurveyedRun], p: Array) -> Judged:
    happened = np.array([run.trained for run in runs], dtype=np.float64)
    return Judged(split, forecast, p, happened, tuple(run.model for run in runs))


def seeds_agree(runs: Sequence[SurveyedRun]) -> tuple[int, int]:
    """Return how many pairs of runs that differ in their seed alone both trained or both did not, and how
    many pairs there are: no forecast can be surer.
    """
    pairs: dict[tuple[str, float], list[bool]] = {}
    for run in runs:
        pairs.setdefault((run.model, run.lr), []).append(run.trained)
    both = [found for found in pairs.values() if len(found) == 2]
    return sum(a == b for a, b in both), len(both)


def edge_known(runs: Sequence[SurveyedRun]) -> tuple[Array, Array, tuple[str, ...]]:
    """Return, of each drawn run, how far its rate lies below the edge that was searched for its model, in
    octaves, whether it trained, and its model: what who knows the edge could rank the runs by.
    """
    edges = {model: edge for model in dict.fromkeys(r.model for r in runs) if (edge := _edge(runs, model))}
    drawn = [run for run in runs if run.kind == "drawn" and run.model in edges]
    below = [math.log2(math.sqrt(math.prod(edges[run.model])) / run.lr) for run in drawn]
    return np.array(below), np.array([run.trained for run in drawn], float), tuple(r.model for r in drawn)


def _edge(runs: Sequence[SurveyedRun], model: str) -> tuple[float, float] | None:
    """The largest rate of a model's search that trained, and the smallest one above it that did not."""
    own = [run for run in runs if run.model == model and run.kind == "search"]
    low = max((run.lr for run in own if run.trained), default=None)
    high = min((run.lr for run in own if low and run.lr > low and not run.trained), default=None)
    return None if low is None or high is None else (low, high)


@dataclass(frozen=True)
class Ceiling:
    """The largest learning rate of a model that trains: as it is forecast, and as it was searched for."""

    model: str
    forecast: float | None
    """By a forecaster that was fitted without the model; None where it sees none within the rates."""
    low: float
    """The largest rate of the search that trained."""
    high: float
    """The smallest one above it that did not."""

    @property
    def narrowed(self) -> bool:
        """Whether the search came to rates a factor of √2 apart, before its runs were spent."""
        return self.high / self.low <= NARROW

    def within(self, factor: float) -> bool:
        """Whether the forecast lies within a factor of the middle of the two rates."""
        middle = math.sqrt(self.low * self.high)
        return self.forecast is not None and middle / factor <= self.forecast <= middle * factor


def ceilings(
    runs: Sequence[SurveyedRun], swept: Sequence[SweptRate], forecast: str = MEASURED
) -> list[Ceiling]:
    """Forecast the ceiling of each model whose search found it, and which was swept, by the features before
    its first step or by its configuration, and by runs of the other parts of the models.
    """
    part, found = SPLITS["model"], list[Ceiling]()
    fitted: dict[str, Forecaster] = {}
    for model in dict.fromkeys(rate.model for rate in swept):
        if (edge := _edge(runs, model)) is None:
            continue
        own = next(run for run in runs if run.model == model)
        if (name := part(own)) not in fitted:
            rest = [run for run in runs if part(run) != name]
            fitted[name] = forecaster_of(rest, ENCODINGS[forecast])
        at_rates = {
            rate.lr: ENCODINGS[forecast](replace(own, lr=rate.lr, features={"0": rate.features})) or {}
            for rate in swept
            if rate.model == model
        }
        rows = {lr: whole(row, fitted[name]) for lr, row in at_rates.items()}
        found.append(Ceiling(model, fitted[name].ceiling(rows), *edge))
    return found
