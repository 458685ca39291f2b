"""Text and JSON files that no reader sees half written."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from normlab.errors import UserError
from normlab.spec.serialise import parsed, to_plain


def read_json(path: Path) -> Any:
    """Read a JSON file. Raises UserError with line and column if it is not JSON, or not UTF-8 text."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text: byte {error.start}; mend or delete it") from error
    try:
        return parsed(text)
    except UserError as error:
        raise UserError(f"{path} is not JSON: {error}; mend or delete it") from error


@contextmanager
def named(path: Path) -> Generator[None]:
    """Name a file in the errors of the operating system: that of a full disk names none."""
    try:
        yield
    except OSError as error:
        if error.errno is not None:
            error.filename = str(path)
        raise


def append_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Append rows, one a line, in a single write."""
    with named(path), path.open("a", encoding="utf-8") as file:
        file.write("".join(map(row_line, rows)))


def row_line(row: Mapping[str, Any]) -> str:
    """Return a row as a line of JSON; numbers that are not finite become "nan", "inf" and "-inf"."""
    return json.dumps(to_plain(row), allow_nan=False) + "\n"


def write_json_atomic(path: Path, content: Any) -> None:
    """Write dataclasses, dicts, lists and scalars; numbers that are not finite as in ``row_line``."""
    text = json.dumps(to_plain(content), ensure_ascii=False, indent=1, allow_nan=False)
    write_text_atomic(path, text + "\n")


def write_text_atomic(path: Path, text: str) -> None:
    """Write beside the file, sync and rename: a reader sees the old text or the new one, never a part."""
    write_bytes_atomic(path, text.encode())


def write_bytes_atomic(path: Path, content: bytes) -> None:
    """Write bytes as ``write_text_atomic`` writes text."""
    new = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
    with named(path):
        try:
            with new.open("wb") as file:
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
    """Wait until a file, or the list of a folder's names, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with named(path):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
