"""A folder with a file for each run: logs, and what trainers write beside their checkpoints.

The files of a folder are of one kind, the first of ``KINDS`` that it holds. Each is read for the values of
one metric in their order; ``Take`` says which of them is the score.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from normlab.base.files import read_json
from normlab.base.units import count
from normlab.errors import UserError, nearest
from normlab.judging.logs import compiled, last_lines, read_log, values_in_log
from normlab.judging.naming import change_and_seed
from normlab.judging.run import FAILED, ScoredRun, ScoreOptions, ended
from normlab.judging.table import (
    Table,
    column_named,
    is_numeric,
    number_of,
    numbers_in,
    read_csv,
    read_json_rows,
)

MOST_FILES: Final = 20_000
"""A folder with more files is refused: it is not one of logs."""
NANOGPT: Final = r"step \d+: train loss \S+, val loss ([0-9.]+)"
"""What nanoGPT, and scripts like it, print when they evaluate: read if no --metric is given."""


@dataclass(frozen=True)
class Kind:
    """A kind of file that holds the values of one run."""

    noun: str
    is_of: Callable[[Path], bool]
    values: Callable[[Path, ScoreOptions], list[float]]


def runs_in(folder: Path, options: ScoreOptions) -> list[ScoredRun]:
    """Return the runs of a folder. Raises UserError if it holds none, or two for one seed of a change."""
    files = list(_files(folder))
    for kind in _kinds(options):
        of_kind = [path for path in files if kind.is_of(path)]
        if of_kind:
            return _runs(folder, _latest(of_kind), kind, options)
    raise UserError(
        f"{folder} holds no file that is known: a log (.log, .txt or .out; type --metric and a regular "
        "expression), trainer_state.json, metrics.csv, event files of TensorBoard or their exports, or JSON "
        "lines"
    )


def _files(folder: Path) -> Iterator[Path]:
    """The files below a folder, hidden ones apart, in the order of their names."""
    number = 0
    for path in sorted(folder.rglob("*")):
        hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
        if hidden or not path.is_file():
            continue
        number += 1
        if number > MOST_FILES:
            raise UserError(f"{folder} holds more than {MOST_FILES:,} files; name the folder of the logs")
        yield path


def _latest(files: list[Path]) -> list[Path]:
    """Of the files in a run's numbered checkpoints and beside them, the last; other files stay as they are.

    A trainer of Hugging Face writes its whole history again into each checkpoint.
    """
    last: dict[Path, tuple[float, Path]] = {}
    for path in files:
        match = re.fullmatch(r"checkpoint-(\d+)", path.parent.name)
        run = path.parent.parent / path.name if match else path
        step = float(match[1]) if match else float("inf")
        if run not in last or step > last[run][0]:
            last[run] = (step, path)
    return [path for _, path in last.values()]


def _runs(folder: Path, files: list[Path], kind: Kind, options: ScoreOptions) -> list[ScoredRun]:
    runs: list[ScoredRun] = []
    known: dict[tuple[str, str], Path] = {}
    for path in files:
        change, seed = change_and_seed(str(path.relative_to(folder)), options.name)
        change = change or folder.resolve().name
        if seed is not None and (other := known.setdefault((change, seed), path)) is not path:
            raise UserError(
                f"{other} and {path} are both seed {seed} of {change}; move one away, or say with --name how "
                "changes and seeds are named"
            )
        values = kind.values(path, options)
        score = options.take.score(values, higher_is_better=options.higher_is_better)
        runs.append(ended(change, seed, score, str(path)))
    if all(run.outcome == FAILED for run in runs):
        typed = f"--metric {options.metric!r}" if options.metric else "the form of nanoGPT's logs"
        raise UserError(
            f"none of {count(len(runs), kind.noun)} in {folder} has a score by {typed}; type a --metric that "
            f"matches what they print: {files[0]} ends with: {last_lines(files[0]) or 'nothing'}"
        )
    return runs


def _log_values(path: Path, options: ScoreOptions) -> list[float]:
    return values_in_log(read_log(path), compiled(options.metric or NANOGPT))


# --------------------------------------------------------------------------------------- trainers' files


def _csv_values(path: Path, options: ScoreOptions) -> list[float]:
    table = read_csv(path)
    if table.columns == ("Wall time", "Step", "Value"):
        return numbers_in(table, "Value")
    return numbers_in(table, _metric_of(table, options))


def _metric_of(table: Table, options: ScoreOptions) -> str:
    if options.metric:
        return column_named(table, options.metric, "--metric")
    numeric = [column for column in table.columns if is_numeric(table, column)]
    candidates = numeric or table.columns
    raise UserError(
        f"{table.source} has {', '.join(candidates)}; type one, as in --metric {shlex.quote(candidates[-1])}"
    )


def _json_lines_values(path: Path, options: ScoreOptions) -> list[float]:
    table = read_json_rows(path)
    return numbers_in(table, _metric_of(table, options))


def _trainer_state_values(path: Path, options: ScoreOptions) -> list[float]:
    """The values of ``eval_loss``, or of another key, in the history of Hugging Face's Trainer."""
    state = read_json(path)
    history = state.get("log_history") if isinstance(state, dict) else None
    if not isinstance(history, list) or not all(isinstance(row, dict) for row in history):
        raise UserError(f"{path} has no log_history, as a trainer_state.json has; leave that file out")
    metric = options.metric or "eval_loss"
    known = dict.fromkeys(key for row in history for key in row)
    if history and metric not in known:
        raise UserError(f"{path} has no {metric!r}{nearest(metric, known)}; mend --metric")
    return [number for row in history if (number := number_of(row.get(metric))) is not None]


def _exported_values(path: Path, options: ScoreOptions) -> list[float]:
    """The values of a chart that TensorBoard exported as JSON: a list of time, step and value."""
    rows = read_json(path)
    if not all(isinstance(row, list) and len(row) == 3 for row in rows):
        raise UserError(f"{path} is not a list of [wall time, step, value], as TensorBoard exports one")
    return [number for row in rows if (number := number_of(row[2])) is not None]


def _event_values(path: Path, options: ScoreOptions) -> list[float]:
    """The values of a tag in an event file of TensorBoard."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(path), size_guidance={"scalars": 0, "tensors": 0}).Reload()
    tags: dict[str, Any] = events.Tags()
    known = [*tags["scalars"], *tags["tensors"]]
    if not known:
        raise UserError(f"{path} holds no scalar, or is damaged; leave it out, or log scalars")
    if options.metric not in known:
        raise UserError(
            f"{path} has no tag {options.metric!r}{nearest(options.metric, known)}; mend --metric"
        )
    if options.metric in tags["scalars"]:
        return [event.value for event in events.Scalars(options.metric)]
    from tensorboard.util.tensor_util import make_ndarray

    return [float(make_ndarray(event.tensor_proto)) for event in events.Tensors(options.metric)]


def _is_exported_json(path: Path) -> bool:
    if path.suffix != ".json":
        return False
    with path.open("rb") as file:
        return file.read(2) == b"[["


def _is_log(path: Path) -> bool:
    return path.suffix in (".log", ".txt", ".out", "")


LOGS: Final = Kind("log", _is_log, _log_values)
KINDS: Final = (
    Kind("trainer state", lambda path: path.name == "trainer_state.json", _trainer_state_values),
    Kind("event file", lambda path: path.name.startswith("events.out.tfevents"), _event_values),
    Kind("table", lambda path: path.suffix == ".csv", _csv_values),
    Kind("file of JSON lines", lambda path: path.suffix == ".jsonl", _json_lines_values),
    Kind("exported chart", _is_exported_json, _exported_values),
    LOGS,
)


def _kinds(options: ScoreOptions) -> tuple[Kind, ...]:
    """The kinds of files to look for: only logs have a regular expression, which has a group."""
    return (LOGS,) if "(" in options.metric else KINDS
