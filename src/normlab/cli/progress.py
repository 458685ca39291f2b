"""The progress of runs in training: a table that changes in a terminal, and lines of a log elsewhere."""

from __future__ import annotations

import json
import math
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from types import TracebackType
from typing import Any, Self

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from normlab.base.metric import IGNORES_SOURCE, NLL, Metric, selection_metric
from normlab.base.units import duration, rate
from normlab.cli.terminal import PlainConsole
from normlab.errors import UserError
from normlab.lab.config import Config
from normlab.lab.runs import RunFolder, Runs, Status

LOG_EVERY_SECONDS = 30.0
"""Without a terminal, a run logs its progress this often, and at every validation."""
POLL_SECONDS = 0.5
RATE_ROWS = 20
"""The number of log rows over which tokens per second are computed."""
WIDE = 110
"""The width in columns that a terminal needs to show all values."""
STYLES = {
    "trained": "green",
    "stuck": "yellow",
    IGNORES_SOURCE: "yellow",
    "diverged": "red",
    "failed": "red",
    "interrupted": "yellow",
}


def state_of(status: Status) -> str:
    """Return the outcome of a finished run, otherwise its state, in a word or two."""
    if status.state == "done" and status.outcome:
        return status.outcome.state
    return "waiting" if status.state == "new" else status.state


class Tail:
    """A reader of the rows that are appended to a JSON-lines file. It waits for the end of a torn last line.

    If the last line it read is no longer where it was, the run went back or started again; the file is then
    read from the start.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.offset = 0
        self.last = b""

    def rows(self) -> tuple[bool, list[dict[str, Any]]]:
        """Return whether the file was written again from the start, and the new rows."""
        try:
            file = self.path.open("rb")
        except FileNotFoundError:
            return False, []
        with file:
            file.seek(self.offset - len(self.last))
            anew = file.read(len(self.last)) != self.last
            if anew:
                self.offset, self.last = file.seek(0), b""
            complete, newline, _ = file.read().rpartition(b"\n")
        self.offset += len(complete) + len(newline)
        if newline:
            self.last = complete[complete.rfind(b"\n") + 1 :] + newline
        return anew, [json.loads(line) for line in complete.splitlines() if line.strip()]


@dataclass
class RunBar:
    """The progress of one run, as far as its rows and its status show it."""

    name: str
    steps: int
    metric: Metric = NLL
    """The dev metric that decides which checkpoint is best."""
    state: str = "waiting"
    phase: str = ""
    """Work in progress other than training, with the share that is done: ``translating 40%``."""
    last: dict[str, Any] = field(default_factory=dict)
    best: float | None = None
    """The best dev score so far."""
    recent: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=RATE_ROWS))
    """The (seconds, tokens) of the last log rows."""

    @classmethod
    def of(cls, config: Config, metrics: Sequence[Metric]) -> Self:
        name = f"{config.recipe} · {rate(config.optim.lr)} · seed {config.seeds.init}"
        return cls(name, config.train.steps, selection_metric(metrics, config.train.best_by))

    def add(self, row: Mapping[str, Any]) -> None:
        """Add one row of the metrics; infinities may be strings."""
        if row["kind"] == "dev":
            score = float(row.get(self.metric.name, math.nan))
            if self.metric.better(score, self.best):
                self.best = score
        else:
            self.last = dict(row)
            self.recent.append((float(row["seconds"]), float(row["tokens"])))

    def update(self, status: Status) -> None:
        """Update the state and the phase of the run."""
        self.state = state_of(status)
        share = "" if status.phase_done is None else f" {status.phase_done:.0%}"
        self.phase = f"{status.phase}{share}" if status.phase and self.state == "running" else ""

    @property
    def step(self) -> int:
        return int(self.last.get("step", 0))

    @property
    def tokens_per_second(self) -> float | None:
        if len(self.recent) < 2 or self.recent[-1][0] <= self.recent[0][0]:
            return None
        (start, before), (end, after) = self.recent[0], self.recent[-1]
        return (after - before) / (end - start)

    @property
    def remaining_seconds(self) -> float | None:
        """The remaining training time, at the mean pace so far (validations included)."""
        if self.state not in ("running", "waiting"):
            return 0.0
        if not self.step:
            return None
        return float(self.last["seconds"]) / self.step * (self.steps - self.step)

    def cells(self) -> list[tuple[str, str]]:
        """The (label, value) pairs of the display; an unknown value is an empty string."""
        tokens, left = self.tokens_per_second, self.remaining_seconds
        return [
            ("step", f"{self.step:,}/{self.steps:,}"),
            ("tokens/s", "" if tokens is None else f"{tokens:,.0f}"),
            ("loss", self._number("loss", ".3f")),
            ("gradient norm", self._number("grad_norm_l2", ".3g")),
            ("lr", rate(float(self.last["lr"])) if self.last.get("lr") else ""),
            (f"best {self.metric.label}", self.metric.shown(self.best)),
            ("ETA", duration(left) if left else ""),
        ]

    def line(self) -> str:
        known = [f"{label} {value}" for label, value in self.cells() if value]
        return f"{self.name} [{self.phase or self.state}]: {', '.join(known)}"

    def _number(self, key: str, form: str) -> str:
        return format(float(self.last[key]), form) if key in self.last else ""


class ProgressDisplay:
    """A display of runs in training: ``watch`` takes run folders, ``watch_one`` the rows of a single run.

    By default it is on standard error; standard output is for results.
    """

    def __init__(self, console: Console | None = None, *, jobs: int = 1, expected_runs: int = 0) -> None:
        console = console or PlainConsole(stderr=True)
        self.console, self.jobs, self.expected_runs = console, jobs, expected_runs
        self.bars: dict[Path, RunBar] = {}
        self.tails: dict[Path, Tail] = {}
        self.requested = 0
        """The number of runs that have been requested so far."""
        self.live = Live(console=console, auto_refresh=False, transient=True) if console.is_terminal else None
        self.logged: dict[Path, tuple[object, float]] = {}
        """What was logged last of each run, and when."""
        self.over = threading.Event()

    def __enter__(self) -> Self:
        if self.live:
            self.live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.over.set()
        if self.live:
            with suppress(OSError):
                self.live.stop()

    def watch(self, folders: Sequence[RunFolder]) -> None:
        """Update the display from the folders of all runs requested so far."""
        self.requested = len(folders)
        for folder in folders:
            path = folder.path
            if not (path / "config.json").exists():
                continue
            if path not in self.bars:
                self.bars[path] = RunBar.of(folder.config(), folder.task_metrics())
                self.tails[path] = Tail(path / "metrics.jsonl")
            bar = self.bars[path]
            anew, rows = self.tails[path].rows()
            if anew:
                bar.recent.clear()
            for row in rows:
                bar.add(row)
            bar.update(folder.status())
        self.show()

    def watch_one(
        self, config: Config, metrics: Sequence[Metric], root: Path
    ) -> Callable[[dict[str, Any]], None]:
        """Return a callback for the rows of a run of this process, whose folder appears under ``root``.

        After the first row, a thread reads the run's status twice a second.
        """
        bar = RunBar.of(config, metrics)
        bar.state = "running"
        self.bars[Path()] = bar
        self.requested = 1

        def is_this_run(folder: RunFolder) -> bool:
            if folder.status().state != "running":
                return False
            other = folder.config()
            parts = (config.recipe, config.optim, config.model, config.seeds)
            return parts == (other.recipe, other.optim, other.model, other.seeds)

        def follow() -> None:
            with suppress(OSError, UserError):  # what is shown beside a training must not end it
                folder = next(filter(is_this_run, Runs(root)), None)
                while folder and not self.over.wait(POLL_SECONDS):
                    bar.update(folder.status())
                    self.show()

        def add(row: dict[str, Any]) -> None:
            if not bar.last:
                threading.Thread(target=follow, daemon=True).start()
            bar.add(row)
            self.show()

        return add

    def show(self) -> None:
        """Draw the table, or log what is new. A closed terminal does not stop the run."""
        with suppress(OSError):
            self._draw()

    def _draw(self) -> None:
        if self.live:
            self.live.update(Group(self.table(self.console.height - 4), Text(self.summary())), refresh=True)
            return
        for path, bar in self.bars.items():
            if bar.state != "waiting":
                self._log(path, bar)

    def _log(self, path: Path, bar: RunBar) -> None:
        """Log a line about a run if there is news of it, or if it has run for some time since the last."""
        news, now = (bar.state, bar.best, bool(bar.last)), time.monotonic()
        news_before, then = self.logged.get(path, (None, -math.inf))
        is_due = bar.state == "running" and now - then >= LOG_EVERY_SECONDS
        if news != news_before or is_due:
            self.logged[path] = news, now
            line = f"{time.strftime('%H:%M:%S')} {bar.line()}"
            self.console.print(line, soft_wrap=True, highlight=False, markup=False)

    def table(self, height: int) -> Table:
        """Build a table of at most ``height`` runs, with those in progress first."""
        order = sorted(self.bars.values(), key=lambda bar: (bar.state != "running", bar.state == "waiting"))
        first = order[0] if order else RunBar("", 0)
        labels = [label for label, _ in first.cells()]
        if self.console.width < WIDE:
            labels.remove("lr")
        table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
        table.add_column("run", min_width=12)
        table.add_column("", min_width=8)
        for name in labels:
            table.add_column(name.replace(" ", "\n"), justify="right", min_width=max(map(len, name.split())))
        for bar in order[: max(1, height)]:
            cells = dict(bar.cells())
            texts = [Text(cells.get(label, ""), no_wrap=True) for label in labels]
            table.add_row(bar.name, self._state(bar), *texts)
        return table

    def _state(self, bar: RunBar) -> Text | ProgressBar:
        """The state of a run in words, or how far it has trained."""
        words = bar.phase or ("" if bar.state == "running" else bar.state)
        if words:
            return Text(words, style=STYLES.get(bar.state, ""))
        return ProgressBar(total=max(1, bar.steps), completed=bar.step, width=8)

    def summary(self) -> str:
        """The number of runs in each state, and the remaining time."""
        states = Counter(bar.state for bar in self.bars.values())
        states["waiting"] += self.requested - len(self.bars)
        parts = [f"{number} {state}" for state, number in states.items() if number]
        total = max(self.requested, self.expected_runs)
        left = self.remaining_seconds(total)
        return f"{total} runs: {', '.join(parts)}" + ("" if left is None else f" · ETA {duration(left)}")

    def remaining_seconds(self, total: int) -> float | None:
        """The remaining time of the runs in progress, plus a mean run for each that is yet to begin."""
        begun = [bar for bar in self.bars.values() if bar.step]
        if not begun:
            return None
        left = [bar.remaining_seconds or 0.0 for bar in begun]
        mean_run = fmean(float(bar.last["seconds"]) / bar.step * bar.steps for bar in begun)
        work = sum(left) + mean_run * (total - len(begun))
        return max([work / max(1, self.jobs), *left])  # no run is shared among jobs
