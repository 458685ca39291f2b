"""Masked language modelling: which tokens are predicted, and what stands in their places."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from normlab.data.arrays import Ints
from normlab.data.batches import uniform
from normlab.data.segments import SPECIAL_TOKENS
from normlab.data.tokenizer import EOS, PAD, Tokenizer

SHARE: Final = 0.15
"""The share of the tokens that are predicted."""
MASKED: Final = 0.8
"""Of these, the share that the mask replaces in training. Of the others, random vocabulary entries replace
one half, and the other half stays as it is.
"""


@dataclass(frozen=True)
class Masked:
    """Rows in which some tokens are replaced, and what these were."""

    ids: Ints
    """`[B, W]`."""
    positions: Ints
    """`[B, P]`: the places that are predicted, ascending, then 0."""
    targets: Ints
    """`[B, P]`: the original tokens there, then PAD."""


def predictions(tokens: int) -> int:
    """Return how many of so many tokens are predicted: 15%, rounded, and at least one."""
    return max(1, round(SHARE * tokens))


def mask_tokens(
    ids: Ints, *, mask: int, begins: NDArray[np.bool_] | None, seed: int, masked: float = MASKED
) -> Masked:
    """Choose ``predictions`` of the tokens of each row `[B, W]`, and replace the share ``masked`` of them by
    ``mask``, and half of the others by random vocabulary entries.

    Devlin et al. 2019, Section 3.1 and Appendix A.1 (arXiv 1810.04805). Special and unknown tokens are never
    chosen and replace none. With ``begins`` `[V]`, which entries begin a word, the tokens of a word are all
    chosen or none, as in the authors' later code; a word that would exceed the number is passed over.
    ``mask`` is the number of vocabulary entries, the first that is none. The draws depend on the seed alone.
    """
    order, kind, entry = uniform(seed, 3, *ids.shape)
    words = EOS + 1 + (entry * (mask - EOS - 1)).astype(np.int64)
    noisy = np.where(kind < masked, mask, np.where(kind < (1 + masked) / 2, words, ids))
    most = predictions(ids.shape[1] - SPECIAL_TOKENS)
    found, positions = ids.copy(), np.zeros((len(ids), most), np.int64)
    targets = np.full_like(positions, PAD)
    for row, original in enumerate(ids):
        places = _chosen(original, order[row], begins)
        found[row, places] = noisy[row, places]
        positions[row, : len(places)], targets[row, : len(places)] = places, original[places]
    return Masked(found, positions, targets)


def _chosen(ids: Ints, order: NDArray[np.float64], begins: NDArray[np.bool_] | None) -> list[int]:
    """The places of a row that are predicted, words in the order of the draws of their first tokens."""
    places = np.flatnonzero(ids > EOS)
    if not len(places):
        return []
    first = np.ones(len(places), bool) if begins is None else begins[ids[places]].copy()
    first[0] = True
    first[1:] |= np.diff(places) > 1  # nothing goes on over a special token
    edges = np.flatnonzero(first)
    ends = np.append(edges[1:], len(places))
    wanted, chosen = predictions(len(places)), list[int]()
    for word in np.argsort(order[places[edges]], kind="stable"):
        if len(chosen) + ends[word] - edges[word] <= wanted:
            chosen.extend(places[edges[word] : ends[word]].tolist())
        if len(chosen) == wanted:
            break
    return sorted(chosen)


def word_beginnings(tokenizer: Tokenizer) -> NDArray[np.bool_]:
    """Return which vocabulary entries begin a word, `[V]`: those that a space precedes after another one."""
    entries = range(EOS + 1, tokenizer.vocab_size)
    alone = tokenizer.decode([[entry] for entry in entries])
    before = next(entry for entry, text in zip(entries, alone, strict=True) if text.strip())
    (text,) = tokenizer.decode([[before]])
    after = tokenizer.decode([[before, entry] for entry in range(tokenizer.vocab_size)])
    return np.array([line.removeprefix(text).startswith(" ") for line in after])
