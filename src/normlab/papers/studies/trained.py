"""Trained runs as tables: cells, runs, curves and gradients, and measures of their weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from normlab.base.metric import Metric, metric_named
from normlab.diagnosis.tables import as_float
from normlab.judging.statistics import MetricScale
from normlab.lab.comparison.result import has_trained
from normlab.lab.runs.folder import RunFolder, read_scores
from normlab.papers.artefact import Measurement
from normlab.papers.effects import score_or_worst
from normlab.papers.estimate import Estimate, mean
from normlab.papers.intervals import Array
from normlab.papers.lab import Lab, Row
from normlab.papers.measures import OfWeights
from normlab.papers.regimes import Curve, Run
from normlab.papers.studies.trained_models import TrainedModel


@dataclass(frozen=True)
class Trained:
    """The finished runs of an artefact, by cell, in the order of their seeds."""

    cells: Mapping[str, Sequence[RunFolder]]

    def seeds(self) -> Iterator[tuple[str, int, RunFolder]]:
        """Every run, with its cell and the place of its seed, from 1 on: cells are paired by places."""
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
        shown = self.metric(metric)
        scores = []
        for seed, folder in enumerate(self.cells[cell], 1):
            test, dev = _test_score(folder, shown), _dev_curve(folder, shown.name)
            outcome = folder.status().ended_as
            run = Run(cell, seed, folder.path.name, outcome, {shown.name: test}, {shown.name: dev})
            scores.append(score_or_worst(run, shown))
        return np.array(scores)

    def mean_score(self, metric: str, scores: Array) -> Estimate:
        """Return the mean of scores, taken on the metric's scale."""
        scale = MetricScale(self.metric(metric))
        return mean(scale.values(scores)).mapped(lambda value: float(scale.scores(np.array(value))))

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
    of_weights = {name: measure.measure(runs) for name, measure in (measures or {}).items()}
    return Measurement(of_weights, tables, _facts(runs))


def learned_scales(lab: Lab, *, measures: Mapping[str, OfWeights]) -> Measurement:
    """Do as ``trainings``, and add a table of the scales that every run has learned."""
    measured = trainings(lab, measures=measures)
    rows: list[Row] = []
    for cell, seed, run in Trained(lab.runs).seeds():
        rows += TrainedModel(run).scale_rows(cell, seed)
    return replace(measured, tables={**measured.tables, "scales": rows})


def _dev_curve(folder: RunFolder, metric: str) -> Curve:
    dev = [(int(row["step"]), as_float(row.get(metric))) for row in folder.metrics() if row["kind"] == "dev"]
    return [(step, value) for step, value in dev if value is not None]


def _test_score(folder: RunFolder, metric: Metric) -> float | None:
    return as_float(read_scores(folder.scores).get(metric.name))


def _cell(runs: Trained, metric: Metric, cell: str) -> Row:
    """Return a cell as the paper's table prints it, with every seed beside the mean."""
    scores = runs.scores(metric.name, cell)
    outcomes = [run.status().ended_as for run in runs.cells[cell]]
    return {
        "cell": cell,
        **runs.mean_score(metric.name, scores).columns(metric.label),
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
    # dictionaries, because sets would lose the order
    facts: dict[str, dict[str, None]] = {"text": {}, "model": {}, "training": {}, "trained on": {}}
    for _, _, folder in runs.seeds():
        config = folder.config()
        data, model, train = config.data, config.model, config.train
        text = data.train_src or data.train_text or data.train_pairs or data.dataset
        facts["text"][text or f"the built-in corpus {data.builtin}"] = None
        facts["model"][f"{model.encoder_layers}+{model.decoder_layers} layers of width {model.dim}"] = None
        facts["training"][f"{train.steps:,} steps of {train.max_tokens:,} positions"] = None
        facts["trained on"][folder.status().hardware] = None
    return {name: "; ".join(filter(None, values)) for name, values in facts.items()}
