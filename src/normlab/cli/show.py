"""The output of the commands: tables in a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from normlab.cli import terminal
from normlab.cli.progress import STYLES, Progress, state_of
from normlab.comparison.result import Comparison
from normlab.config.config import Config
from normlab.config.metric import deciding, in_words
from normlab.config.tex import readable
from normlab.config.units import duration, p_value, rate, steps_named
from normlab.errors import UserError, nearest
from normlab.runs import RunFolder, Runs
from normlab.runs.folder import Status, read_json, read_scores
from normlab.runs.manifest import committed, read_state

if TYPE_CHECKING:
    from normlab.comparison.plan import ComparePlan

STALE = "stale"
FORCED = "forced"
ROOMY = 160
"""Columns of a terminal that has room for an equation and its source side by side."""


def progress(*, jobs: int = 1, expected_runs: int = 0) -> Progress:
    """Return a progress display on standard error; standard output is for results."""
    return Progress(terminal.PlainConsole(stderr=True), jobs=jobs, expected_runs=expected_runs)


def plan(planned: ComparePlan, *, jobs: int) -> None:
    """Print the runs of a plan, what they could tell, and the time they take."""
    table = terminal.table("recipe", ">lr", ">seed", "run", "")
    for run in planned.sweep:
        table.add_row(run.recipe, rate(run.lr), str(run.seed), run.run, "done" if run.done else "to train")
    seconds, metric = planned.seconds, planned.metric
    terminal.write(
        *([table] if planned.sweep else []),
        *(f"{name}: {meaning}" for name, meaning in planned.resolves_to.items()),
        f"{'then ' if planned.sweep else ''}{planned.seed_runs} runs with the reported seeds at each "
        f"recipe's best learning rate\n{seconds.step * 1000:.0f} ms a step, {duration(seconds.run)} a run, "
        f"about {duration(planned.total_seconds)} in all with {jobs} at a time",
        "",
        "A difference of this size between two recipes would be found four times in five:",
    )
    tells = terminal.table(">seeds", f">{metric.label}", ">spreads of a recipe", ">runs", ">time")
    for power in planned.power:
        size = metric.amount(power.difference) if power.difference is not None else "?"
        tells.add_row(str(power.seeds), size, f"{power.sd:.1f}", str(power.runs), duration(power.seconds))
    terminal.write(tells, planned.basis)


def comparison(result: Comparison) -> None:
    """Print what was found, the result table, and the answer about every pair."""
    headline, *others = result.tested or result.metrics[:1]
    scores = [f">{metric.label}" for metric in others]
    seeds = f">{headline.label} by seed"
    header = (
        "recipe",
        ">lr",
        f">{headline.label}",
        ">95% interval",
        seeds,
        ">trained",
        "outcomes",
        *scores,
        ">time a run",
    )
    rows: list[Sequence[str | Text]] = []
    for recipe in result.ranked:
        mean = recipe.means.get(headline.name)
        cells = (
            f"{recipe.name} ({FORCED})" if recipe.forced else recipe.name,
            rate(recipe.lr),
            headline.shown(recipe.value(headline)),
            f"{headline.shown(mean.low)} to {headline.shown(mean.high)}"
            if mean and mean.low is not None
            else "",
            recipe.by_seed(headline),
            f"{recipe.trained} of {recipe.ended}",
            Text(", ").join(
                Text(part, STYLES.get(part.rpartition(" ")[0], "")) for part in recipe.states.split(", ")
            ),
            *(metric.shown(recipe.value(metric)) for metric in others),
            duration(recipe.train_seconds),
        )
        rows.append(cells)
    table = _fitted(header, rows, (">time a run", *reversed(scores), "outcomes", ">95% interval", ">lr"))
    terminal.write(*(Text(said, "bold") for said in result.sentences), "", table)
    terminal.write(*(d.sentence for d in result.differences))
    terminal.write(*(d.trains_sentence for d in result.differences if d.trains_sentence))
    models = [d for d in result.differences if d.models is not None and d.p_models is not None]
    if models:
        about = terminal.table("these very models", f">{headline.label}", ">p")
        for d in models:
            about.add_row(f"{d.a} - {d.b}", headline.signed(d.models or 0.0), p_value(d.p_models or 0.0))
        terminal.write(
            "", about, "p by exchanging outputs, not corrected: about these models, not their recipes"
        )
    terminal.write(*(f"failed: {reason}" for reason in result.failed))
    terminal.write(*_forced({recipe.name: recipe.forced for recipe in result.recipes if recipe.forced}))
    terminal.write(*filter(None, [result.seen_before]))


def run(folder: RunFolder) -> None:
    """Print the outcome and the scores of a run."""
    status, metrics = folder.status(), folder.task_metrics()
    decides = deciding(metrics, folder.config().train.best_by)
    if folder.start.exists():
        terminal.write(read_json(folder.start)["sentence"])
    if status.outcome:
        terminal.write(f"{status.outcome.state} at step {status.outcome.step}: {status.outcome.evidence}")
    if status.stopped:
        terminal.write(_stopped(status))
    for report in folder.flights():
        terminal.write(f"flight recorder: {report['verdict']['sentence']}")
    if status.best_step is not None:
        dev = decides.said(status.best_dev.get(decides.name))
        terminal.write(f"best checkpoint: step {status.best_step}, dev {dev}")
    if folder.best_scores.exists():
        terminal.write(f"test {in_words(metrics, read_scores(folder.best_scores))}")
        average = read_state(committed(folder.average))
        dev = decides.said(average["dev"].get(decides.name))
        terminal.write(f"average of {steps_named(average['average']['steps'])}: dev {dev}")
        terminal.write(f"its test {in_words(metrics, read_scores(folder.scores))}")
    elif folder.scores.exists():
        terminal.write(f"test {in_words(metrics, read_scores(folder.scores))}")
    terminal.write(f"{duration(status.train_seconds)} of training; run folder: {folder.path}")


def _stopped(status: Status) -> str:
    return f"ended at step {status.step:,}: {status.stopped}"


def runs(store: Runs) -> None:
    """Print one row per run, and the reason for each folder that cannot be read."""
    header = ("run", "recipe", ">lr", ">seed", ">step", "state", ">dev", ">test", ">time")
    rows: list[list[str]] = []
    forced: dict[str, str] = {}
    damaged: list[str] = []
    stopped: list[str] = []
    for folder in store:
        try:
            rows.append(_run_cells(folder))
            config, status = folder.config(), folder.status()
            stopped += [f"{folder.path.name}: {_stopped(status)}"] if status.stopped else []
            forced |= {config.recipe: config.forced} if config.forced else {}
        except (UserError, OSError) as error:
            damaged.append(f"{folder.path.name}: {error}")
    if rows:
        terminal.write(_fitted(header, rows, (">time", ">step", ">dev", ">seed")))
    elif not damaged:
        terminal.write(f"no runs in {store.root}; `normlab train` or `normlab compare` makes some")
    if any(STALE in row[header.index("state")] for row in rows):
        terminal.write("stale: made by older code; the current code gives other numbers and another id")
    terminal.write(*_forced(forced), *stopped, *damaged)


def _forced(reasons: Mapping[str, str]) -> list[str]:
    """The reasons for marking recipes as forced."""
    return [f"{FORCED}: {recipe}: {reason}" for recipe, reason in reasons.items()]


def _run_cells(folder: RunFolder) -> list[str]:
    config, status, metrics = folder.config(), folder.status(), folder.task_metrics()
    scores = read_scores(folder.scores)
    decides = deciding(metrics, config.train.best_by)
    host = folder.elsewhere() if status.state == "running" else ""
    state = f"running on {host}" if host else state_of(status)
    return [
        folder.path.name,
        config.recipe,
        rate(config.optim.lr),
        str(config.seeds.init),
        f"{status.step:,}/{config.train.steps:,}",
        ", ".join([state, *[STALE] * folder.stale(), *[FORCED] * bool(config.forced)]),
        decides.said(status.best_dev.get(decides.name)),
        in_words(metrics[:1], scores),
        duration(status.train_seconds),
    ]


def recipes(axis: str = "") -> None:
    """Print all parts, or those of one axis. Raises UserError for an unknown axis."""
    from normlab.training.recipes.grammar import listed, summary

    found = listed()
    axes = dict.fromkeys(part.axis for part in found)
    if axis and axis not in axes:
        raise UserError(f"there is no axis {axis!r}{nearest(axis, axes)}")
    roomy = terminal.console().width >= ROOMY
    table = terminal.table("name", "equation", *(("source",) if roomy else ()))
    for heading, members in groupby(found, key=lambda part: part.axis):
        if heading in (axis or axes):
            table.add_row(Text(heading, "bold"))
            for part in members:
                equation, source = summary(part)
                said = Text(readable(equation)), Text(source, "dim")
                table.add_row(
                    Text(f"  {part.name}"), *(said if roomy else [Text("\n").join(filter(None, said))])
                )
    terminal.write(table)
    if not axis:
        terminal.write(
            "A recipe is a placement, or enc:PLACEMENT/dec:PLACEMENT, and at most one name\n"
            "from each other axis, joined by +: post, post+warmup, pre+fixnorm+scalenorm,\n"
            "enc:post/dec:pre+rmsnorm. `normlab recipes RECIPE` says what it resolves to."
        )


def recipe(config: Config) -> None:
    """Print the parts that a recipe resolves to."""
    from normlab.training.recipes.explain import explain

    table = terminal.table("", "")
    table.show_header = False
    for label, text in explain(config).items():
        table.add_row(Text(label, "bold"), Text(text))
    terminal.write(Text(config.recipe, "bold"), table, "")


def _fitted(header: Sequence[str], rows: Sequence[Sequence[str | Text]], spare: Sequence[str]) -> Table:
    """Build a table that fits the terminal; ``spare`` columns are dropped first, in this order."""
    console = terminal.console()
    for dropped in range(len(spare) + 1):
        kept = [i for i, name in enumerate(header) if name not in spare[:dropped]]
        table = terminal.table(*(header[i] for i in kept))
        for row in rows:
            table.add_row(*(row[i] for i in kept))
        if console.measure(table, options=console.options.update(width=1000)).maximum <= console.width:
            break
    return table
