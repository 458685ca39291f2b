"""Batches made ahead of their use, by threads."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final, Generic, TypeVar

T = TypeVar("T")

AHEAD: Final = 2
"""Batches that wait for each worker."""


class Prefetch(Generic[T]):
    """``at(index)`` is ``make(index)``, made before it is asked for.

    After ``index`` come ``index + stride`` and so on, below ``stop``; another index is made when it is asked
    for. ``make`` must depend on nothing but the index, and bear to be called by ``workers`` threads at once;
    with 0 workers there is no thread. What it raises comes out of ``at``.
    """

    def __init__(self, make: Callable[[int], T], *, workers: int, stop: int, stride: int = 1) -> None:
        self._make, self._stop, self._stride = make, stop, stride
        self._ahead = AHEAD * workers
        self._workers = ThreadPoolExecutor(workers, "loader") if workers else None
        self._coming: dict[int, Future[T]] = {}

    def at(self, index: int) -> T:
        """The batch of an index."""
        if self._workers is None:
            return self._make(index)
        wanted = [index, *range(index + self._stride, self._stop, self._stride)[: self._ahead]]
        for other in self._coming.keys() - set(wanted):
            self._coming.pop(other).cancel()
        for i in wanted:
            if i not in self._coming:
                self._coming[i] = self._workers.submit(self._make, i)
        return self._coming.pop(index).result()

    def close(self) -> None:
        """Stop the threads, once each has made the batch that it is at."""
        if self._workers is not None:
            self._workers.shutdown(cancel_futures=True)
