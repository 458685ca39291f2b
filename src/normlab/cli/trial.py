"""``normlab trial``: short real trainings at several learning rates, and which of them train."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Self

from tyro.conf import Positional, UseAppendAction, arg

from normlab.cli import failures
from normlab.cli.check import kind_of, progress_line, recipe_flags, recipe_of, require_one
from normlab.cli.common import RUNS, ConfigParts, Imports, Switch, base_of
from normlab.cli.flags import ConfigFlags, load
from normlab.config.units import seconds_of
from normlab.errors import UserError
from normlab.trials import STEPS

if TYPE_CHECKING:
    from normlab.config.config import Config
    from normlab.trace.setup import Setup
    from normlab.training.setups import Source
    from normlab.trials.trials import Trials

WHAT: Final = """normlab trial trains copies of a model at several rates. Name what to train:

  normlab trial train.py:setup          your function that returns normlab.Setup(model, batches, optimizer=…)
  normlab trial --recipe pre+smallinit  a recipe of normlab's"""
OTHERS: Final = {
    "hf": "hf: has neither text nor an optimizer; write a function setup() with both, as in train.py:setup",
    "run": "a run has begun already; --config RUN/config.json tries its recipe from the start",
}
CHANGE: Final = (
    "One thing to change, tried beside on the same batches: warmup=500, an option of the optimizer as "
    "betas=0.9,0.95, or another recipe; may be given several times."
)


@dataclass(frozen=True, kw_only=True)
class Trial:
    """Train copies of a model at several learning rates for a short while, and say which of them train.

    SOURCE is train.py:setup, a function of yours that returns normlab.Setup(model, batches, optimizer=…) and
    runs with your file. Without it --recipe names one. --steps are those of a trial. Ctrl-C gives the answer
    so far.
    """

    source: Annotated[Positional[str], arg(metavar="SOURCE")] = ""
    """train.py:setup; leave it out to try --recipe."""
    recipe: str = ""
    """A placement and what goes with it, such as pre+scalenorm; `normlab recipes` lists the parts."""
    lr: float | None = None
    """Peak learning rate of a recipe, from which the scan begins; by default that of the configuration."""
    seed: int = 1
    """Seed of the weights, of the data, and of the trials' random numbers."""
    budget: str = "10min"
    """Time that may be spent, such as 90s, 10min or 1h."""
    rates: tuple[float, ...] = ()
    """Rates to try in place of the scan, such as 1e-4 1e-3."""
    change: Annotated[UseAppendAction[tuple[str, ...]], arg(metavar="CHANGE", help=CHANGE)] = ()
    folder: Path | None = None
    """Folder in which trials are kept, so that the same command goes on where it was stopped."""
    flags: ConfigParts
    config: str
    """Where a recipe's defaults come from: a configuration's name (demo, text …) or a run's config.json."""
    out: Path | None = None
    """File of a page to write, such as trial.html."""
    as_json: Annotated[Switch, arg(name="json")] = False
    """Print everything as JSON instead of sentences."""
    runs: Path = RUNS
    """Folder in which the text of a recipe is prepared."""
    force: Switch = False
    """Also try a combination that its source does not define."""
    imports: Imports = ()

    @classmethod
    def defaults(cls, argv: Sequence[str]) -> Self:
        """A configuration's flags, of which ``--steps`` are those of a trial, not of the planned run."""
        name, base = base_of(argv)
        return cls(flags=ConfigFlags.of(_with_steps(base, STEPS)), config=name)

    def run(self) -> None:
        """Raises KeyboardInterrupt after the answer so far, where the trials were interrupted."""
        from normlab.config.io import to_plain
        from normlab.trials.trial import trial

        budget_s = seconds_of(self.budget, "--budget")
        with self._source() as source:
            with redirect_stdout(sys.stderr), progress_line() as progress:
                answer = trial(
                    source.setup,
                    steps=self._steps,
                    budget_s=0.0 if budget_s is None else budget_s,
                    rates=self.rates or None,
                    change=self._changes(),
                    seed=self.seed,
                    folder=self.folder,
                    progress=progress,
                    announce=failures.write,
                )
            plain = to_plain({**answer.to_dict(), "title": source.title})
            plain["facts"] = {**source.facts, **plain["facts"]}
        plain["command"] = shlex.join(["normlab", *sys.argv[1:]])
        if self.as_json:
            print(json.dumps(plain, ensure_ascii=False, allow_nan=False))
        else:
            _say(plain, answer)
        if self.out is not None:
            from normlab.report.trial import write_trial_page

            print(
                f"page: {write_trial_page(plain, self.out)}", file=sys.stderr if self.as_json else sys.stdout
            )
        if answer.interrupted:
            if self.folder is not None:
                failures.write(f"the trials are kept in {self.folder}; the same command goes on")
            raise KeyboardInterrupt

    @property
    def _steps(self) -> int:
        return self.flags.train.steps

    @contextmanager
    def _source(self) -> Iterator[Source]:
        """Yield what is to be tried. Raises UserError if that is nothing, or flags that nothing reads."""
        from normlab.training import setups

        kind = kind_of(self.source)
        of_recipe = recipe_flags(self, _with_steps(load(self.config), self._steps))
        if kind in OTHERS:
            raise UserError(OTHERS[kind])
        require_one(self.source, of_recipe, WHAT)
        if kind == "recipe":
            yield self._recipe(self.recipe)
            return
        failures.write(f"running {self.source}")
        with setups.setup_from_file(self.source, seed=self.seed) as source:
            yield source

    def _recipe(self, name: str) -> Source:
        from normlab.training import setups

        base = load(self.config)
        config = recipe_of(replace(self, recipe=name), base)
        config = _with_steps(config, base.train.steps)
        return setups.setup_from_config(config, self.runs, tokens=config.train.max_tokens)

    def _changes(self) -> Mapping[str, Setup | None]:
        """The changes; those without = are recipes, which stand in the place of ``--recipe``."""
        recipes = [word for word in self.change if "=" not in word]
        if recipes and self.source:
            raise UserError(
                f"--change {recipes[0]} is a recipe, which goes with --recipe; of {self.source} an option "
                "can change, as in --change warmup=500 or --change betas=0.9,0.95"
            )
        return {word: self._recipe(word).setup if word in recipes else None for word in self.change}


def _with_steps(config: Config, steps: int) -> Config:
    return replace(config, train=replace(config.train, steps=steps))


def _say(plain: Mapping[str, Any], answer: Trials) -> None:
    """Print the answer, then each rate with its loss."""
    from rich.text import Text

    from normlab.cli import terminal
    from normlab.config.units import count, duration, short_rate

    console = terminal.console()
    first, *rest = answer.lines()
    console.print(Text(first, "bold"))
    for line in rest:
        console.print(Text(line))
    every = [plain, *plain["beside"]]
    table = terminal.table(">rate", *(f">{one['change'] or 'loss'}" for one in every), "")
    cells = [{t["rate"]: t for t in one["trials"] if t["steps"] == one["steps"]} for one in every]
    for value in sorted({value for row in cells for value in row}):
        found = [row.get(value) for row in cells]
        notes = ["today"] * (value == plain["today"]) + ["best"] * (value == plain["best"])
        notes += [found[0]["stopped"]] if found[0] and found[0]["stopped"] else []
        losses = ("" if t is None else "–" if t["loss"] is None else f"{t['loss']:.3f}" for t in found)
        table.add_row(short_rate(value), *losses, ", ".join(notes))
    console.print(table)
    about = "; ".join(f"{name} {value}" for name, value in plain["facts"].items())
    console.print(Text(plain["title"], "bold"), Text(about, "dim"), sep="\n")
    number = sum(len(one["trials"]) for one in every)
    print(f"{count(number, 'trial')} in {duration(plain['seconds'])}")
