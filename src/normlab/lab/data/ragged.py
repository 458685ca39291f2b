"""Write NumPy files part by part, and read ranges of large files without mapping them."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import BinaryIO, Protocol, Self, TypeAlias

import numpy as np
from numpy.typing import NDArray

from normlab.errors import UserError
from normlab.lab.data.tokenizer import PAD

Ints: TypeAlias = NDArray[np.integer]


class TokenArray(Protocol):
    """One-dimensional tokens, in memory or on disk."""

    def __len__(self) -> int: ...
    def __getitem__(self, wanted: slice, /) -> Ints: ...


Read: TypeAlias = Callable[[int, int], Ints]

TOKENS_AT_A_TIME = 2**20
"""Tokens that are read, counted or hashed at a time, so that memory stays bounded."""
LARGE_BYTES = 2**25
"""Mapped files of at least this size are read in ranges; a smaller one may stay in memory entirely."""


class ArrayWriter:
    """Write a one-dimensional ``.npy`` file part by part, byte for byte as ``numpy.save`` does."""

    def __init__(self, stream: BinaryIO, dtype: type[np.integer]) -> None:
        self._stream, self._dtype, self.length = stream, np.dtype(dtype), 0

    @classmethod
    @contextmanager
    def open(cls, path: Path, dtype: type[np.integer]) -> Generator[Self]:
        """Open a new file; its header holds the final length once the block is left without an error."""
        with path.open("wb") as stream:
            writer = cls(stream, dtype)
            writer._write_header()
            yield writer
            # NumPy leaves room in a header for the longest possible length, so its size stays.
            stream.seek(0)
            writer._write_header()

    def append(self, values: Ints) -> None:
        """Append values. Raises TypeError for signed values if the file's type is unsigned."""
        part = values.astype(self._dtype, casting="same_kind", copy=False)
        # Through the stream, not ndarray.tofile, so that a full disk is reported with its errno.
        self._stream.write(np.ascontiguousarray(part).data)
        self.length += len(values)

    def _write_header(self) -> None:
        described = {"descr": self._dtype.str, "fortran_order": False, "shape": (self.length,)}
        np.lib.format.write_array_header_1_0(self._stream, described)


def reader_of(array: TokenArray) -> Read:
    """Return a function that reads ``array[start:stop]``, bypassing the mapping of a large mapped array.

    Mapped pages count as memory of this process, and a system with huge pages in its file cache maps several
    MiB for every sentence that is read.
    """
    if not isinstance(array, np.memmap) or array.nbytes < LARGE_BYTES or not hasattr(os, "pread"):
        return lambda start, stop: np.asarray(array[start:stop])
    name, dtype, begin = str(array.filename), array.dtype, array.offset
    file = os.open(name, os.O_RDONLY)

    def read(start: int, stop: int) -> Ints:
        wanted = (stop - start) * dtype.itemsize
        raw = os.pread(file, wanted, begin + start * dtype.itemsize)
        if len(raw) < wanted:
            raise UserError(f"{name} was cut off since it was prepared; delete its folder and start again")
        return np.frombuffer(raw, dtype)

    weakref.finalize(read, os.close, file)  # nobody else knows when the last read is done
    return read


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
        """Map the files of a ``RaggedWriter``; tokens stay on disk until needed."""
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
        """Return the chosen sentences, given a truth value for each."""
        lengths = self.lengths
        offsets = np.append(0, lengths[chosen]).cumsum()
        return Ragged(self.tokens[np.repeat(chosen, lengths)], offsets)

    def shifted(self) -> Ragged:
        """Return the same sentences, each moved to the place of the next, the last to that of the first."""
        last_sentence = self.offsets[-2]
        tokens = np.concatenate([self.tokens[last_sentence:], self.tokens[:last_sentence]])
        return Ragged(tokens, np.append(0, np.roll(self.lengths, 1)).cumsum())

    def padded(self, rows: Ints, width: int) -> tuple[Ints, Ints]:
        """Return ``[B, width]`` ids padded with PAD, and ``[B]`` lengths."""
        bounds = np.array([self.bounds(row, row + 2) for row in rows.tolist()]).reshape(
            -1, 2
        )  # also for no rows
        ids = np.full((len(rows), width), PAD, np.int64)
        for line, (start, stop) in zip(ids, bounds.tolist(), strict=True):
            line[: stop - start] = self._read_tokens(start, stop)
        return ids, bounds[:, 1] - bounds[:, 0]

    @cached_property
    def bounds(self) -> Read:
        """A function that returns ``offsets[start:stop]``, reading only that part of a large file."""
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
        return TokenPairs(self.source.only(chosen), self.target.only(chosen))

    @property
    def lengths(self) -> tuple[Ints, Ints]:
        """Number of tokens of each source and each target, without special tokens."""
        return self.source.lengths, self.target.lengths

    def lengths_in_parts(self) -> Iterator[tuple[Ints, Ints]]:
        """Yield ``lengths`` in parts of bounded size; memory never holds all of a large text's."""
        for start in range(0, len(self), _PAIRS_AT_A_TIME):
            stop = min(start + _PAIRS_AT_A_TIME, len(self)) + 1
            yield np.diff(self.source.bounds(start, stop)), np.diff(self.target.bounds(start, stop))


@dataclass(frozen=True)
class RaggedWriter:
    """Write a ``Ragged`` to files part by part."""

    tokens: ArrayWriter
    offsets: ArrayWriter

    @classmethod
    @contextmanager
    def open(cls, path: Path, dtype: type[np.integer]) -> Generator[Self]:
        tokens, offsets = _files(path)
        with (
            ArrayWriter.open(tokens, dtype) as tokens_writer,
            ArrayWriter.open(offsets, np.int64) as offsets_writer,
        ):
            offsets_writer.append(np.zeros(1, np.int64))
            yield cls(tokens_writer, offsets_writer)

    def append(self, part: Ragged) -> None:
        self.offsets.append(part.offsets[1:] + self.tokens.length)
        self.tokens.append(part.tokens)


def _files(path: Path) -> tuple[Path, Path]:
    return path.with_name(f"{path.name}.tokens.npy"), path.with_name(f"{path.name}.offsets.npy")
