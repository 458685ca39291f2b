"""BERT's inputs: spans of a text as pairs of segments, pairs as rows of tokens, and masks over them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from normlab.base.model_config import derive
from normlab.errors import UserError
from normlab.lab.data.draws import permutation, uniform
from normlab.lab.data.ragged import Ints, TokenArray
from normlab.lab.data.text import document_starts
from normlab.lab.data.tokenizer import BOS, EOS, PAD, Tokenizer

SPECIAL_TOKENS = 3
"""[CLS], which is BOS, and two [SEP], which are EOS, in each row."""
WIDTH_STEP = 32
"""Rows are padded to a multiple of this, so that batches have few shapes."""

Tokens: TypeAlias = Sequence[int] | Ints


class Shuffled:
    """Endless micro-batches of ``rows`` of ``count`` examples; in each epoch every example occurs once.

    The order depends only on the seed and the epoch. A micro-batch may hold the end of one epoch and the
    beginning of the next, so that all have the same size.
    """

    def __init__(self, count: int, *, rows: int, seed: int) -> None:
        self._count, self._rows = count, rows
        # Two epochs, since a micro-batch may have examples of both.
        self._order = lru_cache(2)(lambda epoch: permutation(count, derive(seed, "shuffle", epoch)))

    def at(self, index: int) -> Ints:
        """Return the numbers of the examples of a micro-batch, `[rows]`."""
        examples = []
        for place in range(index * self._rows, (index + 1) * self._rows):
            epoch, place_in_epoch = divmod(place, self._count)
            examples.append(self._order(epoch)[place_in_epoch])
        return np.array(examples, np.int64)


@dataclass(frozen=True)
class Spans:
    """A text cut into spans of at most ``span_len`` tokens, each within one document.

    Each span is cut into A and the following B at the beginning of one of its lines, or anywhere if it is
    part of a single line. Ends of lines are left out.
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
    def of(cls, stream: TokenArray, *, span_len: int) -> Spans:
        """Cut a ``Stream`` of tokens into the documents of ``text.document_sizes`` and their spans; a
        remainder of one token is left out.

        Raises UserError for a text of one document, which has no other to draw a random segment from.
        """
        tokens = np.asarray(stream)
        line_sizes = np.diff(np.flatnonzero(tokens == EOS)) - 1
        line_starts = np.concatenate([[0], np.cumsum(line_sizes)])
        edges = np.append(line_starts[document_starts(line_sizes == 0)], line_starts[-1])
        if len(edges) < 3:
            raise UserError(
                "next-sentence prediction needs a text of several documents, and this is one; separate "
                "documents by blank lines"
            )
        spans_in = -(-np.diff(edges) // span_len)
        document = np.repeat(np.arange(len(spans_in)), spans_in)
        first_span = np.cumsum(spans_in) - spans_in
        number_in_document = np.arange(len(document)) - first_span[document]
        starts = edges[document] + number_in_document * span_len
        bounds = np.stack([starts, np.minimum(starts + span_len, edges[document + 1])], axis=1)
        divisible = np.diff(bounds)[:, 0] > 1  # into A and B
        text, lines = tokens[tokens != EOS], line_starts[:-1][line_sizes > 0]
        return cls(text, lines, bounds[divisible], document[divisible], edges[1:], span_len)

    def __len__(self) -> int:
        return len(self.bounds)

    def pairs(self, chosen: Ints, seed: int) -> tuple[Ints, Ints, Ints]:
        """Return A of the chosen spans `[B]` and, with a probability of one half each, either its B or as
        many tokens after the cut of a span in another document.

        Ids and segments `[B, W]` are those of ``joined``; a third array `[B]` is 1 if B comes from another
        document, 0 if it follows A. Devlin et al. 2019, Section 3.1 (arXiv 1810.04805). The draws depend only
        on the seed.
        """
        place, coin, other_span, place_there = uniform(seed, 4, len(chosen))
        cut = self._cuts(chosen, place)
        random = coin >= 0.5
        others = self._of_another_document(chosen, other_span)
        lengths = self.bounds[chosen, 1] - cut
        begin = np.where(random, self._cuts(others, place_there), cut)
        source = np.where(random, others, chosen)
        end = np.minimum(begin + lengths, self.document_ends[self.document[source]])
        segments_ab = []
        for start, stop, start_b, stop_b in zip(self.bounds[chosen, 0], cut, begin, end, strict=True):
            segments_ab.append((self.text[start:stop], self.text[start_b:stop_b]))
        ids, segments = joined(segments_ab, most=self.span_len + SPECIAL_TOKENS)
        return ids, segments, random.astype(np.int64)

    def _cuts(self, chosen: Ints, draw: NDArray[np.float64]) -> Ints:
        """Return the first token of B in each span: that of a line that begins within it or, if none does,
        any but the span's own first.
        """
        start, stop = self.bounds[chosen].T
        low = np.searchsorted(self.lines, start, "right")
        high = np.searchsorted(self.lines, stop, "left")
        number = low + (draw * (high - low)).astype(np.int64)
        line = self.lines[np.minimum(number, len(self.lines) - 1)]  # unused where none begins
        anywhere = start + 1 + (draw * (stop - start - 1)).astype(np.int64)
        return np.where(high > low, line, anywhere)

    def _of_another_document(self, chosen: Ints, draw: NDArray[np.float64]) -> Ints:
        """Return a span of another document for each, all equally likely."""
        first = np.searchsorted(self.document, self.document[chosen], "left")
        size = np.searchsorted(self.document, self.document[chosen], "right") - first
        # An index among the spans of other documents, which skips those of this one.
        index = (draw * (len(self) - size)).astype(np.int64)
        return index + size * (index >= first)


def joined(pairs: Sequence[tuple[Tokens, Tokens]], *, most: int) -> tuple[Ints, Ints]:
    """Return ids and segments `[B, W]` of rows ``[CLS] A [SEP] B [SEP]``, padded on the right; W is a
    multiple of ``WIDTH_STEP``, or ``most``. Segments are 1 in B and the [SEP] after it, else 0.
    """
    longest = max(len(a) + len(b) for a, b in pairs) + SPECIAL_TOKENS
    width = min(most, -(-longest // WIDTH_STEP) * WIDTH_STEP)
    ids = np.full((len(pairs), width), PAD, np.int64)
    segments = np.zeros_like(ids)
    for row, segment, (a, b) in zip(ids, segments, pairs, strict=True):
        end = len(a) + len(b) + SPECIAL_TOKENS
        row[:end] = np.concatenate([[BOS], a, [EOS], b, [EOS]])
        segment[len(a) + 2 : end] = 1
    return ids, segments


SHARE: Final = 0.15
"""The share of the tokens that are predicted."""
MASKED: Final = 0.8
"""The share of these that the mask replaces in training. Random vocabulary entries replace half of the
others, and the rest stays as it is.
"""


def predictions(tokens: int) -> int:
    """Return how many of ``tokens`` tokens are predicted: 15%, rounded, and at least one."""
    return max(1, round(SHARE * tokens))


def mask_tokens(
    ids: Ints, *, mask: int, begins: NDArray[np.bool_] | None, seed: int, masked: float = MASKED
) -> tuple[Ints, Ints, Ints]:
    """Choose ``predictions`` of the tokens of each row `[B, W]`, and replace the share ``masked`` of them by
    ``mask``, and half of the others by random vocabulary entries.

    Returns the rows with replacements `[B, W]`; the places that are predicted `[B, P]`, ascending, then 0;
    and the original tokens there `[B, P]`, then PAD. Devlin et al. 2019, Section 3.1 and Appendix A.1 (arXiv
    1810.04805). Special and unknown tokens are never chosen, nor used as replacements. With ``begins`` `[V]`,
    which marks the entries that begin a word, all tokens of a word are chosen or none, as in the authors'
    later code; a word that would exceed the number is skipped. ``mask`` is the number of vocabulary entries.
    The draws depend only on the seed.
    """
    order, kind, entry = uniform(seed, 3, *ids.shape)
    random_entries = EOS + 1 + (entry * (mask - EOS - 1)).astype(np.int64)
    unchanged_or_random = np.where(kind < (1 + masked) / 2, random_entries, ids)
    noisy = np.where(kind < masked, mask, unchanged_or_random)
    most = predictions(ids.shape[1] - SPECIAL_TOKENS)
    replaced = ids.copy()
    positions = np.zeros((len(ids), most), np.int64)
    targets = np.full_like(positions, PAD)
    for row, original in enumerate(ids):
        places = _chosen(original, order[row], begins)
        replaced[row, places] = noisy[row, places]
        positions[row, : len(places)] = places
        targets[row, : len(places)] = original[places]
    return replaced, positions, targets


def _chosen(ids: Ints, order: NDArray[np.float64], begins: NDArray[np.bool_] | None) -> list[int]:
    """Return the predicted places of a row, choosing words in the order of their first tokens' draws."""
    places = np.flatnonzero(ids > EOS)
    if not len(places):
        return []
    begins_word = np.ones(len(places), bool) if begins is None else begins[ids[places]].copy()
    begins_word[0] = True
    begins_word[1:] |= np.diff(places) > 1  # no word continues across a special token
    starts = np.flatnonzero(begins_word)
    ends = np.append(starts[1:], len(places))
    wanted = predictions(len(places))
    chosen: list[int] = []
    for word in np.argsort(order[places[starts]], kind="stable"):
        if len(chosen) + ends[word] - starts[word] <= wanted:
            chosen.extend(places[starts[word] : ends[word]].tolist())
        if len(chosen) == wanted:
            break
    return sorted(chosen)


def word_beginnings(tokenizer: Tokenizer) -> NDArray[np.bool_]:
    """Return which entries begin a word, `[V]`: those that decode with a space before them after another."""
    entries = range(EOS + 1, tokenizer.vocab_size)
    alone = tokenizer.decode([[entry] for entry in entries])
    # Decoding drops a space at the beginning of a text, so every entry is decoded after a visible one.
    first, text = next((entry, text) for entry, text in zip(entries, alone, strict=True) if text.strip())
    pairs = tokenizer.decode([[first, entry] for entry in range(tokenizer.vocab_size)])
    return np.array([line.removeprefix(text).startswith(" ") for line in pairs])
