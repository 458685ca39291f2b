"""Text, read line by line as often as needed in constant memory: files, parts of them, facts about them."""

from __future__ import annotations

import gzip
import hashlib
import lzma
import os
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, TypeAlias, TypeVar, final

import numpy as np
from numpy.typing import NDArray

from normlab.base.io import flag_name
from normlab.base.units import count
from normlab.errors import UserError

LINES_AT_A_TIME = 8192
"""The most lines in a part of a text, few enough that a part's memory does not matter."""
CHARACTERS_AT_A_TIME = 2**21
"""The most characters in a part, for texts with long lines; a line is never cut."""
LONGEST_WORD = 2**15
"""The most characters without white space between them: tokenizers take minutes over many more."""
FEWEST_DOCUMENTS = 20
"""Blank lines separate documents only if this gives at least so many."""
_HEAD = 8000
"""Bytes at a file's beginning among which a zero byte tells data from text, as many as git reads."""
_OPENERS = {".gz": gzip.open, ".xz": lzma.open}
_DATA_FOLDER = re.compile(r"\$(NORMLAB_DATA\b|\{NORMLAB_DATA\})")

T = TypeVar("T")
Unit: TypeAlias = tuple[str, bool]
"""A part of a text, unchanged, and whether a document begins with it."""


@dataclass(frozen=True)
class Pairs:
    """Sentences and their translations, line by line; both sides have the same length."""

    source: list[str]
    target: list[str]

    def __len__(self) -> int:
        return len(self.source)


@dataclass(frozen=True)
class TextFile:
    r"""The lines of a file without their ends; only one of them is in memory at a time.

    Only ``\n`` ends a line (U+2028, form feeds and the like stay inside one); a ``\r`` before it and a
    byte-order mark at the start of the file are dropped. Iteration raises ``FileNotFoundError``, or
    ``UserError`` for a broken archive and for bytes that are not UTF-8, naming file and line.
    """

    path: str | Path
    in_rows: ClassVar[bool] = False
    """Whether each unit is a row, a document whose end is not a character of the text."""

    @property
    def name(self) -> str:
        return str(self.path)

    def __iter__(self) -> Iterator[str]:
        for number, content in enumerate(self._raw(), 1):
            line = content.removeprefix("\ufeff") if number == 1 else content
            if line:  # a byte-order mark alone is no line
                yield line.removesuffix("\n").rstrip("\r")

    def units(self) -> Iterator[Unit]:
        """Yield the file byte for byte, line by line: one document."""
        return ((line, number == 0) for number, line in enumerate(self._raw()))

    def _raw(self) -> Iterator[str]:
        path, number = located(self.path), 0
        opener = _OPENERS.get(path.suffix, open)
        try:
            with opener(path, "rb") as stream:
                for content in stream:
                    number += 1
                    yield content.decode()
        except UnicodeDecodeError as error:
            with opener(path, "rb") as stream:
                if b"\0" in stream.read(_HEAD):
                    raise UserError(
                        f"{path} is not a UTF-8 text: it has zero bytes, like a picture or UTF-16; "
                        f"name text files alone, as in 'texts/*.txt', or convert it"
                    ) from error
            raise UserError(
                f"{path}, line {number}: byte 0x{error.object[error.start]:02x} is not UTF-8; convert the "
                f"file, for example with iconv -f latin1 -t utf-8"
            ) from error
        except FileNotFoundError:
            raise FileNotFoundError(
                f"there is no text file {path}; pass the path of an existing one"
            ) from None
        except IsADirectoryError:
            raise UserError(f"{path} is a folder; pass a text file, plain, .gz or .xz") from None
        except (gzip.BadGzipFile, lzma.LZMAError, zlib.error, EOFError) as error:
            raise UserError(f"{path} cannot be unpacked as {path.suffix} ({error}); pack it again") from error


@dataclass(frozen=True)
class LineList:
    r"""Lines in memory, a text of one document in which each line ends with ``\n``."""

    name: str
    lines: Sequence[str]
    in_rows: ClassVar[bool] = False

    def __iter__(self) -> Iterator[str]:
        return iter(self.lines)

    def units(self) -> Iterator[Unit]:
        return lines_as_units(self.lines)


def lines_as_units(lines: Iterable[str]) -> Iterator[Unit]:
    """Yield lines, each with its end, as one document."""
    return ((f"{line}\n", number == 0) for number, line in enumerate(lines))


def filled_in(path: str | Path) -> str:
    """Fill in the environment variables of a path.

    Raises FileNotFoundError if the path has ``$NORMLAB_DATA`` and that is not set.
    """
    if _DATA_FOLDER.search(str(path)) and not os.environ.get("NORMLAB_DATA"):
        raise FileNotFoundError(
            f"{path} is in the folder of local data sets, and NORMLAB_DATA is not set; "
            f"type: export NORMLAB_DATA=/folder/of/data/sets"
        )
    return os.path.expandvars(path)


def located(path: str | Path) -> Path:
    """Return the file that a path refers to: variables are ``filled_in``, and ``x`` is ``x.gz`` or ``x.xz``
    if only that exists. Raises what ``filled_in`` raises.
    """
    file = Path(filled_in(path))
    if file.exists():
        return file
    packed = [file.with_name(file.name + ending) for ending in _OPENERS]
    return next((archive for archive in packed if archive.exists()), file)


def read_lines(path: str | Path) -> list[str]:
    """Read all lines of a ``TextFile``, which defines lines and errors."""
    return list(TextFile(path))


@dataclass(frozen=True)
class Survey:
    """The number of lines of a text, whether all of it is white space, and the SHA-256 of its ``raw``."""

    lines: int
    blank: bool
    digest: bytes


def survey(lines: Iterable[str], name: str) -> Survey:
    """Read a text once, in constant memory, and return facts about it. Raises as ``require_words`` does."""
    sha, count, blank = hashlib.sha256(), 0, True
    for part in parts(lines):
        require_words(part, name, first=count + 1)
        sha.update(raw(part))
        count += len(part)
        blank = blank and not any(line.strip() for line in part)
    return Survey(count, blank, sha.digest())


def raw(part: Sequence[str]) -> bytes:
    r"""Encode lines as UTF-8, each with ``\n`` at its end."""
    return "\n".join([*part, ""]).encode()


def parts(lines: Iterable[str]) -> Iterator[list[str]]:
    """Yield the lines in lists of bounded size; no list is empty."""
    return _parts(lines, len)


def paired_parts(source: Iterable[str], target: Iterable[str]) -> Iterator[tuple[list[str], list[str]]]:
    """Yield both sides of a parallel text in lists of bounded size, line n with line n.

    The iteration ends with the shorter side.
    """
    both = zip(source, target, strict=False)
    for part in _parts(both, lambda pair: len(pair[0]) + len(pair[1])):
        yield [pair[0] for pair in part], [pair[1] for pair in part]


def _parts(items: Iterable[T], characters: Callable[[T], int]) -> Iterator[list[T]]:
    part: list[T] = []
    size = 0
    for item in items:
        part.append(item)
        size += characters(item)
        if len(part) == LINES_AT_A_TIME or size >= CHARACTERS_AT_A_TIME:
            yield part
            part = list[T]()
            size = 0
    if part:
        yield part


def require_words(lines: Iterable[str], name: str, *, first: int = 1) -> None:
    """Raise UserError for a word of more than ``LONGEST_WORD`` characters; ``first`` numbers the lines."""
    for number, line in enumerate(lines, first):
        if len(line) <= LONGEST_WORD:  # as almost every line, which need not be split
            continue
        longest = max(map(len, line.split()), default=0)
        if longest > LONGEST_WORD:
            raise UserError(
                f"{name}, line {number:,} has a word of {longest:,} characters, and at most {LONGEST_WORD:,} "
                "are allowed; put spaces into it, or leave the line out"
            )


def require_texts(given: Sequence[str], needed: Sequence[str], rule: str) -> None:
    """Raise UserError if a needed field of the configuration is not given; ``rule`` says which are needed."""
    missing = [name for name in needed if name not in given]
    if missing:
        came, absent = ", ".join(map(flag_name, given)), ", ".join(map(flag_name, missing))
        verb = "was" if len(given) == 1 else "were"
        raise UserError(f"only {came} {verb} given, but {rule}; also give {absent}")


def require_parallel(names: tuple[str, str], counts: tuple[int, int]) -> None:
    """Raise UserError if a side of a parallel text is empty or the numbers of lines differ."""
    for name, lines in zip(names, counts, strict=True):
        if not lines:
            raise UserError(f"{name} is empty; pass a file with one sentence a line")
    if counts[0] != counts[1]:
        raise UserError(
            f"{names[0]} has {count(counts[0], 'line')} but {names[1]} has {counts[1]}; line n "
            "of one must be the translation of line n of the other"
        )


def require_unchanged(name: str, before: bytes, now: bytes) -> None:
    """Raise UserError if the digest of a text is no longer the one of its first reading."""
    if before != now:
        raise UserError(
            f"{name} changed while it was prepared; type the command again when nothing writes to it any more"
        )


@final
class Overlap:
    """Counts the sentences of dev and test that also occur in training, which is read part by part, and those
    of test in dev. Empty ones do not count.
    """

    def __init__(self, dev: Iterable[str], test: Iterable[str]) -> None:
        self._wanted: dict[str, Counter[str]] = {}
        """How often each sentence occurs in dev and in test."""
        self._seen: dict[str, set[str]] = {"dev": set(), "test": set()}
        """Those that also occur in the training text so far."""
        for name, text in (("dev", dev), ("test", test)):
            self._wanted[name] = Counter(filter(None, map(_words_of, text)))

    def see(self, part: Iterable[str]) -> None:
        """Read a part of the training text."""
        sentences = set(map(_words_of, part))
        for name, wanted in self._wanted.items():
            self._seen[name] |= wanted.keys() & sentences

    def shares(self) -> dict[str, float]:
        """Return the share of the sentences, 0 to 1, by what they are and where they occur."""

        def share(name: str, seen: Iterable[str]) -> float:
            wanted = self._wanted[name]
            return sum(wanted[sentence] for sentence in seen) / max(1, wanted.total())

        in_training = {f"{name} in training": share(name, seen) for name, seen in self._seen.items()}
        return {**in_training, "test in dev": share("test", self._wanted["dev"])}


def describe_shares(shares: Mapping[str, float]) -> str:
    """Say ``Overlap.shares`` in words: ``1.5% of test in training, 0.0% of test in dev``."""
    return ", ".join(f"{100 * share:.1f}% of {name}" for name, share in shares.items())


def _words_of(sentence: str) -> str:
    """Return a sentence with single spaces, so that white space alone makes no difference."""
    return " ".join(sentence.split())


def document_sizes(lines: Iterable[Unit]) -> NDArray[np.int64]:
    """Return lines, words and bytes of each document, `[documents, 3]`; they add up to those of the text.

    Documents are those of the text itself; if these are fewer than ``FEWEST_DOCUMENTS``, what blank lines
    separate; and if those are still too few, the lines. Blank lines belong to the document before them,
    leading ones to the first. The end of a line counts as a word. ``lines`` include their ends, if they have
    any, and say which of them begin a document of the text.
    """
    sizes: list[tuple[int, int, int]] = []
    blank: list[bool] = []
    begins_document: list[bool] = []
    for line, begins in lines:
        sizes.append((1, count_words(line), len(line.encode())))
        blank.append(not line.strip())
        begins_document.append(begins)
    starts = np.flatnonzero(begins_document)
    if len(starts) < FEWEST_DOCUMENTS:
        starts = document_starts(np.array(blank))
    starts[:1] = 0
    return np.add.reduceat(np.array(sizes, np.int64), starts, axis=0)


def count_words(text: str) -> int:
    """Return the number of words between white space; the end of a line counts as one."""
    return len(text.split()) + text.count("\n")


def document_starts(blank: NDArray[np.bool_]) -> NDArray[np.intp]:
    """Return the first line with words of each document, given which lines are blank."""
    after_blank = np.concatenate([[True], blank[:-1]])
    starts = np.flatnonzero(~blank & after_blank)
    if len(starts) >= FEWEST_DOCUMENTS:
        return starts
    return np.flatnonzero(~blank)
