"""Random draws that are the same in every version of NumPy: they use only the raw bits of PCG64.

NumPy guarantees these bits forever, but not what the methods of ``Generator`` make of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from normlab.lab.data.ragged import Ints
from normlab.lab.data.tokenizer import EOS, UNK


def uniform(seed: int, *shape: int) -> NDArray[np.float64]:
    """Draw numbers from 0 to 1, excluding 1, that depend only on the seed."""
    bits = np.random.PCG64(seed).random_raw(math.prod(shape))
    mantissas = bits >> np.uint64(11)  # float64 holds 53 of the 64 bits
    return (mantissas.astype(np.float64) / 2**53).reshape(shape)


def permutation(count: int, seed: int) -> Ints:
    """Return the numbers below ``count`` in an order that depends only on the seed, as uint32 if that holds
    them: the order that sorts ``count`` draws of 64 bits.
    """
    order = np.argsort(np.random.PCG64(seed).random_raw(count), kind="stable")
    return order.astype(np.uint32 if count <= 2**32 else np.int64)


def drop_words(inputs: Sequence[Ints], probability: float, seed: int) -> None:
    """Word dropout: replace each id of a word by UNK with that probability, in place."""
    draws = uniform(seed, sum(ids.size for ids in inputs))
    start = 0
    for ids in inputs:
        draw = draws[start : start + ids.size].reshape(ids.shape)
        ids[(draw < probability) & (ids > EOS)] = UNK
        start += ids.size
