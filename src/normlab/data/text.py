"""Parallel text files: plain, ``.gz`` or ``.xz``, one sentence a line, strict UTF-8."""

from __future__ import annotations

import gzip
import lzma
import os
import zlib
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Pairs:
    """Sentences and their translations, line by line; both sides have the same length."""

    source: list[str]
    target: list[str]

    def __len__(self) -> int:
        return len(self.source)


_OPENERS = {".gz": gzip.open, ".xz": lzma.open}


def located(path: str | Path) -> Path:
    """The file that a path means: ``$NORMLAB_DATA`` is filled in, and ``x`` is ``x.gz`` or ``x.xz`` where
    only that exists.

    Raises FileNotFoundError where ``$NORMLAB_DATA`` is meant and not set.
    """
    expanded = os.path.expandvars(path)
    if "$NORMLAB_DATA" in expanded:
        raise FileNotFoundError(
            f"{path} is in the folder of local data sets, and NORMLAB_DATA is not set; "
            f"type: export NORMLAB_DATA=/folder/of/data/sets"
        )
    plain = Path(expanded)
    packed = (plain.with_name(plain.name + ending) for ending in _OPENERS)
    return plain if plain.exists() else next((p for p in packed if p.exists()), plain)


def _read_bytes(path: Path) -> bytes:
    try:
        with _OPENERS.get(path.suffix, open)(path, "rb") as stream:
            return stream.read()
    except FileNotFoundError:
        raise FileNotFoundError(f"there is no text file {path}; pass the path of an existing one") from None
    except IsADirectoryError:
        raise ValueError(f"{path} is a folder; pass a text file, plain, .gz or .xz") from None
    except (gzip.BadGzipFile, lzma.LZMAError, zlib.error, EOFError) as error:
        raise ValueError(f"{path} cannot be unpacked as {path.suffix} ({error}); pack it again") from error


def read_lines(path: str | Path) -> list[str]:
    r"""The lines of a text file, without their ends.

    Only ``\n`` ends a line (U+2028, form feeds and their like stay inside one); a ``\r`` before it and a
    byte-order mark at the start of the file are dropped. Raises ``FileNotFoundError``, or ``ValueError`` for
    a broken archive and for bytes that are not UTF-8, naming file and line.
    """
    path = located(path)
    content = _read_bytes(path)
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ValueError(
            f"{path}, line {line}: byte 0x{content[error.start]:02x} is not UTF-8; convert the file, for "
            f"example with iconv -f latin1 -t utf-8"
        ) from error
    lines = text.removeprefix("\ufeff").split("\n")
    if lines[-1] == "":
        lines.pop()
    return [line.rstrip("\r") for line in lines]


def read_parallel(source: str | Path, target: str | Path) -> tuple[list[str], list[str]]:
    """Both sides of a parallel text. Raises ``ValueError`` if one is empty or their line counts differ."""
    sides = read_lines(source), read_lines(target)
    for path, lines in zip((source, target), sides, strict=True):
        if not lines:
            raise ValueError(f"{path} is empty; pass a file with one sentence a line")
    if len(sides[0]) != len(sides[1]):
        raise ValueError(
            f"{source} has {len(sides[0])} lines but {target} has {len(sides[1])}; line n of one must be the "
            f"translation of line n of the other"
        )
    return sides
