"""``normlab trial``: short real trainings at several learning rates, to see which of them train."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final

from rich.text import Text
from tyro.conf import UseAppendAction, arg

from normlab.cli import errors, terminal
from normlab.cli.options import SourceFlags, command_line, load, progress_line, title_lines
from normlab.config.config import Config
from normlab.config.io import to_plain
from normlab.config.units import count, duration, seconds_of, short_rate
from normlab.errors import UserError
from normlab.trials import STEPS

if TYPE_CHECKING:
    from normlab.trace.setup import Setup
    from normlab.training.setups import NamedSetup
    from normlab.trials.trials import Trials

OTHERS: Final = {
    "hf": "hf: has neither text nor an optimizer; write a function setup() with both, as in train.py:setup",
    "run": "a run has begun already; --config RUN/config.json tries its recipe from the start",
}
CHANGE: Final = (
    "A change to try as well, on the same batches: warmup=500, an option of the optimizer such as "
    "betas=0.9,0.95, or another recipe; may be given several times."
)


@dataclass(frozen=True, kw_only=True)
class TrialCommand(SourceFlags):
    """Train copies of a model at several learning rates for a short while, and say which of them train.

    SOURCE is train.py:setup, a function of yours that returns normlab.Setup(model, batches, optimizer=…);
    your file is run. Without SOURCE, --recipe names a recipe. --steps is the length of a trial. Ctrl-C gives
    the answer so far.
    """

    WHAT: ClassVar[str] = """trial trains copies of a model at several rates; type one of:

  normlab trial train.py:setup          your function that returns normlab.Setup(model, batches, optimizer=…)
  normlab trial --recipe pre+smallinit  a recipe of normlab's"""

    OWN: ClassVar[Sequence[str]] = ("--steps",)

    budget: str = "10min"
    """Time to spend at most, such as 90s, 10min or 1h."""
    rates: tuple[float, ...] = ()
    """Rates to try instead of the scan, such as 1e-4 1e-3."""
    change: Annotated[UseAppendAction[tuple[str, ...]], arg(metavar="CHANGE", help=CHANGE)] = ()
    folder: Path | None = None
    """Folder that keeps the trials, so that the same command continues where it stopped."""
    out: Path | None = None
    """File of a page to write, such as trial.html."""

    @classmethod
    def adapted(cls, base: Config) -> Config:
        """A configuration's values, but with the steps of a trial and not those of the planned run."""
        return with_steps(base, STEPS)

    def run(self) -> None:
        """Raises KeyboardInterrupt, after the answer so far, if the trials were interrupted."""
        from normlab.trials.trial import trial

        command, budget_s = command_line(), budget_of(self.budget)
        with self._source() as source:
            with redirect_stdout(sys.stderr), progress_line() as progress:
                answer = trial(
                    source.setup,
                    steps=self.flags.train.steps,
                    budget_s=budget_s,
                    rates=self.rates or None,
                    change=self._changes(),
                    seed=self.seed,
                    folder=self.folder,
                    progress=progress,
                    announce=errors.write,
                )
            plain = to_plain({**answer.to_dict(), "title": source.title})
            plain["facts"] = {**source.facts, **plain["facts"]}
        plain["command"] = command
        if self.as_json:
            self.print_json([plain])
        else:
            _print(plain, answer)
        if self.out is not None:
            from normlab.report.trial import trial_page

            self.print_page(trial_page(plain).write(self.out))
        if answer.interrupted:
            raise interrupted(self.folder)

    @contextmanager
    def _source(self) -> Iterator[NamedSetup]:
        """Yield what to try. Raises UserError if nothing is named, or for flags that would be ignored."""
        from normlab.training import setups

        if self.kind in OTHERS:
            raise UserError(OTHERS[self.kind])
        self.require_one()
        if self.kind == "recipe":
            yield self._recipe(self.recipe)
            return
        errors.write(f"running {self.source}")
        with setups.setup_from_file(self.source, seed=self.seed) as source:
            yield source

    def _recipe(self, name: str) -> NamedSetup:
        from normlab.training import setups

        config = with_steps(self.resolved(name), load(self.config).train.steps)
        return setups.setup_from_config(config, self.runs, tokens=config.train.max_tokens)

    def _changes(self) -> Mapping[str, Setup | None]:
        """The changes. Those without = are recipes, each of which replaces ``--recipe``."""
        recipes = [word for word in self.change if "=" not in word]
        if recipes and self.source:
            raise UserError(
                f"--change {recipes[0]} is a recipe, which needs --recipe; for {self.source} change an "
                "option, as in --change warmup=500 or --change betas=0.9,0.95"
            )
        return {word: self._recipe(word).setup if word in recipes else None for word in self.change}


def with_steps(config: Config, steps: int) -> Config:
    """A configuration with another number of steps."""
    return replace(config, train=replace(config.train, steps=steps))


def budget_of(text: str) -> float:
    """The seconds of ``--budget``. Raises UserError for anything but a time above 0."""
    seconds = seconds_of(text, "--budget")
    if not seconds:
        raise UserError(f"--budget is {text!r}, but must be a time above 0, such as 10min or 2h")
    return seconds


def interrupted(folder: Path | None) -> KeyboardInterrupt:
    """Say where the trials are kept; return what ends an interrupted command once its answer is printed."""
    if folder is not None:
        errors.write(f"the trials are kept in {folder}; type the same command again to continue")
    return KeyboardInterrupt()


def _print(plain: Mapping[str, Any], answer: Trials) -> None:
    first, *rest = answer.lines()
    every = [plain, *plain["beside"]]
    table = terminal.table(">rate", *(f">{one['change'] or 'loss'}" for one in every), "")
    cells = [{t["rate"]: t for t in one["trials"] if t["steps"] == one["steps"]} for one in every]
    for value in sorted(set[float]().union(*cells)):
        row = [known.get(value) for known in cells]
        notes = ["today"] * (value == plain["today"]) + ["best"] * (value == plain["best"])
        notes += [row[0]["stopped"]] if row[0] and row[0]["stopped"] else []
        losses = ("" if t is None else "–" if t["loss"] is None else f"{t['loss']:.3f}" for t in row)
        table.add_row(short_rate(value), *losses, ", ".join(notes))
    number = sum(len(one["trials"]) for one in every)
    terminal.write(
        Text(first, "bold"),
        *map(Text, rest),
        table,
        *title_lines(plain["title"], plain["facts"]),
        f"{count(number, 'trial')} in {duration(plain['seconds'])}",
    )
