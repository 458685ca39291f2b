"""The page of two commands that were run seed after seed until it was decided: the gains and every run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from normlab.base.metric import Metric
from normlab.base.units import count, duration
from normlab.judging.experiment import BASELINE, CANDIDATE, Experiment, SideRun
from normlab.report.page import Block, Cell, Chart, Code, Notes, Page, PageTable, Section, Text, capital

if TYPE_CHECKING:
    from normlab.report.charts.drawing import Drawn

METHOD: Final = (
    "After each seed from the third on, the gain is tested by a paired t test whose critical values make up "
    "for the looks: the chance to keep a change without a gain is at most the level, however often it is "
    "looked at (Lan and DeMets 1983; Jennison and Turnbull 1991). docs/statistics.md has errors and power."
)


@dataclass(frozen=True)
class Pair:
    """The two runs of one seed."""

    seed: int
    baseline: SideRun
    candidate: SideRun
    gain: float | None
    """By how much the change is better; None if one of the two runs has no score."""


def pairs_of(experiment: Experiment) -> list[Pair]:
    """Return the runs that the answer rests on, seed by seed."""
    runs = zip(
        experiment.seeds, experiment.runs.get(BASELINE, ()), experiment.runs.get(CANDIDATE, ()), strict=True
    )
    return [
        Pair(seed, baseline, candidate, _gain(baseline, candidate, experiment.metric))
        for seed, baseline, candidate in runs
    ]


def _gain(baseline: SideRun, candidate: SideRun, metric: Metric) -> float | None:
    if baseline.score is None or candidate.score is None:
        return None
    if metric.higher_is_better:
        return candidate.score - baseline.score
    return baseline.score - candidate.score


def experiment_page(experiment: Experiment, command: str = "") -> Page:
    """The page of an experiment; ``command`` is what was typed for it."""
    metric, pairs = experiment.metric, pairs_of(experiment)
    headline, *others = experiment.lines()
    better = "higher" if metric.higher_is_better else "lower"
    method: list[Block] = [Text(METHOD)]
    if command:
        method.append(Code(command))
    return Page(
        title=f"Judgement of {experiment.candidate.text}",
        headline=capital(headline.removesuffix(".")),
        facts=[
            count(len(pairs), "seed"),
            f"score: {better} is better",
            f"margin {experiment.request.margin:g}",
        ],
        lead="",
        blocks=[
            Section(
                "", [_gains_chart(pairs), Notes([Text(line) for line in others])], "glance", listed=False
            ),
            Section("Every run", [_runs(pairs, metric)], "runs"),
            Section("The two commands", list(_commands(experiment)), "commands"),
            Section("How this was judged", method, "method"),
        ],
    )


def _commands(experiment: Experiment) -> Iterator[Block]:
    """Each command, and the digests of the files that it depends on."""
    for side, command in ((BASELINE, experiment.baseline), (CANDIDATE, experiment.candidate)):
        yield Text(f"{side.capitalize()}, in {experiment.request.folder}/{command.id}:")
        yield Code(command.text)
        if command.files:
            rows = [[Cell(path), Cell(digest)] for path, digest in command.files.items()]
            yield PageTable(("file", "SHA-256"), rows, text_columns=2)


def _runs(pairs: Sequence[Pair], metric: Metric) -> PageTable:
    rows = []
    for pair in pairs:
        gain = "–" if pair.gain is None else metric.signed(pair.gain)
        rows.append(
            [Cell(str(pair.seed)), _run(pair.baseline, metric), _run(pair.candidate, metric), Cell(gain)]
        )
    header = ("seed", "baseline", "candidate", "gain")
    return PageTable(header, rows, "A positive gain is a better candidate.")


def _run(run: SideRun, metric: Metric) -> Cell:
    if run.score is None:
        return Cell(run.outcome, run.reason, tone="alarm")
    return Cell(metric.shown(run.score), duration(run.seconds))


def _gains_chart(pairs: Sequence[Pair]) -> Chart:
    """The gain of each seed, and the mean of the gains so far."""
    points: list[dict[str, Any]] = []
    gains: list[float] = []
    for pair in pairs:
        if pair.gain is not None:
            gains.append(pair.gain)
            points.append({"seed": pair.seed, "gain": pair.gain, "mean so far": sum(gains) / len(gains)})

    def draw(_: int) -> Drawn:
        from normlab.report.charts.judge import gains_by_seed

        return gains_by_seed(points)

    caption = "A point for each seed, the line is their mean so far."
    return Chart("gains", "Gain by seed", caption, draw, points)
