"""Searches for the best translation in plain Python: slow and obvious."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from numpy import ndarray as Array

NextLogP = Callable[[list[int]], Array]
"""A prefix with BOS in front, to log-probabilities `[V]` of the next token."""

BOS, EOS = 2, 3

Ended = list[tuple[float, list[int]]]
"""Scores and ids without BOS and EOS, best first."""


@dataclass(frozen=True)
class Asked:
    """The constraints on an output, and its score."""

    limit: int
    """Tokens at most, EOS counted."""
    alpha: float = 1.0
    gnmt: bool = False
    least: int = 0
    """Tokens before EOS."""
    prefix: tuple[int, ...] = ()

    def may(self, ids: list[int]) -> bool:
        """Whether an output may be, or begin with, these ids, which start with BOS."""
        begun = ids[1 : 1 + len(self.prefix)]
        if begun != list(self.prefix[: len(begun)]):
            return False
        if ids[-1] == EOS:
            return self.least < len(ids) - 1 <= self.limit
        return len(ids) - 1 < self.limit

    def score(self, log_p: float, length: int) -> float:
        return log_p / (((5.0 + length) / 6.0) ** self.alpha if self.gnmt else float(length) ** self.alpha)


def beam_search(log_p: NextLogP, beams: int, asked: Asked) -> Ended:
    """In plain Python: of the 2K best continuations, those among the first K that end are put aside; the K
    best others go on.

    The search ends with K hypotheses put aside, or at the limit, where EOS is all that may follow.
    """
    alive: Ended = [(0.0, [BOS])]
    ended: Ended = []
    while alive and len(ended) < beams:
        grown = [
            (score + lp, [*ids, word])
            for score, ids in alive
            for word, lp in enumerate(log_p(ids).tolist())
            if math.isfinite(lp) and asked.may([*ids, word])
        ]
        grown.sort(key=lambda item: -item[0])
        ended += [(asked.score(s, len(ids) - 1), ids[1:-1]) for s, ids in grown[:beams] if ids[-1] == EOS]
        alive = [item for item in grown[: 2 * beams] if item[1][-1] != EOS][:beams]
    return sorted(ended, key=lambda item: -item[0])


def exhaustive_search(log_p: NextLogP, words: list[int], asked: Asked) -> Ended:
    """All outputs that may be."""
    found: Ended = []
    waiting: Ended = [(0.0, [BOS])]
    for score, ids in waiting:
        row = log_p(ids)
        if asked.may([*ids, EOS]):
            found.append((asked.score(score + float(row[EOS]), len(ids)), ids[1:]))
        waiting += [(score + float(row[w]), [*ids, w]) for w in words if asked.may([*ids, w])]
    return sorted(found, key=lambda item: -item[0])


def draw(
    log_p: NextLogP, uniform: Sequence[float], asked: Asked, *, temperature: float, top_k: int, top_p: float
) -> tuple[float, list[int]]:
    """One output, whose types are drawn by one number each: the first type, in the order of ids, at which the
    summed shares exceed the number. The score is the model's log-probability.
    """
    ids, score = [BOS], 0.0
    for number in uniform:
        row = log_p(ids).tolist()
        may = [v for v in range(len(row)) if math.isfinite(row[v]) and asked.may([*ids, v])]
        weight = {v: math.exp(row[v] / temperature) for v in may}
        ranked = sorted(may, key=lambda v: -weight[v])[: top_k or len(may)]
        whole, kept = sum(weight[v] for v in ranked), []
        for v in ranked:
            if sum(weight[u] for u in kept) >= top_p * whole:
                break
            kept.append(v)
        kept.sort()
        whole, below = sum(weight[v] for v in kept), 0.0
        for v in kept:
            below += weight[v] / whole
            if below > number:
                break
        ids.append(v)
        score += row[v]
        if v == EOS:
            return score, ids[1:-1]
    raise AssertionError("the limit lets nothing but EOS follow")
