"""Locks that keep a run folder to one process, on this host or another one."""

from __future__ import annotations

import fcntl
import os
import socket
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

from normlab.errors import UserError
from normlab.runs.files import regular

_TRIES, _PAUSE_SECONDS = 5, 0.02
"""A reader that asks whether a run is alive holds the lock for microseconds; a trainer waits for that."""
_BEAT_SECONDS, _WATCH_SECONDS = 5.0, 16.0
"""How often a holder touches its lock, and how long another host watches whether it still does."""


class RunBusyError(UserError):
    """Another process is in the run folder."""


@contextmanager
def hold(folder: Path) -> Generator[None]:
    """Keep other processes out of a folder; the file ``lock`` in it names the holder.

    A lock ends with its process, but some network file systems do not show it to other hosts: if the file
    names a holder on another host, it is watched for a while. Clocks are not compared, so they may differ or
    be set back. Raises RunBusyError if a process is in the folder.
    """
    path = folder / "lock"
    with open(path, "a+", encoding="utf-8", opener=regular) as file:
        _take(file, folder)
        holder = _said(path)
        if holder and holder.partition(" ")[0] != socket.gethostname() and _beats(path):
            raise RunBusyError(_busy(folder, holder))
        _write(file, f"{socket.gethostname()} {os.getpid()}")
        ended = threading.Event()
        beating = threading.Thread(target=_beat, args=(path, ended), daemon=True)
        beating.start()
        try:
            yield
        finally:
            ended.set()
            beating.join()
            with suppress(OSError):  # a full disk keeps nobody from leaving
                _write(file, "")


def held(folder: Path) -> bool:
    """Whether a process whose lock this host sees is in the folder."""
    try:
        with open(folder / "lock", encoding="utf-8", opener=regular) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except FileNotFoundError:
        return False
    return False


def elsewhere(folder: Path) -> str:
    """Return the other host whose process has just touched the folder's lock; empty if there is none.

    It is also empty if the two clocks are further apart than a holder may be silent.
    """
    lock = folder / "lock"
    with suppress(FileNotFoundError):
        host = _said(lock).partition(" ")[0]
        silent = abs(time.time() - _touched(lock) / 1e9)
        if host != socket.gethostname() and silent < _WATCH_SECONDS:
            return host
    return ""


def _take(file: TextIO, folder: Path) -> None:
    for remaining in reversed(range(_TRIES)):
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if not remaining:
                raise RunBusyError(_busy(folder, _said(folder / "lock"))) from None
            time.sleep(_PAUSE_SECONDS)


def _busy(folder: Path, holder: str) -> str:
    host, _, process = holder.partition(" ")
    who = f" (process {process} on {host})" if process else ""
    return f"another process is training {folder}{who}; wait for it, or stop it and try again"


def _said(path: Path) -> str:
    with open(path, encoding="utf-8", errors="replace", opener=regular) as file:
        return file.read().strip()


def _write(file: TextIO, text: str) -> None:
    file.seek(0)
    file.truncate()
    file.write(text)
    file.flush()


def _beat(path: Path, ended: threading.Event) -> None:
    while not ended.wait(_BEAT_SECONDS):
        with suppress(OSError):
            os.utime(path)


def _beats(path: Path) -> bool:
    """Watch whether a process touches the file, opening it each time so that a network file system looks."""
    before = _touched(path)
    until = time.monotonic() + _WATCH_SECONDS
    while time.monotonic() < until:
        time.sleep(_WATCH_SECONDS / 50)
        if _touched(path) != before:
            return True
    return False


def _touched(path: Path) -> int:
    with open(path, "rb", opener=regular) as file:
        return os.fstat(file.fileno()).st_mtime_ns
