"""Text files: plain, ``.gz`` or ``.xz``, one sentence a line, strict UTF-8, read line by line."""

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
    r"""The lines of a file without their ends; only a line of it is in memory at a time.

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
        path, number = located(self.path), 0
        try:
            with _OPENERS.get(path.suffix, open)(path, "rb") as stream:
                for number, content in enumerate(stream, 1):
                    line = content.decode().removeprefix("\ufeff") if number == 1 else content.decode()
                    if line:  # a mark alone is none
                        yield line.removesuffix("\n").rstrip("\r")
        except UnicodeDecodeError as error:
            raise UserError(
                f"{path}, line {number}: byte 0x{error.object[error.start]:02x} is not UTF-8; convert the "
                f"file, for example with iconv -f latin1 -t utf-8"
            ) from error
        except FileNotFoundError:
            raise FileNotFoundError(
                f"there is no text file {path}; pass the path of an existing one"
            ) from None
        except IsADirectoryError:
            raise UserError(f"{path} is a folder; pass a text file, plain, .gz or .xz") from None
        except (gzip.BadGzipFile, lzma.LZMAError, zlib.error, EOFError) as error:
            raise UserError(f"{path} cannot be unpacked as {path.suffix} ({error}); pack it again") from error


_OPENERS = {".gz": gzip.open, ".xz": lzma.open}

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
