"""NumPy files that are written part by part, and ranges of large files that are read without mapping them."""

from __future__ import annotations

import os
import weakref
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import final

import numpy as np
from numpy.typing import NDArray

from normlab.errors import UserError

LARGE_BYTES = 2**25
"""Mapped files of at least this size are read in ranges; a smaller one may stay in memory as a whole."""


class ArrayWriter:
    """Write a one-dimensional ``.npy`` file part by part, byte for byte as ``numpy.save`` does.

    A context manager: the header holds the final length once the block is left without an error.
    """

    def __init__(self, path: Path, dtype: type[np.integer]) -> None:
        self._dtype, self.length = np.dtype(dtype), 0
        with ExitStack() as opened:
            self._stream = opened.enter_context(path.open("wb"))
            self._write_header()
            opened.pop_all()

    def append(self, values: NDArray[np.integer]) -> None:
        """Append values. Raises TypeError for signed values if the file's type is unsigned."""
        part = values.astype(self._dtype, casting="same_kind", copy=False)
        # Through the stream, not ndarray.tofile, so that a full disk is told with its errno.
        self._stream.write(np.ascontiguousarray(part).data)
        self.length += len(values)

    def __enter__(self) -> ArrayWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._stream:
            if kind is None:
                # NumPy leaves room in a header for the longest length there can be, so it keeps its size.
                self._stream.seek(0)
                self._write_header()

    def _write_header(self) -> None:
        described = {
            "descr": np.lib.format.dtype_to_descr(self._dtype),
            "fortran_order": False,
            "shape": (self.length,),
        }
        np.lib.format.write_array_header_1_0(self._stream, described)


@final
class FileReader:
    """Read ranges of a mapped array from its file, without the mapping.

    Mapped pages count as memory of this process, and a system with huge pages in its file cache maps some MiB
    for every sentence that is read.
    """

    def __init__(self, array: np.memmap) -> None:
        self._name = str(array.filename)
        self._file = os.open(self._name, os.O_RDONLY)
        weakref.finalize(self, os.close, self._file)
        self._dtype, self._begin = array.dtype, array.offset

    def __call__(self, start: int, stop: int) -> NDArray[np.integer]:
        size = self._dtype.itemsize
        raw = os.pread(self._file, (stop - start) * size, self._begin + start * size)
        if len(raw) < (stop - start) * size:
            raise UserError(
                f"{self._name} was cut off since it was prepared; delete its folder and start again"
            )
        return np.frombuffer(raw, self._dtype)


def reader_of(array: NDArray[np.integer]) -> FileReader | None:
    """Return a reader for a large mapped array; None for others, which may be in memory as a whole."""
    if (
        isinstance(array, np.memmap)
        and array.nbytes >= LARGE_BYTES
        and array.filename
        and hasattr(os, "pread")
    ):
        return FileReader(array)
    return None
