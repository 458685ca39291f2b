"""The page of a judgement: what was found, every change by seed, every pair, and what is missing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

from normlab.base.metric import Metric
from normlab.base.units import count
from normlab.judging.difference import Difference, Interval
from normlab.judging.judgement import ChangeResult, Judgement
from normlab.report.page import Block, Cell, Chart, Code, Notes, Page, PageTable, Section, Text

if TYPE_CHECKING:
    from normlab.report.charts.drawing import Drawn

TONES: Final = {"keep": "good", "discard": "bad", "undecided": "faint", "": ""}
"""The tone of each verdict."""
ANSWERS_OF_PAIRS: Final = {
    "better": ("a difference", "good"),
    "equal": ("none that matters", ""),
    "open": ("open", "faint"),
}
"""The words and the tone of each answer about a pair."""
METHOD: Final = (
    "Changes are compared at each seed, and the differences averaged. Interval and p come from one t, whose "
    "variance the other pairs moderate, and hold for all pairs at once (Bonferroni). How often a change "
    "trains is compared by Fisher’s exact test. docs/statistics.md has the errors and the power, simulated."
)


def judgement_page(judgement: Judgement) -> Page:
    """The page of a judgement."""
    metric = judgement.metric
    headline, *others = judgement.lines()
    better = "higher" if metric.higher_is_better else "lower"
    facts = [
        judgement.source,
        count(len(judgement.changes), "change"),
        count(len(judgement.seeds), "seed"),
        f"{metric.label}: {better} is better",
    ]
    if judgement.baseline:
        facts.append(f"against {judgement.baseline}")
    if judgement.margin:
        facts.append(f"margin {judgement.margin:g}")
    return Page(
        title=f"Judgement of {judgement.source}",
        headline=headline.removesuffix("."),  # it may begin with a name that the user has chosen
        facts=facts,
        lead="",
        blocks=list(_sections(judgement, others)),
    )


def _sections(judgement: Judgement, lines: Sequence[str]) -> Iterator[Section]:
    # the page has a table of the pairs, so that their lines need not be repeated
    about_pairs = lines_of_pairs(judgement.differences)
    notes = [Text(line) for line in lines if line not in about_pairs]
    yield Section("", [_scores_chart(judgement), Notes(notes)], "glance", listed=False)
    yield Section("Changes", [_changes(judgement)], "changes")
    if judgement.differences:
        yield Section("Which differences are real?", [_pairs(judgement)], "pairs")
    if judgement.failed:
        rows = [[Cell(sentence)] for sentence in judgement.failed]
        yield Section("Runs without a score", [PageTable(("run",), rows)], "failed")
    method: list[Block] = [Text(METHOD)]
    if judgement.command:
        method.append(Code(judgement.command))
    yield Section("How this was judged", method, "method")


def _pairs(judgement: Judgement) -> PageTable:
    """The answer about every pair, those with the baseline first."""
    rows = []
    for difference in sorted(judgement.differences, key=lambda d: not is_pair_of(d, judgement.baseline)):
        word, tone = ANSWERS_OF_PAIRS[difference.answer]
        rows.append([Cell(word, tone=tone), Cell(difference.sentence, difference.trains_sentence)])
    return PageTable(("", "answer"), rows, text_columns=2)


def is_pair_of(difference: Difference, change: str) -> bool:
    """Whether a change is one of the two that are compared."""
    return change in (difference.a, difference.b)


def lines_of_pairs(differences: Sequence[Difference]) -> set[str]:
    """The lines of ``Judgement.lines()`` that are about these pairs."""
    sentences = {d.sentence for d in differences} | {d.trains_sentence for d in differences}
    return {f"{sentence}." for sentence in sentences if sentence}


def _changes(judgement: Judgement) -> PageTable:
    """A row for each change: its mean with an interval, how often it trained, and the score of each seed."""
    metric, is_decided = judgement.metric, bool(judgement.baseline)
    header = ["change"]
    if is_decided:
        header.append("verdict")
    header += [metric.label, "trained", *(f"seed {seed}" for seed in judgement.seeds)]
    rows = []
    for change in judgement.ranked:
        row = [Cell(change.name)]
        if is_decided:
            row.append(Cell(change.verdict or "baseline", tone=TONES[change.verdict]))
        row += [_mean(change, metric), Cell(f"{change.trained} of {change.ended}"), *_scores(change, metric)]
        rows.append(row)
    caption = "The mean is over the seeds that trained, with its 95% interval."
    return PageTable(header, rows, caption, text_columns=2 if is_decided else 1)


def _mean(change: ChangeResult, metric: Metric) -> Cell:
    if change.mean is None:
        return Cell("–", tone="faint")
    return Cell(metric.shown(change.mean.value), between(change.mean, metric))


def between(interval: Interval, metric: Metric) -> str:
    """The ends of an interval, ``3.19 to 3.24``; empty if it has none."""
    if interval.low is None:
        return ""
    return f"{metric.shown(interval.low)} to {metric.shown(interval.high)}"


def _scores(change: ChangeResult, metric: Metric) -> Iterator[Cell]:
    """The score of each seed, or how its run ended."""
    for score, outcome, reason in zip(change.scores, change.outcomes, change.reasons, strict=True):
        if score is None:
            yield Cell(outcome, title=reason, tone="faint" if outcome == "missing" else "alarm")
        else:
            yield Cell(metric.shown(score))


def _scores_chart(judgement: Judgement) -> Chart:
    """The score of each seed, a row of points for each change."""
    metric = judgement.metric
    rows = [
        {"change": change.name, "seed": seed, metric.label: score}
        for change in judgement.ranked
        for seed, score in zip(judgement.seeds, change.scores, strict=True)
        if score is not None
    ]

    def draw(_: int) -> Drawn:
        from normlab.report.charts.judge import scores_by_change

        return scores_by_change(rows, [change.name for change in judgement.ranked], metric.label)

    caption = "A point for each run; a line joins the runs of one seed."
    return Chart("scores", "Scores by change and seed", caption, draw, rows)
