"""Trained runs as the measures of ``papers.measures`` read them, and the study that takes these measures."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final, TypeAlias

import numpy as np

from normlab.base.metric import Metric, metric_named
from normlab.diagnosis.study import as_float
from normlab.errors import UserError
from normlab.lab.comparison.result import Interval, has_trained
from normlab.lab.comparison.statistics import MetricScale, share, share_gap
from normlab.lab.runs.folder import RunFolder, read_scores
from normlab.lab.training.outcome import ignores_source
from normlab.papers import find_artefact
from normlab.papers.artefact import Measurement, Reproduction
from normlab.papers.claim import Measure
from normlab.papers.intervals import Array, mean, mean_ratio
from normlab.papers.lab import Lab, Row
from normlab.papers.measures import Cells, OfRuns
from normlab.papers.results import folders, standing
from normlab.papers.studies.trained_models import TrainedModel
from normlab.papers.trainings import SCALES

Curve: TypeAlias = list[tuple[int, float]]
SPIKE: Final = 3.0
"""A gradient norm this many times the median of the steps around it is a spike."""
AROUND: Final = 25
"""How many log rows before and after a step its gradient norm is compared with."""


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

    def scale(self, metric: str) -> MetricScale:
        return MetricScale(self.metric(metric))

    def scores(self, metric: str, cell: str) -> Array:
        """Return the test score of each seed; the worst one for a run without any."""
        of = self.metric(metric)
        found = ((_test_score(folder, of), folder) for folder in self.cells[cell])
        return np.array([_worst(of, folder) if score is None else score for score, folder in found])

    def on_dev(self, metric: str, cell: str) -> list[Curve]:
        """Return the dev scores of each seed by step, without values that are not finite."""
        return [_dev_curve(folder, metric) for folder in self.cells[cell]]

    def trained(self, cell: str) -> list[bool]:
        return [has_trained(folder.status().ended_as) for folder in self.cells[cell]]

    def trained_to_the_end(self, cell: str) -> list[bool]:
        """Return whether each seed trained and at last reads its source and repeats no output."""
        return [has_trained(folder.status().ended_as) and _reads(folder) for folder in self.cells[cell]]

    def together(self, metric: str, cells: Cells) -> Array:
        """Return the scores of each seed on the scale, averaged over cells."""
        names = [cells] if isinstance(cells, str) else cells
        return np.mean([self.scale(metric).values(self.scores(metric, cell)) for cell in names], axis=0)

    def best(self, metric: str, cells: Sequence[str]) -> Array:
        """Return the best score of each seed in any of the cells, on the scale."""
        best = np.max if self.metric(metric).higher_is_better else np.min
        return self.scale(metric).values(best([self.scores(metric, cell) for cell in cells], axis=0))

    def mean_score(self, metric: str, values: Array) -> Measure:
        """Return the mean of values on the scale, as a score."""
        return _mapped(mean(values), self.scale(metric).scores)

    def score_difference(self, metric: str, first: Array, second: Array) -> Measure:
        """Return the mean difference of values on the scale, as a difference of scores at a level halfway
        between the two, which is taken as known.
        """
        centre = np.array(float((first + second).mean() / 2))
        return _mapped(mean(first - second), lambda moved: self.scale(metric).difference(centre, moved))

    def models(self, cell: str) -> list[TrainedModel]:
        return [TrainedModel(folder) for folder in self.cells[cell]]

    mean = staticmethod(mean)
    mean_ratio = staticmethod(mean_ratio)

    def share(self, found: Sequence[bool]) -> Measure:
        return replace(_measured(share(sum(found), len(found)), len(found)), share=True)

    def share_gap(self, first: Sequence[bool], second: Sequence[bool]) -> Measure:
        """Return the difference between two shares of paired runs."""
        pairs = list(zip(first, second, strict=True))
        gap = share_gap(sum(x and not y for x, y in pairs), sum(y and not x for x, y in pairs), len(pairs))
        return _measured(gap, len(pairs))

    def spikes(self, cell: str) -> list[float]:
        """Return the percentage of logged steps after the warm-up whose gradient norm is a spike, for each
        seed.
        """
        return [_spikes(norms) for norms in _gradient_norms(self, cell)]

    def median_gradients(self, cell: str) -> list[float]:
        """Return the median gradient norm of each seed after the warm-up."""
        return [float(np.median(norms)) for norms in _gradient_norms(self, cell)]


def trainings(
    lab: Lab,
    *,
    measures: Mapping[str, OfRuns],
    gpu: Mapping[str, OfRuns] | None = None,
    paper: Mapping[str, OfRuns] | None = None,
    shown: str = "",
) -> Measurement:
    """Take measures of the artefact's runs.

    ``gpu`` are measures that need trainings to convergence and are left out at the laptop scale; ``paper``
    are measures that need the paper's own settings and are taken only there. ``shown`` names the metric of
    the table of cells; empty means the headline.
    """
    runs = Trained(lab.runs)
    large = {"gpu": gpu or {}, "paper": {**(gpu or {}), **(paper or {})}}
    wanted = {**measures, **large.get(lab.scale, {})}
    found = {name: one.measure(runs) for name, one in wanted.items()}
    metric = runs.metric(shown)
    tables = {
        "cells": [_cell(runs, metric, cell) for cell in runs.cells],
        "runs": list(_runs(runs)),
        "curves": _logged(runs, "dev", [metric.name for metric in runs.metrics if metric.on_dev]),
    }
    if any(one.of_gradients for one in wanted.values()):
        tables["gradients"] = _logged(runs, "train", ["grad_norm_l2"])
    return Measurement(found, tables, _facts(runs))


def learned_scales(
    lab: Lab, *, measures: Mapping[str, OfRuns] | None = None, paper: Mapping[str, OfRuns] | None = None
) -> Measurement:
    """Do as ``trainings``, and add a table of the scales that every run has learned."""
    found = trainings(lab, measures=measures or {}, paper=paper)
    seeds = Trained(lab.runs).seeds()
    rows = [row for cell, seed, run in seeds for row in TrainedModel(run).scale_rows(cell, seed)]
    return replace(found, tables={**found.tables, "scales": rows})


def _measured(found: Interval, runs: int) -> Measure:
    assert found.low is not None
    assert found.high is not None
    return Measure(found.value, found.low, found.high, runs)


def _mapped(found: Measure, back: Callable[[Array], Array]) -> Measure:
    value, low, high = (float(back(np.array(v))) for v in (found.value, found.low, found.high))
    return Measure(value, low, high, found.runs)


def _reads(folder: RunFolder) -> bool:
    """Return whether a run's last validation meets what ``training.outcome`` asks of the best one."""
    return not ignores_source([row for row in folder.metrics() if row["kind"] == "dev"][-1])


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


def _gradient_norms(runs: Trained, cell: str) -> Iterator[Array]:
    for folder in runs.cells[cell]:
        first = folder.config().optim.warmup_steps
        rows = (row for row in folder.metrics() if row["kind"] == "train" and row["step"] > first)
        norms = (as_float(row.get("grad_norm_l2")) for row in rows)
        yield np.array([v for v in norms if v is not None], float)


def _spikes(norms: Array) -> float:
    around = [np.median(norms[max(0, i - AROUND) : i + AROUND + 1]) for i in range(len(norms))]
    return 100.0 * float((norms > SPIKE * np.array(around)).mean())


def _cell(runs: Trained, metric: Metric, cell: str) -> Row:
    """Return a cell as the paper's table prints it, with every seed beside the mean."""
    scores, outcomes = runs.scores(metric.name, cell), [run.status().ended_as for run in runs.cells[cell]]
    found = runs.mean_score(metric.name, runs.together(metric.name, cell))
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


def answers(lab: Lab, *, rows: Mapping[str, tuple[str, str]]) -> Measurement:
    """Return measures of other artefacts under new names, each given as an artefact's id and its measure,
    at the largest scale at which it was measured. A measure that no scale has yet is left out.

    Raises UserError for an artefact that was not measured for today's claims.
    """
    values: dict[str, Measure] = {}
    table: list[Row] = []
    for name, (id_, measure) in rows.items():
        one = _result(lab, id_, measure)
        if measure in one.measures:
            values[name] = one.measures[measure]
            told = {"sentence": name, "artefact": id_, "measure": measure}
            table.append({**told, "scale": one.scale, "fingerprint": one.fingerprint})
    ids = ", ".join(dict.fromkeys(id_ for id_, _ in rows.values()))
    return Measurement(values, {"rows": table}, {"rests on": ids})


def _result(lab: Lab, id_: str, measure: str) -> Reproduction:
    now = [standing(find_artefact(id_), folders(lab.root), scale) for scale in SCALES]
    fresh = [s.found for s in now if s.found is not None and s.fresh]
    if not fresh:
        raise UserError(
            f"this rests on {id_}, which is {now[0].state}; type first: normlab papers reproduce {id_}"
        )
    return next((one for one in reversed(fresh) if measure in one.measures), fresh[0])
