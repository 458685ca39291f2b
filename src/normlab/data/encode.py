"""Tokens of a text that is larger than memory, part by part; those of a large one by every core."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from queue import SimpleQueue

import numpy as np

from normlab.data.encode_worker import part_tokens, receive, send
from normlab.data.ragged import Ragged
from normlab.data.tokenizer import Tokenizer
from normlab.spec.request import usable_cores

Part = tuple[list[str], ...]

Ask = Callable[[Part], "Future[list[Ragged] | None]"]
"""For the ids of a part; None comes where the process that had it is gone."""

SECONDS_ALONE = 1.0
"""Before other processes are asked: they need the time of one to start and to learn the words."""

MOST_WORKERS = 8
"""Each takes some 100 MiB, and twelve would be all that this process can read, send and write for."""


def encoded(
    tokenizer: Tokenizer, parts: Iterable[Part], dtype: type[np.integer]
) -> Iterator[tuple[Part, list[Ragged]]]:
    """Each part, lines of the source and perhaps of the target, with the tokens of each; the order stays.

    What is not done after ``SECONDS_ALONE`` is encoded by processes, one a usable core, which end with the
    iterator. A part that one of them cannot do is done here, so that an error is the one there would be
    without them.
    """
    until = time.monotonic() + SECONDS_ALONE
    count = min(usable_cores(), MOST_WORKERS)
    waiting: deque[tuple[Part, Future[list[Ragged] | None]]] = deque()

    def oldest() -> tuple[Part, list[Ragged]]:
        part, asked = waiting.popleft()
        result = asked.result()
        return part, part_tokens(tokenizer, part, dtype) if result is None else result

    with ExitStack() as opened:
        ask: Ask | None = None
        for part in parts:
            if ask is None and (count == 1 or time.monotonic() < until):
                yield part, part_tokens(tokenizer, part, dtype)
                continue
            ask = ask or opened.enter_context(_workers(count, tokenizer, dtype))
            waiting.append((part, ask(part)))
            if len(waiting) > 2 * count:
                yield oldest()
        while waiting:
            yield oldest()


@contextmanager
def _workers(count: int, tokenizer: Tokenizer, dtype: type[np.integer]) -> Iterator[Ask]:
    """Processes, each with a thread that talks to it.

    They are ``python -m normlab.data.encode_worker``, not those of ``multiprocessing``, which would execute
    the user's script once more in each.
    """
    model = tokenizer.to_json().encode()
    everyone: list[_Worker] = []
    idle: SimpleQueue[_Worker] = SimpleQueue()

    def encode(part: Part) -> list[Ragged] | None:
        worker = idle.get()
        try:
            return worker.encode(part)
        finally:
            idle.put(worker)

    threads = ThreadPoolExecutor(count, "encode")
    try:
        for _ in range(count):
            everyone.append(_Worker(model, dtype))
            idle.put(everyone[-1])
        yield partial(threads.submit, encode)
    finally:
        # Killed first: a thread that waits for one is then told that it is gone.
        for worker in everyone:
            worker.process.kill()
        threads.shutdown(cancel_futures=True)
        for worker in everyone:
            worker.close()


class _Worker:
    """One process; in a session of its own, so that Ctrl-C reaches it from here alone."""

    def __init__(self, model: bytes, dtype: type[np.integer]) -> None:
        self._unsent, self._dtype = [model], dtype
        self.process = subprocess.Popen(
            [sys.executable, "-m", "normlab.data.encode_worker", np.dtype(dtype).name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
            env={**os.environ, "TOKENIZERS_PARALLELISM": "false"},
        )

    def encode(self, part: Part) -> list[Ragged] | None:
        """None if the process is gone, or goes while it encodes."""
        requests, replies = self.process.stdin, self.process.stdout
        assert requests is not None
        assert replies is not None
        try:
            # The model goes with the first part: a pipe takes it only once the process reads.
            send(requests, *self._unsent, json.dumps(part).encode())
            self._unsent.clear()
            arrays = [(receive(replies), receive(replies)) for _ in part]
        except (OSError, EOFError):
            return None
        return [
            Ragged(np.frombuffer(tokens, self._dtype), np.frombuffer(offsets, np.int64))
            for tokens, offsets in arrays
        ]

    def close(self) -> None:
        """Of a process that was killed."""
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            with suppress(OSError):
                stream.close()
        self.process.wait()
