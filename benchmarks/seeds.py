"""Level, coverage and power of the comparison of recipes, simulated: ``python benchmarks/seeds.py --write``.

Recipes are drawn that differ in nothing, under equal and unequal spread over seeds, with an effect of the
seed that all share, and with runs that fail. Each draw is judged by the functions that ``normlab compare``
calls. ``--write`` keeps the results in ``benchmarks/results/seeds.json`` and writes the tables in
``docs/statistics.md``.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, Final

import numpy as np

from documents import with_tables
from normlab.base.metric import Metric
from normlab.judging.statistics import LEVEL, MetricScale, contrasts, detectable, fisher, mean_margin

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks/results/seeds.json"
DOCUMENT = ROOT / "docs/statistics.md"

DRAWS: Final = 10_000
SEEDS: Final = (2, 3, 5, 10)
RECIPES: Final = (2, 4, 8)
SPREAD: Final = 0.05
"""Standard deviation over seeds on the scale of the logit: 1.1 BLEU at a BLEU of 33."""
SCORE: Final = Metric("bleu", "BLEU", least=0.0, most=100.0)
LEVELS: Final = (33.0, 35.0)
"""True scores, from the first recipe to the last, where coverage is counted."""

CONDITIONS: Final[dict[str, dict[str, float]]] = {
    "equal spread": {},
    "one recipe spreads 5 times as much": {"unequal": 5},
    "the seed shifts all recipes": {"shared": 3},
    "one run in five fails": {"failing": 0.2},
    "all three": {"unequal": 5, "shared": 3, "failing": 0.2},
}


def noise(
    recipes: int, seeds: int, *, unequal: float = 1, shared: float = 0, failing: float = 0, draws: int = DRAWS
) -> np.ndarray[Any, Any]:
    """Draw what seeds add to recipes, `[draws, recipes, seeds]`; NaN where a run fails."""
    random = np.random.default_rng([recipes, seeds])
    own = random.standard_normal((draws, recipes, seeds))
    own[:, -1] *= unequal
    values = SPREAD * (own + shared * random.standard_normal((draws, 1, seeds)))
    return np.where(random.random(values.shape) < failing, np.nan, values)


def cell(recipes: int, seeds: int, condition: dict[str, float], draws: int = DRAWS) -> dict[str, float]:
    """Measure the errors of one number of recipes and seeds under one condition, as shares."""
    drawn = noise(recipes, seeds, **condition, draws=draws)
    found, scale = contrasts(drawn), MetricScale(SCORE)
    level = np.linspace(*LEVELS, recipes)
    values = drawn + scale.values(level)[:, None]
    moved, (means, margins) = contrasts(values), mean_margin(values)
    first, second = np.triu_indices(recipes, 1)
    halfway = np.nan_to_num((values[:, first] + values[:, second]) / 2).sum(axis=-1)
    centre = halfway / np.maximum(moved.common, 1)
    low, high = (scale.difference(centre, moved.delta + sign * moved.margin) for sign in (-1, 1))
    true = level[first] - level[second]
    inside = ((low <= true) & (true <= high))[moved.given]
    ends = [scale.scores(means + sign * margins) for sign in (-1, 1)]
    own = ((ends[0] <= level) & (level <= ends[1]))[np.isfinite(margins)]
    return {
        "false_positives": float((found.p < LEVEL).any(axis=-1).mean()),
        "coverage": float(inside.mean()),
        "coverage_of_means": float(own.mean()),
        "without_interval": float(1 - found.given.mean()),
        "false_positives_of_training": _training(np.isfinite(drawn).sum(axis=-1), seeds),
    }


def _training(trained: np.ndarray[Any, Any], seeds: int) -> float:
    """The share of draws in which some pair is said to train more often than another."""
    recipes = trained.shape[1]
    pairs = recipes * (recipes - 1) // 2
    table = np.array(
        [[pairs * fisher((a, seeds), (b, seeds)) < LEVEL for b in range(seeds + 1)] for a in range(seeds + 1)]
    )
    return float(table[trained.max(axis=1), trained.min(axis=1)].mean())


def simulate(draws: int = DRAWS) -> dict[str, Any]:
    """Return every cell, and the table of detectable differences."""
    return {
        "draws": draws,
        "cells": [
            {"recipes": r, "seeds": s, "condition": name, **cell(r, s, condition, draws)}
            for name, condition in CONDITIONS.items()
            for r in RECIPES
            for s in SEEDS
        ],
        "detectable": [{"recipes": r, "seeds": s, "sd": detectable(r, s)} for r in RECIPES for s in SEEDS],
    }


def tables(results: dict[str, Any]) -> dict[str, str]:
    """Return the tables of the document, by the name of their marker."""
    rows = ["| recipes | " + " | ".join(f"{s} seeds" for s in SEEDS) + " |", "|---" * (len(SEEDS) + 1) + "|"]
    power = [*rows]
    power += [
        f"| {r} | " + " | ".join(f"{c['sd']:.1f}" for c in results["detectable"] if c["recipes"] == r) + " |"
        for r in RECIPES
    ]
    header = "| condition | recipes | " + " | ".join(f"{s} seeds" for s in SEEDS) + " |"
    errors = [header, "|---" * (len(SEEDS) + 2) + "|"]
    names = ("false_positives", "coverage", "coverage_of_means", "without_interval")
    for condition in CONDITIONS:
        for r in RECIPES:
            row = [c for c in results["cells"] if (c["condition"], c["recipes"]) == (condition, r)]
            shown = " | ".join(" / ".join(f"{100 * c[name]:.1f}" for name in names) for c in row)
            errors.append(f"| {condition} | {r} | {shown} |")
    return {"errors": "\n".join(errors), "power": "\n".join(power)}


def written(document: str, results: dict[str, Any]) -> str:
    """Return the document with its tables written anew."""
    return with_tables(document, tables(results))


if __name__ == "__main__":
    measured = simulate()
    for rows in tables(measured).values():
        print(rows)
    if "--write" in sys.argv:
        RESULTS.write_text(json.dumps(measured, indent=1) + "\n", encoding="utf-8")
        DOCUMENT.write_text(written(DOCUMENT.read_text(encoding="utf-8"), measured), encoding="utf-8")
