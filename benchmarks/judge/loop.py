"""Sixty proposals to a small real script, kept by one run or by ``normlab.Judge``, at equal budget.

``python benchmarks/judge/loop.py --write`` runs it, keeps ``benchmarks/results/judge_loop.json``, and writes
the tables in ``docs/judge-loop.md``. Forty proposals change the random numbers alone; the true gain of the
other twenty is measured by twenty runs each. The script's function is called here, which saves the start of a
process.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import Any, Final

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))  # where documents.py is
from character_model import Options, train

from documents import with_tables
from normlab import Judge
from normlab.base.files import write_json_atomic
from normlab.judging.ledger import level_of
from normlab.judging.statistics import LEVEL, mean_margin

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks/results/judge_loop.json"
DOCUMENT = ROOT / "docs/judge-loop.md"

RUNS = ROOT / "build/judge_loop_runs.json"
"""The losses of runs, so that the benchmark can be interrupted; delete it to measure anew."""

UNTUNED: Final[tuple[dict[str, Any], ...]] = (
    *({"lr": 6e-3}, {"lr": 4e-3}, {"lr": 2e-3}, {"hidden": 96}, {"hidden": 72}, {"hidden": 48}),
    *({"embedding": 16}, {"embedding": 14}, {"embedding": 8}, {"context": 4}, {"context": 5}, {"context": 8}),
    *({"schedule": "linear"}, {"activation": "relu"}, {"dropout": 0.1}, {"init": 0.5}, {"init": 1.5}),
    *({"beta1": 0.8}, {"batch": 96}, {"batch": 48}),
)
"""Changes that do something to a script that nobody has tuned: some matter by several times the noise."""
START: Final = {"lr": 1e-2, "hidden": 96, "embedding": 16, "batch": 96, "beta1": 0.8}
"""A script that was tuned."""
TUNED: Final[tuple[dict[str, Any], ...]] = (
    *({"lr": 1.2e-2}, {"lr": 8e-3}, {"hidden": 112}, {"hidden": 80}, {"embedding": 18}, {"embedding": 14}),
    *({"context": 5}, {"context": 7}, {"activation": "relu"}, {"dropout": 0.05}, {"init": 0.5}),
    *({"init": 1.5}, {"head_init": 0.5}, {"beta1": 0.85}, {"beta1": 0.7}, {"beta2": 0.99}),
    *({"decay": 0.01}, {"smoothing": 0.01}, {"clip": 1.0}, {"batch": 112}),
)
"""Changes to that: all matter by less than the noise, and many are harmful."""
SETTINGS: Final = {"untuned": (Options(), UNTUNED), "tuned": (Options(**START), TUNED)}
NULLS: Final = 40
"""Proposals that change the random numbers alone."""
RERUNS: Final = 20
ORDERS: Final = 2
"""The loop is repeated with the proposals in so many orders."""
FRESH: Final = 10_000
"""The first seed of runs that measure the truth; no loop uses these."""


@cache
def known() -> dict[str, float]:
    """The losses of all runs so far, by their options."""
    return json.loads(RUNS.read_text(encoding="utf-8")) if RUNS.exists() else {}


def loss(options: Options) -> float:
    """The loss of one run. None is repeated, as ``normlab judge`` repeats none."""
    name = json.dumps(asdict(options))
    if name not in known():
        known()[name] = train(options)
        if len(known()) % 20 == 0:
            write_json_atomic(RUNS, known())
    return known()[name]


def proposals(real: Sequence[dict[str, Any]], order: int) -> list[dict[str, Any]]:
    """All sixty in a random order."""
    every = [*real, *({"salt": 1000 * (order + 1) + number} for number in range(NULLS))]
    random.Random(order).shuffle(every)
    return every


def changed(options: Options, proposal: Mapping[str, Any]) -> Options:
    """The options with a proposal among them."""
    return replace(options, **proposal)


def truth(options: Options) -> list[float]:
    """Losses of a configuration on fresh seeds."""
    return [loss(replace(options, seed=FRESH + number, salt=0)) for number in range(RERUNS)]


def gain(before: Sequence[float], after: Sequence[float]) -> dict[str, float]:
    """The mean gain with half the width of its 95% interval, from runs paired by their seeds."""
    mean, margin = mean_margin(np.array(before) - np.array(after))
    return {"gain": float(mean), "margin": float(margin)}


# -------------------------------------------------------------------------------------------------- loops


class Loop:
    """A configuration that grows by what is kept, and the number of runs that it has taken."""

    def __init__(self, setting: str, order: int) -> None:
        self.options, real = SETTINGS[setting]
        self.proposals = proposals(real, order)
        self.runs = 0
        self.kept: list[dict[str, Any]] = []
        self.seen: set[Options] = set()

    def run(self, options: Options) -> float:
        if options not in self.seen:
            self.seen.add(options)
            self.runs += 1
        return loss(options)

    def keep(self, proposal: Mapping[str, Any]) -> None:
        self.options = changed(self.options, proposal)
        self.kept.append(dict(proposal))


def judged(loop: Loop, *, ledger: bool) -> Loop:
    """Keep what the judge keeps, at 5% each or at the levels of a ledger."""
    keeps = list[int]()
    for number, proposal in enumerate(loop.proposals, start=1):
        judge = Judge(level=level_of(number, keeps) if ledger else LEVEL)
        for seed in range(1, judge.max_seeds + 1):
            pair = [loop.run(replace(o, seed=seed)) for o in (loop.options, changed(loop.options, proposal))]
            decision = judge.add(seed, *pair)
            if decision.decided or decision.hopeless:
                break
        if decision.verdict == "keep":
            keeps.append(number)
            loop.keep(proposal)
    return loop


def greedy(loop: Loop, budget: int) -> Loop:
    """Keep what is better in one run with one seed; begin anew until so many runs are spent."""
    best, turn = loop.run(loop.options), 0
    while loop.runs < budget:
        for proposal in loop.proposals:
            if "salt" in proposal:  # proposed once more, it draws other numbers
                proposal = {"salt": proposal["salt"] + 10_000 * turn}
            score = loop.run(changed(loop.options, proposal))
            if score < best:
                best = score
                loop.keep(proposal)
            if loop.runs >= budget:
                break
        turn += 1
    return loop


def describe(loop: Loop, base: Sequence[float], true: Mapping[str, float]) -> dict[str, Any]:
    """What came of a loop: its true gain, and what it kept without reason."""
    lucky = [p for p in loop.kept if "salt" in p]
    harmful = [p for p in loop.kept if "salt" not in p and true[json.dumps(p)] <= 0]
    return {
        "runs": loop.runs,
        **gain(base, truth(loop.options)),
        "kept": len(loop.kept),
        "without_effect": len(lucky),
        "harmful": len(harmful),
        "options": asdict(loop.options),
    }


def measure(setting: str) -> dict[str, Any]:
    """Run every loop of a setting."""
    start, changes = SETTINGS[setting]
    base = truth(start)
    real = [{"change": p, **gain(base, truth(changed(start, p)))} for p in changes]
    true = {json.dumps(row["change"]): row["gain"] for row in real}
    loops: dict[str, list[dict[str, Any]]] = {}
    for order in range(ORDERS):
        judge_alone = judged(Loop(setting, order), ledger=False)
        by_name = {
            "judge": judge_alone,
            "judge with a ledger": judged(Loop(setting, order), ledger=True),
            "one run, as many runs as the judge": greedy(Loop(setting, order), judge_alone.runs),
            "one run, each proposal once": greedy(Loop(setting, order), 1 + len(changes) + NULLS),
        }
        for name, loop in by_name.items():
            loops.setdefault(name, []).append(describe(loop, base, true))
            print(setting, order, name, loops[name][-1], flush=True)
    noise = float(np.std(base, ddof=1))
    return {"base": float(np.mean(base)), "noise": noise, "real": real, "loops": loops}


def tables(results: Mapping[str, Any]) -> dict[str, str]:
    """The tables of the document, by the name of their marker."""
    return {
        f"{setting} {name}": table
        for setting, measured in results.items()
        for name, table in (("proposals", _of_proposals(measured)), ("loops", _of_loops(measured)))
    }


def _of_proposals(results: Mapping[str, Any]) -> str:
    rows = ["| change | true gain, 20 runs each |", "|---|---|"]
    for row in sorted(results["real"], key=lambda row: -row["gain"]):
        words = ", ".join(f"`{name} = {value}`" for name, value in row["change"].items())
        rows.append(f"| {words} | {row['gain']:+.3f} ± {row['margin']:.3f} |")
    return "\n".join(rows)


def _of_loops(results: Mapping[str, Any]) -> str:
    header = "| kept by | runs | true gain at the end | kept | of these without effect | of these harmful |"
    loops = [header, "|---" * 6 + "|"]
    for name, several in results["loops"].items():

        def each(key: str, form: str, several: Sequence[Mapping[str, Any]] = several) -> str:
            return ", ".join(format(loop[key], form) for loop in several)

        cells = [each(key, form) for key, form in COLUMNS.items()]
        loops.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(loops)


COLUMNS: Final = {"runs": "d", "gain": ".3f", "kept": "d", "without_effect": "d", "harmful": "d"}


def written(document: str, results: Mapping[str, Any]) -> str:
    """The document with its tables written anew."""
    return with_tables(document, tables(results))


if __name__ == "__main__":
    RUNS.parent.mkdir(exist_ok=True)
    measured = {setting: measure(setting) for setting in SETTINGS}
    if "--write" in sys.argv:
        RESULTS.write_text(json.dumps(measured, indent=1) + "\n", encoding="utf-8")
        DOCUMENT.write_text(written(DOCUMENT.read_text(encoding="utf-8"), measured), encoding="utf-8")
