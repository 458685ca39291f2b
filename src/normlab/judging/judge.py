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
from normlab.judging.run import ScoreOptions, Take
from normlab.judging.scores import Scores, read_scores
from normlab.judging.sentences import findings, of_difference

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
    options = ScoreOptions(
        metric=metric,
        take=Take.of(reading.get("take", "last")),
        by=tuple(reading.get("by", ())),
        seed=reading.get("seed_column", ""),
        name=reading.get("name", ""),
        higher_is_better=higher_is_better,
    )
    read = read_scores(scores, options)
    if baseline:
        _require_comparable(read, baseline)
    return judged(read, _metric(read, options), margin=margin, baseline=baseline)


def _require_comparable(scores: Scores, baseline: str) -> None:
    """Raise UserError unless scores can decide about changes against a baseline."""
    if baseline not in scores.changes:
        raise UserError(f"{scores.source} has no change {baseline!r}{nearest(baseline, scores.changes)}")
    if len(scores.changes) == 1:
        raise UserError(f"{scores.source} holds no change but {baseline!r}; add the scores of another")
    if scores.looked_at:
        raise UserError(
            f"the scores in {scores.source} have decided how many seeds were run, so that they cannot decide "
            "about a change once more; type its command again, with --baseline and --candidate: no run is "
            "repeated"
        )


def _metric(scores: Scores, options: ScoreOptions) -> Metric:
    """The metric of the scores, shown with as many decimals as their noise over seeds leaves meaningful."""
    noise = noise_of((scores.values(change) for change in scores.changes), Metric("score", "score"))
    typed = "" if "(" in options.metric else options.metric  # a regular expression is no name
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
        recipes = max(2, len(changes))
        can_tell = {seeds: statistics.detectable(recipes, seeds) * spread for seeds in PLANNED_SEEDS}
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
        decided = tuple(_with_verdict(change, judgement) for change in changes)
        judgement = replace(judgement, changes=decided)
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
    difference = next(other for other in judgement.differences if {other.a, other.b} == pair)
    reference = next(other for other in judgement.changes if other.name == judgement.baseline)
    # the sign of the difference of two shares, in whole numbers
    more_often = change.trained * reference.ended - reference.trained * change.ended
    if (difference.p_trains or 1.0) < statistics.LEVEL:
        return replace(change, verdict=KEEP if more_often > 0 else DISCARD)
    gains = _gains(difference, change.name, judgement.metric)
    if gains is None:
        return replace(change, verdict=UNDECIDED)
    low, high = gains
    if low > judgement.margin and more_often < 0:
        why = (
            f"{change.name} is undecided: it is better where both trained, but it trained at "
            f"{change.trained} of {change.ended} seeds, and {reference.name} at {reference.trained} of "
            f"{reference.ended}"
        )
        return replace(change, verdict=UNDECIDED, why=why)
    verdict = UNDECIDED
    if low > judgement.margin:
        verdict = KEEP
    elif high < judgement.margin:
        verdict = DISCARD
    return replace(change, verdict=verdict)


def _gains(difference: Difference, change: str, metric: Metric) -> tuple[float, float] | None:
    """The ends of the interval of a change's gain, positive if it is better; None if there is none."""
    delta = difference.delta
    if delta is None or delta.low is None or delta.high is None:
        return None
    is_first = difference.a == change
    is_gain = is_first == metric.higher_is_better
    return (delta.low, delta.high) if is_gain else (-delta.high, -delta.low)
