r"""Measures of trained runs: scores by cell, differences between cells, and how many runs train.

A score is averaged and compared over seeds on a scale without edges (``comparison.scale``), so that no
interval leaves the metric's range. A run without a score, such as one that diverged before its first
validation, has the worst one: papers print such runs as 0 BLEU or as a failure, and leave none out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final, TypeAlias

import numpy as np

from normlab.comparison.scale import Scale
from normlab.comparison.trains import share as share_of
from normlab.comparison.trains import share_gap as gap_of
from normlab.papers import study
from normlab.reproduce.intervals import Array, mean, mean_ratio
from normlab.reproduce.lab import Lab, Row
from normlab.spec.artefact import Measurement
from normlab.spec.claim import Measure
from normlab.spec.comparison import Interval, learnt
from normlab.spec.metric import Metric, named
from normlab.store.folder import RunFolder, read_scores

Cells: TypeAlias = Mapping[str, Sequence[RunFolder]]
Kind: TypeAlias = Callable[..., Measure]
KINDS: Final[dict[str, Kind]] = {}
"""The kinds of measures of trained runs, by name."""
OF_GRADIENTS: Final = frozenset(("spikes", "spikes_difference", "gradient_ratio"))
"""The kinds that read gradient norms, which are then a table of their own."""
SPIKE: Final = 3.0
"""A gradient norm of so many times the median of the steps around it is a spike."""
AROUND: Final = 25
"""Rows of the log before and after a step with which its gradient norm is compared."""


def kind(function: Kind) -> Kind:
    """Register a measure under the function's name, as a decorator."""
    KINDS[function.__name__] = function
    return function


@dataclass(frozen=True)
class Trained:
    """The finished runs of an artefact, by cell, in the order of their seeds."""

    cells: Cells

    @cached_property
    def metrics(self) -> tuple[Metric, ...]:
        return next(iter(self.cells.values()))[0].task_metrics()

    def metric(self, name: str) -> Metric:
        """The metric of that name; an empty name is the headline."""
        return named(name or self.metrics[0].name, self.metrics, f"a measure wants {name!r}, and the runs")

    def scores(self, metric: Metric, cell: str) -> Array:
        """The test score of each seed; the worst one for a run without any."""
        found = [_test_score(folder, metric) for folder in self.cells[cell]]
        return np.array([_worst(metric, folder) if score is None else score
                         for score, folder in zip(found, self.cells[cell], strict=True)])  # fmt: skip

    def on_dev(self, metric: str, cell: str) -> list[list[tuple[int, float]]]:
        """The dev scores of each seed by step; values that are not finite are left out."""
        return [
            [(int(row["step"]), float(row[metric])) for row in folder.metrics() if row["kind"] == "dev"
             and isinstance(row.get(metric), (int, float)) and math.isfinite(row[metric])]
            for folder in self.cells[cell]
        ]  # fmt: skip

    def trained(self, cell: str) -> list[bool]:
        """Whether each seed trained."""
        return [learnt(_outcome(folder)) for folder in self.cells[cell]]


@study
def trainings(
    lab: Lab,
    *,
    measures: Mapping[str, Sequence[Any]],
    gpu: Mapping[str, Sequence[Any]] | None = None,
    paper: Mapping[str, Sequence[Any]] | None = None,
    shown: str = "",
) -> Measurement:
    """Measures of the artefact's runs, each a kind of ``KINDS`` with its arguments.

    ``gpu`` are measures that need trainings to convergence, and are left out at the laptop scale; ``paper``
    are those that need the paper's own settings, at which alone they are taken. ``shown`` names the metric
    of the table of cells; empty: the headline.
    """
    runs = Trained(lab.runs)
    large = {"gpu": gpu or {}, "paper": {**(gpu or {}), **(paper or {})}}
    wanted = {**measures, **large.get(lab.scale, {})}
    found = {name: KINDS[kind_](runs, *rest) for name, (kind_, *rest) in wanted.items()}
    metric = runs.metric(shown)
    tables = {
        "cells": [_cell(runs, metric, cell) for cell in runs.cells],
        "runs": list(_runs(runs)),
        "curves": list(_curves(runs)),
    }
    if OF_GRADIENTS & {kind_ for kind_, *_ in wanted.values()}:
        tables["gradients"] = list(_gradients(runs))
    return Measurement(found, tables, _facts(runs))


# ------------------------------------------------------------------------------------------------ kinds


@kind
def score(runs: Trained, metric: str, cell: str) -> Measure:
    """The mean test score of a cell."""
    return _mean(runs.metric(metric), runs.scores(runs.metric(metric), cell))


@kind
def difference(runs: Trained, metric: str, a: str | Sequence[str], b: str | Sequence[str]) -> Measure:
    """The test score of ``a`` minus that of ``b`` within seeds; of several cells their mean on the scale."""
    of = runs.metric(metric)
    return _within_seeds(of, *(_together(runs, of, cells) for cells in (a, b)))


@kind
def difference_size(runs: Trained, metric: str, a: str, b: str) -> Measure:
    """The size of ``difference`` either way; its interval begins at 0 where the signs of its ends differ."""
    found = difference(runs, metric, a, b)
    ends = sorted((abs(found.low), abs(found.high)))
    return Measure(abs(found.value), 0.0 if found.low < 0 < found.high else ends[0], ends[1], found.runs)


@kind
def best_difference(runs: Trained, metric: str, a: Sequence[str], b: Sequence[str]) -> Measure:
    """The best test score of any cell in ``a`` minus that of any in ``b``, within seeds. The best of several
    favours the side that has more cells: such a claim is one that this works against.
    """
    of = runs.metric(metric)
    best = np.max if of.higher_is_better else np.min
    return _within_seeds(
        of, *(best([Scale(of).values(runs.scores(of, cell)) for cell in cells], axis=0) for cells in (a, b))
    )


@kind
def best_score(runs: Trained, metric: str, *cells: str) -> Measure:
    """The mean over seeds of the best test score of any cell."""
    of = runs.metric(metric)
    best = np.max if of.higher_is_better else np.min
    return _mean(of, best([runs.scores(of, cell) for cell in cells], axis=0))


@kind
def share_trained(runs: Trained, *cells: str) -> Measure:
    """The share of the runs of some cells that train, with its exact interval (Clopper and Pearson 1934)."""
    return _share([one for cell in cells for one in runs.trained(cell)])


@kind
def share_gap(runs: Trained, a: Sequence[str], b: Sequence[str]) -> Measure:
    """The share of the runs of the cells ``a`` that train minus that of ``b``, which are paired in order; its
    interval is that of ``comparison.trains.share_gap``.
    """
    first, second = (np.array([one for cell in cells for one in runs.trained(cell)]) for cells in (a, b))
    gap = gap_of(int(np.sum(first & ~second)), int(np.sum(second & ~first)), len(first))
    return _measured(gap, len(first))


@kind
def pairs_better(runs: Trained, metric: str, *pairs: Sequence[str]) -> Measure:
    """The share of pairs (a, b) of cells in which ``a`` has the better test score, of the seeds at which both
    train, with its exact interval; all of 0 to 1 where there are none.
    """
    of = runs.metric(metric)
    sign = 1.0 if of.higher_is_better else -1.0
    ahead = [
        bool(sign * (x - y) > 0)
        for a, b in pairs
        for x, y, *both in zip(*(runs.scores(of, c) for c in (a, b)), *map(runs.trained, (a, b)), strict=True)
        if all(both)
    ]
    return _share(ahead) if ahead else Measure(0.5, 0.0, 1.0)


@kind
def steps_ratio(runs: Trained, a: str, b: str, metric: str = "nll") -> Measure:
    """The first step at which ``a`` is as good on dev as ``b`` ever is, over the step at which ``b`` is that
    good; its geometric mean over seeds. A run ``a`` that never gets there counts with its last step, which is
    less than its ratio, so that the interval then has no upper end.
    """
    sign = 1.0 if runs.metric(metric).higher_is_better else -1.0
    ratios, arrived = list[float](), True
    for first, second in zip(runs.on_dev(metric, a), runs.on_dev(metric, b), strict=True):
        step, best = max(second, key=lambda one: sign * one[1])
        reached = next((s for s, value in first if sign * value >= sign * best), None)
        ratios.append((reached or first[-1][0]) / step)
        arrived = arrived and reached is not None
    found = mean_ratio(ratios)
    return found if arrived else replace(found, high=math.inf)


@kind
def dev_at(runs: Trained, metric: str, a: str, b: str, share: float) -> Measure:
    """The dev score of ``a`` minus that of ``b`` after a share of the training, its mean over seeds."""
    return mean(
        _at(first, share) - _at(second, share)
        for first, second in zip(runs.on_dev(metric, a), runs.on_dev(metric, b), strict=True)
    )


@kind
def spikes(runs: Trained, cell: str) -> Measure:
    """The share of logged steps, in per cent, whose gradient norm is a spike; its mean over seeds."""
    return mean(_spikes(norms) for norms in _gradient_norms(runs, cell))


@kind
def spikes_difference(runs: Trained, a: str, b: str) -> Measure:
    """``spikes`` of ``a`` minus those of ``b``, within seeds."""
    both = zip(_gradient_norms(runs, a), _gradient_norms(runs, b), strict=True)
    return mean(_spikes(first) - _spikes(second) for first, second in both)


@kind
def gradient_ratio(runs: Trained, a: str, b: str) -> Measure:
    """The median gradient norm of ``a`` over that of ``b``, within seeds."""
    both = zip(_gradient_norms(runs, a), _gradient_norms(runs, b), strict=True)
    return mean_ratio(float(np.median(first) / np.median(second)) for first, second in both)


@kind
def disordered_pairs(runs: Trained, good: float, metric: str = "") -> Measure:
    """The number of pairs of runs that reach at most ``good`` on the metric, of which the one with the better
    dev loss has the worse score, at the validation with its best loss.
    """
    of = runs.metric(metric)
    ends = []
    for cell in runs.cells:
        for losses, scores in zip(runs.on_dev("nll", cell), runs.on_dev(of.name, cell), strict=True):
            if losses:
                step, loss = min(losses, key=lambda one: one[1])
                ends.append((loss, dict(scores).get(step, 0.0)))
    bad = [one for one in ends if one[1] <= good]
    return Measure.exact(float(sum(a[0] < b[0] and a[1] < b[1] for a in bad for b in bad)))


# ----------------------------------------------------------------------------------------------- helpers


def _share(found: Sequence[bool]) -> Measure:
    return replace(_measured(share_of(sum(found), len(found)), len(found)), share=True)


def _measured(found: Interval, runs: int) -> Measure:
    assert found.low is not None
    assert found.high is not None
    return Measure(found.value, found.low, found.high, runs)


def _mean(metric: Metric, scores: Array) -> Measure:
    return _mapped(mean(Scale(metric).values(scores)), Scale(metric).scores)


def _within_seeds(metric: Metric, first: Array, second: Array) -> Measure:
    """The mean difference of values on the scale, as a difference of scores halfway between the two, a level
    that is taken as known.
    """
    centre = np.array(float((first + second).mean() / 2))
    return _mapped(mean(first - second), lambda moved: Scale(metric).difference(centre, moved))


def _mapped(found: Measure, back: Callable[[Array], Array]) -> Measure:
    value, low, high = (float(back(np.array(v))) for v in (found.value, found.low, found.high))
    return Measure(value, low, high, found.runs)


def _together(runs: Trained, metric: Metric, cells: str | Sequence[str]) -> Array:
    """The scores of each seed on the scale, averaged over cells."""
    names = [cells] if isinstance(cells, str) else cells
    return np.mean([Scale(metric).values(runs.scores(metric, cell)) for cell in names], axis=0)


def _test_score(folder: RunFolder, metric: Metric) -> float | None:
    if not folder.scores.exists():
        return None
    score = read_scores(folder.scores).get(metric.name)
    return score if score is not None and math.isfinite(score) else None


def _worst(metric: Metric, folder: RunFolder) -> float:
    """The score of a run without one: the metric's worst, or its first on dev where there is no worst."""
    edge = metric.least if metric.higher_is_better else metric.most
    if edge is not None:
        return edge
    rows = [row[metric.name] for row in folder.metrics() if row["kind"] == "dev" and metric.name in row]
    finite = [float(value) for value in rows if isinstance(value, (int, float)) and math.isfinite(value)]
    return max(finite) if finite else math.inf


def _outcome(folder: RunFolder) -> str:
    status = folder.status()
    return status.outcome.state if status.outcome else status.state


def _at(curve: Sequence[tuple[int, float]], share: float) -> float:
    """The value at the last step up to a share of the training."""
    last = curve[-1][0]
    return next(value for step, value in reversed(curve) if step <= share * last or step == curve[0][0])


def _gradient_norms(runs: Trained, cell: str) -> Iterator[Array]:
    for folder in runs.cells[cell]:
        norms = [row.get("grad_norm_l2") for row in folder.metrics() if row["kind"] == "train"]
        yield np.array([v for v in norms if isinstance(v, (int, float)) and math.isfinite(v)], float)


def _spikes(norms: Array) -> float:
    around = [np.median(norms[max(0, i - AROUND) : i + AROUND + 1]) for i in range(len(norms))]
    return 100.0 * float((norms > SPIKE * np.array(around)).mean())


def _cell(runs: Trained, metric: Metric, cell: str) -> Row:
    """A cell as the paper's table prints one, with every seed beside the mean."""
    scores, outcomes = runs.scores(metric, cell), [_outcome(folder) for folder in runs.cells[cell]]
    found = _mean(metric, scores)
    shown = [metric.shown(float(s)) if learnt(o) else f"({metric.shown(float(s))})"
             for s, o in zip(scores, outcomes, strict=True)]  # fmt: skip
    return {
        "cell": cell,
        metric.label: found.value,
        "low": found.low,
        "high": found.high,
        "seeds": ", ".join(shown),
        "trained": f"{sum(map(learnt, outcomes))} of {len(outcomes)}",
    }


def _runs(runs: Trained) -> Iterator[Row]:
    for cell, folders in runs.cells.items():
        for seed, folder in enumerate(folders, 1):
            status = folder.status()
            yield {
                "cell": cell,
                "seed": seed,
                "run": folder.path.name,
                "outcome": _outcome(folder),
                **{m.name: _test_score(folder, m) for m in runs.metrics},
                **{f"dev_{name}": value for name, value in status.best_dev.items()},
                "seconds": status.train_seconds,
            }


def _curves(runs: Trained) -> Iterator[Row]:
    """The dev scores through training, which the drawings show."""
    wanted = [metric.name for metric in runs.metrics if metric.on_dev]
    for cell, folders in runs.cells.items():
        for seed, folder in enumerate(folders, 1):
            for row in folder.metrics():
                if row["kind"] == "dev":
                    scores = {name: row.get(name) for name in wanted}
                    yield {"cell": cell, "seed": seed, "step": int(row["step"]), **scores}


def _gradients(runs: Trained) -> Iterator[Row]:
    """The global gradient norm of logged steps."""
    for cell, folders in runs.cells.items():
        for seed, folder in enumerate(folders, 1):
            for row in folder.metrics():
                if row["kind"] == "train":
                    yield {
                        "cell": cell,
                        "seed": seed,
                        "step": int(row["step"]),
                        "grad_norm_l2": row.get("grad_norm_l2"),
                    }


def _facts(runs: Trained) -> dict[str, str]:
    """Text, models, steps and machines of all runs, each said once."""
    facts: dict[str, dict[str, None]] = {"text": {}, "model": {}, "training": {}, "trained on": {}}
    for folder in (folder for folders in runs.cells.values() for folder in folders):
        config = folder.config()
        data, model, train = config.data, config.model, config.train
        layers = f"{model.encoder_layers}+{model.decoder_layers} layers of width {model.dim}"
        text = data.train_src or data.train_text or data.train_pairs or data.dataset
        facts["text"][text or f"the built-in corpus {data.builtin}"] = None
        facts["model"][layers] = None
        facts["training"][f"{train.steps:,} steps of {train.max_tokens:,} positions"] = None
        facts["trained on"][folder.status().hardware] = None
    return {name: "; ".join(filter(None, said)) for name, said in facts.items()}
