"""Texts from a file, a column of a table, or a column of a Hugging Face data set.

The library ``datasets`` reads data sets; no code from a data set is executed.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, Final, Self, TypeAlias, final

from normlab.base.units import count
from normlab.errors import UserError
from normlab.lab.data.text import LineList, TextFile, Unit, filled_in, lines_as_units, located

HUB: Final = "hf:"
_PART: Final = re.compile(r"(.+)\[(\d*):(\d*)\]")
_ROWS_AT_A_TIME: Final = 1000

Text: TypeAlias = "TextFile | Column | HubColumn | _LineRange | LineList"


def open_lines(spec: str | Path) -> Text:
    """Return the text that a path in the configuration refers to; it is read when it is iterated.

    ``corpus.de``, a file; ``pairs.tsv#2`` and ``pairs.tsv#en``, a ``Column``;
    ``hf:wmt14:de-en#train.translation.de``, a ``HubColumn``; ``corpus.de[:1000]``, a part of any of
    these. A file whose own name contains a ``#`` or ``[:1000]`` is a file. Raises UserError for a path of any
    other form.
    """
    text = str(spec)
    part = _PART.fullmatch(text)
    if part and not located(text).exists():
        start, stop = int(part[2] or 0), int(part[3]) if part[3] else None
        return _LineRange(open_lines(part[1]), start, stop)
    if text.startswith(HUB):
        return HubColumn.of(text)
    if "#" not in text or located(text).exists():
        return TextFile(spec)
    signs = [place for place, character in enumerate(text) if character == "#"]
    # The names of a table and of its column may both have a #: the file that exists decides.
    sign = next((place for place in signs if located(text[:place]).is_file()), signs[0])
    if not sign:
        raise UserError(f"{text} names no table; type its file before the #, for example pairs.tsv{text}")
    return Column(text[:sign], text[sign + 1 :])


def open_text(spec: str | Path) -> Text:
    """Return the text as ``open_lines`` does, for callers that iterate it more than once.

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


def file_of(text: Text) -> Path | None:
    """Return the file that holds a text; None for a column of the Hub and for lines in memory."""
    if isinstance(text, _LineRange):
        return file_of(text.text)
    if isinstance(text, HubColumn | LineList):
        return None
    return located(text.path)


@final
@dataclass(frozen=True)
class Column:
    r"""A column of a table: a text file (plain, ``.gz`` or ``.xz``) with columns between tabs.

    A tab always ends a column and ``\n`` a row: quotation marks are ordinary characters and nothing is
    escaped, as in the tables of GLUE. A column is given by its number, from 1 on, if every row is text, or by
    its name if the first row holds names.
    """

    path: str
    column: str
    in_rows: ClassVar[bool] = False

    @property
    def name(self) -> str:
        return f"{self.path}#{self.column}"

    def __iter__(self) -> Iterator[str]:
        """Yield the cells. Raises UserError for an unknown column and for a row with more or fewer columns
        than the first, as well as the errors of ``TextFile``.
        """
        rows = iter(TextFile(self.path))
        first = next(rows, None)
        if first is None:
            return
        names = first.split("\t")
        by_number = self.column.isascii() and self.column.isdecimal()
        if by_number:
            place, first_number = self._place_of_number(len(names)), 1
            rows = itertools.chain([first], rows)
        else:
            place, first_number = self._place_of_name(names), 2
        for number, row in enumerate(rows, first_number):
            cells = row.split("\t")
            if len(cells) != len(names):
                raise UserError(
                    f"{self.path}, line {number} has {count(len(cells), 'column')} and line 1 has "
                    f"{len(names)}; put one tab between two columns and none inside a column"
                )
            yield cells[place]

    def units(self) -> Iterator[Unit]:
        return lines_as_units(self)

    def _place_of_number(self, columns: int) -> int:
        place = int(self.column)
        if not 1 <= place <= columns:
            last = f" to #{columns}" if columns > 1 else ""
            raise UserError(
                f"{self.path} has {count(columns, 'column')}, and #{self.column} is none of them; type "
                f"{self.path}#1{last}"
            )
        return place - 1

    def _place_of_name(self, names: list[str]) -> int:
        if names.count(self.column) != 1:
            wrong = "more than one column" if self.column in names else "no column"
            numbers = f"a number from 1 to {len(names)}" if len(names) > 1 else "1 for its only column"
            raise UserError(
                f"{self.path} has {wrong} {self.column!r}; its first line has {', '.join(map(repr, names))}; "
                f"type one of these after the #, or {numbers}"
            )
        return names.index(self.column)


@final
@dataclass(frozen=True)
class _LineRange:
    """The lines of a text from ``start`` up to ``stop``, counted from 0 as in Python: ``[start:stop]``."""

    text: Text
    start: int
    stop: int | None

    @property
    def name(self) -> str:
        return f"{self.text.name}[{self.start or ''}:{'' if self.stop is None else self.stop}]"

    @property
    def in_rows(self) -> bool:
        return self.text.in_rows

    def __iter__(self) -> Iterator[str]:
        return itertools.islice(iter(self.text), self.start, self.stop)

    def units(self) -> Iterator[Unit]:
        chosen = itertools.islice(self.text.units(), self.start, self.stop)
        return ((part, begins or number == 0) for number, (part, begins) in enumerate(chosen))


@final
@dataclass(frozen=True)
class HubSet:
    """A data set on the Hub, or a folder of parquet, JSON lines or CSV files in the same layout."""

    path: str
    """``wmt14``, ``IWSLT/iwslt2017``, ``./folder``, ``$NORMLAB_DATA/folder``."""
    config: str = ""

    @classmethod
    def of(cls, spec: str) -> Self:
        """Parse ``[hf:]name[:config]``. Raises UserError if there is no name."""
        path, _, config = spec.removeprefix(HUB).partition(":")
        if not path:
            raise UserError(f"{spec} names no data set; type {HUB}NAME or {HUB}NAME:CONFIG")
        return cls(path, config)

    def __str__(self) -> str:
        return f"{HUB}{self.path}" + (f":{self.config}" if self.config else "")

    def configs(self) -> list[str]:
        with _library(self) as datasets:
            return list(datasets.get_dataset_config_names(self._where))

    def splits(self) -> list[str]:
        try:
            with _library(self) as datasets:
                return list(datasets.get_dataset_split_names(self._where, self.config or None))
        except UserError:
            self._require_config()
            raise

    def table(self, split: str) -> Any:
        """Return the rows of a split, memory-mapped. Raises UserError or OSError with one sentence."""
        try:
            with _library(self) as datasets:
                return datasets.load_dataset(self._where, self.config or None, split=split)
        except UserError:
            self._require_config()
            self._require_split(split)
            raise

    @property
    def _where(self) -> str:
        where = filled_in(self.path)
        if where.startswith("~"):
            where = str(Path(where).expanduser())
        if where.startswith((".", "/", "$")) and not Path(where).exists():
            raise FileNotFoundError(f"there is no folder {where}")
        return where

    def _require_config(self) -> None:
        configs = self.configs()
        needs_no_name = len(configs) <= 1 and not self.config
        if self.config not in configs and not needs_no_name:
            wrong = f"has no configuration {self.config!r}" if self.config else "has several configurations"
            raise UserError(
                f"{HUB}{self.path} {wrong}; it has {', '.join(configs)}; type {HUB}{self.path}:{configs[0]}#…"
            )

    def _require_split(self, split: str) -> None:
        splits = self.splits()
        if split.partition("[")[0] not in splits:
            raise UserError(
                f"{self} has no split {split!r}; it has {', '.join(splits)}; type {self}#{splits[0]}.…"
            )


@final
@dataclass(frozen=True)
class HubColumn:
    """``hf:NAME[:CONFIG]#SPLIT.COLUMN[.KEY]``: the texts of one column, in order.

    A line end inside a text becomes a space; numbers, such as labels, are written in decimals.
    """

    of_set: HubSet
    split: str
    """A split or a part of one: ``train[:1000]``."""
    keys: tuple[str, ...]
    """The column, and the language in it if it holds a translation."""
    in_rows: ClassVar[bool] = True

    @classmethod
    def of(cls, spec: str) -> Self:
        name, _, place = spec.removeprefix(HUB).partition("#")
        split, *keys = place.split(".")
        if not name or not split or not keys or not all(keys):
            raise UserError(
                f"{spec} names no column of a data set; type hf:NAME#SPLIT.COLUMN or "
                f"hf:NAME:CONFIG#SPLIT.COLUMN, for example hf:wmt14:de-en#train.translation.de"
            )
        return cls(HubSet.of(name), split, tuple(keys))

    @property
    def name(self) -> str:
        return f"{self.of_set}#{self.split}.{'.'.join(self.keys)}"

    def __iter__(self) -> Iterator[str]:
        """Yield the texts. Raises UserError if the column does not exist or a row holds no text."""
        return (re.sub(r"\r\n|\n|\r", " ", text) for text in self._texts())

    def units(self) -> Iterator[Unit]:
        """Yield the texts unchanged; each is a document."""
        return ((text, True) for text in self._texts())

    def _texts(self) -> Iterator[str]:
        table = self.of_set.table(self.split)
        self._require_key(self.keys[0], table.column_names, f"{self.of_set}#{self.split}.")
        parts = table.select_columns([self.keys[0]]).with_format("arrow").iter(batch_size=_ROWS_AT_A_TIME)
        row = 0
        for part in parts:
            for value in part.column(0).to_pylist():
                row += 1
                yield self._text(value, row)

    def _text(self, value: Any, row: int) -> str:
        """Return the text of a cell, or of a key in it. Raises UserError if it is no text."""
        before = f"{self.of_set}#{self.split}.{self.keys[0]}."
        for key in self.keys[1:]:
            self._require_key(key, list(value) if isinstance(value, dict) else [], before)
            value = value[key]
            before += f"{key}."
        if isinstance(value, dict):
            self._require_key("", list(value), before)
        if value is None or isinstance(value, (list, bytes)):
            content = "nothing" if value is None else f"a {type(value).__name__}"
            raise UserError(
                f"row {row} of {self.name} has {content} where a text is needed; name another column"
            )
        return str(value)

    def _require_key(self, key: str, known: Sequence[str], before: str) -> None:
        if key in known:
            return
        if not known:
            raise UserError(f"{self.name} does not exist, {before[:-1]} is a text; type {before[:-1]}")
        wrong = f"has no {key!r}" if key else "is not a text"
        raise UserError(f"{before[:-1]} {wrong}; it has {', '.join(known)}; type {before}{known[0]}")


@contextmanager
def _library(of_set: HubSet) -> Iterator[ModuleType]:
    """Yield the library without progress bars, and turn its errors into one sentence each."""
    try:
        import datasets
    except ImportError as error:
        raise FileNotFoundError(
            f"{of_set} is a Hugging Face data set, and those need the package datasets; type: pip install "
            f"'normlab[hf]'"
        ) from error
    from yaml import YAMLError  # which the library needs

    bars = datasets.is_progress_bar_enabled()
    datasets.disable_progress_bars()
    try:
        yield datasets
    except RuntimeError as error:
        if "scripts are no longer supported" not in str(error):
            raise
        raise UserError(
            f"{of_set} is a script, and no code of a data set is executed; save its tables as parquet, JSON "
            f"lines or CSV in a folder, and type hf:./folder#SPLIT.COLUMN"
        ) from error
    except (ValueError, RecursionError, YAMLError) as error:  # YAML stands at the head of its README
        raise UserError(
            f"{of_set} cannot be read ({' '.join(str(error).split())}); check its name and the part of "
            f"its split, such as train[:1000]"
        ) from error
    except (OSError, datasets.exceptions.DatasetsError) as error:
        raise FileNotFoundError(
            f"{of_set} was not found or cannot be read ({' '.join(str(error).split())}); check the name and "
            f"the network, or give the folder of its files: hf:./folder#SPLIT.COLUMN"
        ) from error
    finally:
        if bars:
            datasets.enable_progress_bars()
