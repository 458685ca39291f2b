"""Text files: plain, ``.gz`` or ``.xz``, one sentence a line, strict UTF-8, read part by part."""

from __future__ import annotations

import gzip
import lzma
import os
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from normlab.errors import UserError


@dataclass(frozen=True)
class Pairs:
    """Sentences and their translations, line by line; both sides have the same length."""

    source: list[str]
    target: list[str]

    def __len__(self) -> int:
        return len(self.source)


@dataclass(frozen=True)
class TextFile:
    r"""The lines of a file without their ends; only a part of it is in memory at a time.

    Only ``\n`` ends a line (U+2028, form feeds and the like stay inside one); a ``\r`` before it and a
    byte-order mark at the start of the file are dropped. Iteration raises ``FileNotFoundError``, or
    ``UserError`` for a broken archive and for bytes that are not UTF-8, naming file and line.
    """

    path: str | Path

    @property
    def name(self) -> str:
        """The path as it was given, for messages."""
        return str(self.path)

    def __iter__(self) -> Iterator[str]:
        path = located(self.path)
        ended = 0
        for content in _whole_lines(path):
            try:
                text = content.decode("utf-8")
            except UnicodeDecodeError as error:
                line = ended + content.count(b"\n", 0, error.start) + 1
                raise UserError(
                    f"{path}, line {line}: byte 0x{content[error.start]:02x} is not UTF-8; convert the file, "
                    f"for example with iconv -f latin1 -t utf-8"
                ) from error
            lines = (text if ended else text.removeprefix("\ufeff")).split("\n")
            if lines[-1] == "":
                lines.pop()
            ended += len(lines)
            yield from (line.rstrip("\r") for line in lines)


_OPENERS = {".gz": gzip.open, ".xz": lzma.open}

_BYTES_AT_A_TIME = 2**20
_DATA_FOLDER = re.compile(r"\$(NORMLAB_DATA\b|\{NORMLAB_DATA\})")


def filled_in(path: str | Path) -> str:
    """Fill the environment variables into a path.

    Raises FileNotFoundError if the path has ``$NORMLAB_DATA`` and that is not set.
    """
    if _DATA_FOLDER.search(str(path)) and not os.environ.get("NORMLAB_DATA"):
        raise FileNotFoundError(
            f"{path} is in the folder of local data sets, and NORMLAB_DATA is not set; "
            f"type: export NORMLAB_DATA=/folder/of/data/sets"
        )
    return os.path.expandvars(path)


def located(path: str | Path) -> Path:
    """Return the file that a path means: variables are ``filled_in``, and ``x`` is ``x.gz`` or ``x.xz`` if
    only that exists. Raises as ``filled_in``.
    """
    plain = Path(filled_in(path))
    packed = (plain.with_name(plain.name + ending) for ending in _OPENERS)
    return plain if plain.exists() else next((p for p in packed if p.exists()), plain)


def read_lines(path: str | Path) -> list[str]:
    """Read all lines of a ``TextFile``, which defines lines and errors."""
    return list(TextFile(path))


def _whole_lines(path: Path) -> Iterator[bytes]:
    """Yield a file in parts that end with a line; no part is empty."""
    rest: list[bytes] = []
    for block in _blocks(path):
        end = block.rfind(b"\n") + 1
        if end:
            yield b"".join([*rest, block[:end]])
            rest = []
        if end < len(block):
            rest.append(block[end:])
    if rest:
        yield b"".join(rest)


def _blocks(path: Path) -> Iterator[bytes]:
    try:
        with _OPENERS.get(path.suffix, open)(path, "rb") as stream:
            while block := stream.read(_BYTES_AT_A_TIME):
                yield block
    except FileNotFoundError:
        raise FileNotFoundError(f"there is no text file {path}; pass the path of an existing one") from None
    except IsADirectoryError:
        raise UserError(f"{path} is a folder; pass a text file, plain, .gz or .xz") from None
    except (gzip.BadGzipFile, lzma.LZMAError, zlib.error, EOFError) as error:
        raise UserError(f"{path} cannot be unpacked as {path.suffix} ({error}); pack it again") from error
