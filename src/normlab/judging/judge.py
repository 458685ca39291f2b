"""``normlab.judge``: what scores over seeds say about the changes that they belong to."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final, TypedDict, Unpack

import numpy as np

from normlab.base.io import Amount, validated
from normlab.base.metric import Metric
from normlab.errors import UserError, nearest
from normlab.judging import statistics
from normlab.judging.answers import answer_of, digits_for, mean_of, noise_of, training_of
from normlab.judging.difference import Difference
from normlab.judging.judgement import DISCARD, KEEP, UNDECIDED, ChangeResult, Judgement
from normlab.judging.run import Take
from normlab.judging.scores import Scores, read_scores
from normlab.judging.sentences import findings, of_difference
from normlab.judging.table import Asked

PLANNED_SEEDS: Final = (2, 3, 5, 10)
"""The numbers of seeds for which a judgement says what they can tell."""


class Reading(TypedDict, total=False):
    """Where changes, seeds and scores are found."""

    take: str
    """Which value of a run that logged several is its score: last, best, or mean:5."""
    by: Sequence[str]
    """Columns that say what was changed."""
    seed_column: str
    """The column of the seed."""
    name: str
    """A regular expression for names of files, with groups called ``change`` and ``seed``."""


@validated
def judge(
    scores: Any,
    *,
    metric: str = "",
    higher_is_better: bool = False,
    margin: Amount = 0.0,
    baseline: str = "",
    **reading: Unpack[Reading],
) -> Judgement:
    """Say what scores over seeds tell about changes, by the statistics of docs/statistics.md.

    Args:
        scores: A file or folder of scores (docs/judge.md lists the forms), a data frame, a list of rows, or a
            dict with the scores of each change: a list in the order of their seeds, or a dict by seed.
        metric: The column or key of the score, or for logs a regular expression with one group.
        higher_is_better: Whether a higher score is better; a loss is lower.
        margin: The smallest difference that matters.
        baseline: The change that the others are compared with; each then gets a verdict.
        **reading: Where changes, seeds and scores are found, see ``Reading``.

    Raises:
        UserError: nothing can be read, or it is not clear what is what.

    >>> scores = {"base": [3.31, 3.29, 3.30], "qknorm": [3.21, 3.18, 3.20]}
    >>> normlab.judge(scores, baseline="base").verdict
    'keep'
    """
    asked = Asked(
        metric=metric,
        take=Take.of(reading.get("take", "last")),
        by=tuple(reading.get("by", ())),
        seed=reading.get("seed_column", ""),
        name=reading.get("name", ""),
        higher_is_better=higher_is_better,
    )
    read = read_scores(scores, asked)
    if baseline and baseline not in read.changes:
        raise UserError(f"{read.source} has no change {baseline!r}{nearest(baseline, read.changes)}")
    if baseline and len(read.changes) == 1:
        raise UserError(f"{read.source} holds no change but {baseline!r}; add the scores of another")
    if baseline and read.looked_at:
        raise UserError(
            f"the scores in {read.source} have decided how many seeds were run, so that they cannot decide "
            "about a change once more; type its command again, with --baseline and --candidate: no run is "
            "repeated"
        )
    return judged(read, _metric(read, asked), margin=margin, baseline=baseline)


def _metric(scores: Scores, asked: Asked) -> Metric:
    """The metric of the scores, shown with as many decimals as their noise over seeds leaves meaningful."""
    noise = noise_of((scores.values(change) for change in scores.changes), Metric("score", "score"))
    typed = "" if "(" in asked.metric else asked.metric  # a regular expression is no name
    label = typed or scores.metric or "score"
    sizes = [run.score for run in scores.runs.values() if run.score is not None]
    return Metric(label, label, higher_is_better=scores.higher_is_better, digits=digits_for(noise, sizes))


def judged(scores: Scores, metric: Metric, *, margin: float, baseline: str = "") -> Judgement:
    """Judge scores that were read."""
    changes = tuple(_change(scores, change, metric) for change in scores.changes)
    noise = noise_of((scores.values(change) for change in scores.changes), metric)
    can_tell: dict[int, float] = {}
    if noise:
        spread = noise / 2**0.5
        can_tell = {n: statistics.detectable(max(2, len(changes)), n) * spread for n in PLANNED_SEEDS}
    judgement = Judgement(
        source=scores.source,
        metric=metric,
        margin=margin,
        seeds=scores.seeds,
        changes=changes,
        noise=noise,
        can_tell=can_tell,
        baseline=baseline,
        seeds_named=scores.seeds_named,
        looked_at=scores.looked_at,
    )
    judgement = replace(judgement, differences=_differences(judgement, scores))
    if baseline:
        judgement = replace(judgement, changes=tuple(_with_verdict(c, judgement) for c in changes))
    return replace(judgement, sentences=findings(judgement))


def _change(scores: Scores, name: str, metric: Metric) -> ChangeResult:
    runs = scores.of(name)
    change = ChangeResult(
        name=name,
        scores=tuple(run.score for run in runs),
        outcomes=tuple(run.outcome for run in runs),
        reasons=tuple(run.reason for run in runs),
        mean=mean_of(scores.values(name), metric),
    )
    return replace(change, trains=statistics.share(change.trained, change.ended))


def _differences(judgement: Judgement, scores: Scores) -> tuple[Difference, ...]:
    changes = judgement.ranked
    if len(changes) < 2:
        return ()
    values = np.stack([scores.values(change.name) for change in changes])
    contrast = statistics.contrasts(values)
    pairs = list(itertools.combinations(range(len(changes)), 2))
    differences = []
    for index, (i, j) in enumerate(pairs):
        a, b = changes[i], changes[j]
        difference = Difference(
            a=a.name,
            b=b.name,
            **answer_of(judgement, contrast, index, values[[i, j]]),
            **training_of(a, b, len(pairs)),
        )
        differences.append(replace(difference, sentence=of_difference(difference, judgement)))
    return tuple(differences)


def _with_verdict(change: ChangeResult, judgement: Judgement) -> ChangeResult:
    """Return a change with its verdict against the baseline.

    It is kept if the whole interval of its gain is above the margin, and discarded if the whole interval is
    below; or if one of the two trains more often by more than chance.
    """
    if change.name == judgement.baseline:
        return change
    pair = {change.name, judgement.baseline}
    difference = next(d for d in judgement.differences if {d.a, d.b} == pair)
    reference = next(c for c in judgement.changes if c.name == judgement.baseline)
    more_often = change.trained * reference.ended - reference.trained * change.ended
    if (difference.p_trains or 1.0) < statistics.LEVEL:
        return replace(change, verdict=KEEP if more_often > 0 else DISCARD)
    gains = _gains(difference, change.name, judgement.metric)
    if gains is None:
        return replace(change, verdict=UNDECIDED)
    low, high = gains
    if low > judgement.margin and more_often < 0:
        often = f"{change.trained} of {change.ended} seeds, and {reference.name} at {reference.trained}"
        why = f"{change.name} is undecided: it is better where both trained, but it trained at {often}"
        return replace(change, verdict=UNDECIDED, why=f"{why} of {reference.ended}")
    if low > judgement.margin:
        return replace(change, verdict=KEEP)
    return replace(change, verdict=DISCARD if high < judgement.margin else UNDECIDED)


def _gains(difference: Difference, change: str, metric: Metric) -> tuple[float, float] | None:
    """The ends of the interval of a change's gain, positive if it is better; None if there is none."""
    delta = difference.delta
    if delta is None or delta.low is None or delta.high is None:
        return None
    is_first = difference.a == change
    return (delta.low, delta.high) if is_first == metric.higher_is_better else (-delta.high, -delta.low)
