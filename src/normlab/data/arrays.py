"""NumPy files that are written part by part, and ranges of large files that are read without mapping them."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Self, TypeAlias

import numpy as np
from numpy.typing import NDArray

from normlab.errors import UserError

Ints: TypeAlias = NDArray[np.integer]
Read: TypeAlias = Callable[[int, int], Ints]

LARGE_BYTES = 2**25
"""Mapped files of at least this size are read in ranges; a smaller one may stay in memory as a whole."""


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
            # NumPy leaves room in a header for the longest length there can be, so it keeps its size.
            stream.seek(0)
            writer._write_header()

    def append(self, values: Ints) -> None:
        """Append values. Raises TypeError for signed values if the file's type is unsigned."""
        part = values.astype(self._dtype, casting="same_kind", copy=False)
        # Through the stream, not ndarray.tofile, so that a full disk is told with its errno.
        self._stream.write(np.ascontiguousarray(part).data)
        self.length += len(values)

    def _write_header(self) -> None:
        described = {"descr": self._dtype.str, "fortran_order": False, "shape": (self.length,)}
        np.lib.format.write_array_header_1_0(self._stream, described)


def reader_of(array: Ints) -> Read:
    """Return a function that reads ``array[start:stop]``, of a large mapped array without the mapping.

    Mapped pages count as memory of this process, and a system with huge pages in its file cache maps some MiB
    for every sentence that is read.
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

    weakref.finalize(read, os.close, file)
    return read
