"""Pairs of segments of plain text: two consecutive ones of a document, or two of different documents."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from normlab.config.randomness import derive
from normlab.data.arrays import Ints
from normlab.data.batches import permutation, uniform
from normlab.data.documents import document_starts
from normlab.data.tokenizer import BOS, EOS, PAD
from normlab.errors import UserError

SPECIAL_TOKENS = 3
"""[CLS], which is BOS, and two [SEP], which are EOS, in each row."""
WIDTH_STEP = 32
"""Rows are padded to a multiple of this, so that batches have few shapes."""

Tokens: TypeAlias = Sequence[int] | Ints


class Shuffled:
    """Endless micro-batches of ``rows`` of ``count`` examples; in each epoch every example occurs once.

    The order depends on the seed and the epoch alone. A micro-batch may hold the end of one epoch and the
    beginning of the next, so that all have the same size.
    """

    def __init__(self, count: int, *, rows: int, seed: int) -> None:
        self._count, self._rows = count, rows
        self._order = lru_cache(2)(lambda epoch: permutation(count, derive(seed, "shuffle", epoch)))

    def at(self, index: int) -> Ints:
        """Return the numbers of the examples of a micro-batch, `[rows]`."""
        places = np.arange(index * self._rows, (index + 1) * self._rows)
        return np.array([self._order(p // self._count)[p % self._count] for p in places.tolist()], np.int64)


@dataclass(frozen=True)
class SegmentPairs:
    """Rows ``[CLS] A [SEP] B [SEP]``, padded on the right."""

    ids: Ints
    """`[B, W]`."""
    segments: Ints
    """`[B, W]`: 1 in B and the [SEP] after it, else 0."""
    random: Ints
    """`[B]`: 1 where B comes from another document, 0 where it follows A."""


@dataclass(frozen=True)
class Spans:
    """A text cut into spans of at most ``span_len`` tokens, each within one document.

    Each span is cut in two at the beginning of one of its lines, or anywhere if it has a part of one line
    only: A and the B that follows it. Ends of lines are left out.
    """

    text: Ints
    lines: Ints
    """The index of the first token of each line."""
    bounds: Ints
    """First token of each span and its end, `[spans, 2]`."""
    document: Ints
    """The number of each span's document, ascending, `[spans]`."""
    document_ends: Ints
    span_len: int

    @classmethod
    def of(cls, stream: Ints, *, span_len: int) -> Spans:
        """Cut a ``Stream`` of tokens. Documents are those of ``documents.document_sizes``; a rest of one
        token is left out.

        Raises UserError for a text of one document, for none of its segments could follow a random one.
        """
        tokens = np.asarray(stream)
        sizes = np.diff(np.flatnonzero(tokens == EOS)) - 1
        offsets = np.concatenate([[0], np.cumsum(sizes)])
        edges = np.append(offsets[document_starts(sizes == 0)], offsets[-1])
        if len(edges) < 3:
            raise UserError(
                "next-sentence prediction needs a text of several documents, and this is one; separate "
                "documents by blank lines"
            )
        spans = -(-np.diff(edges) // span_len)
        document = np.repeat(np.arange(len(spans)), spans)
        number = np.arange(len(document)) - np.repeat(np.cumsum(spans) - spans, spans)
        starts = edges[document] + number * span_len
        bounds = np.stack([starts, np.minimum(starts + span_len, edges[document + 1])], axis=1)
        whole = np.diff(bounds)[:, 0] > 1
        text, lines = tokens[tokens != EOS], offsets[:-1][sizes > 0]
        return cls(text, lines, bounds[whole], document[whole], edges[1:], span_len)

    def __len__(self) -> int:
        return len(self.bounds)

    def pairs(self, chosen: Ints, seed: int) -> SegmentPairs:
        """Return A of the chosen spans `[B]` and, with a probability of one half each, what follows or as
        many tokens from the cut of a span of another document on.

        Devlin et al. 2019, Section 3.1 (arXiv 1810.04805). The draws depend on the seed alone.
        """
        where, follows, other, elsewhere = uniform(seed, 4, len(chosen))
        cut = self._cuts(chosen, where)
        random = follows >= 0.5
        strangers = self._of_another_document(chosen, other)
        lengths = self.bounds[chosen, 1] - cut
        begin = np.where(random, self._cuts(strangers, elsewhere), cut)
        home = np.where(random, strangers, chosen)
        end = np.minimum(begin + lengths, self.document_ends[self.document[home]])
        first = (self.text[a:b] for a, b in zip(self.bounds[chosen, 0], cut, strict=True))
        second = (self.text[a:b] for a, b in zip(begin, end, strict=True))
        ids, segments = joined(list(zip(first, second, strict=True)), most=self.span_len + SPECIAL_TOKENS)
        return SegmentPairs(ids, segments, random.astype(np.int64))

    def _cuts(self, chosen: Ints, draw: NDArray[np.float64]) -> Ints:
        """The first token of B in each span."""
        start, stop = self.bounds[chosen].T
        low, high = np.searchsorted(self.lines, start, "right"), np.searchsorted(self.lines, stop, "left")
        line = self.lines[np.minimum(low + (draw * (high - low)).astype(np.int64), len(self.lines) - 1)]
        return np.where(high > low, line, start + 1 + (draw * (stop - start - 1)).astype(np.int64))

    def _of_another_document(self, chosen: Ints, draw: NDArray[np.float64]) -> Ints:
        """A span of another document for each, all alike likely."""
        first = np.searchsorted(self.document, self.document[chosen], "left")
        own = np.searchsorted(self.document, self.document[chosen], "right") - first
        found = (draw * (len(self) - own)).astype(np.int64)
        return found + own * (found >= first)


def joined(pairs: Sequence[tuple[Tokens, Tokens]], *, most: int) -> tuple[Ints, Ints]:
    """Return ids and segments `[B, W]` of rows ``[CLS] A [SEP] B [SEP]``; W is a multiple of
    ``WIDTH_STEP``, or ``most``.
    """
    longest = max(len(a) + len(b) for a, b in pairs) + SPECIAL_TOKENS
    ids = np.full((len(pairs), min(most, -(-longest // WIDTH_STEP) * WIDTH_STEP)), PAD, np.int64)
    segments = np.zeros_like(ids)
    for row, segment, (a, b) in zip(ids, segments, pairs, strict=True):
        end = len(a) + len(b) + SPECIAL_TOKENS
        row[:end] = np.concatenate([[BOS], a, [EOS], b, [EOS]])
        segment[len(a) + 2 : end] = 1
    return ids, segments
