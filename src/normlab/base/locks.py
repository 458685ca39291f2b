"""Locks that reserve a folder for one process, also between hosts that share a file system."""

from __future__ import annotations

import fcntl
import os
import socket
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, TextIO

from normlab.base.files import regular
from normlab.errors import UserError

_TRIES: Final = 5
_PAUSE_SECONDS: Final = 0.02
"""A reader that checks whether a run is alive holds the lock for microseconds; a trainer waits for that."""
_BEAT_SECONDS: Final = 5.0
"""How often a holder touches its lock."""
_WATCH_SECONDS: Final = 16.0
"""How long another host watches for that: three beats, and some delay of a network file system."""


class RunBusyError(UserError):
    """Another process is in the run folder."""


@contextmanager
def reserved(folder: str | Path | None) -> Generator[None]:
    """Make the folder in which a command keeps its work, and keep other processes out of it until the end of
    the block: two at once would each read only a part of what the other keeps. None is no folder.

    Raises RunBusyError if a process is in it.
    """
    if folder is None:
        yield
        return
    Path(folder).mkdir(parents=True, exist_ok=True)
    with hold(Path(folder)):
        yield


@contextmanager
def hold(folder: Path) -> Generator[None]:
    """Keep other processes out of a folder; the file ``lock`` in it names the holder.

    A lock ends with its process, but some network file systems do not show it to other hosts: if the file
    names a holder on another host, we watch it for a while. Clocks are not compared, so they may differ or
    be set back. Raises RunBusyError if a process is in the folder.
    """
    path = folder / "lock"
    with open(path, "a+", encoding="utf-8", opener=regular) as file:
        _take(file, folder)
        holder = _holder_of(path)
        is_elsewhere = bool(holder) and holder.partition(" ")[0] != socket.gethostname()
        if is_elsewhere and _beats(path):
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
            with suppress(OSError):  # even with a full disk, a process can leave
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


def other_host(folder: Path) -> str:
    """Return the other host whose process has just touched the folder's lock; empty if there is none.

    It is also empty if the two clocks differ by more than the time that a holder may be silent.
    """
    lock = folder / "lock"
    with suppress(FileNotFoundError):
        host = _holder_of(lock).partition(" ")[0]
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
                raise RunBusyError(_busy(folder, _holder_of(folder / "lock"))) from None
            time.sleep(_PAUSE_SECONDS)


def _busy(folder: Path, holder: str) -> str:
    host, _, process = holder.partition(" ")
    who = f" (process {process} on {host})" if process else ""
    return f"another process is at work in {folder}{who}; wait for it, or stop it and try again"


def _holder_of(path: Path) -> str:
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
