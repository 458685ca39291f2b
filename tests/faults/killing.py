"""A process that kills itself at its n-th operation on a folder, and one that only writes down what it does.

An operation changes names or content on the disk: a file opened for writing, a rename, a removal, a new
folder, an fsync, a file of tensors, appended rows. It kills itself with SIGKILL: nothing is tidied up.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from normlab.lab.runs import folder as folders
from normlab.lab.training import checkpoint

WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT


class Operations:
    """Counts this process's operations on a folder, for as long as the process lives.

    At operation ``at``, counted from 0, it is killed: before it, or, where ``torn`` is a share and the
    operation writes, when that share of the bytes is written. ``log`` gets a line for each operation.
    """

    def __init__(self, root: Path, *, at: int = -1, torn: float = -1.0, log: Path | None = None) -> None:
        self._prefix, self._left, self._torn = f"{root.resolve()}{os.sep}", at, torn
        self._log = os.open(log, os.O_WRONLY | os.O_CREAT) if log else None
        sys.addaudithook(self._audited)
        fsync, save, append = os.fsync, checkpoint.save_file, folders.append_rows
        os.fsync = lambda descriptor: self._written("fsync", _of(descriptor), lambda: fsync(descriptor))
        checkpoint.save_file = lambda tensors, path: self._written("save", path, lambda: save(tensors, path))
        folders.append_rows = lambda path, rows: self._written("append", path, lambda: append(path, rows))

    def _audited(self, event: str, args: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(args[0], str) and args[2] & WRITING:
            self._before("open", Path(args[0]))
        elif event in ("os.mkdir", "os.rename"):
            self._before(event, Path(args[0]))
        elif event in ("os.remove", "os.rmdir"):  # relative to an open folder
            self._before(event, (_of(args[1]) if args[1] >= 0 else Path()) / args[0])

    def _written(self, what: str, path: Path, write: Callable[[], object]) -> None:
        """An operation that may be stopped half-way."""
        whole = path.is_dir() or (what == "fsync" and path.suffix == ".jsonl")  # was written before
        torn = self._torn >= 0 and not whole
        if not self._due(what, path):
            write()
        elif not torn:
            kill()
        else:
            before = path.stat().st_size if what == "append" and path.exists() else 0
            write()
            os.truncate(path, before + int(self._torn * (path.stat().st_size - before)))
            kill()

    def _before(self, what: str, path: Path) -> None:
        if self._due(what, path):
            kill()

    def _due(self, what: str, path: Path) -> bool:
        """Whether this is the operation at which to die."""
        inside = os.path.abspath(path)  # noqa: PTH100 - of what may be gone, and no link is followed
        if not inside.startswith(self._prefix):
            return False
        if self._log is not None:
            os.write(self._log, f"{what} {inside.removeprefix(self._prefix)}\n".encode())
        self._left -= 1
        return self._left == -1


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _of(descriptor: int) -> Path:
    return Path(f"/proc/self/fd/{descriptor}").readlink()
