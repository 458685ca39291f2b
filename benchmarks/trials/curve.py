"""Kept lines, and what long runs at several rates say of a model; without torch."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, Final

KEPT: Final = Path(__file__).resolve().parents[2] / "results/trials"
TRUTH, PROCEDURES = KEPT / "truth.jsonl", KEPT / "procedures.jsonl"
THIRTY, VARIANTS = KEPT / "thirty.jsonl", KEPT / "variants.jsonl"
USABLE: Final = 0.05
"""A rate is usable within this share of what the best run learns beyond the unigrams."""
LEARNT_NATS: Final = 0.15
"""By which a loss is below the entropy of the unigrams where something was learnt."""
MARKS: Final = (25, 50, 100, 200, 400, 600, 800)
"""Steps whose loss is kept: the mean over the last fifth, of 5 to 25 batches."""
Row = dict[str, Any]


def rows(path: Path) -> list[Row]:
    """The lines of a file."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def keep(row: Row, path: Path) -> None:
    """Append a line, on disk when this returns."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row, separators=(",", ":")) + "\n")
        file.flush()
        os.fsync(file.fileno())


def number(x: float) -> float | None:
    """Five digits, or nothing where it is not finite."""
    return float(f"{x:.5g}") if math.isfinite(x) else None


def octaves(a: float, b: float) -> float:
    """How far the first rate lies above the second."""
    return math.log2(a / b)


@dataclass(frozen=True)
class Curve:
    """The losses of one model by rate, in half octaves of a first; infinite for a run that ended early."""

    losses: Mapping[int, float]
    unigram: float
    first: float
    """The rate at 0 half octaves."""
    ends: Mapping[int, float]
    """The losses, with the last that was seen of runs that ended early."""

    @classmethod
    def of(cls, runs: Sequence[Row]) -> Curve:
        """Means over seeds."""
        halves = sorted({r["half"] for r in runs})
        by = {half: [r for r in runs if r["half"] == half] for half in halves}
        return cls(
            {h: fmean(math.inf if r["dev"] is None else r["dev"] for r in found) for h, found in by.items()},
            runs[0]["unigram"],
            runs[0]["rate"] / 2 ** (runs[0]["half"] / 2),
            {h: fmean(_end(r) for r in found) for h, found in by.items()},
        )

    @property
    def best(self) -> int:
        """The rate with the lowest loss, in half octaves."""
        return min(self.losses, key=lambda half: self.losses[half])

    @property
    def lowest(self) -> float:
        """The loss of the best."""
        return self.losses[self.best]

    @property
    def limit(self) -> float:
        """The largest usable loss."""
        return self.lowest + USABLE * max(0.0, self.unigram - self.lowest)

    @property
    def top(self) -> tuple[int, int | None]:
        """The last usable rate of those that follow on the best, and the first that is not."""
        last = self.best
        for half in (h for h in self.losses if h > self.best):
            if self.losses[half] > self.limit:
                return last, half
            last = half
        return last, None

    @property
    def trains(self) -> bool:
        """Whether any rate gets below the unigrams."""
        return self.unigram - self.lowest >= LEARNT_NATS

    def rate(self, half: float) -> float:
        """The rate at a place."""
        return self.first * 2 ** (half / 2)

    @property
    def upper(self) -> float | None:
        """The usable upper end: where the loss, linear in the logarithm of the rate, crosses the limit."""
        last, first = self.top
        if first is None:
            return None
        low, high = self.losses[last], self.losses[first]
        share = (self.limit - low) / (high - low) if math.isfinite(high) else 0.5
        return self.rate(last + share * (first - last))

    def at(self, rate: float) -> float:
        """The loss at a rate, linear in its logarithm; at the ends of the grid, that of the end."""
        place = 2 * octaves(rate, self.first)
        below = max((h for h in self.ends if h <= place), default=min(self.ends))
        above = min((h for h in self.ends if h >= place), default=max(self.ends))
        share = (place - below) / (above - below) if above > below else 0.0
        return self.ends[below] + share * (self.ends[above] - self.ends[below])


def _end(row: Row) -> float:
    """The held-out loss; of a run that ended early its last that was kept, or its first if that is less."""
    if row["dev"] is not None:
        return float(row["dev"])
    seen = [x for x in row["train"] if x is not None]
    return float(min(seen[-1] if seen else row["start"], row["start"]))
