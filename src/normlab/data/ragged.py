"""Ragged arrays of token ids: in memory, written to files part by part, and memory-mapped."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray

from normlab.data.arrays import ArrayWriter, Ints, Read, reader_of
from normlab.data.tokenizer import PAD

_PAIRS_AT_A_TIME = 2**18


@dataclass(frozen=True)
class Ragged:
    """Sentences of different lengths end to end: sentence i is ``tokens[offsets[i]:offsets[i + 1]]``."""

    tokens: Ints
    offsets: Ints

    @classmethod
    def of(cls, sentences: Sequence[Sequence[int]], dtype: type[np.integer] = np.int32) -> Ragged:
        offsets = np.cumsum([0, *map(len, sentences)], dtype=np.int64)
        return cls(np.fromiter(chain.from_iterable(sentences), dtype, int(offsets[-1])), offsets)

    @classmethod
    def mapped(cls, path: Path) -> Ragged:
        """Map the files of a ``RaggedWriter``; tokens stay on disk until they are read."""
        tokens, offsets = (np.load(file, mmap_mode="r", allow_pickle=False) for file in _files(path))
        return cls(tokens, offsets)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, row: int) -> list[int]:
        return self.tokens[self.offsets[row] : self.offsets[row + 1]].tolist()

    @property
    def lengths(self) -> Ints:
        return np.diff(self.offsets)

    def only(self, chosen: NDArray[np.bool_]) -> Ragged:
        """Return the sentences where ``chosen`` is true."""
        lengths = self.lengths
        offsets = np.append(0, lengths[chosen]).cumsum()
        return Ragged(self.tokens[np.repeat(chosen, lengths)], offsets)

    def shifted(self) -> Ragged:
        """Return the same sentences, each in the place of the next, the last in that of the first."""
        last = self.offsets[-2]
        tokens = np.concatenate([self.tokens[last:], self.tokens[:last]])
        return Ragged(tokens, np.append(0, np.roll(self.lengths, 1)).cumsum())

    def padded(self, rows: Ints, width: int) -> tuple[Ints, Ints]:
        """Return ``[B, width]`` ids padded with PAD, and ``[B]`` lengths."""
        bounds = np.array([self.bounds(row, row + 2) for row in rows.tolist()]).reshape(-1, 2)
        ids = np.full((len(rows), width), PAD, np.int64)
        for line, (start, stop) in zip(ids, bounds.tolist(), strict=True):
            line[: stop - start] = self._read_tokens(start, stop)
        return ids, bounds[:, 1] - bounds[:, 0]

    @cached_property
    def bounds(self) -> Read:
        """A function that returns ``offsets[start:stop]``; of a large file only that part is read."""
        return reader_of(self.offsets)

    @cached_property
    def _read_tokens(self) -> Read:
        return reader_of(self.tokens)


@dataclass(frozen=True)
class TokenPairs:
    """Both sides of a parallel text as ids without special tokens."""

    source: Ragged
    target: Ragged

    def __len__(self) -> int:
        return len(self.source)

    def only(self, chosen: NDArray[np.bool_]) -> TokenPairs:
        """Return the pairs where ``chosen`` is true."""
        return TokenPairs(self.source.only(chosen), self.target.only(chosen))

    @property
    def lengths(self) -> tuple[Ints, Ints]:
        """Number of tokens of each source and each target, without special tokens."""
        return self.source.lengths, self.target.lengths

    def lengths_in_parts(self) -> Iterator[tuple[Ints, Ints]]:
        """Yield ``lengths`` in parts of bounded size; those of a large text are never all in memory."""
        for start in range(0, len(self), _PAIRS_AT_A_TIME):
            stop = min(start + _PAIRS_AT_A_TIME, len(self)) + 1
            source, target = (np.diff(side.bounds(start, stop)) for side in (self.source, self.target))
            yield source, target


@dataclass(frozen=True)
class RaggedWriter:
    """Write a ``Ragged`` to files part by part."""

    tokens: ArrayWriter
    offsets: ArrayWriter

    @classmethod
    @contextmanager
    def open(cls, path: Path, dtype: type[np.integer]) -> Generator[Self]:
        tokens, offsets = _files(path)
        with ArrayWriter.open(tokens, dtype) as tokens_file, ArrayWriter.open(offsets, np.int64) as file:
            file.append(np.zeros(1, np.int64))
            yield cls(tokens_file, file)

    def append(self, part: Ragged) -> None:
        self.offsets.append(part.offsets[1:] + self.tokens.length)
        self.tokens.append(part.tokens)


def _files(path: Path) -> tuple[Path, Path]:
    return path.with_name(f"{path.name}.tokens.npy"), path.with_name(f"{path.name}.offsets.npy")
