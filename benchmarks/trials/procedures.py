"""The procedures that answer which learning rate to use, each run on the models of ``models.py``.

    NORMLAB_DATA=... python benchmarks/trials/procedures.py              # what is missing
    NORMLAB_DATA=... python benchmarks/trials/procedures.py --only GPT-2 BERT

``trial``: ``normlab.trial`` as it comes, 100 steps; none takes ten minutes of an idle core, and the budget is
larger, so that a busy machine changes no answer. ``before``: what its first version said, within ten minutes.
``range``: a range test, whose rate rises by a constant factor a step from 1e-5 to 1, in as many steps as the
trials of the first version took together. ``own``: the scan of a trial, with a warm-up of as many steps as
the long runs have. ``ramp``: range tests of 100 to 800 steps, on two of the models that the procedure was
designed on. An answer leaves one line in ``results/trials/procedures.jsonl``; what is there is not run again.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from statistics import fmean
from typing import Any, Final

import torch
from curve import LEARNT_NATS, PROCEDURES, Row, keep, number, rows
from models import MODELS, PLANS, TESTED, TRIED
from truth import entropy

import normlab
from normlab.lab.training.devices import hardware
from normlab.setups.setup import Setup
from normlab.trials.search import LAST, highest_usable, hopeless, next_octave

BUDGET_S: Final = 36_000.0
SEED: Final = 1
"""Of the models and batches; those of the long runs are others."""
STEPS: Final = 100
LOWEST, HIGHEST = 1e-5, 1.0
BETA: Final = 0.98
"""Of the running mean of a range test's losses."""
DIVERGED: Final = 4.0
"""A range test ends where its running mean is so many times its lowest."""
SKIPPED: Final = 10
"""First steps in which no slope is read."""
LONGEST: Final = 400
"""Steps of a trial with its own warm-up, at most."""
RAMPS: Final = (100, 200, 400, 800)
RAMPED: Final = ("Llama", "OPT, Post-LN")


def run_trial(name: str, seed: int = SEED, steps: int = STEPS) -> Row:
    """What ``normlab.trial`` says, with the losses behind it."""
    answer = normlab.trial(MODELS[name](seed), steps=steps, seed=seed, budget_s=BUDGET_S)
    best, usable = answer.best, answer.usable
    return {
        "answers": usable is not None,
        "sentence": answer.sentence,
        "n": answer.steps,
        "c": best.rate if best and usable else None,
        "usable": usable,
        "edge": answer.edge,
        "ended_by": answer.ended_by,
        "unigram": answer.unigram,
        "spent": sum(len(t.losses) for t in answer.tried),
        "trials": [[t.rate, t.steps, number(t.loss), t.stopped] for t in answer.tried],
    }


def train_with(own: Setup, factor: Callable[[int], float], steps: int) -> Iterator[float]:
    """The losses of a plain loop, whose rates are those of the setup times a factor by step, from 0 on."""
    model = own.model
    optimizer = own.optimizer(model)
    every = optimizer if isinstance(optimizer, list) else [optimizer]
    groups = [(group, group["lr"]) for one in every for group in one.param_groups]
    for step, batch in zip(range(steps), own.batches, strict=False):
        for group, rate in groups:
            group["lr"] = rate * factor(step)
        yield own.step(model, batch, optimizer, None).item()


def run_range(name: str, steps: int, seed: int = SEED) -> Row:
    """A range test: the rate of the steepest slope, and that of the lowest loss."""
    base = PLANS[name].rate
    rates = [LOWEST * (HIGHEST / LOWEST) ** (i / (steps - 1)) for i in range(steps)]
    mean, curve = 0.0, list[float]()
    for i, loss in enumerate(train_with(MODELS[name](seed), lambda step: rates[step] / base, steps)):
        mean = BETA * mean + (1 - BETA) * loss
        curve.append(mean / (1 - BETA ** (i + 1)))
        if not math.isfinite(loss) or (i > SKIPPED and curve[-1] > DIVERGED * min(curve)):
            curve.pop()
            break
    slopes = [b - a for a, b in pairwise(curve)]
    steepest = min(range(SKIPPED, len(slopes)), key=lambda i: slopes[i])
    lowest = min(range(SKIPPED, len(curve)), key=lambda i: curve[i])
    thin = max(1, len(curve) // 80)
    return {
        "n": steps,
        "spent": len(curve),
        "steepest": number(rates[steepest]),
        "lowest": number(rates[lowest]),
        "curve": [[float(f"{rates[i]:.3g}"), float(f"{curve[i]:.4g}")] for i in range(0, len(curve), thin)],
    }


def run_own(name: str, seed: int = SEED) -> Row:
    """The scan of a trial, whose rate warms up over as many steps as the long runs' does."""
    plan, steps, spent = PLANS[name], STEPS, 0
    while True:
        scores, tried, leader = dict[int, float](), list[Any](), list[float]()
        while (octave := next_octave(scores, entropy(name))) is not None:
            losses, why = list[float](), ""

            def factor(step: int, octave: int = octave) -> float:
                return 2.0**octave * (min(1.0, (step + 1) / plan.warmup) if plan.warmup else 1.0)

            for loss in train_with(MODELS[name](seed), factor, steps):
                losses.append(loss)
                if why := hopeless(losses, steps, leader, 1.0):
                    break
            scores[octave] = math.inf if why else fmean(losses[-max(LAST, steps // 10) :])
            leader = losses if scores[octave] == min(scores.values()) and not why else leader
            tried.append([plan.rate * 2.0**octave, steps, number(scores[octave]), why])
            spent += len(losses)
        best = min(scores, key=lambda k: scores[k])
        learns = scores[best] < entropy(name) - LEARNT_NATS
        if learns or steps >= LONGEST:
            break
        steps *= 2
    top = plan.rate * 2.0 ** highest_usable(scores, entropy(name))
    return {
        "answers": learns,
        "n": steps,
        "c": plan.rate * 2.0**best if learns else None,
        "usable": (plan.rate * 2.0 ** min(scores), top) if learns else None,
        "spent": spent,
        "trials": tried,
    }


def missing(name: str, done: Sequence[Row]) -> Iterator[tuple[dict[str, Any], Callable[[], Row]]]:
    """What has not been run on a model: what to call it, and how to run it."""
    there = {(r["procedure"], r["n"] if r["procedure"] == "ramp" else 0) for r in done if r["name"] == name}
    if ("trial", 0) not in there:
        yield {"procedure": "trial"}, lambda: run_trial(name)
    elif ("range", 0) not in there:
        spent = next(r["spent"] for r in done if r["name"] == name and r["procedure"] == "trial")
        yield {"procedure": "range"}, lambda: run_range(name, spent)
    if ("own", 0) not in there and name in TESTED:
        yield {"procedure": "own"}, lambda: run_own(name)
    for steps in RAMPS if name in RAMPED else ():
        if ("ramp", steps) not in there:
            yield {"procedure": "ramp"}, lambda steps=steps: run_range(name, steps)


def main() -> None:
    """Run what is missing."""
    parser = argparse.ArgumentParser(description="Procedures that choose a learning rate.")
    parser.add_argument("--only", nargs="*", choices=[*MODELS], default=[*MODELS])
    parser.add_argument("--kind", choices=("trial", "range", "own", "ramp"), help="no other procedure")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    for name in asked.only:
        while work := next(
            (w for w in missing(name, rows(PROCEDURES)) if asked.kind in (None, w[0]["procedure"])), None
        ):
            began, busy = time.perf_counter(), time.process_time()
            row = {"name": name, **work[0], "seed": SEED, **work[1]()}
            row["seconds"] = round(time.perf_counter() - began, 1)
            row["core_seconds"] = round(time.process_time() - busy, 1)
            row["hardware"] = hardware(torch.device("cpu"))
            keep(row, PROCEDURES)
            shown = ("name", "procedure", "n", "spent", "sentence", "steepest", "lowest", "seconds")
            print(*(row[k] for k in shown if k in row), flush=True)


assert set(RAMPED) <= set(TRIED)

if __name__ == "__main__":
    main()
