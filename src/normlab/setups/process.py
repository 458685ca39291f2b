"""What code sets for the whole process, such as the default dtype, put back after a script has run."""

from __future__ import annotations

import gc
import logging
import multiprocessing
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any, Final

import numpy
import torch
from torch import distributed

from normlab.private_torch import (
    PRECISIONS,
    default_device,
    flags,
    precision,
    set_precision,
    set_stance,
    stance,
)

Setting = tuple[Callable[[], Any], Callable[[Any], Any]]
"""How to read a setting of the process, and how to set it."""

STREAMS: Final = ("stdin", "stdout", "stderr", "excepthook", "displayhook")


@contextmanager
def same_process() -> Iterator[None]:
    """Put back after this block what a script may have set for the whole process: the modes, flags and
    threads of torch, numpy's and Python's own settings, signals, logging, warnings, streams, ``sys.path``,
    ``sys.argv``, the environment and the current folder. A process group that it has made is destroyed.
    """
    path, argv, environment = list(sys.path), list(sys.argv), dict(os.environ)
    handlers, was_distributed = list(logging.root.handlers), is_distributed()
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        for get, put in [*_settings_of_python(), *_settings_of_torch()]:
            stack.callback(_put_back, get, put, get())
        try:
            yield
        finally:
            if is_distributed() and not was_distributed:
                distributed.destroy_process_group()  # which the script would have done at its end
            sys.path[:], sys.argv[:] = path, argv
            logging.root.handlers[:] = handlers
            if dict(os.environ) != environment:
                os.environ.clear()
                os.environ.update(environment)


def is_distributed() -> bool:
    """Return whether this process is in a group of processes."""
    return distributed.is_available() and distributed.is_initialized()


def _put_back(get: Callable[[], Any], put: Callable[[Any], Any], before: Any) -> None:
    if get() != before:
        put(before)


def _settings_of_python() -> Iterator[Setting]:
    yield os.getcwd, os.chdir
    yield sys.getrecursionlimit, sys.setrecursionlimit
    yield gc.isenabled, lambda enabled: gc.enable() if enabled else gc.disable()
    yield gc.get_threshold, lambda threshold: gc.set_threshold(*threshold)
    yield numpy.geterr, lambda kinds: numpy.seterr(**kinds)
    yield numpy.get_printoptions, lambda options: numpy.set_printoptions(**options)
    yield partial(getattr, logging.root, "level"), logging.root.setLevel
    yield partial(getattr, logging.root.manager, "disable"), logging.disable
    yield (
        partial(multiprocessing.get_start_method, allow_none=True),
        partial(multiprocessing.set_start_method, force=True),
    )
    for name in STREAMS:
        yield partial(getattr, sys, name), partial(setattr, sys, name)
    if threading.current_thread() is threading.main_thread():  # the only one that may
        for number in signal.valid_signals():
            # None stands for a handler that is not Python's, such as a debugger's: nothing could put it back
            if signal.getsignal(number) is not None:
                yield partial(signal.getsignal, number), partial(signal.signal, number)


def _settings_of_torch() -> Iterator[Setting]:
    yield torch.get_default_dtype, torch.set_default_dtype
    yield default_device, torch.set_default_device
    yield torch.get_num_threads, torch.set_num_threads
    yield torch.is_grad_enabled, torch.set_grad_enabled
    yield torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled
    yield _anomalies, lambda flags: torch.set_anomaly_enabled(*flags)
    yield _determinism, lambda flags: torch.use_deterministic_algorithms(flags[0], warn_only=flags[1])
    yield stance, set_stance
    accelerator = torch.accelerator.current_accelerator()
    for kind in ("cpu", *([] if accelerator is None else [accelerator.type])):
        yield partial(torch.is_autocast_enabled, kind), partial(torch.set_autocast_enabled, kind)
        yield partial(torch.get_autocast_dtype, kind), partial(torch.set_autocast_dtype, kind)
    yield from _flags_of_torch()


def _flags_of_torch() -> Iterator[Setting]:
    """Yield what ``torch.backends`` sets, as far as it can be read."""
    for get, put in flags():
        yield from _readable(get, put)
    for place in PRECISIONS:
        yield from _readable(partial(precision, *place), partial(set_precision, *place))


def _readable(get: Callable[[], Any], put: Callable[..., Any]) -> Iterator[Setting]:
    """Yield a setting if it can be read without an argument."""

    def read() -> Any:
        # it raises if it takes arguments, or if a script has mixed old names of a flag with new ones
        with suppress(Exception):
            return get()
        return None

    def write(value: Any) -> None:
        with suppress(Exception):
            put(*value) if isinstance(value, tuple) else put(value)

    if read() is not None:
        yield read, write


def _anomalies() -> tuple[bool, bool]:
    return torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()


def _determinism() -> tuple[bool, bool]:
    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
