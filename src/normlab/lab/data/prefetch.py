"""Batches made ahead of time by threads."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final, Generic, TypeVar

T = TypeVar("T")

AHEAD: Final = 2
"""Number of batches that each worker makes ahead."""


class Prefetch(Generic[T]):
    """Return ``make(index)`` from ``at(index)``, computed in advance.

    The indices ``index + stride``, ``index + 2 stride`` … below ``stop`` are expected next; any other index
    is computed on request. ``make`` must depend only on the index and be safe to call from ``workers``
    threads at once; with 0 workers there is no thread. ``at`` raises the exceptions of ``make``.
    """

    def __init__(self, make: Callable[[int], T], *, workers: int, stop: int, stride: int = 1) -> None:
        self._make, self._stop, self._stride = make, stop, stride
        self._ahead = AHEAD * workers
        self._workers = ThreadPoolExecutor(workers, "loader") if workers else None
        self._coming: dict[int, Future[T]] = {}

    def at(self, index: int) -> T:
        if self._workers is None:
            return self._make(index)
        later = range(index + self._stride, self._stop, self._stride)
        wanted = [index, *later[: self._ahead]]
        for unwanted in self._coming.keys() - set(wanted):
            self._coming.pop(unwanted).cancel()
        for i in wanted:
            if i not in self._coming:
                self._coming[i] = self._workers.submit(self._make, i)
        return self._coming.pop(index).result()

    def close(self) -> None:
        """Stop the threads once each has finished its batch."""
        if self._workers is not None:
            self._workers.shutdown(cancel_futures=True)
