"""The report on forecasts, in Markdown: what they rest on, how good they are, and where they fail."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from statistics import median
from typing import Final

import numpy as np

from normlab.comparison.trains import share
from normlab.forecast.evaluation import (
    CONFIGURATION,
    ENCODINGS,
    MEASURED,
    SPLITS,
    WIDE,
    Judged,
    ceilings,
    judged,
    seeds_agree,
)
from normlab.forecast.scores import SCORES, brier, interval, log_loss, reliability, risk_coverage
from normlab.forecast.table import SurveyedRun, SweptRate
from normlab.spec.comparison import Interval
from normlab.spec.units import count

COMMAND: Final = "normlab forecast --evaluate"
FACTOR: Final = 2.0
"""A forecast of the largest learning rate is right within this factor."""
COVERAGES: Final = (1.0, 0.9, 0.75, 0.5)
WORST: Final = 3
"""Groups of a split that are named as failures."""
ABOUT: Final = (
    f"Will a training succeed within its budget? This page is written by `{COMMAND}` from the table of runs. "
    "A forecast is fitted without the group that it is judged on, and compared with the same learner on the "
    "configuration alone and on the learning rate alone: one that does not beat the configuration says "
    "nothing about a model that nobody has tried."
)
SCORES_MEAN: Final = (
    "AUROC is the probability that a run that trained was given a larger probability than one that did not; "
    "for the Brier score, the log loss (in nats) and the expected calibration error (ECE) smaller is better. "
    "Intervals of 95%, over resampled models."
)
GAIN: Final = (
    "How much smaller the log loss of the features at step 0 is than that of the configuration, in nats for "
    "each run:"
)


def forecast_report(runs: Sequence[SurveyedRun], swept: Sequence[SweptRate] = ()) -> str:
    """Return the report on a table of runs, its wide ones apart, and on swept rates."""
    wide = [run for run in runs if run.kind == "wide"]
    others = [run for run in runs if run.kind != "wide"]
    several = [split for split, group in SPLITS.items() if len(set(map(group, others))) > 1]
    found = [judged(others, split, name) for split in several for name in ENCODINGS]
    found += [judged(others, WIDE, name, wide=wide) for name in ENCODINGS if len(wide) > 1]
    parts = [
        "# Forecasts",
        ABOUT,
        "## The runs",
        *_runs(others, wide),
        "## How good the forecasts are",
        SCORES_MEAN,
        *(_scores(split, [j for j in found if j.split == split]) for split in (*several, WIDE)),
        "## Against the configuration",
        *_against(found),
        "## Do the probabilities mean what they say",
        _reliability(_one(found, "model")),
        "## Abstention",
        _coverage(found),
        "## The largest learning rate",
        _ceilings(others, swept),
        "## Where it fails",
        *_failures(found, others),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _between(value: float, low: float, high: float) -> str:
    return f"{value:.2f} [{low:.2f}, {high:.2f}]"


def _one(found: Iterable[Judged], split: str, name: str = MEASURED) -> Judged:
    return next(one for one in found if (one.split, one.forecast) == (split, name))


def _runs(runs: Sequence[SurveyedRun], wide: Sequence[SurveyedRun]) -> list[str]:
    outcomes = Counter(run.outcome for run in runs)
    failed = len(runs) - outcomes["trained"]
    models = len({run.model for run in runs})
    same, pairs = seeds_agree(runs)
    texts = sorted({str(run.choices["text"]) for run in runs})
    return [
        f"{count(len(runs), 'run')} of {count(models, 'model')}, drawn from a Sobol sequence over placement, "
        "norm, initialisation, optimiser, β2, depth, width, warm-up and text, in "
        f"{sum(run.seconds for run in runs) / 3600:.1f} core-hours; {failed / len(runs):.0%} fail. "
        + (f"{count(len(wide), 'run')} of wide models are kept apart." if wide else ""),
        _table(
            ["outcome", *texts],
            [
                [
                    outcome,
                    *(str(sum(r.outcome == outcome and r.choices["text"] == t for r in runs)) for t in texts),
                ]
                for outcome, _ in outcomes.most_common()
            ],
        ),
        f"Most rates are near the edge of their model, where chance decides: of {count(pairs, 'pair')} of "
        f"runs that differ in their seed alone, {same} have two runs that both train or both fail"
        + (f" ({same / pairs:.0%})." if pairs else "."),
    ]


def _scores(split: str, found: Sequence[Judged]) -> str:
    if not found:
        return f"### One {split} left out\n\nNo such runs are in the table yet."
    title = "Wide models, none of them fitted on" if split == WIDE else f"One {split} left out"
    rows = [[one.forecast, *(_between(*one.scores()[name]) for name in SCORES)] for one in found]
    return f"### {title}\n\n{_table(['forecast from', *SCORES], rows)}"


def _against(found: Sequence[Judged]) -> list[str]:
    rows = []
    for split in dict.fromkeys(one.split for one in found):
        ours, theirs = _one(found, split), _one(found, split, CONFIGURATION)

        def gain(i: np.ndarray, happened: np.ndarray, ours: Judged = ours, theirs: Judged = theirs) -> float:
            chosen = i.astype(int)
            return log_loss(theirs.p[chosen], happened) - log_loss(ours.p[chosen], happened)

        places = np.arange(len(ours.p), dtype=np.float64)
        ends = interval(gain, places, ours.happened, ours.models)
        verdict = "better" if ends[0] > 0 else "worse" if ends[1] < 0 else "undecided"
        rows.append([split, _between(gain(places, ours.happened), *ends), verdict])
    return [
        GAIN,
        _table(["left out", "difference", "the features are"], rows),
    ]


def _reliability(found: Judged) -> str:
    rows = [
        [f"{row.forecast:.2f}", f"{row.happened:.2f}", str(row.count)]
        for row in reliability(found.p, found.happened)
    ]
    return "By features at step 0, with one model left out at a time.\n\n" + _table(
        ["mean probability", "share that trained", "runs"], rows
    )


def _coverage(found: Sequence[Judged]) -> str:
    rows = []
    for split in dict.fromkeys(one.split for one in found):
        one = _one(found, split)
        curve = risk_coverage(one.p, one.happened)
        risks = [next(risk for answered, risk in curve if answered >= share - 1e-9) for share in COVERAGES]
        rows.append([split, *(f"{risk:.0%}" for risk in risks)])
    return (
        "The share of wrong answers (trains, or does not) among those that are answered, the least sure runs "
        "left out first; by features at step 0. Leaving a group out breaks exchangeability, so that no "
        "guarantee is claimed.\n\n"
    ) + _table(["left out", *(f"{share:.0%} answered" for share in COVERAGES)], rows)


def _ceilings(runs: Sequence[SurveyedRun], swept: Sequence[SweptRate]) -> str:
    found = ceilings(runs, swept)
    if not found:
        return "No model was swept yet; type normlab forecast --sweep."
    near = sum(one.within(FACTOR) for one in found)
    interval_ = share(near, len(found))
    off = [abs(np.log2(c.forecast / (c.low * c.high) ** 0.5)) for c in found if c.forecast]
    return (
        f"Of {count(len(found), 'model')}, each left out of the fit, the forecast of {near} lies within a "
        f"factor of {FACTOR:g} of the edge that was searched for, {_percent(interval_)}; half of the "
        f"forecasts are off by less than a factor of {2 ** median(off):.1f}."
    )


def _percent(found: Interval) -> str:
    return f"{found.value:.0%} [{found.low:.0%}, {found.high:.0%}]"


def _failures(found: Sequence[Judged], runs: Sequence[SurveyedRun]) -> list[str]:
    rows = []
    for split, group in SPLITS.items():
        if split == "model" or not any(one.split == split for one in found):
            continue
        one, names = _one(found, split), np.array([group(run) for run in runs])
        scores = {name: brier(one.p[names == name], one.happened[names == name]) for name in set(names)}
        for name in sorted(scores, key=lambda name: -scores[name])[:WORST]:
            there = names == name
            rows.append(
                [
                    split,
                    str(name),
                    f"{scores[name]:.2f}",
                    f"{one.p[there].mean():.2f}",
                    f"{one.happened[there].mean():.2f}",
                    str(int(there.sum())),
                ]
            )
    head = ["left out", "group", "Brier score", "mean probability", "share that trained", "runs"]
    return ["The groups with the largest Brier scores, by features at step 0.", _table(head, rows)]
