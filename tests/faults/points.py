"""A hundred points at which a run is killed, drawn from one seed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from faults.runs import CASES, Case

SEED: Final = 20
KINDS: Final = {
    "checkpoint": ("last", "best", "previous"),
    "rows": ("metrics.jsonl", "probes.jsonl"),
    "anywhere": ("",),
    "time": (),
}
"""By kind of kill, what the operation at which it happens is on."""
COUNTS: Final = {"checkpoint": 50, "rows": 20, "anywhere": 10, "time": 20}


@dataclass(frozen=True)
class Kill:
    """One SIGKILL."""

    kind: str
    place: float
    """Where it falls among the operations of its kind, or in the time that a run takes: from 0 to 1."""
    torn: float
    """Share of the bytes that a write comes to; negative: it does not begin."""


@dataclass(frozen=True)
class Point:
    """A run, its kill, and further kills after it has gone on."""

    case: Case
    kills: tuple[Kill, ...]


def points() -> Iterator[Point]:
    generator = random.Random(SEED)
    kinds = [kind for kind, count in COUNTS.items() for _ in range(count)]
    for i, kind in enumerate(kinds):
        more = generator.choice((0, 0, 0, 1, 2))
        kinds_of_all = (kind, *generator.choices(tuple(KINDS), k=more))
        kills = tuple(
            Kill(k, generator.random(), generator.choice((-1.0, generator.random()))) for k in kinds_of_all
        )
        yield Point(CASES[i % len(CASES)], kills)
