"""The part of the report about runs that were forecast before they were trained."""

from __future__ import annotations

from normlab.forecast.table import Foretold
from normlab.report.foretold import foretold_report


def row(group: str, answer: str, p: float | None, outcome: str) -> Foretold:
    return Foretold(group, "BERT", {}, 1e-3, answer, p, 0.6, 0.4, 2.0, outcome)


ROWS = [
    row("new", "train", 0.9, "trained"),
    row("new", "train", 0.7, "stuck"),
    row("new", "do not train", 0.1, "diverged"),
    row("new", "cannot say", 0.5, "trained"),
    row("new", "cannot say", None, "trained"),
    row("foreign", "cannot say", None, "trained"),
]


def test_answers_are_counted_apart_from_abstentions():
    text = "\n".join(foretold_report(ROWS))
    assert "5 runs of 1 model, of which 2 failed. 3 were answered and 2 were not" in text
    assert "2 of 3 were right" in text
    assert "The configuration alone is right about 1 of the same 3" in text
    assert "| features at step 0 | 50% |" in text, "0.5 is no forecast that it trains"
    assert "| forecast of 4 runs from |" in text
    assert "The forecaster abstained from all of them." in text
    assert text.index("no run of the table has") < text.index("other libraries")


def test_nothing_is_said_of_runs_that_were_not_trained_yet():
    assert foretold_report([row("new", "train", 0.9, "")]) == []
