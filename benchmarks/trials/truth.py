"""What the learning rates of ``models.py`` lead to: 800 steps at each of a grid, by a plain loop.

    NORMLAB_DATA=... python benchmarks/trials/truth.py         # what is missing, one run after the other
    NORMLAB_DATA=... python benchmarks/trials/truth.py --only GPT-2 BERT --minutes 10

A run leaves one line in ``results/trials/truth.jsonl``; what is there is not run again. The grid is in half
octaves of the rate that the user begins with. It is searched in factors of 4 until the best rate lies within
and the losses above it are no longer usable, then in octaves, then in half octaves around the best and at the
upper end of what is usable, then with a second seed. All models are taken a stage further in turn.

A loss is that of 64 held-out batches, the same for all runs. A run ends early where the loss is not finite,
where after a quarter it is half a nat above its start, and where after a half it is behind the best run by
more than half of what that has learnt beyond the unigrams.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from statistics import fmean, stdev
from typing import Final

import torch
from curve import MARKS, TRUTH, Curve, Row, keep, number, rows
from models import MODELS, PLANS, STEPS, TESTED, setup
from text import Batches, unigram

from normlab.lab.training.devices import hardware
from normlab.setups.setup import Setup

SECOND: Final = 101
"""The second seed; the first is 100."""
LARGEST: Final = 8.0
MOST: Final = 22
"""Runs of a model."""


@cache
def entropy(name: str) -> float:
    """The unigram entropy of a model's targets."""
    return unigram(Batches(PLANS[name].draw, 0))


def optimize(own: Setup, limits: Mapping[int, float]) -> tuple[list[float], str]:
    """Train by the setup's own step. Returns the losses, and why the run ended early, or "".

    ``limits`` are the largest recent losses with which a run goes on, by step.
    """
    model, losses = own.model, list[float]()
    optimizer = own.optimizer(model)
    scheduler = own.scheduler(optimizer)
    for batch, step in zip(own.batches, range(1, (own.declare.steps or STEPS) + 1), strict=False):
        losses.append(own.step(model, batch, optimizer, scheduler).item())
        if not math.isfinite(losses[-1]):
            return losses, "not finite"
        if step in limits and fmean(losses[-25:]) > limits[step]:
            return losses, "rises" if limits[step] > losses[0] else "behind"
    return losses, ""


def held_out(own: Setup) -> tuple[float, float, int]:
    """The mean loss on held-out batches, its standard error, and the tokens."""
    own.model.eval()
    with torch.no_grad():
        batches = list(own.batches.held_out())
        losses = [own.loss(own.model, batch).item() for batch in batches]
    tokens = sum(int((b["labels"] >= 0).sum()) for b in batches)
    return fmean(losses), stdev(losses) / math.sqrt(len(losses)), tokens


def mark(losses: Sequence[float], step: int) -> float | None:
    """The loss at a step."""
    width = min(25, max(5, step // 5))
    return number(fmean(losses[step - width : step])) if len(losses) >= step else None


def measure(name: str, half: int, seed: int, others: Sequence[Row]) -> Row:
    """Train at one rate, so many half octaves above the user's."""
    rate = PLANS[name].rate * 2 ** (half / 2)
    began, busy = time.perf_counter(), time.process_time()
    own = setup(seed, name=name, rate=rate)
    bound = {step: own.loss(own.model, next(iter(own.batches))).item() + 0.5 for step in (STEPS // 4, 600)}
    middle = [r["train"][MARKS.index(400)] for r in others if r["train"][MARKS.index(400)] is not None]
    if middle and min(middle) < entropy(name) - 0.1:
        bound[STEPS // 2] = (entropy(name) + min(middle)) / 2
    losses, stopped = optimize(own, bound)
    dev, error, tokens = held_out(own) if not stopped else (math.inf, math.inf, 0)
    return {
        "name": name,
        "rate": float(f"{rate:.6g}"),
        "half": half,
        "seed": seed,
        "start": number(losses[0]),
        "train": [mark(losses, step) for step in MARKS],
        "dev": number(dev),
        "dev_se": number(error),
        "dev_tokens": tokens,
        "unigram": number(entropy(name)),
        "steps": len(losses),
        "stopped": stopped,
        "seconds": round(time.perf_counter() - began, 1),
        "core_seconds": round(time.process_time() - busy, 1),
        "hardware": hardware(torch.device("cpu")),
    }


def wanted(curve: Curve, stage: int) -> Iterator[int]:
    """Rates that a stage asks for, in half octaves."""
    best, (last, first) = curve.best, curve.top
    width = (4, 2, 1)[stage]
    if first is None:
        yield last + 4
    elif stage and first - last > width:
        yield (first + last) // 2
    yield from (best + width, best - width)
    if stage == 2:
        yield from (best + 2, best - 2, best + 3, best - 3)


def next_run(name: str, runs: Sequence[Row], stage: int) -> tuple[int, int] | None:
    """Rate, in half octaves, and seed of the next run of a model; None where a stage is done."""
    if len(runs) >= MOST:
        return None
    if not runs:
        return 0, SECOND - 1
    curve, done = Curve.of(runs), {(r["half"], r["seed"]) for r in runs}
    if stage and not curve.trains:
        return None
    rate = PLANS[name].rate
    for half in wanted(curve, stage) if stage < 3 else ():
        if (half, SECOND - 1) not in done and rate * 2 ** (half / 2) <= LARGEST:
            return half, SECOND - 1
    if stage == 3:
        near = [curve.best + i for i in (0, 1, -1, 2, -2, 3, -3)]
        for half in (*near[:5], *(h for h in curve.top if h is not None), *near[5:]):
            if (half, SECOND) not in done and curve.losses.get(half, math.inf) < math.inf:
                return half, SECOND
    return None


def main() -> None:
    """Run what is missing."""
    parser = argparse.ArgumentParser(description="Long runs at a grid of learning rates.")
    parser.add_argument("--only", nargs="*", choices=[*MODELS], default=[*MODELS])
    parser.add_argument("--minutes", type=float, default=math.inf, help="start no run after so many")
    parser.add_argument("--core-minutes", type=float, default=50.0, help="of all runs that are kept, at most")
    parser.add_argument("--stages", type=int, nargs="*", default=[*range(4)], help="3: the second seed")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    end = time.monotonic() + 60 * asked.minutes
    for stage in asked.stages:
        for name in asked.only:
            if name not in TESTED and stage == 3:
                continue
            while time.monotonic() < end:
                every = rows(TRUTH)
                if sum(r["core_seconds"] for r in every) >= 60 * asked.core_minutes:
                    return
                runs = [r for r in every if r["name"] == name]
                following = next_run(name, runs, stage)
                if following is None:
                    break
                row = measure(name, *following, runs)
                keep(row, TRUTH)
                shown = {
                    k: row[k] for k in ("name", "rate", "seed", "dev", "stopped", "seconds", "core_seconds")
                }
                print(stage, *shown.values(), flush=True)


if __name__ == "__main__":
    main()
