"""How much memory a process may still take."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


def available_bytes() -> int:
    """Return how much memory a process may take, including that of cached files where the system tells it."""
    with suppress(OSError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def gibibytes(count: float) -> str:
    """Return a number of bytes in words."""
    return f"{count / 2**30:.1f} GiB"
