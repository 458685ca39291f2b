"""Regular files that no reader sees half-written."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import stat
import sys
import threading
import tomllib
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

from normlab.base.io import parsed, to_json, to_plain
from normlab.errors import UserError


def regular(path: str | Path, flags: int = os.O_RDONLY) -> int:
    """Open a regular file, as an ``opener`` of ``open``; a symlink is followed only for reading.

    A folder from elsewhere may hold a pipe, which never opens, or a symlink to a file outside it. Raises
    UserError for these.
    """
    nofollow = os.O_NOFOLLOW if flags & os.O_ACCMODE != os.O_RDONLY else 0
    try:
        file = os.open(path, flags | nofollow | os.O_NONBLOCK, 0o666)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.ENXIO):
            raise
    else:
        mode = os.fstat(file).st_mode
        if stat.S_ISREG(mode) or stat.S_ISDIR(mode):  # a folder has an error of its own
            return file
        os.close(file)
    raise _irregular(path)


def regular_or_new(path: Path) -> Path:
    """Return a path that nobody typed. Raises UserError if it exists and is not a regular file."""
    if path.is_symlink() or (path.exists() and not path.is_file()):
        raise _irregular(path)
    return path


def _irregular(path: str | Path) -> UserError:
    return UserError(f"{path} is a symlink, a pipe or a device in place of a regular file; delete it")


def read_json(path: Path) -> Any:
    """Read a JSON file. Raises UserError with line and column if it is not JSON, or not UTF-8 text."""
    try:
        with open(path, encoding="utf-8", opener=regular) as file:
            text = file.read()
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text: byte {error.start}; mend or delete it") from error
    try:
        return parsed(text)
    except UserError as error:
        raise UserError(f"{path} is {error}; mend or delete it") from error


def read_toml(path: Path) -> dict[str, Any]:
    """Read a TOML file. Raises UserError with the reason if it is none, or is not there."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"there is no file {path}") from None
    except (OSError, ValueError) as error:  # not UTF-8, not TOML, or a number of thousands of digits
        raise UserError(f"{path} is not TOML: {error}") from error
    except RecursionError:
        raise UserError(f"{path} is not TOML: lists or tables inside one another, thousands deep") from None


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def name_in_errors(path: Path) -> Generator[None]:
    """Name a file in errors of the operating system: the one for a full disk names none."""
    try:
        yield
    except OSError as error:
        if error.errno is not None:
            error.filename = str(path)
        raise


@contextmanager
def blame(path: Path) -> Generator[None]:
    """Name a file in any UserError about its content."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{path}: {error}; mend or delete it") from error


def append_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Append rows, one per line, in a single write."""
    with name_in_errors(path), open(path, "a", encoding="utf-8", opener=regular) as file:
        file.write("".join(map(row_line, rows)))


def row_line(row: Mapping[str, Any]) -> str:
    """Return a row as a line of JSON; numbers that are not finite become "nan", "inf" and "-inf"."""
    return json.dumps(to_plain(row), allow_nan=False) + "\n"


_INNERMOST: Final = re.compile(r"\{[^{}]*\}")
_BREAK: Final = re.compile(r"\s*\n\s*")


def write_json_atomic(path: Path, content: Any, *, flat: bool = False) -> None:
    """Write dataclasses, dicts, lists and scalars; numbers that are not finite as in ``row_line``.

    ``flat`` writes each innermost object, such as a row of a table, on one line.
    """
    text = to_json(content, indent=1)
    if flat:  # newlines occur only between values: inside a string they are escaped
        text = _INNERMOST.sub(lambda match: _BREAK.sub(" ", match[0]), text)
    write_text_atomic(path, text + "\n")


def write_output(path: Path, text: str) -> None:
    """Write text to a path that the user named: to a symlink's target, or into a device or a pipe.

    A regular file is replaced as by ``write_text_atomic``, unless this process prints into it.
    """
    stream = next((stream for stream in (1, 2) if _is_open_as(path, stream)), None)
    if stream is None and (path.is_file() or not path.exists()):
        write_text_atomic(path.resolve(), text)
        return
    if sys.stdout is not None:
        sys.stdout.flush()
    with name_in_errors(path), open(path if stream is None else stream, "wb", closefd=stream is None) as file:
        file.write(text.encode())


def _is_open_as(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except OSError:
        return False


def write_text_atomic(path: Path, text: str) -> None:
    """Write a new file, sync and rename it: a reader sees the old text or the new one, never a part."""
    write_bytes_atomic(path, text.encode())


def write_bytes_atomic(path: Path, content: bytes) -> None:
    """Write bytes as ``write_text_atomic`` writes text; the new file keeps the mode of the old one."""
    new = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
    with name_in_errors(path):
        try:
            new.unlink(missing_ok=True)
            with new.open("xb") as file:
                if path.is_file() and not path.is_symlink():
                    os.fchmod(file.fileno(), stat.S_IMODE(path.stat().st_mode))
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            new.replace(path)
        except BaseException:
            with suppress(OSError):
                new.unlink(missing_ok=True)
            raise
    sync(path.parent)


def sync(path: Path) -> None:
    """Wait until a file, or a folder's list of names, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with name_in_errors(path):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
