"""What commands print: tables in a terminal."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from normlab.cli.progress import STYLES, Progress, state_of
from normlab.spec.comparison import Comparison, Difference, RecipeResult
from normlab.spec.units import duration, p_value, rate
from normlab.store import RunFolder, Runs
from normlab.store.folder import read_json

if TYPE_CHECKING:
    from normlab.run.compare import ComparePlan

STALE = "stale"
SIGNS = {"leftarrow": "←", "odot": "⊙", "cdot": "·", ";": " ", ",": " ", "|": "‖", "lambda": "λ"}
"""TeX commands in the docstrings of variants, and what a terminal shows; Greek letters go by their names."""


def progress(*, jobs: int = 1, expected_runs: int = 0) -> Progress:
    """Progress on standard error, so that results alone go to standard output."""
    return Progress(Console(stderr=True), jobs=jobs, expected_runs=expected_runs)


def plan(planned: ComparePlan, *, jobs: int) -> None:
    """The runs of a dry run and their time."""
    table = _table("recipe", ">lr", ">seed", "run", "")
    for run in planned.sweep:
        table.add_row(run.recipe, rate(run.lr), str(run.seed), run.run, "done" if run.done else "to train")
    seconds = planned.seconds
    _print(
        table,
        *(f"{name}: {meaning}" for name, meaning in planned.resolves_to.items()),
        f"then {planned.seed_runs} runs with other seeds at each recipe's best learning rate\n"
        f"{seconds.step * 1000:.0f} ms a step, {duration(seconds.run)} a run, "
        f"about {duration(planned.total_seconds)} in all with {jobs} at a time",
    )


def comparison(result: Comparison) -> None:
    """The result table, best first, and the differences that are significant."""
    header = ("recipe", ">lr", ">BLEU", ">95% interval", ">chrF", ">dev BLEU", "outcomes", ">time a run")
    rows: list[Sequence[str | Text]] = []
    for recipe in sorted(result.recipes, key=_bleu, reverse=True):
        low_high = f"{recipe.bleu.low:z.1f} to {recipe.bleu.high:z.1f}" if recipe.bleu else ""
        cells = (
            recipe.name,
            rate(recipe.lr),
            f"{recipe.bleu.value:.1f}" if recipe.bleu else "",
            low_high,
            _number(recipe.chrf),
            _number(recipe.dev_bleu),
            Text(" ").join(Text(outcome, STYLES.get(outcome, "")) for outcome in recipe.outcomes),
            duration(recipe.train_seconds),
        )
        rows.append(cells)
    table = _fitted(header, rows, (">time a run", ">chrF", ">dev BLEU", ">95% interval"))
    _print(table, *map(_difference, result.differences), *(f"failed: {reason}" for reason in result.failed))


def run(folder: RunFolder) -> None:
    """How a single training ended."""
    status = folder.status()
    if status.outcome:
        print(f"{status.outcome.state} at step {status.outcome.step}: {status.outcome.evidence}")
    if status.best_dev_bleu is not None:
        print(f"best checkpoint: step {status.best_step}, dev BLEU {status.best_dev_bleu:.1f}")
    if folder.scores.exists():
        scores = read_json(folder.scores)
        print(f"test BLEU {scores['bleu']:.1f}, chrF {scores['chrf']:.1f}  {scores['signature']}")
    print(f"{duration(status.train_seconds)} of training; run folder: {folder.path}")


def runs(store: Runs) -> None:
    """One row a run of a folder, and why a folder cannot be read."""
    header = ("run", "recipe", ">lr", ">seed", ">step", "state", ">dev BLEU", ">test BLEU", ">time")
    rows: list[list[str]] = []
    damaged: list[str] = []
    for folder in store:
        try:
            rows.append(_run_cells(folder))
        except (ValueError, OSError) as error:
            damaged.append(f"{folder.path.name}: {error}")
    if rows:
        _print(_fitted(header, rows, (">time", ">step", ">dev BLEU", ">seed")))
    elif not damaged:
        print(f"no runs in {store.root}; `normlab train` or `normlab compare` makes some")
    if any(STALE in row[header.index("state")] for row in rows):
        print("stale: made by older code; today's gives the same configuration other numbers and another id")
    _print(*damaged)


def _run_cells(folder: RunFolder) -> list[str]:
    config, status = folder.config(), folder.status()
    return [
        folder.path.name,
        config.recipe,
        rate(config.optim.lr),
        str(config.seeds.init),
        f"{status.step:,}/{config.train.steps:,}",
        state_of(status) + (f", {STALE}" if folder.stale() else ""),
        _number(status.best_dev_bleu),
        _number(read_json(folder.scores)["bleu"] if folder.scores.exists() else None),
        duration(status.train_seconds),
    ]


def recipes() -> None:
    """Every registered part, axis by axis."""
    from normlab.run.recipes import parts, summary

    table = _table("axis", "name", "equation", "source")
    for axis, members in groupby(parts(), key=lambda part: part.axis):
        for i, part in enumerate(members):
            equation, source = summary(part)
            table.add_row("" if i else axis, part.name, _plain(equation), source)
    _print(table)
    print(
        "A recipe is a placement, or enc:PLACEMENT/dec:PLACEMENT, and at most one name from each other\n"
        "axis, joined by +: post, post+warmup, pre+fixnorm+scalenorm, enc:post/dec:pre+rmsnorm"
    )


def _plain(text: str) -> str:
    r"""TeX of a docstring as a terminal can show it: ``x \leftarrow \alpha x`` becomes ``x ← α x``."""
    text = re.sub(r":math:`([^`]*)`", r"\1", text).replace("`", "")
    text = re.sub(r"\\(?:mathrm|text)\{([^}]*)\}", r"\1", text)
    text = re.sub(r"\\sqrt\{((?:[^{}]|\{[^{}]*\})*)\}", r"√(\1)", text)
    text = re.sub(r"\\([a-z]+|[;,|])", lambda found: _sign(found[1]), text)
    return re.sub(r" {2,}", " ", re.sub(r"_\{(\w+)\}", r"_\1", text))


def _sign(command: str) -> str:
    try:
        return SIGNS.get(command) or unicodedata.lookup(f"GREEK SMALL LETTER {command}")
    except KeyError:
        return command


def _print(*things: Table | str) -> None:
    """To standard output; what is not a terminal gets whole lines, however long."""
    console = _console()
    for thing in things:
        console.print(thing, markup=False, highlight=False, soft_wrap=isinstance(thing, str))


def _console() -> Console:
    console = Console()
    return console if console.is_terminal else Console(width=1000)


def _fitted(header: Sequence[str], rows: Sequence[Sequence[str | Text]], spare: Sequence[str]) -> Table:
    """A table that fits the terminal: before a cell wraps it drops ``spare`` columns, in this order."""
    console = _console()
    for dropped in range(len(spare) + 1):
        kept = [i for i, name in enumerate(header) if name not in spare[:dropped]]
        table = _table(*(header[i] for i in kept))
        for row in rows:
            table.add_row(*(row[i] for i in kept))
        if console.measure(table, options=console.options.update(width=1000)).maximum <= console.width:
            break
    return table


def _table(*columns: str) -> Table:
    """A plain table; a column whose name begins with > is aligned to the right and never wraps.

    What is too long for its column goes on in the next line; nothing is cut off.
    """
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in columns:
        number = name.startswith(">")
        table.add_column(
            name.removeprefix(">"),
            justify="right" if number else "left",
            no_wrap=number or name == "run",
            overflow="fold",
        )
    return table


def _bleu(recipe: RecipeResult) -> float:
    return recipe.bleu.value if recipe.bleu else -1.0


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"


def _signed(value: float) -> str:
    text = f"{value:+.1f}"
    return text if float(text) else text[1:]


def _difference(d: Difference) -> str:
    verdict = "significant" if d.significant else "not significant"
    return (
        f"{d.a} - {d.b}: {_signed(d.delta.value)} BLEU ({_signed(d.delta.low)} to {_signed(d.delta.high)}), "
        f"{p_value(d.p_corrected)} corrected, {verdict}"
    )
