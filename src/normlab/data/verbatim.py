"""Verbatim text, for tokenizers that take it: its pieces of bounded size, and its tokens."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from normlab.data.corpus import Encoded, id_type
from normlab.data.ragged import TOKENS_AT_A_TIME, ArrayWriter, Ragged, TokenArray
from normlab.data.text import Survey, Unit, count_words, document_sizes
from normlab.data.tokenizer import EOS, Tokenizer

PIECE_CHARACTERS: Final = 2**16
"""Documents are cut into pieces of at most this many characters, which a tokenizer sees one by one."""
_PIECES_AT_A_TIME: Final = 32
_BREAK: Final = b"\xff"
"""Separates documents in a digest; it never occurs in UTF-8."""


def pieces(units: Iterable[Unit]) -> Iterator[Unit]:
    """Yield a text in non-empty pieces of bounded size; no piece has parts of two documents.

    A document is cut before white space that follows a letter or a digit. Every common tokenizer also ends a
    word there, so the tokens are those of the whole document.
    """
    parts: list[str] = []
    size, first = 0, True
    for text, begins in units:
        if begins:
            if size:
                yield "".join(parts), first
            parts.clear()
            size, first = 0, True
        parts.append(text)
        size += len(text)
        if size >= PIECE_CHARACTERS:
            held, start = "".join(parts), 0
            while len(held) - start >= PIECE_CHARACTERS:
                stop = _cut(held, start, start + PIECE_CHARACTERS)
                yield held[start:stop], first
                start, first = stop, False
            parts = [held[start:]]
            size = len(parts[0])
    if size:
        yield "".join(parts), first


def _cut(text: str, start: int, stop: int) -> int:
    """Return where to cut ``text[start:stop]``: at the last place that ``pieces`` wants, else after its last
    line, else at its end.
    """
    for place in range(stop - 1, start, -1):
        if text[place] in " \n\r\t" and text[place - 1].isalnum():
            return place
    return text.rfind("\n", start, stop) + 1 or stop


def lines(units: Iterable[Unit]) -> Iterator[Unit]:
    """Yield the lines of a text with their ends, and whether a document begins with them."""
    for text, begins in units:
        *whole, rest = text.split("\n")
        for line in whole:
            yield f"{line}\n", begins
            begins = False
        if rest:
            yield rest, begins


def survey(units: Iterable[Unit]) -> Survey:
    """Read a text once, in constant memory, and return facts about it."""
    whole, count, blank = hashlib.sha256(), 0, True
    for number, (text, begins) in enumerate(pieces(units)):
        whole.update(_BREAK + text.encode() if begins and number else text.encode())
        count += text.count("\n")
        blank = blank and not text.strip()
    return Survey(count, blank, whole.digest())


def encode(path: Path, tokenizer: Tokenizer, units: Iterable[Unit]) -> Encoded:
    """Write a text's stream: each document after an EOS."""
    encoded = Encoded(tokenizer.vocab_size)
    whole, dtype = hashlib.sha256(), id_type(tokenizer.vocab_size)
    before = " "
    with ArrayWriter.open(path, dtype) as file:
        rest = pieces(units)
        while part := list(islice(rest, _PIECES_AT_A_TIME)):
            texts = [text for text, _ in part]
            begins = np.array([begins for _, begins in part])
            ids = tokenizer.encode(texts)
            ragged = Ragged.of(ids, dtype)
            stream = np.insert(ragged.tokens, ragged.offsets[:-1][begins], EOS)
            for text, first in part:
                content = text.encode()
                whole.update(_BREAK + content if first and encoded.bytes else content)
                encoded.bytes += len(content)
                cut_word = not (first or before.isspace() or text[0].isspace())
                encoded.words += count_words(text) - cut_word
                before = text[-1]
            encoded.compare(texts, tokenizer.decode(ids))
            encoded.counts += np.bincount(stream, minlength=tokenizer.vocab_size)
            file.append(stream)
    encoded.counts[EOS] -= 1  # the first is not predicted
    encoded.digest = whole.digest()
    return encoded


def documents(units: Iterable[Unit], tokens: TokenArray, tokenizer: Tokenizer) -> NDArray[np.int64]:
    """Return predicted tokens, words and bytes of each document of a text and its stream, `[documents, 3]`.

    Documents are those of ``text.document_sizes``. A token belongs to the document that contains its first
    byte, and an EOS to the one that it ends.
    """
    _, words, size = document_sizes(lines(units)).T
    begins = np.cumsum(size) - size
    held = np.zeros((len(begins), 2), np.int64)
    lengths, place = tokenizer.byte_counts(), 0
    for start in range(1, len(tokens), TOKENS_AT_A_TIME):
        part = np.asarray(tokens[start : start + TOKENS_AT_A_TIME])
        length = lengths[part]
        ends = place + np.cumsum(length)
        owner = np.searchsorted(begins, ends - length, side="right") - 1 - (part == EOS)
        owner = np.maximum(owner, 0)
        held[:, 0] += np.bincount(owner, minlength=len(held))
        np.add.at(held[:, 1], owner, length)
        place = int(ends[-1])
    sizes = np.stack([held[:, 0], words, held[:, 1]], axis=1)
    return np.add.reduceat(sizes, np.flatnonzero(sizes[:, 0]), axis=0)
