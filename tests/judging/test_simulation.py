"""Errors and power of the judge and its ledger: simulated, and as docs/statistics.md has them."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from normlab.judging.ledger import level_of
from normlab.judging.sequential import Judge
from normlab.judging.statistics import LEVEL
from scripts import script

judging = script("judging")
KEPT = json.loads(judging.RESULTS.read_text(encoding="utf-8"))
AGAIN = "python benchmarks/judging.py --write"
UNBOUNDED = "skewed to the bad side, and spread"
"""The condition in which no t test of a few seeds holds, and which the page names."""


def chance_error(share, draws):
    """Four standard errors of a simulated share."""
    return 4 * math.sqrt(max(share, 1 / draws) / draws)


def require_promises(results):
    """Assert what the page promises, within the error of the simulation."""
    for row in results["errors"]:
        if row["condition"] != UNBOUNDED:
            assert row["kept"] <= LEVEL + chance_error(LEVEL, results["draws"]), row
    for rule in results["rules"][:2]:  # the judge, and the judge that also stops where it is hopeless
        assert rule["2"]["kept"] >= 0.8
        assert rule["2"]["seeds"] <= 6
    ledger = results["ledgers"][0]
    assert ledger["0"]["any"] <= LEVEL + chance_error(LEVEL, results["streams"])
    for gain in ("2", "3"):
        assert ledger[gain]["wrong"] <= LEVEL


def test_the_tables_are_those_of_the_kept_simulation():
    document = judging.DOCUMENT.read_text(encoding="utf-8")
    assert judging.written(document, KEPT) == document, f"docs/statistics.md is old; type: {AGAIN}"
    assert (KEPT["draws"], KEPT["streams"]) == (20_000, 200)
    require_promises(KEPT)


@pytest.mark.slow
def test_the_promises_hold_when_it_is_simulated_again():
    again = judging.simulate(draws=5_000, streams=40)
    require_promises(again)
    for row, kept in zip(again["errors"], KEPT["errors"], strict=True):
        assert row["kept"] == pytest.approx(kept["kept"], abs=chance_error(kept["kept"], 5_000)), AGAIN


@pytest.mark.parametrize("condition", ["normal", "one run in five fails"])
def test_what_is_simulated_is_what_the_judge_does(condition):
    baseline, candidate = judging.scores(40, gain=1.5, **judging.CONDITIONS[condition])
    ever, seeds = judging.kept(baseline, candidate)
    for draw in range(len(baseline)):
        judge = Judge(higher_is_better=True)
        decision = judge.decision
        for seed in range(baseline.shape[1]):
            decision = judge.add(seed, baseline[draw, seed], candidate[draw, seed])
            if decision.decided:
                break
        if decision.verdict == "discard":  # the simulation of keeping goes on where the judge stops
            continue
        assert (decision.verdict == "keep", decision.seeds) == (ever[draw], seeds[draw])


def test_the_levels_that_are_simulated_are_those_of_the_ledger():
    least = np.ones(40)
    least[[3, 10, 11]] = 1e-9
    keeps = []
    for number, was_kept in enumerate(judging.lord(least), start=1):
        assert was_kept == (least[number - 1] <= level_of(number, keeps))
        if was_kept:
            keeps.append(number)
    assert keeps == [4, 11, 12]
    borderline = level_of(20, keeps)
    for factor, expected in ((0.999, True), (1.001, False)):
        least[19] = borderline * factor
        assert judging.lord(least)[19] == expected
