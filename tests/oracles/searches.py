"""Searches for the best translation in plain Python: slow and obvious."""

from __future__ import annotations

import math
from collections.abc import Callable

from numpy import ndarray as Array

NextLogP = Callable[[list[int]], Array]
"""A prefix with BOS in front, to log-probabilities `[V]` of the next token."""

BOS, EOS = 2, 3


def beam_search(log_p: NextLogP, beams: int, limit: int, alpha: float) -> list[tuple[float, list[int]]]:
    """Ended hypotheses (score, ids without BOS and EOS), best first, in plain Python.

    Of the 2K best continuations, those among the first K that end are put aside; the K best others go on. The
    search ends with K hypotheses put aside, or at ``limit`` tokens, where EOS is all that may follow.
    """
    alive: list[tuple[float, list[int]]] = [(0.0, [BOS])]
    ended: list[tuple[float, list[int]]] = []
    for length in range(1, limit + 1):
        grown = [
            (score + lp, [*ids, word])
            for score, ids in alive
            for word, lp in enumerate(log_p(ids).tolist())
            if math.isfinite(lp) and (length < limit or word == EOS)
        ]
        grown.sort(key=lambda item: -item[0])
        ended += [(s / length**alpha, ids[1:-1]) for s, ids in grown[:beams] if ids[-1] == EOS]
        if len(ended) >= beams:
            ended = ended[:beams]
            break
        alive = [item for item in grown[: 2 * beams] if item[1][-1] != EOS][:beams]
    return sorted(ended, key=lambda item: -item[0])


def exhaustive_search(log_p: NextLogP, words: list[int], limit: int, alpha: float) -> tuple[float, list[int]]:
    """The best of all hypotheses of at most ``limit`` tokens, EOS counted."""
    best, level = (-math.inf, [0]), [(0.0, [BOS])]
    for length in range(1, limit + 1):
        following = []
        for score, ids in level:
            row = log_p(ids)
            best = max(best, ((score + float(row[EOS])) / length**alpha, ids[1:]))
            following += [(score + float(row[word]), [*ids, word]) for word in words]
        level = following
    return best
