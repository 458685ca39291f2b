"""Variants of a trial, on models that it was designed on: grids of the same rates, an octave apart.

    NORMLAB_DATA=... python benchmarks/trials/variants.py

``plain``: 100 steps, warm-up over a fifth, then constant, as ``normlab.trial`` trains. ``seed``: the same
from another start on other batches. ``twice``: 200 steps. ``decay``: 100 steps, over the last fifth of which
the rate falls in a line to nothing. ``own``: 100 steps, warm-up over 40 of them, as in the long runs. One
line a run in ``results/trials/variants.jsonl``; what is there is not run again. A line has the losses of
eight batches at each tenth of the run.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from statistics import fmean
from typing import Final

import torch
from curve import VARIANTS, keep, number, rows
from models import MODELS, PLANS, TRIED, WARMUP
from procedures import SEED, STEPS, train_with
from truth import entropy

OCTAVES: Final = range(-3, 5)
WARM: Final = 0.2


@dataclass(frozen=True)
class Variant:
    """How a trial is trained."""

    steps: int = STEPS
    seed: int = SEED
    warm: float = WARM
    """The share in which the rate rises."""
    decay: float = 0.0
    """The share of the steps, at the end, over which the rate falls to nothing."""

    def factor(self, step: int) -> float:
        """The rate at a step, from 0 on, as a share of the largest."""
        rise = min(1.0, (step + 1) / (self.warm * self.steps))
        fall = min(1.0, (self.steps - step) / (self.decay * self.steps)) if self.decay else 1.0
        return min(rise, fall)


VARIED: Final = {
    "plain": Variant(),
    "seed": Variant(seed=SEED + 1),
    "twice": Variant(steps=2 * STEPS),
    "decay": Variant(decay=WARM),
    "own": Variant(warm=WARMUP / STEPS),
}


def scaled(factor: Callable[[int], float], octave: int) -> Callable[[int], float]:
    """The same course at a rate that is so many octaves above."""
    return lambda step: factor(step) * 2.0**octave


def main() -> None:
    """Run what is missing."""
    parser = argparse.ArgumentParser(description="Variants of a trial.")
    parser.add_argument("--only", nargs="*", choices=[*VARIED], default=[*VARIED])
    only = parser.parse_args().only
    torch.set_num_threads(1)
    for name, label, octave in product(TRIED, only, OCTAVES):
        key = {"name": name, "variant": label, "octave": octave}
        if any(key.items() <= r.items() for r in rows(VARIANTS)):
            continue
        variant, began = VARIED[label], time.process_time()
        losses = []
        own = MODELS[name](variant.seed)
        for loss in train_with(own, scaled(variant.factor, octave), variant.steps):
            losses.append(loss)
            if not math.isfinite(loss):
                break
        tenth = variant.steps // 10
        ends = range(tenth, len(losses) + 1, tenth)
        row = {
            **key,
            "rate": PLANS[name].rate * 2.0**octave,
            "start": number(losses[0]),
            "at": [number(fmean(losses[end - 8 : end])) for end in ends],
            "unigram": number(entropy(name)),
            "core_seconds": round(time.process_time() - began, 1),
        }
        keep(row, VARIANTS)
        print(*key.values(), row["at"][-1:], row["core_seconds"], flush=True)


if __name__ == "__main__":
    main()
