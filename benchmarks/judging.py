"""Error and power of the sequential judge and of its ledger, simulated: ``python benchmarks/judging.py``.

Seeds are drawn for a baseline and a change, and judged after every seed with the critical values that
``normlab.Judge`` uses; beside it stand other rules. ``--write`` keeps the results in
``benchmarks/results/judging.json`` and writes the tables in ``docs/statistics.md``.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, Final

import numpy as np
from scipy.optimize import brentq
from scipy.special import stdtr
from scipy.stats import nct
from scipy.stats import t as student_t

from documents import with_tables
from normlab.judging.boundary import FIRST
from normlab.judging.ledger import share
from normlab.judging.sequential import MOST_SEEDS, critical, streak
from normlab.judging.statistics import LEVEL

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks/results/judging.json"
DOCUMENT = ROOT / "docs/statistics.md"
Array = np.ndarray[Any, np.dtype[np.float64]]

DRAWS: Final = 20_000
NUMBERS: Final = np.arange(1, MOST_SEEDS + 1)
GAINS: Final = (1.0, 1.5, 2.0, 3.0)
"""In standard deviations of one run over seeds."""


# ------------------------------------------------------------------------------------------------- scores


def normal(random: np.random.Generator, shape: tuple[int, ...]) -> Array:
    """The normal distribution."""
    return random.standard_normal(shape)


def skewed(random: np.random.Generator, shape: tuple[int, ...]) -> Array:
    """Lognormal, with a skewness of 1.75."""
    drawn = np.exp(0.5 * random.standard_normal(shape))
    return (drawn - np.exp(0.125)) / np.sqrt(np.expm1(0.25) * np.exp(0.25))


def heavy(random: np.random.Generator, shape: tuple[int, ...]) -> Array:
    """Student's t with three degrees of freedom."""
    return random.standard_t(3, shape) / np.sqrt(3)


SHAPES: Final[dict[str, Callable[..., Array]]] = {"normal": normal, "skewed": skewed, "heavy-tailed": heavy}
CONDITIONS: Final[dict[str, dict[str, Any]]] = {
    "normal": {},
    "skewed": {"shape": "skewed"},
    "heavy-tailed": {"shape": "heavy-tailed"},
    "one run in five fails": {"failing": 0.2},
    "the change spreads 5 times as much": {"spread": 5},
    "heavy-tailed, spread and failures": {"shape": "heavy-tailed", "spread": 5, "failing": 0.2},
    "skewed to the good side, and spread": {"shape": "skewed", "spread": 5},
    "skewed to the bad side, and spread": {"shape": "skewed", "spread": -5},
}


def scores(
    draws: int,
    *,
    shape: str = "normal",
    spread: float = 1,
    failing: float = 0,
    gain: float = 0,
    seed: int = 0,
) -> tuple[Array, Array]:
    """Draw scores of a baseline and of a change ``[draws, seeds]``; higher is better, NaN is a failed run."""
    random = np.random.default_rng([seed, draws])
    pair = []
    for scale, shift in ((1.0, 0.0), (spread, gain)):
        drawn = shift + scale * SHAPES[shape](random, (draws, MOST_SEEDS))
        pair.append(np.where(random.random(drawn.shape) < failing, np.nan, drawn))
    return pair[0], pair[1]


# -------------------------------------------------------------------------------------------------- rules

CHOSEN: Final = "spending a quarter of what is left (chosen)"


def running_t(gains: Array) -> tuple[Array, Array]:
    """Student's t after each seed, and how many gains it rests on; a gain that is NaN does not count."""
    known = np.isfinite(gains)
    common = known.cumsum(axis=1)
    filled = np.where(known, gains, 0.0)
    mean = filled.cumsum(axis=1) / np.maximum(common, 1)
    squares = (filled**2).cumsum(axis=1) - common * mean**2
    error = np.sqrt(np.maximum(squares, 1e-300) / np.maximum(common - 1, 1) / np.maximum(common, 1))
    return np.where(common > 1, mean / error, -np.inf), common


@cache
def critical_values(level: float) -> Array:
    """The critical values of the judge by the number of common seeds, from none on."""
    return np.array([np.inf, *(critical(level, number) for number in NUMBERS)])


def kept(baseline: Array, candidate: Array, level: float = LEVEL) -> tuple[Array, Array]:
    """Whether the judge keeps the change, and after how many seeds it stops; as ``Judge`` decides.

    It stops undecided after ``MOST_SEEDS``; what it discards is not looked at.
    """
    return first_time(_keeps(baseline, candidate, level))


def _keeps(baseline: Array, candidate: Array, level: float) -> Array:
    t, common = running_t(candidate - baseline)
    only_baseline = (np.isfinite(baseline) & ~np.isfinite(candidate)).cumsum(axis=1)
    only_candidate = (np.isfinite(candidate) & ~np.isfinite(baseline)).cumsum(axis=1)
    by_gain = (t > critical_values(level)[common]) & (only_baseline <= only_candidate)
    return by_gain | ((only_candidate >= streak(level)) & (only_baseline == 0))


def first_time(holds: Array) -> tuple[Array, Array]:
    """Whether something ever holds, and after how many seeds; after ``MOST_SEEDS`` if it never does."""
    ever = holds.any(axis=1)
    return ever, np.where(ever, holds.argmax(axis=1) + 1, MOST_SEEDS)


@cache
def mixture_values(spread: float) -> Array:
    """Critical t of a scale-invariant mixture, whose effect is half-normal: an anytime-valid e-process."""
    return _values_of(lambda t, n: _mixture(t, n, spread))


def _mixture(t: float, n: int, spread: float) -> float:
    freedom, grown = n - 1, 1 + n * spread**2
    rest = freedom + t**2 / grown
    likely = 2 * float(stdtr(n, n * spread * t / np.sqrt(grown * rest)))
    return likely / np.sqrt(grown) * ((freedom + t**2) / rest) ** (n / 2)


@cache
def point_values(effect: float) -> Array:
    """Critical t of the likelihood ratio of one effect size."""

    def ratio(t: float, n: int) -> float:
        return float(nct.pdf(t, n - 1, np.sqrt(n) * effect) / student_t.pdf(t, n - 1))

    return _values_of(ratio)


def _values_of(evidence: Callable[[float, int], float]) -> Array:
    """The t at which evidence reaches one over the level, by the number of seeds; infinite if it cannot."""
    values = [np.inf, np.inf]
    for number in NUMBERS[1:]:
        most = 1e4
        reached = evidence(most, number) > 1 / LEVEL
        values.append(brentq(lambda t: evidence(t, number) - 1 / LEVEL, 0, most) if reached else np.inf)  # noqa: B023
    return np.array(values)


def bonferroni_values() -> Array:
    """Critical t if the level is divided by the number of looks."""
    looks = MOST_SEEDS - FIRST + 1
    return np.array([np.inf] * FIRST + [student_t.isf(LEVEL / looks, n - 1) for n in NUMBERS[FIRST - 1 :]])


def repeated_values() -> Array:
    """Critical t if nobody makes up for the looks."""
    return np.array([np.inf] * 2 + [student_t.isf(LEVEL, n - 1) for n in NUMBERS[1:]])


def impatient(gains: Array) -> tuple[Array, Array]:
    """Whether the judge keeps a change, and when it stops, if it also stops where it is hopeless: no gain
    within a standard error of the one seen would be decided by ``MOST_SEEDS``.
    """
    t, common = running_t(gains)
    crossed = t > critical_values(LEVEL)[common]
    reach = (np.abs(t) + 1) * np.sqrt(MOST_SEEDS / np.maximum(common, 1))
    hopeless = (common >= FIRST) & (reach < critical_values(LEVEL)[MOST_SEEDS])
    _, seeds = first_time(crossed | hopeless)
    return np.take_along_axis(crossed, seeds[:, None] - 1, axis=1)[:, 0], seeds


def signs(gains: Array) -> Array:
    """Whether a bet on the signs of the gains has multiplied its stake by one over the level.

    The stake is spread evenly over all chances from a half to one that a gain is positive.
    """
    wins, number = (gains > 0).cumsum(axis=1), NUMBERS[None, :]
    chances = np.linspace(0.5, 1, 41)[:, None, None]
    wealth = (2**number * chances**wins * (1 - chances) ** (number - wins)).mean(axis=0)
    return wealth >= 1 / LEVEL


def rules() -> dict[str, Callable[[Array], tuple[Array, Array]]]:
    """Whether each rule keeps a change, and after how many seeds it stops, from the gains."""
    values = {
        CHOSEN: critical_values(LEVEL),
        "Bonferroni over ten looks": bonferroni_values(),
        "mixture of t, half-normal effect of 1": mixture_values(1.0),
        "mixture of t, half-normal effect of 2": mixture_values(2.0),
        "likelihood ratio of t, effect of 1.4": point_values(1.4),
        "t at 5% after every seed (wrong)": repeated_values(),
    }

    def crossing(critical_t: Array) -> Callable[[Array], tuple[Array, Array]]:
        def crosses(gains: Array) -> tuple[Array, Array]:
            t, common = running_t(gains)
            return first_time(t > critical_t[common])

        return crosses

    by_name = {CHOSEN: crossing(values.pop(CHOSEN)), f"{CHOSEN}, until it is hopeless": impatient}
    by_name |= {name: crossing(critical_t) for name, critical_t in values.items()}
    return {**by_name, "bets on signs": lambda gains: first_time(signs(gains))}


# ----------------------------------------------------------------------------------------------- the tables


def errors(draws: int = DRAWS) -> list[dict[str, Any]]:
    """How often a change without a gain is kept by the judge."""
    rows = []
    for name, condition in CONDITIONS.items():
        ever, _ = kept(*scores(draws, **condition))
        rows.append({"condition": name, "kept": float(ever.mean())})
    return rows


def comparison(draws: int = DRAWS) -> list[dict[str, Any]]:
    """The error of each rule, and its power and mean number of seeds by the size of the gain."""
    rows = []
    for name, rule in rules().items():
        row: dict[str, Any] = {"rule": name}
        for gain in (0.0, *GAINS):
            baseline, candidate = scores(draws, gain=gain)
            ever, seeds = rule(candidate - baseline)
            row[f"{gain:g}"] = {"kept": float(ever.mean()), "seeds": float(seeds.mean())}
        rows.append(row)
    return rows


def beside_fixed(draws: int = DRAWS) -> list[dict[str, Any]]:
    """The judge beside a t test with as many seeds as the judge takes on average."""
    rows = []
    for gain in GAINS:
        baseline, candidate = scores(draws, gain=gain)
        ever, seeds = kept(baseline, candidate)
        number = max(2, round(float(seeds.mean())))
        t, _ = running_t(candidate - baseline)
        fixed = (t[:, number - 1] > student_t.isf(LEVEL, number - 1)).mean()
        row = {"gain": gain, "kept": float(ever.mean()), "seeds": float(seeds.mean())}
        rows.append({**row, "fixed_seeds": number, "fixed": float(fixed)})
    return rows


# ----------------------------------------------------------------------------------------------- the ledger


STREAMS: Final = 200
PROPOSALS: Final = 1000
REAL: Final = 0.1
"""The share of proposals that have a gain."""
LEVELS: Final = np.geomspace(LEVEL, 1e-7, 28)
"""Levels at which a simulated proposal can be kept; a level between them counts as the next lower one."""


def least_levels(gains: Array) -> Array:
    """The lowest of ``LEVELS`` at which a change with such gains ``[..., seeds]`` is kept; 1 if at none."""
    t, _ = running_t(gains.reshape(-1, MOST_SEEDS))
    least = np.ones(len(t))
    for level in LEVELS:
        least[(t > critical_values(level)[NUMBERS]).any(axis=1)] = level
    return least.reshape(gains.shape[:-1])


def stream(random: np.random.Generator, gain: float) -> tuple[Array, Any]:
    """The lowest levels of a stream of proposals against one baseline, and which of them have a gain."""
    real = random.random(PROPOSALS) < (REAL if gain else 0)
    baseline = random.standard_normal(MOST_SEEDS)
    candidates = random.standard_normal((PROPOSALS, MOST_SEEDS)) + gain * real[:, None]
    return least_levels(candidates - baseline), real


@cache
def shares() -> Array:
    """The shares of the level of as many proposals as a stream has."""
    return np.array([share(number) for number in range(1, PROPOSALS + 1)])


def lord(least: Array) -> Array:
    """Which proposals the ledger keeps (LORD++): as ``ledger.level_of`` sets their levels."""
    levels, keeps = LEVEL * shares()[: len(least)], 0
    kept_ones = np.zeros(len(least), dtype=bool)
    for number in range(len(least)):
        if least[number] <= levels[number]:
            kept_ones[number] = True
            keeps += 1
            if keeps > 1:
                levels[number + 1 :] += LEVEL * shares()[: len(least) - number - 1]
    return kept_ones


def lond(least: Array) -> Array:
    """LOND (Javanmard and Montanari 2015): the level grows with the number of keeps."""
    kept_ones = np.zeros(len(least), dtype=bool)
    for number in range(len(least)):
        kept_ones[number] = least[number] <= LEVEL * shares()[number] * (kept_ones.sum() + 1)
    return kept_ones


def saffron(least: Array, candidates_below: float = 0.5) -> Array:
    """SAFFRON (Ramdas, Zrnic, Wainwright and Jordan 2018): only proposals that look hopeful cost anything."""
    start, earned = LEVEL / 2, (1 - candidates_below) * LEVEL
    hopeful = np.concatenate([[0], (least <= candidates_below).cumsum()])
    kept_ones, keeps = np.zeros(len(least), dtype=bool), np.array([], dtype=int)
    for number in range(len(least)):
        since = number - keeps - 1 - (hopeful[number] - hopeful[keeps + 1])
        rewards = np.full(len(keeps), earned)
        rewards[:1] -= start
        level = start * shares()[number - hopeful[number]] + rewards @ shares()[since]
        if least[number] <= min(candidates_below, level):
            kept_ones[number] = True
            keeps = np.append(keeps, number)
    return kept_ones


def each_at_level(least: Array) -> Array:
    """Every proposal at 5%, without a ledger."""
    return least <= LEVEL


LEDGERS: Final[dict[str, Callable[[Array], Any]]] = {
    "LORD++ (chosen)": lord,
    "LOND": lond,
    "SAFFRON": saffron,
    "each at 5%, without a ledger (wrong)": each_at_level,
}


def ledgers(streams: int = STREAMS) -> list[dict[str, Any]]:
    """Wrong keeps and power of each rule for streams of proposals that share a baseline."""
    rows = [{"rule": name} for name in LEDGERS]
    for gain in (0.0, 2.0, 3.0):
        random = np.random.default_rng([7, int(10 * gain)])
        sums = np.zeros((len(LEDGERS), 3))
        for _ in range(streams):
            least, real = stream(random, gain)
            for row, rule in enumerate(LEDGERS.values()):
                kept_ones = rule(least)
                number, wrong = kept_ones.sum(), (kept_ones & ~real).sum()
                power = (kept_ones & real).sum() / max(1, real.sum())
                sums[row] += (number > 0, wrong / max(1, number), power)
        for row, (any_kept, wrong_share, power) in zip(rows, sums / streams, strict=True):
            row[f"{gain:g}"] = {"any": any_kept, "wrong": wrong_share, "power": power}
    return rows


def simulate(draws: int = DRAWS, streams: int = STREAMS) -> dict[str, Any]:
    """Return every table."""
    return {
        "draws": draws,
        "streams": streams,
        "ledgers": ledgers(streams),
        "errors": errors(draws),
        "rules": comparison(draws),
        "fixed": beside_fixed(draws),
    }


def tables(results: dict[str, Any]) -> dict[str, str]:
    """Return the tables of the document, by the name of their marker."""
    wrong = ["| scores | kept without a gain |", "|---|---|"]
    wrong += [f"| {row['condition']} | {100 * row['kept']:.1f}% |" for row in results["errors"]]
    header = "| rule | no gain | " + " | ".join(f"{gain:g} σ" for gain in GAINS) + " |"
    compared = [header, "|---" * (len(GAINS) + 2) + "|"]
    for row in results["rules"]:
        cells = [f"{100 * row[f'{g:g}']['kept']:.0f}%, {row[f'{g:g}']['seeds']:.1f} seeds" for g in GAINS]
        nothing = f"{100 * row['0']['kept']:.1f}%, {row['0']['seeds']:.1f} seeds"
        compared.append(f"| {row['rule']} | {nothing} | {' | '.join(cells)} |")
    fixed = ["| gain | judge | t test with a fixed number of seeds |", "|---|---|---|"]
    for row in results["fixed"]:
        judge = f"{100 * row['kept']:.0f}% with {row['seeds']:.1f} seeds on average"
        fixed.append(f"| {row['gain']:g} σ | {judge} | {100 * row['fixed']:.0f}% with {row['fixed_seeds']} |")
    header = "| rule | no proposal has a gain: streams with any keep |"
    header += "".join(f" one in ten gains {gain} σ: wrong keeps, gains found |" for gain in (2, 3))
    kept_by = [header, "|---|---|---|---|"]
    for row in results["ledgers"]:
        cells = [f"{100 * row[g]['wrong']:.1f}%, {100 * row[g]['power']:.0f}%" for g in ("2", "3")]
        kept_by.append(f"| {row['rule']} | {100 * row['0']['any']:.1f}% | {' | '.join(cells)} |")
    return {
        "judge ledger": "\n".join(kept_by),
        "judge errors": "\n".join(wrong),
        "judge rules": "\n".join(compared),
        "judge beside fixed": "\n".join(fixed),
    }


def written(document: str, results: dict[str, Any]) -> str:
    """Return the document with its tables written anew."""
    return with_tables(document, tables(results))


if __name__ == "__main__":
    measured = simulate()
    for rows in tables(measured).values():
        print(rows)
    if "--write" in sys.argv:
        RESULTS.write_text(json.dumps(measured, indent=1) + "\n", encoding="utf-8")
        document = written(DOCUMENT.read_text(encoding="utf-8"), measured)
        DOCUMENT.write_text(document, encoding="utf-8")
