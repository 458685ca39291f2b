"""Tables as they are read: from CSV, JSON, data frames or rows, each cell as its source has it."""

from __future__ import annotations

import codecs
import csv
import io
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from normlab.base.files import regular
from normlab.base.io import parsed
from normlab.errors import UserError, nearest

SEPARATOR_LINE: Final = re.compile(r"\"?sep=.\"?")
"""How Excel names the separator of a table, before its heading."""
DECIMAL_COMMA: Final = re.compile(r"[-+]?\d+,\d+(?:[eE][-+]?\d+)?")


@dataclass(frozen=True)
class Table:
    """Rows by column, and what to call a row in an error."""

    columns: tuple[str, ...]
    rows: tuple[Mapping[str, Any], ...]
    source: str
    lines: tuple[int, ...] = ()
    """The line of each row in its file; without them rows are counted from 1."""

    def where(self, index: int) -> str:
        """The place of a row."""
        return f"{self.source}, line {self.lines[index] if self.lines else index + 1}"

    def values(self, column: str) -> list[Any]:
        return [row[column] for row in self.rows]


def read_text(path: Path) -> str:
    """Read a text file. Raises UserError if it is empty, or neither UTF-8 nor marked as UTF-16."""
    with open(path, "rb", opener=regular) as file:
        content = file.read()
    is_utf16 = content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    try:
        text = content.decode("utf-16" if is_utf16 else "utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path} is not UTF-8 text: its byte {error.start} cannot be read; save it again as UTF-8"
        ) from None
    if not text.strip():
        raise UserError(f"{path} is empty; name a file with scores")
    if "\0" in text:
        raise UserError(f"{path} holds NUL bytes, as a damaged file does; export it again")
    return text


def read_csv(path: Path) -> Table:
    """Read a table separated by commas, semicolons or tabs, as spreadsheets and loggers write it.

    Spreadsheets also write the separator into a line of its own, rows and columns that hold nothing, and,
    where semicolons separate, a comma in the place of the decimal point.

    Raises UserError for rows of other lengths, and for columns whose names are missing or the same.
    """
    text = read_text(path)
    heading = text.splitlines()[0]
    separator = max("\t;,", key=heading.count)
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=separator, strict=True)
    lines: list[tuple[int, list[str]]] = []
    try:
        for cells in reader:
            names_separator = reader.line_num == 1 and SEPARATOR_LINE.fullmatch(separator.join(cells))
            if any(cell.strip() for cell in cells) and not names_separator:
                lines.append((reader.line_num, cells))
    except csv.Error as error:
        raise UserError(f"{path}, line {reader.line_num}: {error}; export the table again") from None
    (_, header), *rows = lines
    if not rows:
        raise UserError(f"{path} has a heading and no rows; name a file with scores")
    for line, row in rows:
        if len(row) != len(header):
            raise UserError(
                f"{path}, line {line} has {len(row)} cells, but the heading has {len(header)}; export the "
                "table again, or mend that line"
            )
    named = _named_columns(header, [row for _, row in rows], path)
    reads = _with_point if separator == ";" else str
    by_column = [{name: reads(row[place]) for place, name in named.items()} for _, row in rows]
    return Table(tuple(named.values()), tuple(by_column), str(path), tuple(line for line, _ in rows))


def _named_columns(header: Sequence[str], rows: Sequence[Sequence[str]], path: Path) -> dict[int, str]:
    """The names of the columns by their place, without columns that hold nothing.

    Raises UserError if a column with cells has no name, or the name of another.
    """
    named: dict[int, str] = {}
    for place, name in enumerate(cell.strip() for cell in header):
        if name and name in named.values():
            raise UserError(f"{path} has two columns called {name!r}; rename one")
        if name:
            named[place] = name
        elif any(row[place].strip() for row in rows):
            raise UserError(
                f"{path}: column {place + 1} has cells, but no name in the first line; write a name for each "
                "column there, such as change, seed and val_loss"
            )
    return named


def _with_point(cell: str) -> str:
    """A number with a decimal comma as one with a decimal point; anything else as it is."""
    return cell.replace(",", ".") if DECIMAL_COMMA.fullmatch(cell.strip()) else cell


def read_json_rows(path: Path) -> Table:
    """Read JSON lines, or one list of objects; what is nested gets names such as ``config.seed``."""
    text = read_text(path)
    if text.lstrip().startswith("["):
        rows = _parsed(text, str(path))
    else:
        lines = enumerate(text.split("\n"), start=1)  # U+2028 may stand in a string
        rows = [_parsed(line, f"{path}, line {number}") for number, line in lines if line.strip()]
    return table_of_rows(rows, str(path))


def _parsed(text: str, where: str) -> Any:
    try:
        return parsed(text)
    except UserError as error:
        raise UserError(f"{where} is {error}; mend it, or export it again") from None


def table_of_rows(rows: Iterable[Any], source: str) -> Table:
    """Return a table of objects. Raises UserError if one is no object; absent keys are empty cells."""
    flat = []
    for line, row in enumerate(rows, start=1):
        if not isinstance(row, Mapping):
            raise UserError(f"{source}, line {line} is {row!r:.60}, but each row is an object by column")
        flat.append(_flattened(row))
    if not flat:
        raise UserError(f"there is no row in {source}; a row for each run is needed")
    columns = tuple(dict.fromkeys(name for row in flat for name in row))
    return Table(columns, tuple({name: row.get(name) for name in columns} for row in flat), source)


def _flattened(row: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in row.items():
        name = f"{before}{key}"
        if isinstance(value, Mapping):
            flat |= _flattened(value, f"{name}.")
        else:
            flat[name] = value
    return flat


def rows_of_frame(frame: Any) -> list[dict[str, Any]]:
    """Return the rows of a data frame of polars or pandas, or of a series, with their index as columns."""
    if hasattr(frame, "to_dicts"):
        return frame.to_dicts()
    if any(name is not None for name in frame.index.names):
        frame = frame.reset_index()
    rows = frame.to_dict("records") if hasattr(frame, "columns") else []
    return [{str(name): value for name, value in row.items()} for row in rows]


# ------------------------------------------------------------------------------------------------- cells


def is_empty(value: Any) -> bool:
    """Whether a cell holds nothing. NaN is something: the score of a run that diverged."""
    return value is None or (isinstance(value, str) and not value.strip())


def number_of(value: Any) -> float | None:
    """Return a cell as a number, NaN included; None if it is no number."""
    if isinstance(value, bool) or is_empty(value):
        return None
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return None


def is_numeric(table: Table, column: str) -> bool:
    """Whether a column holds numbers, and perhaps empty cells."""
    cells = [value for value in table.values(column) if not is_empty(value)]
    return bool(cells) and all(number_of(value) is not None for value in cells)


def numbers_in(table: Table, column: str) -> list[float]:
    """The numbers of a column, in order; a logger leaves cells empty at steps where it did not measure."""
    numbers = [number_of(value) for value in table.values(column)]
    return [number for number in numbers if number is not None]


def seed_text(value: Any) -> str:
    """Return a seed as text; a data frame with an empty cell turns 1 into 1.0."""
    number = number_of(value)
    return str(int(number)) if number is not None and number.is_integer() else str(value).strip()


def column_named(table: Table, name: str, flag: str) -> str:
    """Return a column by its name, or by the end of it: ``val_loss`` for ``summary.val_loss``.

    Raises UserError, with the columns there are, if none or several are called so.
    """
    if name in table.columns:
        return name
    ending = [column for column in table.columns if column.endswith((f".{name}", f"/{name}"))]
    if len(ending) == 1:
        return ending[0]
    if ending:
        raise UserError(f"{table.source} has {' and '.join(ending)}; type {flag} {shlex.quote(ending[0])}")
    raise UserError(f"{table.source} has no column {name!r}{nearest(name, table.columns)}; mend {flag}")
