"""The runs in a table of scores: with a row for each, or wide by change or seed, or exported curves."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any, Final

from normlab.errors import UserError
from normlab.judging.naming import SEED_WORD, change_and_seed
from normlab.judging.run import ScoredRun, ScoreOptions, ended
from normlab.judging.table import Table, column_named, is_empty, is_numeric, number_of, numbers_in, seed_text

SEED_COLUMN: Final = re.compile(r"(?:.*[._/ ])?(?:random_?|rng_?)?seed", re.IGNORECASE)
SEED_NAME: Final = re.compile(r"(?:seed|s)?[-_= ]?(\d+)", re.IGNORECASE)
"""The heading of a column that holds the scores of one seed: ``1``, ``seed 1``, ``s1``."""
STATE_COLUMN: Final = re.compile(r"state|status", re.IGNORECASE)
NOT_FINISHED: Final = re.compile(r"crash|fail|kill|error|abort|diverge|oom|running|pending", re.IGNORECASE)
OF_WANDB: Final = {"Name", "State"}
"""The columns by which a table of Weights & Biases is known."""
WANDB_CURVE: Final = re.compile(r"(?P<run>.+) - (?P<metric>.+)")
"""The heading of a curve in an exported chart of Weights & Biases."""
ENDS_OF_BAND: Final = ("__MIN", "__MAX")
"""Beside each curve, Weights & Biases exports the ends of its band."""
FORM_OF_DICT: Final = "a dict has a list of scores for each change, such as {'base': [3.31, 3.29]}"


def runs_of(table: Table, options: ScoreOptions) -> list[ScoredRun]:
    """Return the runs of a table. Raises UserError if it is not clear which column is what."""
    means = [column for column in table.columns if not column.endswith(ENDS_OF_BAND)]
    curves = _columns_like(WANDB_CURVE, means)
    if curves and not options.by:
        return _runs_of_curves(table, curves, options)
    seed = column_named(table, options.seed, "--seed-column") if options.seed else _seed_column(table)
    may_be_wide = not options.metric and not options.by
    if may_be_wide and seed is not None:
        columns = _changes_across(table, seed)
        if columns:
            return _wide_by_change(table, seed, columns)
    elif may_be_wide:
        seeds = _seeds_across(table)
        if seeds:
            return _wide_by_seed(table, seeds)
    return _long(table, seed, options)


def _columns_like(pattern: re.Pattern[str], columns: Sequence[str]) -> dict[str, re.Match[str]]:
    """The columns with a name of some form, each with its match."""
    matches = {column: pattern.fullmatch(column) for column in columns}
    return {column: match for column, match in matches.items() if match is not None}


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
    seeds = {
        column: match[1]
        for column, match in _columns_like(SEED_NAME, others).items()
        if is_numeric(table, column)
    }
    are_called_so = all(SEED_WORD.search(column) for column in seeds)
    return seeds if are_called_so or len(seeds) == len(others) else {}


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


def _runs_of_curves(
    table: Table, curves: Mapping[str, re.Match[str]], options: ScoreOptions
) -> list[ScoredRun]:
    """The runs of an exported chart of Weights & Biases: a column for each run, a row for each step."""
    metrics = list(dict.fromkeys(match["metric"] for match in curves.values()))
    is_clear = options.metric in metrics if options.metric else len(metrics) == 1
    if not is_clear:
        raise UserError(
            f"{table.source} has curves of {', '.join(metrics)}; type --metric {shlex.quote(metrics[0])}"
        )
    metric = options.metric or metrics[0]
    runs = []
    for column, match in curves.items():
        if match["metric"] != metric:
            continue
        values = numbers_in(table, column)
        change, seed = change_and_seed(match["run"], options.name)
        score = options.take.score(values, higher_is_better=options.higher_is_better)
        runs.append(ended(change, seed, score, f"{table.source}, {column}", metric=metric))
    return runs


def _long(table: Table, seed: str | None, options: ScoreOptions) -> list[ScoredRun]:
    """The runs of a table with a row for each."""
    state = next((column for column in table.columns if STATE_COLUMN.fullmatch(column)), None)
    metric = _metric_column(table, [seed, state, *options.by], options)
    by = [column_named(table, name, "--by") for name in options.by]
    names_hold_seeds = False
    if not by and set(table.columns) >= OF_WANDB:
        is_grouped = "Group" in table.columns and not any(map(is_empty, table.values("Group")))
        by = ["Group" if is_grouped else "Name"]
        names_hold_seeds = not is_grouped
    by = by or _change_columns(table, [seed, state, metric])
    runs = []
    for i, row in enumerate(table.rows):
        change = str(row[by[0]]) if len(by) == 1 else ", ".join(f"{column}={row[column]}" for column in by)
        seed_of_run = None if seed is None or is_empty(row[seed]) else seed_text(row[seed])
        if names_hold_seeds:
            change, seed_in_name = change_and_seed(change, options.name)
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
        f"{where}: {metric} is {value!r}, which is not a number; write a number, nan for a run that "
        "diverged, or nothing for one that failed"
    )


def _metric_column(table: Table, others: Sequence[str | None], options: ScoreOptions) -> str:
    if options.metric:
        return column_named(table, options.metric, "--metric")
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
                wrong = f"a score of {change!r} is {score!r:.60}, which is not a number"
                raise UserError(f"{wrong}; {FORM_OF_DICT}")
            runs.append(ended(str(change), seed, number, f"{source}, {change}"))
    return runs
