"""Texts from a file, a column of a table, or a column of a Hugging Face data set."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, final

from normlab.config.units import count
from normlab.data.hub import HUB, HubColumn
from normlab.data.text import TextFile, located
from normlab.errors import UserError

_PART: Final = re.compile(r"(.+)\[(\d*):(\d*)\]")


def open_lines(spec: str | Path) -> TextFile | Column | HubColumn | Part:
    """Return the text that a path of the configuration means; it is read when it is iterated.

    ``corpus.de``, a file; ``pairs.tsv#2`` and ``pairs.tsv#en``, a ``Column``;
    ``hf:wmt14:de-en#train.translation.de``, a ``HubColumn``; ``corpus.de[:1000]``, a ``Part`` of any of
    these. A file whose own name has a ``#`` or a part is a file. Raises UserError for a path of none of these
    forms.
    """
    text = str(spec)
    part = _PART.fullmatch(text)
    if part and not located(text).exists():
        return Part(open_lines(part[1]), int(part[2] or 0), int(part[3]) if part[3] else None)
    if text.startswith(HUB):
        return HubColumn.of(text)
    if "#" not in text or located(text).exists():
        return TextFile(spec)
    cuts = [place for place, character in enumerate(text) if character == "#"]
    cut = next((place for place in cuts if located(text[:place]).is_file()), cuts[0])
    if not cut:
        raise UserError(f"{text} names no table; type its file before the #, for example pairs.tsv{text}")
    return Column(text[:cut], text[cut + 1 :])


def open_text(spec: str | Path) -> TextFile | Column | HubColumn | Part:
    """Return the text as ``open_lines`` does, for those who iterate it more than once.

    Raises UserError for a pipe or a device, whose lines can be read only once.
    """
    text = open_lines(spec)
    path = file_of(text)
    if path and path.exists() and not (path.is_file() or path.is_dir()):
        raise UserError(
            f"{spec} is a pipe or a device, and a text is read more than once; save it in a file, and pass "
            "that"
        )
    return text


def file_of(text: TextFile | Column | HubColumn | Part) -> Path | None:
    """Return the file that holds a text; None for a column of the Hub."""
    if isinstance(text, Part):
        return file_of(text.text)
    return None if isinstance(text, HubColumn) else located(text.path)


@final
@dataclass(frozen=True)
class Column:
    r"""A column of a table: a text file (plain, ``.gz`` or ``.xz``) with columns between tabs.

    A tab always ends a column and ``\n`` a row: quotation marks are ordinary characters and nothing is
    escaped, as in the tables of GLUE. Columns have numbers from 1 on, and then every row is text; or names,
    and then the first row holds these.
    """

    path: str
    column: str

    @property
    def name(self) -> str:
        return f"{self.path}#{self.column}"

    def __iter__(self) -> Iterator[str]:
        """Yield the cells. Raises UserError for an unknown column and for a row with more or fewer columns
        than the first, and the errors of ``TextFile``.
        """
        rows = iter(TextFile(self.path))
        first = next(rows, None)
        if first is None:
            return
        names = first.split("\t")
        numbered = self.column.isascii() and self.column.isdecimal()
        place = self._numbered(len(names)) if numbered else self._named(names)
        text = itertools.chain([first], rows) if numbered else rows
        for number, row in enumerate(text, 1 if numbered else 2):
            cells = row.split("\t")
            if len(cells) != len(names):
                raise UserError(
                    f"{self.path}, line {number} has {count(len(cells), 'column')} and line 1 has "
                    f"{len(names)}; put one tab between two columns and none inside a column"
                )
            yield cells[place]

    def _numbered(self, columns: int) -> int:
        place = int(self.column)
        if not 1 <= place <= columns:
            raise UserError(
                f"{self.path} has {count(columns, 'column')}, and #{self.column} is none of them; type "
                f"{self.path}#1" + (f" to #{columns}" if columns > 1 else "")
            )
        return place - 1

    def _named(self, names: list[str]) -> int:
        if names.count(self.column) != 1:
            again = "more than one column" if self.column in names else "no column"
            raise UserError(
                f"{self.path} has {again} {self.column!r}; its first line has {', '.join(map(repr, names))}; "
                f"type one of these after the #, or "
                + (f"a number from 1 to {len(names)}" if len(names) > 1 else "1 for its only column")
            )
        return names.index(self.column)


@final
@dataclass(frozen=True)
class Part:
    """The lines of a text from one on up to another one, counted from 0 as in Python: ``[start:stop]``."""

    text: TextFile | Column | HubColumn | Part
    start: int
    stop: int | None

    @property
    def name(self) -> str:
        return f"{self.text.name}[{self.start or ''}:{'' if self.stop is None else self.stop}]"

    def __iter__(self) -> Iterator[str]:
        return itertools.islice(iter(self.text), self.start, self.stop)
