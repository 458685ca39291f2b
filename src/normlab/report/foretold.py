"""The part of the report on forecasts about runs that were forecast before they were trained."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from normlab.forecast.scores import auroc, brier, log_loss
from normlab.forecast.table import Foretold
from normlab.report.markdown import markdown_table
from normlab.spec.units import count

TITLES: Final = {
    "new": "Recipes at sizes that no run of the table has",
    "later": "Recipes at sizes that no run of the table has, a second time",
    "foreign": "Models of other libraries",
    "advised": "A Post-LN of 18 and 18 layers, and the changes that `normlab advise` tries",
}
RIGHT: Final = {"train": True, "do not train": False}
"""What an answer says about the outcome; the others say nothing."""
ABOUT: Final = (
    "Their forecasts were written down, and committed, before they were trained, by the forecaster of the "
    "day, which may have known fewer runs than today's: `python benchmarks/forecasts.py --forecast GROUP`, "
    "then `--train`. An answer is given from a probability of two thirds on, or up to one third. The scores "
    "are of all runs with a probability, answered or not."
)


def foretold_report(rows: Sequence[Foretold]) -> list[str]:
    """Return the paragraphs and tables about these runs, by group; none without runs that were trained."""
    over = [row for row in rows if row.outcome]
    parts = ["## Forecast first, trained afterwards", ABOUT] if over else []
    for group in dict.fromkeys(row.group for row in over):
        own = [row for row in over if row.group == group]
        parts += [f"### {TITLES.get(group, group)}", _answers(own), _scores(own), _each(own)]
    return parts


def _answers(rows: Sequence[Foretold]) -> str:
    answered = [row for row in rows if row.answer in RIGHT]
    right = sum(RIGHT[row.answer] == row.trained for row in answered)
    failed = sum(not row.trained for row in rows)
    models = count(len({row.model for row in rows}), "model")
    by_configuration = sum((row.configuration > 0.5) == row.trained for row in answered)
    return (
        f"{count(len(rows), 'run')} of {models}, of which {failed} failed. {len(answered)} were answered and "
        f"{len(rows) - len(answered)} were not; of the answers {right} of {len(answered)} were right. The "
        f"configuration alone is right about {by_configuration} of the same {len(answered)}. A forecast took "
        f"{np.median([row.seconds for row in rows]):.1f} s (median)."
    )


def _scores(rows: Sequence[Foretold]) -> str:
    known = [row for row in rows if row.probability is not None]
    if not known:
        return "The forecaster abstained from all of them."
    happened = np.array([row.trained for row in known], dtype=np.float64)
    found = {
        "features at step 0": np.array([row.probability for row in known], dtype=np.float64),
        "configuration": np.array([row.configuration for row in known]),
        "learning rate": np.array([row.learning_rate for row in known]),
    }
    lines = [
        [
            name,
            f"{np.mean((p > 0.5) == happened):.0%}",
            *(_number(score(p, happened)) for score in (log_loss, brier, auroc)),
        ]
        for name, p in found.items()
    ]
    head = [f"forecast of {count(len(known), 'run')} from", "accuracy", "log loss", "Brier", "AUROC"]
    return markdown_table(head, lines)


def _number(value: float) -> str:
    return "-" if np.isnan(value) else f"{value:.2f}"


def _each(rows: Sequence[Foretold]) -> str:
    lines = [
        [
            row.model,
            f"{row.lr:.3g}",
            "-" if row.probability is None else f"{row.probability:.2f}",
            row.answer,
            f"{row.configuration:.2f}",
            row.outcome,
        ]
        for row in rows
    ]
    head = ["model", "learning rate", "probability", "answer", "configuration's", "outcome"]
    return markdown_table(head, lines)
