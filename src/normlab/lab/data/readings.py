"""How a text becomes one stream of tokens: line by line, verbatim, or as shards that already hold tokens."""

from __future__ import annotations

import hashlib
import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final, cast, final

import numpy as np
from numpy.typing import NDArray

from normlab.errors import UserError
from normlab.lab.config import DataConfig
from normlab.lab.data.corpus import Encoded, id_type
from normlab.lab.data.files import AnyText, Folder, Parquet, Shards, ShardTokens
from normlab.lab.data.foreign import ForeignTokenizer
from normlab.lab.data.ragged import TOKENS_AT_A_TIME, ArrayWriter, Ragged, TokenArray
from normlab.lab.data.sources import Text
from normlab.lab.data.text import (
    Overlap,
    Survey,
    Unit,
    count_words,
    document_sizes,
    lines_as_units,
    parts,
    raw,
    survey,
)
from normlab.lab.data.tokenizer import EOS, Tokenizer
from normlab.lab.data.vocabulary import LEARNED, is_verbatim, vocabulary

PIECE_CHARACTERS: Final = 2**16
"""Documents are cut into pieces of at most this many characters, which a tokenizer sees one by one."""
_PIECES_AT_A_TIME: Final = 32
_BREAK: Final = b"\xff"
"""Separates documents in a digest; it never occurs in UTF-8."""


class TextReading(ABC):
    """A way to read texts, the same for train, dev and test."""

    key: str
    """Names the layout of the prepared folder."""

    @abstractmethod
    def content(self, text: AnyText) -> Iterable[str]:
        """Return the text from which a tokenizer learns."""

    @abstractmethod
    def survey(self, text: AnyText, name: str) -> Survey:
        """Read a text once and return facts about it."""

    @abstractmethod
    def encode(self, path: Path, tokenizer: Tokenizer, text: AnyText) -> Encoded:
        """Write the tokens of a text, unless they already exist."""

    @abstractmethod
    def documents(self, text: AnyText, tokens: TokenArray, tokenizer: Tokenizer) -> NDArray[np.int64]:
        """Return predicted tokens, words and bytes of each document, `[documents, 3]`."""

    def tokens(self, path: Path, text: AnyText) -> TokenArray:
        """Return the tokens of an encoded text."""
        return np.load(path, mmap_mode="r", allow_pickle=False)

    def overlap(self, texts: Mapping[str, AnyText]) -> dict[str, float]:
        """Return the shares of lines that also occur in another text, see ``text.Overlap``."""
        by_line = cast("Mapping[str, Iterable[str]]", texts)
        overlap = Overlap(by_line["dev"], by_line["test"])
        for part in parts(by_line["train"]):
            overlap.see(part)
        return overlap.shares()


def reading_of(config: DataConfig, texts: Iterable[AnyText]) -> TextReading:
    """Return how a language model reads these texts. Raises UserError if only some of them are shards, and
    for shards without a tokenizer made by others.
    """
    shards = [isinstance(text, Shards) for text in texts]
    if not any(shards):
        return _Verbatim() if is_verbatim(config) else ByLine()
    if not all(shards):
        raise UserError("all of train, dev and test must be token shards, or none; name the shards of each")
    if config.tokenizer in LEARNED:
        raise UserError(
            f"--tokenizer is {config.tokenizer}, and shards hold the tokens of another one; name its file, a "
            f"tokenizer.json or .tiktoken, with --tokenizer"
        )
    tokenizer = vocabulary(config, (), ())
    if not isinstance(tokenizer, ForeignTokenizer):
        raise UserError(
            f"{config.tokenizer} is neither a tokenizer.json made by others nor a .tiktoken file; name the "
            "tokenizer that the shards were written with"
        )
    return _FromShards(tokenizer)


@final
class ByLine(TextReading):
    """Line by line, each ending with an EOS; the tokenizer may lose white space and rare characters."""

    key = "plain, tokens of documents"

    def content(self, text: AnyText) -> Iterable[str]:
        return _readable(text)

    def survey(self, text: AnyText, name: str) -> Survey:
        return survey(_readable(text), name)

    def encode(self, path: Path, tokenizer: Tokenizer, text: AnyText) -> Encoded:
        """Write an EOS, then each line with an EOS at its end; dev and test are decoded and compared."""
        text = _readable(text)
        encoded, sha = Encoded(tokenizer.vocab_size), hashlib.sha256()
        dtype = id_type(tokenizer.vocab_size)
        lines_as_read = _lines_as_read(text)
        with ArrayWriter.open(path, dtype) as file:
            file.append(np.array([EOS], dtype))
            for part in parts(text):
                content = raw(part)
                sha.update(content)
                encoded.bytes += len(content)
                encoded.words += sum(len(line.split()) + 1 for line in part)
                ids = tokenizer.encode(part)
                ragged = Ragged.of(ids, dtype)
                stream = np.insert(ragged.tokens, ragged.offsets[1:], EOS)
                encoded.counts += np.bincount(stream, minlength=len(encoded.counts))
                file.append(stream)
                if not path.name.startswith("train"):
                    expected = list(itertools.islice(lines_as_read, len(part)))
                    expected += [""] * (len(part) - len(expected))  # rows have no empty last line
                    encoded.compare(expected, [f"{line}\n" for line in tokenizer.decode(ids)])
        encoded.digest = sha.digest()
        return encoded

    def documents(self, text: AnyText, tokens: TokenArray, tokenizer: Tokenizer) -> NDArray[np.int64]:
        sizes = document_sizes(lines_as_units(_readable(text)))
        ends = np.flatnonzero(np.asarray(tokens) == EOS)
        edges = ends[np.concatenate([[0], np.cumsum(sizes[:, 0])])]
        return np.column_stack([np.diff(edges), sizes[:, 1:]])


@final
class _Verbatim(TextReading):
    """Byte for byte, with an EOS before each document."""

    key = "verbatim"

    def content(self, text: AnyText) -> Iterable[str]:
        return (part for part, _ in pieces(_readable(text).units()))

    def survey(self, text: AnyText, name: str) -> Survey:
        sha, count, blank = hashlib.sha256(), 0, True
        for number, (piece, begins) in enumerate(pieces(_readable(text).units())):
            if begins and number:
                sha.update(_BREAK)
            sha.update(piece.encode())
            count += piece.count("\n")
            blank = blank and not piece.strip()
        return Survey(count, blank, sha.digest())

    def encode(self, path: Path, tokenizer: Tokenizer, text: AnyText) -> Encoded:
        """Write each document after an EOS."""
        encoded, sha = Encoded(tokenizer.vocab_size), hashlib.sha256()
        dtype = id_type(tokenizer.vocab_size)
        last_character = " "
        with ArrayWriter.open(path, dtype) as file:
            rest = pieces(_readable(text).units())
            while part := list(itertools.islice(rest, _PIECES_AT_A_TIME)):
                texts = [piece for piece, _ in part]
                begins = np.array([begins for _, begins in part])
                ids = tokenizer.encode(texts)
                ragged = Ragged.of(ids, dtype)
                stream = np.insert(ragged.tokens, ragged.offsets[:-1][begins], EOS)
                for piece, first in part:
                    content = piece.encode()
                    if first and encoded.bytes:
                        sha.update(_BREAK)
                    sha.update(content)
                    encoded.bytes += len(content)
                    # A word across two pieces was counted with the first of them.
                    continues = not first and not last_character.isspace() and not piece[0].isspace()
                    encoded.words += count_words(piece) - continues
                    last_character = piece[-1]
                encoded.compare(texts, tokenizer.decode(ids))
                encoded.counts += np.bincount(stream, minlength=tokenizer.vocab_size)
                file.append(stream)
        encoded.counts[EOS] -= 1  # the first is not predicted
        encoded.digest = sha.digest()
        return encoded

    def documents(self, text: AnyText, tokens: TokenArray, tokenizer: Tokenizer) -> NDArray[np.int64]:
        return _sizes_by_byte(_readable(text).units(), tokens, tokenizer)


@final
class _FromShards(TextReading):
    """Tokens that others wrote, which stay where they are."""

    key = "shards"

    def __init__(self, tokenizer: ForeignTokenizer) -> None:
        self._tokenizer, self._ours = tokenizer, tokenizer.ours()

    def content(self, text: AnyText) -> Iterable[str]:
        return ()

    def survey(self, text: AnyText, name: str) -> Survey:
        tokens = self._tokens_of(text)
        return Survey(0, len(tokens) < 2, tokens.digest())

    def encode(self, path: Path, tokenizer: Tokenizer, text: AnyText) -> Encoded:
        encoded, tokens = Encoded(tokenizer.vocab_size), self._tokens_of(text)
        for start in range(1, len(tokens), TOKENS_AT_A_TIME):
            part = tokens[start : start + TOKENS_AT_A_TIME]
            encoded.counts += np.bincount(part, minlength=tokenizer.vocab_size)
        if tokenizer.verbatim:
            encoded.bytes = int(encoded.counts @ tokenizer.byte_counts())
        if not path.name.startswith("train"):
            encoded.words = sum(count_words(part) for part, _ in self._units(tokens))
            encoded.lost = "" if tokenizer.verbatim else _LOST.format(tokenizer.kind)
        encoded.digest = tokens.digest()
        return encoded

    def documents(self, text: AnyText, tokens: TokenArray, tokenizer: Tokenizer) -> NDArray[np.int64]:
        if tokenizer.verbatim:
            return _sizes_by_byte(self._units(tokens), tokens, tokenizer)
        sizes: list[tuple[int, int, int]] = []
        for ids in _documents(tokens):
            if ids:
                (decoded,) = self._tokenizer.decode([ids])
                sizes.append((len(ids), count_words(decoded), len(decoded.encode())))
        return np.array(sizes, np.int64)

    def tokens(self, path: Path, text: AnyText) -> ShardTokens:
        return self._tokens_of(text)

    def overlap(self, texts: Mapping[str, AnyText]) -> dict[str, float]:
        return {}

    def _tokens_of(self, text: AnyText) -> ShardTokens:
        return ShardTokens(cast("Shards", text).files, self._ours)

    def _units(self, tokens: TokenArray) -> Iterator[Unit]:
        return ((self._tokenizer.decode([ids])[0], True) for ids in _documents(tokens))


_LOST: Final = "shards do not show what {} changed in it, so name the text instead of the shards"


def _documents(tokens: TokenArray) -> Iterator[list[int]]:
    """Yield the tokens of each document of a stream, with the EOS that ends it."""
    held: list[int] = []
    for start in range(1, len(tokens), TOKENS_AT_A_TIME):
        part = np.asarray(tokens[start : start + TOKENS_AT_A_TIME])
        *ended, last = np.split(part, np.flatnonzero(part == EOS) + 1)
        for document in ended:
            yield [*held, *document.tolist()]
            held = []
        held += last.tolist()
    yield held


def _sizes_by_byte(units: Iterable[Unit], tokens: TokenArray, tokenizer: Tokenizer) -> NDArray[np.int64]:
    """Return predicted tokens, words and bytes of each document of a text and its stream, `[documents, 3]`,
    with a tokenizer that takes text verbatim.

    Documents are those of ``text.document_sizes``. A token belongs to the document that contains its first
    byte, and an EOS to the one that it ends.
    """
    _, words, size = document_sizes(lines(units)).T
    begins = np.cumsum(size) - size
    held = np.zeros((len(begins), 2), np.int64)  # tokens and bytes of each document
    bytes_of_entry = tokenizer.byte_counts()
    place = 0  # in bytes
    for start in range(1, len(tokens), TOKENS_AT_A_TIME):
        part = np.asarray(tokens[start : start + TOKENS_AT_A_TIME])
        lengths = bytes_of_entry[part]
        ends = place + np.cumsum(lengths)
        containing = np.searchsorted(begins, ends - lengths, side="right") - 1
        # An EOS has no bytes, so its place is where the next document begins; before the first there is none.
        owner = np.maximum(containing - (part == EOS), 0)
        held[:, 0] += np.bincount(owner, minlength=len(held))
        np.add.at(held[:, 1], owner, lengths)
        place = int(ends[-1])
    sizes = np.stack([held[:, 0], words, held[:, 1]], axis=1)
    # A document without a token of its own is counted with the one before it.
    return np.add.reduceat(sizes, np.flatnonzero(sizes[:, 0]), axis=0)


def pieces(units: Iterable[Unit]) -> Iterator[Unit]:
    """Yield a text in non-empty pieces of bounded size; no piece has parts of two documents.

    A document is cut before white space that follows a letter or a digit. Every common tokenizer also ends a
    word there, so the tokens are those of the whole document.
    """
    waiting: list[str] = []
    size, first = 0, True
    for text, begins in units:
        if begins:
            if size:
                yield "".join(waiting), first
            waiting = []
            size, first = 0, True
        waiting.append(text)
        size += len(text)
        if size < PIECE_CHARACTERS:
            continue
        document, start = "".join(waiting), 0
        while len(document) - start >= PIECE_CHARACTERS:
            stop = _cut(document, start, start + PIECE_CHARACTERS)
            yield document[start:stop], first
            start, first = stop, False
        waiting = [document[start:]]
        size = len(waiting[0])
    if size:
        yield "".join(waiting), first


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
        *ended, rest = text.split("\n")
        for line in ended:
            yield f"{line}\n", begins
            begins = False
        if rest:
            yield rest, begins


def _lines_as_read(text: Text | Folder | Parquet) -> Iterator[str]:
    """Yield the lines of a text with their ends; the end of a row also ends a line."""
    for line, _ in lines(text.units()):
        yield f"{line}\n" if text.in_rows and not line.endswith("\n") else line


def _readable(text: AnyText) -> Text | Folder | Parquet:
    if isinstance(text, Shards):
        raise UserError(f"{text.name} holds tokens, and this task reads text; name files of text")
    return text
