"""Ragged arrays of token ids: in memory, written to files part by part, and memory-mapped."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from normlab.data.arrays import ArrayWriter, FileReader, reader_of
from normlab.data.tokenizer import PAD

Ints = NDArray[np.integer]

_PAIRS_AT_A_TIME = 2**18


@dataclass(frozen=True)
class Ragged:
    """Sentences of different lengths end to end: sentence i is ``tokens[offsets[i]:offsets[i + 1]]``."""

    tokens: Ints
    offsets: Ints

    @classmethod
    def of(cls, sentences: Sequence[Sequence[int]], dtype: type[np.integer] = np.int32) -> Ragged:
        offsets = np.zeros(len(sentences) + 1, np.int64)
        np.cumsum([len(sentence) for sentence in sentences], out=offsets[1:])
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
        offsets = np.zeros(int(chosen.sum()) + 1, np.int64)
        np.cumsum(lengths[chosen], out=offsets[1:])
        return Ragged(self.tokens[np.repeat(chosen, lengths)], offsets)

    def padded(self, rows: Ints, width: int) -> tuple[Ints, Ints]:
        """Return ``[B, width]`` ids padded with PAD, and ``[B]`` lengths."""
        if self._read_tokens:
            return self._padded_from_file(rows, width)
        starts = np.asarray(self.offsets[rows])
        lengths = np.asarray(self.offsets[rows + 1]) - starts
        column = np.arange(width)
        inside = column < lengths[:, None]
        ids = np.full(inside.shape, PAD, np.int64)
        ids[inside] = self.tokens[(starts[:, None] + column)[inside]]
        return ids, lengths

    def bounds(self, start: int, stop: int) -> Ints:
        """Return ``offsets[start:stop]``; of a large file only that part is read."""
        return self._read_offsets(start, stop) if self._read_offsets else np.asarray(self.offsets[start:stop])

    def _padded_from_file(self, rows: Ints, width: int) -> tuple[Ints, Ints]:
        assert self._read_tokens
        bounds = np.array([self.bounds(row, row + 2) for row in rows.tolist()])
        ids = np.full((len(rows), width), PAD, np.int64)
        for line, (start, stop) in zip(ids, bounds.tolist(), strict=True):
            line[: stop - start] = self._read_tokens(start, stop)
        return ids, bounds[:, 1] - bounds[:, 0]

    @cached_property
    def _read_tokens(self) -> FileReader | None:
        return reader_of(self.tokens)

    @cached_property
    def _read_offsets(self) -> FileReader | None:
        return reader_of(self.offsets)


@dataclass(frozen=True)
class TokenPairs:
    """Both sides of a parallel text as ids without special tokens."""

    source: Ragged
    target: Ragged

    def __len__(self) -> int:
        return len(self.source)

    @property
    def lengths(self) -> tuple[Ints, Ints]:
        """Number of tokens of each source and each target, without special tokens."""
        return self.source.lengths, self.target.lengths

    def lengths_in_parts(self) -> Iterator[tuple[Ints, Ints]]:
        """Yield ``lengths`` in parts of bounded size, so that those of a large text are never all in
        memory.
        """
        for start in range(0, len(self), _PAIRS_AT_A_TIME):
            stop = min(start + _PAIRS_AT_A_TIME, len(self)) + 1
            source, target = (np.diff(side.bounds(start, stop)) for side in (self.source, self.target))
            yield source, target


class RaggedWriter:
    """Write a ``Ragged`` to files part by part; a context manager."""

    def __init__(self, path: Path, dtype: type[np.integer]) -> None:
        tokens, offsets = _files(path)
        with ExitStack() as opened:
            self._tokens = opened.enter_context(ArrayWriter(tokens, dtype))
            self._offsets = opened.enter_context(ArrayWriter(offsets, np.int64))
            self._offsets.append(np.zeros(1, np.int64))
            self._open = opened.pop_all()

    @property
    def tokens(self) -> int:
        """Number of tokens written so far."""
        return self._tokens.length

    def append(self, part: Ragged) -> None:
        self._offsets.append(part.offsets[1:] + self._tokens.length)
        self._tokens.append(part.tokens)

    def __enter__(self) -> RaggedWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.__exit__(kind, error, trace)


def _files(path: Path) -> tuple[Path, Path]:
    return path.with_name(f"{path.name}.tokens.npy"), path.with_name(f"{path.name}.offsets.npy")
