"""The folder of a run, and the folder of all runs."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from normlab.base.files import (
    append_rows,
    blame,
    read_json,
    row_line,
    sync,
    write_json_atomic,
    write_text_atomic,
)
from normlab.base.io import NOT_FINITE, Count, from_plain
from normlab.base.locks import held, hold, other_host
from normlab.base.metric import NLL, Metric, Outcome
from normlab.base.rows import read_lines, read_reports
from normlab.errors import UserError
from normlab.lab.config import SEMANTICS, Config, run_id
from normlab.lab.runs.manifest import CheckpointError

Row = dict[str, Any]
State = Literal["new", "running", "done", "interrupted", "failed"]


@dataclass(frozen=True)
class Status:
    """How far a run is."""

    state: State = "new"
    step: Count = 0
    outcome: Outcome | None = None
    best_step: int | None = None
    best_dev: dict[str, float] = field(default_factory=dict)
    """The dev scores at ``best_step``, by metric name."""
    train_seconds: float = 0.0
    """Seconds since the first step, including validations, without pauses before resumptions."""
    error: str = ""
    hardware: str = ""
    stopped: str = ""
    """Why a run ended before its last step, if its outcome was not the reason."""
    phase: str = ""
    """Work besides training: ``validating``, ``testing`` or the task's own name for a part; else empty."""
    phase_done: float | None = None
    """The share of it that is done, 0 to 1, if known."""

    @property
    def ended_as(self) -> str:
        """The outcome, or the state of a run without one."""
        return self.outcome.state if self.outcome else self.state


class RunFolder:
    """``runs/<id>/``: configuration, metrics, status, checkpoints, outputs and scores of one run.

    ``config.json`` holds the resolved ``config`` with the ``id`` and ``semantics`` it was made under,
    ``metrics.jsonl`` a row per line, ``probes.jsonl`` a measurement of a module per line, ``flight.json`` the
    flight recorder's reports, and ``status.json`` how far the run is. Everything else is a path here.

    >>> normlab.RunFolder(run).config().recipe
    'pre'
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.config_file = self.path / "config.json"
        self.last = self.path / "last"
        """The last checkpoint, from which the run continues."""
        self.previous = self.path / "previous"
        """The checkpoint before ``last``, in case ``last`` turns out to be damaged."""
        self.best = self.path / "best"
        """Weights with the best dev score."""
        self.average = self.path / "average"
        """Mean of the weights at the last validations, if the configuration asks for it."""
        self.steps = self.path / "steps"
        """Weights after some steps, a folder for each."""
        self.start = self.path / "start.json"
        """The names of the tensors that the run took from another run's weights, if it began with these."""
        self.tensorboard = self.path / "tensorboard"
        self.tokenizer = self.path / "tokenizer.json"
        self.target_vocab = self.path / "target_vocab.npy"
        self.log = self.path / "log.txt"
        self.outputs = self.path / "test.hyp.txt"
        """The model's outputs on the test text, one line per example, if the task writes any."""
        self.scores = self.path / "scores.json"
        self.examples = self.path / "test.examples.safetensors"
        """The statistics of each test example, by metric, as ``examples.read_examples`` reads them."""
        self._metrics, self._probes = self.path / "metrics.jsonl", self.path / "probes.jsonl"
        self._row_files = (self._metrics, self._probes)
        self.lost = self.path / "rows.lost"
        """If this file exists, the run continues although rows are lost."""
        self.best_outputs = self.path / "test-best.hyp.txt"
        """The outputs of ``best``, if ``outputs`` and ``scores`` belong to ``average``."""
        self.best_scores = self.path / "scores-best.json"
        self.best_examples = self.path / "test-best.examples.safetensors"

    @classmethod
    def create(
        cls,
        path: str | Path,
        config: Config,
        metrics: Sequence[Metric] = (),
        imports: Sequence[str] = (),
        repeat: str = "",
    ) -> RunFolder:
        """Make the run folder of a resolved configuration; files in it stay.

        ``metrics`` are those of its task, ``imports`` the modules that were imported for it, ``repeat`` the
        command that trains it again, if the configuration is not enough.
        """
        folder = cls(path)
        folder.path.mkdir(parents=True, exist_ok=True)
        content: dict[str, Any] = {
            "id": run_id(config),
            "semantics": SEMANTICS,
            "config": config,
            "metrics": list(metrics),
            "imports": list(imports),
        }
        if repeat:
            content["repeat"] = repeat
        write_json_atomic(folder.config_file, content)
        return folder

    def config(self) -> Config:
        """Read the resolved configuration. Raises UserError with the place of an error in it."""
        return read_config(self.config_file)

    def there(self) -> bool:
        """Whether the folder has the ``config.json`` of a run."""
        return self.config_file.exists()

    def _recorded(self, name: str) -> Any:
        """Return an entry of ``config.json`` other than the configuration; None if it is missing."""
        content = read_json(self.config_file)
        return content.get(name) if isinstance(content, dict) else None

    def id(self) -> str:
        """Return the run's id from its ``config.json``; empty if that names none."""
        return str(self._recorded("id") or "")

    def task_metrics(self) -> tuple[Metric, ...]:
        """Return the metrics of the run's task, the headline first; only NLL if the folder does not say."""
        recorded = self._recorded("metrics")
        if not recorded:
            return (NLL,)
        with blame(self.config_file):
            return from_plain(tuple[Metric, ...], recorded, "metrics")

    def repeat_command(self) -> str:
        """Return the command that trains the run again, into ``again`` in the current directory."""
        if command := self._recorded("repeat"):
            return str(command)
        file, here = self.config_file.absolute(), Path.cwd()
        if file.is_relative_to(here):
            file = file.relative_to(here)
        words = ["normlab", "train", "--config", file.as_posix(), "--out", "again"]
        for name in self._recorded("imports") or ():
            words += ["--import", str(name)]
        return shlex.join(words)

    def stale(self) -> bool:
        """Whether this version would give other numbers: the run's id no longer matches its config."""
        return self.id() != run_id(self.config())

    def status(self) -> Status:
        """Return how far the run is; ``new`` if nothing has been written yet.

        A run whose process is gone without notice (killed, out of memory) reads as ``interrupted``. A process
        on another host counts as alive while ``elsewhere`` names the host.
        """
        path = self.path / "status.json"
        try:
            content = read_json(path)
        except FileNotFoundError:
            return Status()
        with blame(path):
            status: Status = from_plain(Status, content)
        if status.state == "running" and not held(self.path) and not self.elsewhere():
            return replace(status, state="interrupted")
        return status

    def elsewhere(self) -> str:
        """Return the other host whose process is in this run; empty if there is none."""
        return other_host(self.path)

    def set_status(self, status: Status) -> None:
        write_json_atomic(self.path / "status.json", status)

    def append_metrics(self, row: Row) -> None:
        """Append a row; numbers that are not finite become "nan", "inf" and "-inf"."""
        append_rows(self._metrics, [row])

    def metrics(self) -> list[Row]:
        """Read all rows, except a last line that a crash cut off.

        Raises UserError, naming the line, if any line but the last is damaged.
        """
        return _rows(self._metrics)

    def append_probes(self, rows: Sequence[Row]) -> None:
        """Append rows as ``append_metrics`` does; each has ``step``, ``module``, ``probe`` and ``value``."""
        append_rows(self._probes, rows)

    def probes(self) -> list[Row]:
        """Read the rows of the probes as ``metrics`` does; none if nothing was measured."""
        return _rows(self._probes)

    def add_flight(self, report: Mapping[str, Any]) -> None:
        """Add a report of the flight recorder; its ``step`` is among its keys."""
        self._write_flights([*self.flights(), report])

    def flights(self) -> list[Row]:
        """Read the flight recorder's reports, the oldest first.

        Raises UserError if the file is damaged.
        """
        return read_reports(self.path / "flight.json")

    def cut_rows(self, step: int) -> None:
        """Drop the rows after a step and any line that was cut off; a resumed run writes them again."""
        for path in self._row_files:
            if path.exists() or path == self._metrics:
                rows = [row for row in _rows(path) if row["step"] <= step]
                write_text_atomic(path, "".join(map(row_line, rows)))
        reports = self.flights()
        if reports:
            self._write_flights([report for report in reports if report["step"] <= step])

    def sync_rows(self) -> None:
        """Wait until every row is on the disk."""
        for path in self._row_files:
            if path.exists():
                sync(path)

    def row_sizes(self) -> dict[str, int]:
        """Return the size in bytes of each file of rows, for a checkpoint to keep."""
        return {path.name: path.stat().st_size for path in self._row_files if path.exists()}

    def require_rows(self, sizes: Mapping[str, int], checkpoint: Path) -> None:
        """Raise CheckpointError if rows are lost that existed when a checkpoint kept ``row_sizes``."""
        if self.lost.exists():
            return
        for path in self._row_files:
            size = sizes.get(path.name, 0)
            gone = _gone(path, size) if size > 0 else ""
            if gone:
                raise CheckpointError(
                    checkpoint,
                    f"{path} {gone}, and {checkpoint} was made after rows that it held",
                    f"bring the whole file back, or do without them: touch {shlex.quote(str(self.lost))}",
                )

    def _write_flights(self, reports: Sequence[Mapping[str, Any]]) -> None:
        write_json_atomic(self.path / "flight.json", {"reports": list(reports)})

    def lock(self) -> AbstractContextManager[None]:
        """Keep other processes out of this run, on this host and others, until the block or the process ends.

        Raises RunBusyError if a process is in it.
        """
        return hold(self.path)


class Runs:
    """All run folders under one folder, by id.

    >>> [run.config().recipe for run in normlab.Runs("runs")]
    ['pre']
    """

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root)

    def __iter__(self) -> Iterator[RunFolder]:
        if self.root.is_dir():
            for path in sorted(self.root.iterdir()):
                if (path / "config.json").is_file():
                    yield RunFolder(path)

    def find(self, prefix: str) -> RunFolder:
        """Return the one run whose id begins with ``prefix``.

        Raises UserError with the candidates if several do, FileNotFoundError with all ids if none does.
        """
        ids = [folder.path.name for folder in self]
        candidates = [prefix] if prefix in ids else [i for i in ids if i.startswith(prefix)]
        if len(candidates) == 1:
            return RunFolder(self.root / candidates[0])
        if candidates:
            raise UserError(
                f"{prefix!r} begins {len(candidates)} run ids, {_some(candidates)}; type more of it"
            )
        if not ids:
            raise FileNotFoundError(f"no runs in {self.root}; make one: normlab train")
        raise FileNotFoundError(
            f"no run {prefix!r} in {self.root}, which holds {_some(ids)}; see: normlab run list"
        )


def find_run(name: str, root: Path) -> RunFolder:
    """Find a run by its folder, or by the start of its id under ``root``. Raises as ``Runs.find`` does."""
    return RunFolder(name) if (Path(name) / "config.json").is_file() else Runs(root).find(name)


def named_output(path: Path, inputs: Iterable[Path] = ()) -> Path:
    """Return a path that the user named for output.

    Raises UserError if it is one of the regular files in ``inputs``, or lies in a run folder, where it would
    replace a part of the run.
    """
    for given in inputs:
        if given.is_file() and path.exists() and path.samefile(given):
            raise UserError(f"{path} is an input of this command, and its output too; name another file")
    for folder in Path(os.path.realpath(path)).parents:
        if _has_run(folder):
            raise UserError(
                f"{path} is in the folder of the run {folder.name}; name a file outside of run folders"
            )
    return path


def _has_run(folder: Path) -> bool:
    with suppress(OSError, UserError):
        return bool(RunFolder(folder).id())
    return False


def read_config(path: Path) -> Config:
    """Read a configuration from a run's ``config.json``, or from a file that holds nothing else."""
    try:
        content = read_json(path)
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"there is no {path}; name a run's config.json; normlab run list lists all runs"
        ) from error
    wrapped = isinstance(content, dict) and "config" in content
    try:
        return from_plain(Config, content["config"] if wrapped else content)
    except UserError as error:
        raise UserError(f"{path}: {error}") from error


def read_scores(path: Path) -> dict[str, float]:
    """Read a test's scores by metric; empty without the file. Raises UserError if one is not a number."""
    content = read_json(path) if path.exists() else {}
    if isinstance(content, dict):
        content.pop("signatures", None)
    with blame(path):
        return from_plain(dict[str, float], content)


def _gone(path: Path, size: int) -> str:
    """Return what happened to a file that had at least ``size`` bytes; empty if it still has its rows."""
    if not path.exists():
        return "is missing"
    if path.stat().st_size < size:
        return "is shorter than it was"
    with path.open("rb") as file:
        file.seek(size - 1)
        if file.read(1) == b"\n":
            return ""
    _rows(path)  # its error names a damaged line
    return "is not what it was"


def _rows(path: Path) -> list[Row]:
    if not path.exists():
        return []
    rows: list[Row] = []
    for number, row in read_lines(path):
        if type(row.get("step")) is not int:
            raise UserError(f"{path} is damaged in line {number}; delete that line")
        rows.append({key: float(value) if value in NOT_FINITE else value for key, value in row.items()})
    return rows


def _some(ids: list[str], most: int = 8) -> str:
    """Return the first few ids, and how many there are more."""
    listed = ", ".join(ids[:most])
    more = len(ids) - most
    return f"{listed} and {more} more" if more > 0 else listed
