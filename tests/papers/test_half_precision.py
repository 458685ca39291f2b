"""docs/pilots.md says of the pilots in half precision what their kept curves hold."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest

from kept import ROOT

CURVES = (ROOT / "results/half-precision/section5_3.jsonl").read_text(encoding="utf-8")
RUNS = [json.loads(line) for line in CURVES.splitlines()]
ROWS = {
    "ReZero, six seeds": "ReZero, dropout",
    "FixUp, six seeds": "FixUp, dropout",
    "LookLinear with Post-LN, six seeds": "LookLinear+Post, dropout",
    "Pre-LN, pilot": "Pre-LN",
}


def ends(values: Sequence[float], spec: str) -> str:
    """``2.71 to 2.83``, or one number where both ends are written the same."""
    return " to ".join(dict.fromkeys(format(end, spec) for end in (min(values), max(values))))


def row(name: str) -> str:
    """One row of the page's table, from the curves of a cell."""
    runs = [run for run in RUNS if run["cell"] == ROWS[name]]
    last = min(run["dev"][-1][0] for run in runs)  # the last validation that all of them reached
    _, nll, exchanged, bleu = zip(*(at for run in runs for at in run["dev"] if at[0] == last), strict=True)
    costs = [b - a for a, b in zip(nll, exchanged, strict=True)]
    cells = (
        name,
        ends([run["step"] for run in runs], ",d"),
        f"after {last} steps: {ends(nll, '.2f')}",
        ends(costs, ".1f"),
        ends(bleu, ".1f"),
        ends([run["skipped"] for run in runs], "d"),
    )
    return f"| {' | '.join(cells)} |"


@pytest.mark.parametrize("name", ROWS)
def test_the_table_is_that_of_the_curves(name):
    assert row(name) in (ROOT / "docs/pilots.md").read_text(encoding="utf-8")


def test_the_page_names_the_hardware_and_the_time_of_a_step():
    (hardware,) = {run["hardware"] for run in RUNS}
    milliseconds = [10 * round(100 * run["seconds"] / run["step"]) for run in RUNS]
    page = " ".join((ROOT / "docs/pilots.md").read_text(encoding="utf-8").split())
    assert f"took {ends(milliseconds, 'd')} ms" in page
    assert f"one {hardware.partition('+')[0]}" in page
