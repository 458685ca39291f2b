"""Standard streams that outlive their reader: whoever looks on may leave, and the work goes on."""

from __future__ import annotations

import errno
import io
import os
import stat
import sys
from typing import Any, TextIO

_GONE = (errno.EPIPE, errno.EIO)
"""Errors of a pipe that nobody reads any more, and of a terminal that was closed."""


class _Lasting(io.FileIO):
    """A descriptor that turns to the null device once its reader is gone."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in _GONE or stat.S_ISREG(os.fstat(self.fileno()).st_mode):
                raise
            _turn_to_null(self.fileno())
            return super().write(data)


def keep() -> None:
    """Open closed standard streams on the null device, and let output and errors outlive their readers.

    A closed descriptor would otherwise be given to the next file that is opened, and receive what is printed.
    """
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            _turn_to_null(descriptor)
    sys.stdout, sys.stderr = _lasting(1, sys.stdout), _lasting(2, sys.stderr)


def _lasting(descriptor: int, before: TextIO | None) -> TextIO:
    errors = "backslashreplace" if descriptor == 2 else getattr(before, "errors", None)
    raw = _Lasting(descriptor, "w", closefd=False)
    return io.TextIOWrapper(
        io.BufferedWriter(raw),
        encoding=getattr(before, "encoding", None) or "utf-8",
        errors=errors,
        line_buffering=descriptor == 2 or raw.isatty() or getattr(before, "write_through", False),
    )


def _turn_to_null(descriptor: int) -> None:
    null = os.open(os.devnull, os.O_RDWR)
    if null != descriptor:
        os.dup2(null, descriptor)
        os.close(null)
