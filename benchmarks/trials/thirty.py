"""What ``normlab.trial`` says of three rates of ten language models, beside a plain loop at another seed.

    NORMLAB_DATA=... python benchmarks/trials/thirty.py            # what is missing

Ten families of 4 layers and width 64, AdamW, 200 steps, at 2e-4, 2e-3 and 2e-1. Each model is asked once
about the three rates, then trained at each, from another start on other batches, by two plain loops, whose
rate warms up over 40 steps: "constant" keeps it, as a trial does, and "loop" lets it fall in a cosine. One
line a model and kind in ``results/trials/thirty.jsonl``.
"""

from __future__ import annotations

import argparse
import math
import time
from dataclasses import replace
from functools import partial
from statistics import fmean
from typing import Final

import torch
from asked import NAMES
from curve import THIRTY, Row, keep, number, rows
from families import FAMILIES
from models import Plan, setup
from procedures import SEED
from truth import held_out, optimize

import normlab
from normlab.lab.training.devices import hardware

RATES: Final = (2e-4, 2e-3, 2e-1)
STEPS: Final = 200
OTHER: Final = 2
"""The seed of the plain loop."""
PLAN: Final = Plan(2e-3)
BUDGET_S: Final = 36_000.0
"""More than is needed, so that a busy machine changes no answer."""


def ask(name: str) -> Row:
    """What the trial says of each rate: usable, worse, or nothing learnt; and its sentence."""
    own = setup(SEED, name=name, plan=PLAN, steps=STEPS)
    answer = normlab.trial(own, steps=STEPS, rates=RATES, budget_s=BUDGET_S, seed=SEED)
    return {
        "sentence": answer.sentence,
        "unigram": number(answer.unigram or math.nan),
        "learns": answer.learns,
        "rates": [
            [t.rate, t.steps, number(answer.losses[t.rate]), answer.learns and answer.is_usable(t), t.stopped]
            for t in answer.rates
        ],
    }


def train(name: str, plan: Plan = PLAN) -> Row:
    """The losses of a plain loop at each rate: on the last 20 batches, and held out."""
    found = []
    for rate in RATES:
        own = setup(OTHER, name=name, plan=plan, rate=rate, steps=STEPS)
        losses, stopped = optimize(own, {})
        dev = math.inf if stopped else held_out(own)[0]
        found.append([rate, len(losses), number(fmean(losses[-20:])), number(dev), stopped])
    return {"rates": found}


def main() -> None:
    """Run what is missing."""
    parser = argparse.ArgumentParser(description="Three rates of ten language models.")
    parser.add_argument("--only", nargs="*", choices=NAMES, default=NAMES)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    constant = partial(train, plan=replace(PLAN, last=1.0))
    for name in asked.only:
        assert name in FAMILIES
        for kind, run, seed in (("trial", ask, SEED), ("loop", train, OTHER), ("constant", constant, OTHER)):
            if any(r["name"] == name and r["kind"] == kind for r in rows(THIRTY)):
                continue
            began = time.perf_counter()
            row = {"name": name, "kind": kind, "seed": seed, **run(name)}
            row["seconds"] = round(time.perf_counter() - began, 1)
            row["hardware"] = hardware(torch.device("cpu"))
            keep(row, THIRTY)
            print(name, kind, row["rates"], row.get("sentence", ""), row["seconds"], flush=True)


if __name__ == "__main__":
    main()
