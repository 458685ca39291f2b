"""Run folders, read for the pages."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl
from markupsafe import Markup

from normlab.base.io import changes_numbers
from normlab.base.metric import NLL, Metric, selection_metric
from normlab.base.units import duration, rate
from normlab.errors import UserError
from normlab.lab.config import OWN_TASK, Config
from normlab.lab.runs.folder import RunFolder, Status, read_scores
from normlab.report.charts.theme import SERIES
from normlab.report.page import Block, Cell, Code, Details, PageTable, Text


@dataclass(frozen=True)
class RunView:
    """A run, read for a page. ``problem`` says why the folder could not be read, if it could not."""

    id: str
    config: Config | None = None
    config_text: str = ""
    status: Status | None = None
    metrics: tuple[Mapping[str, Any], ...] = ()
    """Rows of ``metrics.jsonl``."""
    task_metrics: tuple[Metric, ...] = (NLL,)
    scores: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    repeat: str = ""
    """The command that trains it again."""
    problem: str = ""
    stale: bool = False
    """Whether the current code would give other numbers."""

    @property
    def outcome(self) -> str:
        """The outcome of the run, or its state while it has none."""
        if self.status is None:
            return "missing"
        return self.status.outcome.state if self.status.outcome else self.status.state

    @property
    def best(self) -> str:
        """The best dev score by which the run was judged, in words; empty before the first validation."""
        if self.config is None or self.status is None:
            return ""
        selection = selection_metric(self.task_metrics, self.config.train.best_by)
        return selection.with_label(self.status.best_dev.get(selection.name))


def view(root: Path, run: str) -> RunView:
    """Read ``root/run``. The view of a missing or damaged folder has a ``problem``."""
    path = root / run
    try:
        folder = RunFolder(path)
        config = folder.config()
        return RunView(
            id=run,
            config=config,
            config_text=_settings_text_of_setup(config) or (path / "config.json").read_text("utf-8").strip(),
            status=folder.status(),
            metrics=tuple(folder.metrics()),
            task_metrics=folder.task_metrics(),
            repeat=folder.repeat_command(),
            scores=read_scores(folder.scores),
            stale=folder.stale(),
        )
    except (OSError, UserError) as error:
        return RunView(id=run, problem=str(error) or type(error).__name__)


def _settings_text_of_setup(config: Config) -> str:
    """The settings of a user's own setup, as JSON; empty if the run is one of a recipe.

    The run of a setup reads only these from its configuration, whose other values are mere defaults of
    recipes.
    """
    if config.task != OWN_TASK:
        return ""
    settings = {"setup": config.recipe, "code": config.own_code, **flat(config), "seed": config.seeds.init}
    return json.dumps(settings, indent=1, ensure_ascii=False)


@dataclass(frozen=True)
class CurveLabels:
    """Whose curve it is: the columns of text that a frame of curves begins with."""

    series: str
    """The recipe, or on the page of a run the side: training or dev."""
    run: str
    seed: str
    outcome: str


def run_frame(run: RunView, kind: str, columns: Sequence[str]) -> pl.DataFrame:
    """Return the run's rows of one kind: ``step`` and ``columns``, as floats; missing values are null."""
    rows = [row for row in run.metrics if row.get("kind") == kind]
    data = {name: [row.get(name) for row in rows] for name in ("step", *columns)}
    schema = {"step": pl.Int64, **dict.fromkeys(columns, pl.Float64)}
    return pl.DataFrame(data, schema=schema, strict=False)


def curve_frame(run: RunView, kind: str, columns: Sequence[str], labels: CurveLabels) -> pl.DataFrame:
    """Return the run's rows of one kind, each with the labels of the curve that it belongs to."""
    texts = {SERIES: labels.series, "run": labels.run, "seed": labels.seed, "outcome": labels.outcome}
    constants = [pl.lit(text).alias(name) for name, text in texts.items()]
    return run_frame(run, kind, columns).select(*constants, "step", *columns)


def flat(config: Config) -> dict[str, str]:
    """Return the settings by name, such as ``optim.lr``, without those of the machine and the recipe's name;
    for a setup of the user's own only the few that its run reads.
    """
    if config.task == OWN_TASK:
        return {
            "optim.lr": str(config.optim.lr),
            "train.steps": str(config.train.steps),
            "train.validate_every_steps": str(config.train.validate_every_steps),
        }
    settings: dict[str, str] = {}

    def walk(section: Any, prefix: str) -> None:
        for field in dataclasses.fields(section):
            value, name = getattr(section, field.name), prefix + field.name
            if field.name == "machine":
                continue
            if dataclasses.is_dataclass(value):
                walk(value, f"{name}.")
            elif changes_numbers(field) or name.startswith("data."):
                settings[name] = " ".join(map(str, value)) if isinstance(value, tuple) else str(value)

    walk(config, "")
    return settings


def shared(runs: Sequence[RunView]) -> dict[str, str]:
    """Return the settings that all runs share."""
    settings = [flat(run.config) for run in runs if run.config]
    if not settings:
        return {}
    first, *others = settings
    return {name: value for name, value in first.items() if all(other.get(name) == value for other in others)}


def settings_table(settings: Mapping[str, str], caption: str = "") -> PageTable:
    """Return a table of settings by name."""
    rows = [
        [Cell(name), Cell(value) if value else Cell("–", tone="faint")] for name, value in settings.items()
    ]
    return PageTable(("setting", "value"), rows, caption, text_columns=2)


def tag(outcome: str) -> Markup:
    """Return the outcome as a small label."""
    return Markup('<span class="tag {0}">{0}</span>').format(outcome)


def marks(run: RunView) -> list[str]:
    """Return the words shown beside a run's outcome: ``stale``, ``forced``."""
    forced = run.config is not None and bool(run.config.forced)
    return ["stale"] * run.stale + ["forced"] * forced


def seed_of(run: RunView) -> str:
    """Return the run's seed, or its three seeds if they differ."""
    if run.config is None:
        return "?"
    seeds = run.config.seeds
    three = (seeds.init, seeds.data, seeds.dropout)
    return str(three[0]) if len(set(three)) == 1 else "init {}, data {}, dropout {}".format(*three)


def run_details(run: RunView, common: Mapping[str, str]) -> Details:
    """Return a run's block with the anchor ``#run-<id>``: outcome, evidence, settings, configuration."""
    if run.problem or run.config is None or run.status is None:
        summary = Markup("<code>{}</code> {}").format(run.id, tag("missing"))
        return Details(summary, [Text(run.problem or "The folder is incomplete.", "alarm")], f"run-{run.id}")
    best = f", best dev {run.best}" if run.best else ""
    summary = Markup("<code>{}</code> lr {}, seed {} {} <span class=note>{}{}</span>").format(
        run.id,
        rate(run.config.optim.lr),
        seed_of(run),
        Markup(" ").join(tag(mark) for mark in (run.outcome, *marks(run))),
        duration(run.status.train_seconds),
        best,
    )
    blocks: list[Block] = [*_sentences(run, run.config, run.status), Code(run.repeat)]
    differing = {name: value for name, value in flat(run.config).items() if name not in common}
    if differing and common:
        blocks.append(settings_table(differing, "What sets this run apart from others on this page"))
    blocks.append(Details("Exact configuration", [Code(run.config_text)], beside=f"{run.id}/config.json"))
    return Details(summary, blocks, f"run-{run.id}")


def _sentences(run: RunView, config: Config, status: Status) -> Iterator[Text]:
    """Yield what is to be said of a run: how it ended, what is unusual about it, and where it ran."""
    if status.outcome:
        state, step = status.outcome.state.capitalize(), status.outcome.step
        yield Text(f"{state} at step {step:,}: {status.outcome.evidence}")
    if status.stopped:
        yield Text(f"Ended at step {status.step:,}: {status.stopped}")
    if run.stale:
        yield Text("Stale: made by older code. Today's code would give other numbers.", "alarm")
    if config.forced:
        yield Text(f"Forced, although {config.forced}.", "alarm")
    if status.error:
        yield Text(status.error, "alarm")
    if status.hardware:
        yield Text(f"Ran on {status.hardware}.", "note")
