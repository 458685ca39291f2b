"""Trained runs as tables: cells, runs, curves and gradients, and measures of their weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeAlias

import numpy as np

from normlab.base.metric import Metric, metric_named
from normlab.diagnosis.tables import as_float
from normlab.judging.statistics import MetricScale
from normlab.lab.comparison.result import has_trained
from normlab.lab.runs.folder import RunFolder, read_scores
from normlab.papers.artefact import Measurement
from normlab.papers.estimate import Estimate, mean
from normlab.papers.intervals import Array
from normlab.papers.lab import Lab, Row
from normlab.papers.measures import OfWeights
from normlab.papers.studies.trained_models import TrainedModel

Curve: TypeAlias = list[tuple[int, float]]


@dataclass(frozen=True)
class Trained:
    """The finished runs of an artefact, by cell, in the order of their seeds."""

    cells: Mapping[str, Sequence[RunFolder]]

    def seeds(self) -> Iterator[tuple[str, int, RunFolder]]:
        """Every run, with its cell and seed."""
        return ((cell, seed, run) for cell, runs in self.cells.items() for seed, run in enumerate(runs, 1))

    @cached_property
    def metrics(self) -> tuple[Metric, ...]:
        return next(iter(self.cells.values()))[0].task_metrics()

    def metric(self, name: str) -> Metric:
        """Return the metric of that name; an empty name means the headline."""
        return metric_named(
            name or self.metrics[0].name, self.metrics, f"a measure wants {name!r}, and the runs"
        )

    def scores(self, metric: str, cell: str) -> Array:
        """Return the test score of each seed; the worst one for a run without any."""
        of = self.metric(metric)
        found = ((_test_score(folder, of), folder) for folder in self.cells[cell])
        return np.array([_worst(of, folder) if score is None else score for score, folder in found])

    def mean_score(self, metric: str, scores: Array) -> Estimate:
        """Return the mean of scores, taken on the metric's scale."""
        scale = MetricScale(self.metric(metric))
        return _mapped(mean(scale.values(scores)), scale.scores)

    def models(self, cell: str) -> list[TrainedModel]:
        return [TrainedModel(folder) for folder in self.cells[cell]]


def trainings(
    lab: Lab, *, measures: Mapping[str, OfWeights] | None = None, shown: str = "", gradients: bool = False
) -> Measurement:
    """Return the tables of the artefact's runs: cells, runs, curves and, if asked for, gradient norms.

    ``measures`` are taken of their weights. ``shown`` names the metric of the table of cells; empty means the
    headline.
    """
    runs = Trained(lab.runs)
    metric = runs.metric(shown)
    tables = {
        "cells": [_cell(runs, metric, cell) for cell in runs.cells],
        "runs": list(_runs(runs)),
        "curves": _logged(runs, "dev", [metric.name for metric in runs.metrics if metric.on_dev]),
    }
    if gradients:
        tables["gradients"] = _logged(runs, "train", ["grad_norm_l2"])
    found = {name: one.measure(runs) for name, one in (measures or {}).items()}
    return Measurement(found, tables, _facts(runs))


def learned_scales(lab: Lab, *, measures: Mapping[str, OfWeights]) -> Measurement:
    """Do as ``trainings``, and add a table of the scales that every run has learned."""
    found = trainings(lab, measures=measures)
    seeds = Trained(lab.runs).seeds()
    rows = [row for cell, seed, run in seeds for row in TrainedModel(run).scale_rows(cell, seed)]
    return replace(found, tables={**found.tables, "scales": rows})


def _mapped(found: Estimate, back: Callable[[Array], Array]) -> Estimate:
    value, low, high = (float(back(np.array(v))) for v in (found.value, found.low, found.high))
    return Estimate(value, low, high, found.runs)


def _dev_curve(folder: RunFolder, metric: str) -> Curve:
    dev = [(int(row["step"]), as_float(row.get(metric))) for row in folder.metrics() if row["kind"] == "dev"]
    return [(step, value) for step, value in dev if value is not None]


def _test_score(folder: RunFolder, metric: Metric) -> float | None:
    return as_float(read_scores(folder.scores).get(metric.name))


def _worst(metric: Metric, folder: RunFolder) -> float:
    """Return the score of a run without one: the metric's worst or, if it has none, its largest on dev."""
    edge = metric.least if metric.higher_is_better else metric.most
    if edge is not None:
        return edge
    return max((value for _, value in _dev_curve(folder, metric.name)), default=math.inf)


def _cell(runs: Trained, metric: Metric, cell: str) -> Row:
    """Return a cell as the paper's table prints it, with every seed beside the mean."""
    scores, outcomes = runs.scores(metric.name, cell), [run.status().ended_as for run in runs.cells[cell]]
    found = runs.mean_score(metric.name, scores)
    return {
        "cell": cell,
        **found.columns(metric.label),
        "seeds": metric.listed(scores.tolist(), map(has_trained, outcomes)),
        "trained": f"{sum(map(has_trained, outcomes))} of {len(outcomes)}",
    }


def _runs(runs: Trained) -> Iterator[Row]:
    for cell, seed, folder in runs.seeds():
        status = folder.status()
        yield {
            "cell": cell,
            "seed": seed,
            "run": folder.path.name,
            "outcome": status.ended_as,
            **{m.name: _test_score(folder, m) for m in runs.metrics},
            **{f"dev_{name}": value for name, value in status.best_dev.items()},
            "seconds": status.train_seconds,
        }


def _logged(runs: Trained, kind: str, columns: Sequence[str]) -> list[Row]:
    """Return columns of the log through training, such as dev scores, which the drawings show."""
    return [
        {"cell": cell, "seed": seed, "step": int(row["step"]), **{name: row.get(name) for name in columns}}
        for cell, seed, folder in runs.seeds()
        for row in folder.metrics()
        if row["kind"] == kind
    ]


def _facts(runs: Trained) -> dict[str, str]:
    """Return text, models, steps and machines of all runs, each said once."""
    facts: dict[str, dict[str, None]] = {"text": {}, "model": {}, "training": {}, "trained on": {}}
    for _, _, folder in runs.seeds():
        config = folder.config()
        data, model, train = config.data, config.model, config.train
        text = data.train_src or data.train_text or data.train_pairs or data.dataset
        facts["text"][text or f"the built-in corpus {data.builtin}"] = None
        facts["model"][f"{model.encoder_layers}+{model.decoder_layers} layers of width {model.dim}"] = None
        facts["training"][f"{train.steps:,} steps of {train.max_tokens:,} positions"] = None
        facts["trained on"][folder.status().hardware] = None
    return {name: "; ".join(filter(None, said)) for name, said in facts.items()}
