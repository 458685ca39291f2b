"""The report on forecasts, in Markdown: what they rest on, how good they are, and where they fail."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from statistics import median
from typing import Final

import numpy as np

from normlab.comparison.trains import share
from normlab.forecast.evaluation import (
    CONFIGURATION,
    ENCODINGS,
    MEASURED,
    PARTS,
    SPLITS,
    WIDE,
    Ceiling,
    Judged,
    ceilings,
    edge_known,
    judged,
    seeds_agree,
    several,
)
from normlab.forecast.scores import SCORES, auroc, brier, interval, log_loss, reliability, risk_coverage
from normlab.forecast.table import Foretold, SurveyedRun, SweptRate
from normlab.report.foretold import foretold_report
from normlab.report.markdown import markdown_table
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
    "A forecast is made by a forest of randomised trees. It is fitted without the group that it is judged on "
    "and compared with the same learner on the configuration alone and on the learning rate alone: one that "
    "does not beat the configuration says nothing about a model that nobody has tried."
)
SCORES_MEAN: Final = (
    "AUROC is the probability that a run that trained was given a larger probability than one that did not; "
    "for the Brier score, the log loss (in nats) and the expected calibration error (ECE) smaller is better. "
    "Intervals of 95%, over resampled models."
)
TITLES: Final = {
    "model": f"One of {PARTS} parts of the models left out",
    WIDE: "Wide models, none of them fitted on",
}
CEILINGS: Final = (
    "The largest learning rate at which a training is as likely to succeed as not, from the features at "
    "rates a factor of 4 apart, against the edge that was searched for. Each model is left out of the fit "
    "with its part. A search ends at rates a factor of √2 apart, or when its six runs are spent."
)
GAIN: Final = (
    "How much smaller the log loss of the features at step 0 is than that of the configuration, in nats for "
    "each run:"
)


def forecast_report(
    runs: Sequence[SurveyedRun], swept: Sequence[SweptRate] = (), foretold: Sequence[Foretold] = ()
) -> str:
    """Return the report on a table of runs, its wide ones apart, on swept rates, and on runs that were
    forecast before they were trained.
    """
    wide = [run for run in runs if run.kind == "wide"]
    others = [run for run in runs if run.kind != "wide"]
    found = [judged(others, split, name) for split in several(others) for name in ENCODINGS]
    found += [judged(others, WIDE, name, wide=wide) for name in ENCODINGS if len(wide) > 1]
    parts = [
        "# Forecasts",
        ABOUT,
        "## The runs",
        *_runs(others, wide),
        "## How good the forecasts are",
        SCORES_MEAN,
        *(_scores(split, [j for j in found if j.split == split]) for split in (*several(others), WIDE)),
        "## Against the configuration",
        *_against(found),
        "## Do the probabilities mean what they say",
        _reliability(_one(found, "model")),
        "## Abstention",
        _coverage(found),
        "## The largest learning rate",
        *_ceilings(others, swept),
        *foretold_report(foretold),
        "## Where it fails",
        *_failures(found, others),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _between(value: float, low: float, high: float) -> str:
    return f"{value:.2f} [{low:.2f}, {high:.2f}]"


def _one(found: Iterable[Judged], split: str, name: str = MEASURED) -> Judged:
    return next(one for one in found if (one.split, one.forecast) == (split, name))


def _deep(runs: Sequence[SurveyedRun]) -> str:
    """Say how the deep models were drawn, by the letter of their names."""
    deep = {run.model: run.choices for run in runs if run.model.startswith("d")}
    if not deep:
        return ""
    placements = ", ".join(dict.fromkeys(str(c["placement"]) for c in deep.values()))
    layers = max(float(c["layers"]) for c in deep.values())
    return f"{count(len(deep), 'model')} of {layers:g} layers have these placements in turn: {placements}. "


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
        + _deep(runs)
        + (f"{count(len(wide), 'run')} of wide models are kept apart." if wide else ""),
        markdown_table(
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
        + (f" ({same / pairs:.0%})." if pairs else ".")
        + _bound(runs),
    ]


def _bound(runs: Sequence[SurveyedRun]) -> str:
    """How well the drawn runs could be ranked by who knows the edges."""
    below, happened, models = edge_known(runs)
    if len(set(happened)) < 2:
        return ""
    found = _between(auroc(below, happened), *interval(auroc, below, happened, models))
    return (
        " Ranked by how far their rate lies below the edge that the search found for their model, which "
        f"needs trainings of the model itself, the {count(len(below), 'run')} at drawn rates have an AUROC "
        f"of {found}: no forecast of such runs can be expected to reach 0.95."
    )


def _scores(split: str, found: Sequence[Judged]) -> str:
    if not found:
        return f"### One {split} left out\n\nNo such runs are in the table yet."
    title = TITLES.get(split, f"One {split} left out")
    rows = [[one.forecast, *(_between(*one.scores()[name]) for name in SCORES)] for one in found]
    return f"### {title}\n\n{markdown_table(['forecast from', *SCORES], rows)}"


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
        markdown_table(["left out", "difference", "the features are"], rows),
    ]


def _reliability(found: Judged) -> str:
    rows = [
        [f"{row.forecast:.2f}", f"{row.happened:.2f}", str(row.count)]
        for row in reliability(found.p, found.happened)
    ]
    return "By features at step 0, with one part of the models left out at a time.\n\n" + markdown_table(
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
    ) + markdown_table(["left out", *(f"{share:.0%} answered" for share in COVERAGES)], rows)


def _ceilings(runs: Sequence[SurveyedRun], swept: Sequence[SweptRate]) -> list[str]:
    found = {name: ceilings(runs, swept, name) for name in (MEASURED, CONFIGURATION)}
    if not found[MEASURED]:
        return ["No model was swept yet; type normlab forecast --sweep."]
    head = (
        *("forecast from", "models", f"within a factor of {FACTOR:g}"),
        *("half are off by less than a factor of", "without a forecast"),
    )
    narrowed = {
        f"{name}, edge known to a factor of √2": [c for c in own if c.narrowed] for name, own in found.items()
    }
    rows = [_near(name, own) for name, own in (found | narrowed).items() if own]
    return [CEILINGS, markdown_table(head, rows), _worst_ceilings(runs, found[MEASURED])]


def _near(name: str, found: Sequence[Ceiling]) -> list[str]:
    near = sum(one.within(FACTOR) for one in found)
    off = [abs(np.log2(c.forecast / (c.low * c.high) ** 0.5)) for c in found if c.forecast]
    nothing = sum(one.forecast is None for one in found)
    half = f"{2 ** median(off):.1f}" if off else "-"
    return [name, str(len(found)), _percent(share(near, len(found))), half, str(nothing)]


def _worst_ceilings(runs: Sequence[SurveyedRun], found: Sequence[Ceiling]) -> str:
    """The placements and optimisers whose ceilings are missed most often."""
    choices = {run.model: run.choices for run in runs}
    said = list[str]()
    for axis in ("placement", "optimiser"):
        groups = defaultdict[str, list[bool]](list)
        for one in found:
            groups[str(choices[one.model][axis])].append(one.within(FACTOR))
        worst = sorted(groups.items(), key=lambda group: sum(group[1]) / len(group[1]))[:WORST]
        said += [f"{name} {sum(near)} of {len(near)}" for name, near in worst]
    return f"Within the factor least often, by features at step 0: {', '.join(said)}."


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
    return ["The groups with the largest Brier scores, by features at step 0.", markdown_table(head, rows)]
