"""The page on learning rates, and the measurements behind it."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import pytest

from normlab.trials import verdict

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks/trials"
AGAIN = "python benchmarks/trials/evaluate.py --page"


@pytest.fixture(scope="module")
def scripts():
    """``evaluate`` and ``curve`` of the benchmark, whose folder is on the path of its scripts alone."""
    before, known = list(sys.path), set(sys.modules)
    sys.path.insert(0, str(FOLDER))
    try:
        import curve
        import evaluate

        yield evaluate, curve
    finally:
        sys.path[:] = before
        for name in {"asked", "curve", "evaluate", "tables"} - known:
            sys.modules.pop(name, None)


def test_the_tables_are_the_generated_ones(scripts):
    evaluate, _ = scripts
    text = evaluate.PAGE.read_text(encoding="utf-8")
    assert all(f"<!-- {name} -->" in text for name in evaluate.BLOCKS)
    assert text == evaluate.filled(text), f"docs/learning-rate.md is old; type: {AGAIN}"


def test_answers_carry_the_error_that_was_measured(scripts):
    evaluate, _ = scripts
    cells = next(line for line in evaluate.summary().splitlines() if line.startswith("| trial |")).split(
        " | "
    )
    assert cells[2].startswith(f"{verdict.NEAR_ENDS} of {verdict.MODELS} ")
    assert cells[4].startswith(f"{verdict.USABLE_ENDS} of {verdict.MODELS} ")
    words = f"for {verdict.USABLE_ENDS} of {verdict.MODELS} models, and within 2x of the true end for "
    assert f"{words}{verdict.NEAR_ENDS}" in evaluate.PAGE.read_text(encoding="utf-8")


def test_every_run_is_kept_once(scripts):
    _, curve = scripts
    runs = Counter((r["name"], r["half"], r["seed"]) for r in curve.rows(curve.TRUTH))
    assert runs
    assert set(runs.values()) == {1}
    said = Counter(
        (r["name"], r["procedure"], r["n"] * (r["procedure"] == "ramp")) for r in curve.rows(curve.PROCEDURES)
    )
    assert set(said.values()) == {1}


def test_ten_models_are_judged_and_25_rates_asked(scripts):
    evaluate, curve = scripts
    assert len(evaluate.TESTED) == 10
    assert set(evaluate.TESTED) == {r["name"] for r in curve.rows(curve.TRUTH)} - set(evaluate.BEFORE)
    from asked import claims

    for kind in ("constant", "loop"):
        every = claims(kind)
        assert len(every) >= 25
        assert len({(claim.name, claim.rate) for claim in every}) == len(every)


def run(curve, half, dev, seed=1):
    return {
        "name": "x",
        "half": half,
        "rate": 1e-3 * 2 ** (half / 2),
        "seed": seed,
        "dev": dev,
        "start": 5.0,
        "train": [4.0, 3.0],
        "unigram": 3.0,
        "stopped": "" if dev else "behind",
    }


def test_a_curve_has_its_best_and_its_upper_end(scripts):
    _, curve = scripts
    runs = [run(curve, h, dev) for h, dev in ((-2, 2.5), (0, 2.0), (2, 2.02), (4, 2.22), (6, None))]
    found = curve.Curve.of(runs)
    assert (found.best, found.top) == (0, (2, 4))
    assert found.limit == pytest.approx(2.05)
    share = (2.05 - 2.02) / (2.22 - 2.02)
    assert found.upper == pytest.approx(2e-3 * 2**share)
    assert found.at(1e-3 * 2**0.5) == pytest.approx(2.01)
    assert found.at(1e-2) == pytest.approx(3.0, abs=0.3)
    assert found.losses[6] == float("inf")


def test_two_seeds_count_by_their_mean(scripts):
    _, curve = scripts
    found = curve.Curve.of([run(curve, 0, 2.0), run(curve, 0, 2.2, seed=2), run(curve, 2, 2.05)])
    assert found.best == 2
    assert found.upper is None


def test_a_share_has_its_interval(scripts):
    from tables import share

    assert share([True] * 8 + [False] * 2) == "8 of 10 (49 to 94%)"
    assert share([]) == "–"
