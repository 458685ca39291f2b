"""Tables of scores, long or wide, from CSV, JSON lines, exports of Weights & Biases, or data frames."""

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
from normlab.judging.naming import SEED_WORD, change_and_seed
from normlab.judging.run import ScoredRun, Take, ended

SEED_COLUMN: Final = re.compile(r"(?:.*[._/ ])?(?:random_?|rng_?)?seed", re.IGNORECASE)
SEED_NAME: Final = re.compile(r"(?:seed|s)?[-_= ]?(\d+)", re.IGNORECASE)
"""The heading of a column that holds the scores of one seed: ``1``, ``seed 1``, ``s1``."""
SEPARATOR_LINE: Final = re.compile(r"\"?sep=.\"?")
"""How Excel names the separator of a table, before its heading."""
DECIMAL_COMMA: Final = re.compile(r"[-+]?\d+,\d+(?:[eE][-+]?\d+)?")
STATE_COLUMN: Final = re.compile(r"state|status", re.IGNORECASE)
NOT_FINISHED: Final = re.compile(r"crash|fail|kill|error|abort|diverge|oom|running|pending", re.IGNORECASE)
OF_WANDB: Final = {"Name", "State"}
WANDB_CURVE: Final = re.compile(r"(?P<run>.+) - (?P<metric>.+)")
FORM_OF_DICT: Final = "a dict has a list of scores for each change, such as {'base': [3.31, 3.29]}"
ENDS_OF_BAND: Final = ("__MIN", "__MAX")
"""Beside each curve, Weights & Biases exports the ends of its band."""


@dataclass(frozen=True)
class Asked:
    """What the user said about where changes, seeds and scores are found."""

    metric: str = ""
    """The column or key of the score, or for logs a regular expression."""
    take: Take = Take()
    by: tuple[str, ...] = ()
    """Columns that say what was changed."""
    seed: str = ""
    """The column of the seed."""
    name: str = ""
    """A regular expression for the names of files or runs, with groups ``change`` and ``seed``."""
    higher_is_better: bool = False


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


# --------------------------------------------------------------------------------------------------- runs


def runs_of(table: Table, asked: Asked) -> list[ScoredRun]:
    """Return the runs of a table. Raises UserError if it is not clear which column is what."""
    curves = {c: match for c in table.columns if (match := WANDB_CURVE.fullmatch(c))}
    if curves and not asked.by:
        return _runs_of_curves(table, curves, asked)
    seed = column_named(table, asked.seed, "--seed-column") if asked.seed else _seed_column(table)
    if not asked.metric and not asked.by:
        if seed is not None and (columns := _changes_across(table, seed)):
            return _wide_by_change(table, seed, columns)
        if seed is None and (seeds := _seeds_across(table)):
            return _wide_by_seed(table, seeds)
    return _long(table, seed, asked)


def _seed_column(table: Table) -> str | None:
    named = [column for column in table.columns if SEED_COLUMN.fullmatch(column)]
    if len(named) > 1:
        raise UserError(
            f"{table.source} has the columns {', '.join(named)}; type one, as in "
            f"--seed-column {shlex.quote(named[0])}"
        )
    return named[0] if named else None


def _changes_across(table: Table, seed: str) -> list[str]:
    """The columns of a table with a row for each seed and a column for each change; else none."""
    others = [column for column in table.columns if column != seed]
    seeds = [seed_text(value) for value in table.values(seed)]
    if len(set(seeds)) < len(seeds) or not all(is_numeric(table, column) for column in others):
        return []
    return others


def _seeds_across(table: Table) -> dict[str, str]:
    """The seed of each column of a table with a row for each change; else none.

    Other columns of numbers, such as their mean, are left out if the seeds are called so: ``seed 1``.
    """
    _, *others = table.columns
    seeds = {c: match[1] for c in others if (match := SEED_NAME.fullmatch(c)) and is_numeric(table, c)}
    are_called_so = all(SEED_WORD.search(column) for column in seeds)
    return seeds if seeds and (are_called_so or len(seeds) == len(others)) else {}


def _wide_by_change(table: Table, seed: str, columns: Sequence[str]) -> list[ScoredRun]:
    return [
        ended(column, seed_text(row[seed]), number_of(row[column]), f"{table.where(i)}, {column}")
        for column in columns
        for i, row in enumerate(table.rows)
        if not is_empty(row[column])
    ]


def _wide_by_seed(table: Table, seeds: Mapping[str, str]) -> list[ScoredRun]:
    name = table.columns[0]
    return [
        ended(str(row[name]), seed, number_of(row[column]), f"{table.where(i)}, {column}")
        for i, row in enumerate(table.rows)
        for column, seed in seeds.items()
        if not is_empty(row[column])
    ]


def _runs_of_curves(table: Table, curves: Mapping[str, re.Match[str]], asked: Asked) -> list[ScoredRun]:
    """The runs of an exported chart of Weights & Biases: a column for each run, a row for each step."""
    metrics = dict.fromkeys(m["metric"] for c, m in curves.items() if not c.endswith(ENDS_OF_BAND))
    if asked.metric not in metrics and (asked.metric or len(metrics) > 1):
        allowed = f"has curves of {', '.join(metrics)}"
        raise UserError(f"{table.source} {allowed}; type --metric {shlex.quote(next(iter(metrics)))}")
    metric = asked.metric or next(iter(metrics))
    runs = []
    for column, match in curves.items():
        if match["metric"] != metric:
            continue
        cells = table.values(column)
        values = [number for cell in cells if not is_empty(cell) and (number := number_of(cell)) is not None]
        change, seed = change_and_seed(match["run"], asked.name)
        score = asked.take.score(values, higher_is_better=asked.higher_is_better)
        runs.append(ended(change, seed, score, f"{table.source}, {column}", metric=metric))
    return runs


def _long(table: Table, seed: str | None, asked: Asked) -> list[ScoredRun]:
    """The runs of a table with a row for each."""
    state = next((column for column in table.columns if STATE_COLUMN.fullmatch(column)), None)
    metric = _metric_column(table, [seed, state, *asked.by], asked)
    by = [column_named(table, name, "--by") for name in asked.by]
    split_names = not by and set(table.columns) >= OF_WANDB
    if split_names:
        grouped = "Group" in table.columns and not any(map(is_empty, table.values("Group")))
        by, split_names = ["Group" if grouped else "Name"], not grouped
    by = by or _change_columns(table, [seed, state, metric])
    runs = []
    for i, row in enumerate(table.rows):
        change = str(row[by[0]]) if len(by) == 1 else ", ".join(f"{c}={row[c]}" for c in by)
        seed_of_run = None if seed is None or is_empty(row[seed]) else seed_text(row[seed])
        if split_names:
            change, seed_in_name = change_and_seed(change, asked.name)
            seed_of_run = seed_of_run or seed_in_name
        state_of_run = str(row[state] or "") if state else ""
        if NOT_FINISHED.search(state_of_run):  # what it logged before it ended is not its score
            score, reason = None, f"its {state} is {state_of_run}"
        else:
            score, reason = _score(row[metric], metric, table.where(i)), ""
        runs.append(ended(change, seed_of_run, score, table.where(i), reason=reason, metric=metric))
    return runs


def _score(value: Any, metric: str, where: str) -> float | None:
    """Return the number in a cell, None if it is empty. Raises UserError for words."""
    number = number_of(value)
    if number is None and not is_empty(value):
        raise _no_number(where, metric, value)
    return number


def _no_number(where: str, metric: str, value: Any) -> UserError:
    return UserError(
        f"{where}: {metric} is {value!r}, which is no number; write a number, nan for a run that diverged, "
        "or nothing for one that failed"
    )


def _metric_column(table: Table, others: Sequence[str | None], asked: Asked) -> str:
    if asked.metric:
        return column_named(table, asked.metric, "--metric")
    numeric = [c for c in table.columns if c not in others and is_numeric(table, c)]
    if len(numeric) == 1:
        return numeric[0]
    if not numeric:
        raise _without_numbers(table, [c for c in table.columns if c not in others])
    raise UserError(
        f"{table.source} has {', '.join(numeric)}, and each may be the score; type "
        f"--metric {shlex.quote(numeric[-1])}"
    )


def _without_numbers(table: Table, columns: Sequence[str]) -> UserError:
    """The error that no column is one of scores; it names the first word in a column that may be meant."""
    for column in columns:
        cells = table.values(column)
        if any(number_of(cell) is not None for cell in cells):
            words = [i for i, cell in enumerate(cells) if not is_empty(cell) and number_of(cell) is None]
            return _no_number(table.where(words[0]), column, cells[words[0]])
    return UserError(
        f"{table.source} has no column of numbers that can be the score: its columns are "
        f"{', '.join(table.columns)}; name a table with a score for each run"
    )


def _change_columns(table: Table, others: Sequence[str | None]) -> list[str]:
    """The columns that say what was changed: the one of words, or else all that are left."""
    left = [column for column in table.columns if column not in others]
    words = [column for column in left if not is_numeric(table, column)]
    full = [column for column in words if not any(map(is_empty, table.values(column)))]
    words = full or words  # every run has its change, but not every run has a note
    if len(words) == 1:
        return words
    if words:
        raise UserError(
            f"{table.source}: the columns {', '.join(words)} may say what was changed; type one, as in "
            f"--by {shlex.quote(words[0])}"
        )
    if not left:
        raise UserError(
            f"{table.source} has no column that says what was changed: its columns are "
            f"{', '.join(table.columns)}; add one, such as change, and type --by change"
        )
    return left


def runs_of_lists(scores: Mapping[str, Any], source: str) -> list[ScoredRun]:
    """Return the runs of scores by change: a list of them, in the order of their seeds, or by seed.

    The index of a pandas series names its seeds.
    """
    if not scores:
        raise UserError(f"{source} are empty; {FORM_OF_DICT}")
    runs = []
    for change, given in scores.items():
        by_seed = given.to_dict() if hasattr(given, "to_dict") else given
        if isinstance(by_seed, Mapping):
            pairs = [(seed_text(seed), score) for seed, score in by_seed.items()]
        elif isinstance(given, str) or not hasattr(given, "__iter__"):
            raise UserError(f"{change!r} is {given!r:.60}, and no list of scores; {FORM_OF_DICT}")
        else:
            pairs = [(str(seed), score) for seed, score in enumerate(given, start=1)]
        for seed, score in pairs:
            number = number_of(score)
            if number is None and not is_empty(score):
                raise UserError(f"a score of {change!r} is {score!r:.60}, which is no number; {FORM_OF_DICT}")
            runs.append(ended(str(change), seed, number, f"{source}, {change}"))
    return runs


def rows_of_frame(frame: Any) -> list[dict[str, Any]]:
    """Return the rows of a data frame of polars or pandas, or of a series, with their index as columns."""
    if hasattr(frame, "to_dicts"):
        return frame.to_dicts()
    if any(name is not None for name in frame.index.names):
        frame = frame.reset_index()
    rows = frame.to_dict("records") if hasattr(frame, "columns") else []
    return [{str(name): value for name, value in row.items()} for row in rows]
