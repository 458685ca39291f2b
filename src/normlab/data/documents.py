"""The documents of a plain text, by which its scores are resampled."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

FEWEST = 20
"""Blank lines separate documents only where at least so many result."""


def document_sizes(lines: Iterable[str]) -> NDArray[np.int64]:
    """Lines, words and bytes of each document, `[documents, 3]`; they add up to those of the text.

    A document is what blank lines separate. In a text with fewer than ``FEWEST`` of these it is a line.
    Blank lines belong to the document before them, leading ones to the first. The end of a line counts as
    a word and as a byte.
    """
    sizes = np.array([(1, len(line.split()) + 1, len(line.encode()) + 1) for line in lines], np.int64)
    begins = document_starts(sizes[:, 1] == 1)
    begins[0] = 0
    return np.add.reduceat(sizes, begins, axis=0)


def document_starts(blank: NDArray[np.bool_]) -> NDArray[np.intp]:
    """Return the first line with words of each document, given which lines are blank."""
    begins = np.flatnonzero(~blank & np.concatenate([[True], blank[:-1]]))
    return begins if len(begins) >= FEWEST else np.flatnonzero(~blank)
