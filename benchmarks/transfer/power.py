"""What the design of ``placements.py`` can see: verdicts on simulated trials whose answer is known.

    python benchmarks/transfer/power.py

Losses lie on the curve that ``normlab.scaling.optimum`` fits, with the height and noise of the pilot in
``placements.py``. Each size has a skew of its own from the distribution that is fitted, or, where the best
rate does not move, one that grows with the size from a deviation below its mean to one above. A line counts
60 tables.
"""

from __future__ import annotations

from collections import Counter
from itertools import product
from statistics import median
from typing import Final

import numpy as np
from placements import SEEDS, SIZES

from normlab.scaling.exponents import Axis
from normlab.scaling.optimum import SKEWS, WINDOW, bent
from normlab.scaling.sweep import Decay, Sweep
from normlab.trials.scale import Scale
from normlab.trials.verdict import Trial

HEIGHT: Final = 0.07
"""Nats that a rate one octave from the best one costs, without the skew."""
NOISE: Final = 0.06
"""Nats by which single trials differ from their curve."""
DRAWS: Final = 60
SLOPES: Final = (0.0, -0.25, -0.5)
"""Octaves by which the best rate moves with a doubling."""
OCTAVES: Final = np.arange(-10.0, 11.0)
LOSS: Final = 4.5
NATS: Final = Scale(start=6.9, unigram=5.26)


def drawn(axis: Axis, slope: float, rng: np.random.Generator, *, drifts: bool) -> Sweep:
    """Trials at five rates about the best one of each size."""
    sizes, seeds = SIZES[axis], SEEDS[axis]
    trials = dict[int, dict[tuple[float, int], Trial]]()
    first, (mean, deviation) = rng.uniform(-0.5, 0.5), SKEWS
    scores = np.linspace(-1, 1, len(sizes)) if drifts else rng.normal(size=len(sizes))
    for size, score in zip(sizes, scores, strict=True):
        curve = LOSS + HEIGHT * bent(
            OCTAVES - first - slope * np.log2(size / sizes[0]), mean + deviation * score
        )
        losses = curve + NOISE * rng.normal(size=(seeds, curve.size))
        near = np.abs(OCTAVES - OCTAVES[losses.mean(0).argmin()]) <= WINDOW
        trials[size] = {
            (float(x), seed): Trial(1.0, 1, (float(losses[seed, k]),))
            for k, x in enumerate(OCTAVES)
            for seed in range(seeds)
            if near[k]
        }
    return Sweep(Decay(), trials, dict.fromkeys(sizes, NATS))


def main() -> None:
    """Print how often each verdict is given, and how wide intervals are."""
    rng = np.random.default_rng(0)
    for axis, (slope, drifts) in product(SIZES, [(0.0, True), *((slope, False) for slope in SLOPES)]):
        sweeps = [drawn(axis, slope, rng, drifts=drifts) for _ in range(DRAWS)]
        found = Counter(own.verdict for own in sweeps)
        lines = [own.slope for own in sweeps if own.slope]
        wide = median(np.log2(own.high / own.low) / 2 for own in lines)
        holds = sum(own.low <= 2**slope <= own.high for own in lines)
        skews = "skews grow with it" if drifts else "skews differ"
        print(
            f"{axis}, {slope:g} octaves a doubling, {skews}: {dict(found)}; half an interval is {wide:.2f}, "
            f"and it holds the truth in {holds} of {len(lines)}",
            flush=True,
        )


if __name__ == "__main__":
    main()
