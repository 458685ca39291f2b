"""Run folders, read for the pages."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
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
            config_text=_read_by_the_run(config) or (path / "config.json").read_text("utf-8").strip(),
            status=folder.status(),
            metrics=tuple(folder.metrics()),
            task_metrics=folder.task_metrics(),
            repeat=folder.repeat_command(),
            scores=read_scores(folder.scores),
            stale=folder.stale(),
        )
    except (OSError, UserError) as error:
        return RunView(id=run, problem=str(error) or type(error).__name__)


def _read_by_the_run(config: Config) -> str:
    """What the run of a setup reads from its configuration, whose other values are mere defaults of recipes;
    empty for a recipe.
    """
    if config.task != OWN_TASK:
        return ""
    own = {"setup": config.recipe, "code": config.own_code, **flat(config), "seed": config.seeds.init}
    return json.dumps(own, indent=1, ensure_ascii=False)


def run_frame(run: RunView, kind: str, columns: Sequence[str], constants: Mapping[str, str]) -> pl.DataFrame:
    """Return the run's rows of one kind: ``constants``, ``step`` and ``columns``, as floats; missing values
    are null.
    """
    rows = [row for row in run.metrics if row.get("kind") == kind]
    data = {"step": [row.get("step") for row in rows]} | {c: [row.get(c) for row in rows] for c in columns}
    schema = {"step": pl.Int64} | dict.fromkeys(columns, pl.Float64)
    frame = pl.DataFrame(data, schema=schema, strict=False)
    return frame.select(*[pl.lit(value).alias(name) for name, value in constants.items()], "step", *columns)


def flat(config: Config) -> dict[str, str]:
    """Return the settings by name, such as ``optim.lr``, without those of the machine and the recipe's name;
    for a setup of the user's own only the few that its run reads.
    """
    if config.task == OWN_TASK:
        train = config.train
        own = {"steps": train.steps, "validate_every_steps": train.validate_every_steps}
        return {"optim.lr": str(config.optim.lr), **{f"train.{name}": str(n) for name, n in own.items()}}
    found: dict[str, str] = {}

    def walk(value: Any, prefix: str) -> None:
        for field in dataclasses.fields(value):
            inner, name = getattr(value, field.name), prefix + field.name
            if dataclasses.is_dataclass(inner):
                if field.name != "machine":
                    walk(inner, name + ".")
            elif changes_numbers(field) or name.startswith("data."):
                found[name] = " ".join(map(str, inner)) if isinstance(inner, tuple) else str(inner)

    walk(config, "")
    return found


def shared(runs: Sequence[RunView]) -> dict[str, str]:
    """Return the settings that all runs share."""
    first, *others = [flat(run.config) for run in runs if run.config] or [{}]
    return {name: value for name, value in first.items() if all(f.get(name) == value for f in others)}


def settings_table(settings: Mapping[str, str], caption: str = "") -> PageTable:
    """Return a table of settings by name."""
    rows = [[Cell(name), Cell(v or "–", tone="" if v else "faint")] for name, v in settings.items()]
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
    status = run.status
    best = f", best dev {run.best}" if run.best else ""
    summary = Markup("<code>{}</code> lr {}, seed {} {} <span class=note>{}{}</span>").format(
        run.id,
        rate(run.config.optim.lr),
        seed_of(run),
        Markup(" ").join(tag(mark) for mark in (run.outcome, *marks(run))),
        duration(status.train_seconds),
        best,
    )
    own = {name: value for name, value in flat(run.config).items() if name not in common}
    ended = status.outcome
    told = [
        (f"{ended.state.capitalize()} at step {ended.step:,}: {ended.evidence}" if ended else "", ""),
        (f"Ended at step {status.step:,}: {status.stopped}" if status.stopped else "", ""),
        ("Stale: made by older code. Today's code would give other numbers." if run.stale else "", "alarm"),
        (f"Forced, although {run.config.forced}." if run.config.forced else "", "alarm"),
        (status.error, "alarm"),
        (f"Ran on {status.hardware}." if status.hardware else "", "note"),
    ]
    blocks: list[Block] = [Text(text, tone) for text, tone in told if text]
    blocks.append(Code(run.repeat))
    if own and common:
        blocks.append(settings_table(own, "What sets this run apart from others on this page"))
    blocks.append(Details("Exact configuration", [Code(run.config_text)], beside=f"{run.id}/config.json"))
    return Details(summary, blocks, f"run-{run.id}")
