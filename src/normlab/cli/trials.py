"""``normlab trial`` and ``transfer``: short real trainings at several rates, of one size or of several."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, Self

from rich.table import Table
from rich.text import Text
from tyro.conf import UseAppendAction, arg

from normlab.base.io import to_plain
from normlab.base.units import count, duration, seconds_of, short_rate
from normlab.cli import advice, errors, terminal
from normlab.cli.options import (
    FAILS,
    SourceFlags,
    command_line,
    load,
    progress_line,
    title_lines,
    typed_value,
)
from normlab.errors import UserError
from normlab.lab.config import Config
from normlab.report.results.transfer import Estimate, TransferResult
from normlab.report.results.trial import TrialResult, TrialsResult
from normlab.scaling import FACTOR, FIRST_SEED, SEEDS
from normlab.scaling import STEPS as STEPS_OF_SIZES
from normlab.trials import STEPS

if TYPE_CHECKING:
    from normlab.scaling.family import SetupFamily
    from normlab.setups.named import NamedSetup
    from normlab.setups.setup import Setup

OTHERS: Final[dict[str, str]] = {
    "hf": "hf: has neither text nor an optimizer; write a function setup() with both, as in train.py:setup",
    "run": "a run has begun already; --config RUN/config.json tries its recipe from the start",
}
CHANGE: Final = (
    "A change to try as well, on the same batches: warmup=500, an option of the optimizer such as "
    "betas=0.9,0.95, or another recipe; may be given several times."
)


NO_LIMIT: Final = "none"
BUDGET: Final = "Time at most, such as 10min; no limit with --steps alone."
HARVEST: Final = 0.1
"""The share of the budget in which a script may show its batches."""


@dataclass(frozen=True, kw_only=True)
class _TrialFlags(SourceFlags):
    """What both commands make of the flags that name a model."""

    OWN: ClassVar[Sequence[str]] = ("--steps",)
    STEPS: ClassVar[int]
    """The steps of a trial by default."""

    @classmethod
    def adapted(cls, base: Config) -> Config:
        """A configuration's values, but with the steps of a trial and not those of the planned run."""
        return _with_steps(base, cls.STEPS)

    def planned(self, recipe: str = "") -> Config:
        """The configuration of a recipe, with the steps of the planned run."""
        return _with_steps(self.resolved(recipe), load(self.config).train.steps)

    def require_trainable(self) -> None:
        """Raise UserError if nothing is named that can be trained, or for flags that would be ignored."""
        if self.kind == "run":
            advice.find_named_run(self.source, self.runs, self.command)
        if self.kind in OTHERS:
            raise UserError(OTHERS[self.kind])
        self.require_one()


def _with_steps(config: Config, steps: int) -> Config:
    return replace(config, train=replace(config.train, steps=steps))


def _budget_s(budget: str) -> float:
    """The seconds of ``--budget``. Raises UserError for anything but a time above 0, or none."""
    if budget == NO_LIMIT:
        return math.inf
    seconds = seconds_of(budget, "--budget")
    if not seconds:
        raise UserError(f"--budget is {budget!r}, but must be a time above 0, such as 10min or 2h")
    return seconds


def _default_budget(argv: Sequence[str], usual: str) -> str:
    """The budget if none is typed. With ``--steps`` there is none: how many trials of so many steps a time
    holds depends on the machine, and on what else it does.
    """
    return usual if typed_value(argv, "--steps") is None else NO_LIMIT


def _print_answer(result: TrialsResult | TransferResult, table: Table, spent: str) -> None:
    first, *others = result.lines
    about = title_lines(result.title, result.facts)
    terminal.write(Text(first, "bold"), *map(Text, others), table, *about, spent)


def _interrupted(folder: Path | None) -> KeyboardInterrupt:
    """Say where the trials are kept; return what ends an interrupted command once its answer is printed."""
    if folder is not None:
        errors.write(f"the trials are kept in {folder}; type the same command again to continue")
    return KeyboardInterrupt()


@dataclass(frozen=True, kw_only=True)
class TrialCommand(_TrialFlags):
    """Train copies of a model at several learning rates for a short while, and say which of them train.

    A script runs for its batches; its weights and files stay as they are. --steps is the length of a trial.
    Ctrl-C gives the answer so far.
    """

    WHAT: ClassVar[str] = """trial trains copies of a model at several rates; type one of:

  normlab trial train.py -- --lr 3e-4   your training script as it is, with its own arguments
  normlab trial -m package.train        the same, as a module
  normlab trial train.py:setup          your function that returns normlab.Setup(model, batches, optimizer=…)
  normlab trial --recipe pre+smallinit  a recipe of normlab's"""

    STEPS: ClassVar[int] = STEPS

    budget: Annotated[str, arg(help=BUDGET)] = "10min"
    rates: tuple[float, ...] = ()
    """Rates to try instead of the scan, such as 1e-4 1e-3."""
    change: Annotated[UseAppendAction[tuple[str, ...]], arg(metavar="CHANGE", help=CHANGE)] = ()
    folder: Path | None = None
    """Keep the trials in this folder; the same command then continues where it stopped."""
    out: Path | None = None
    """Write a page to this file, such as trial.html."""

    @classmethod
    def defaults(cls, argv: Sequence[str]) -> Self:
        return replace(super().defaults(argv), budget=_default_budget(argv, cls.budget))

    def run(self) -> None:
        """Raises KeyboardInterrupt, after the answer so far, if the trials were interrupted."""
        from normlab.trials.trial import trial

        command, budget_s = command_line(), _budget_s(self.budget)
        with self._source() as source:
            with progress_line() as progress:
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
            values = to_plain({**answer.to_dict(), "title": source.title})
            values["facts"] = {**source.facts, **values["facts"]}
        values["command"] = command
        if self.as_json:
            self.print_json([values])
        else:
            _print_trials(TrialsResult.of(values))
        if self.out is not None:
            from normlab.report.trial import trial_page

            self.print_page(trial_page(values).write(self.out))
        if answer.interrupted:
            raise _interrupted(self.folder)

    def _source(self) -> AbstractContextManager[NamedSetup]:
        """Return what to try. Raises UserError if nothing is named, or for flags that would be ignored."""
        from normlab.setups.function import setup_from_file

        self.require_trainable()
        if self.kind == "recipe":
            return nullcontext(self._recipe(self.recipe))
        if self.kind == "script":
            seconds = HARVEST * _budget_s(self.budget)
            return self.script_setup(batches=self.flags.train.steps, seconds=seconds)
        errors.write(f"running {self.source}")
        return setup_from_file(self.source, seed=self.seed)

    def _recipe(self, name: str) -> NamedSetup:
        from normlab.lab import setups

        config = self.planned(name)
        return setups.setup_from_config(config, self.runs, tokens=config.train.max_tokens)

    def _changes(self) -> Mapping[str, Setup | None]:
        """The changes. Those without = are recipes, each of which replaces ``--recipe``."""
        recipes = [word for word in self.change if "=" not in word]
        named = self.source or self.module
        if recipes and named:
            raise UserError(
                f"--change {recipes[0]} is a recipe, which needs --recipe; for {named} change an "
                "option, as in --change warmup=500 or --change betas=0.9,0.95"
            )
        return {word: self._recipe(word).setup if word in recipes else None for word in self.change}


def _print_trials(result: TrialsResult) -> None:
    """Print the answer with a row for each rate, a column for the setup as it is and for each change."""
    table = terminal.table(">rate", *(f">{setup.change or 'loss'}" for setup in result.setups), "")
    for rate in result.rates:
        losses = [_loss(setup.at(rate)) for setup in result.setups]
        table.add_row(short_rate(rate), *losses, ", ".join(_notes(result, rate)))
    _print_answer(result, table, f"{count(result.number, 'trial')} in {duration(result.seconds)}")


def _loss(trial: TrialResult | None) -> str:
    """The loss of a trial, if it was made and has one."""
    if trial is None:
        return ""
    return "–" if trial.loss is None else f"{trial.loss:.3f}"


def _notes(result: TrialsResult, rate: float) -> Iterator[str]:
    """Yield what there is to say of a rate."""
    if rate == result.current_rate:
        yield "today"
    if rate == result.best:
        yield "best"
    trial = result.at(rate)
    if trial is not None and trial.stopped:
        yield trial.stopped


@dataclass(frozen=True, kw_only=True)
class TransferCommand(_TrialFlags):
    """Train a model in several sizes at several learning rates, and say whether the best one carries.

    In the arguments of a script, {width} or {depth} stands for the size, and {seed} for the seed; the script
    runs up to its first steps once for each. A function returns normlab.Setup(model, batches, optimizer=…). A
    recipe has as many heads at every width. --steps is the length of a trial. Ctrl-C gives the answer so far.
    The exit code is 3 if the rate does not carry, and 0 if it does or the trials cannot say.
    """

    WHAT: ClassVar[
        str
    ] = """transfer trains a model in several widths or depths, at several rates each; type one of:

  normlab transfer train.py --widths 64 128 256 -- --n_embd={width} --seed={seed}   your training script
  normlab transfer train.py:setup --widths 64 128 256 512   your function setup(width=256, seed=0)
  normlab transfer train.py:setup --depths 2 4 8 16         your function setup(depth=4, seed=0)
  normlab transfer --recipe pre+mup --widths 64 128 256     a recipe of normlab's"""

    STEPS: ClassVar[int] = STEPS_OF_SIZES

    widths: tuple[int, ...] = ()
    """Widths of the model, such as 64 128 256 512."""
    depths: tuple[int, ...] = ()
    """Depths to try instead of widths, such as 2 4 8 16."""
    seeds: int = SEEDS
    """How many seeds each trial is run with, counting up from --seed."""
    rates: tuple[float, ...] = ()
    """Rates to try at every size, instead of five octaves around its best."""
    decays: tuple[str, ...] = ("1",)
    """Factors on the weight decay to try, such as 0 1 4, or independent (of the rate), or independent:4."""
    target: int | None = None
    """Size whose best rate is wanted; by default the largest."""
    factor: float = FACTOR
    """The rate carries if the best one changes by at most this factor over all sizes."""
    budget: Annotated[str, arg(help=BUDGET)] = "30min"
    folder: Path | None = None
    """Keep the trials in this folder; the same command then continues where it stopped."""
    out: Path | None = None
    """Write a page to this file, such as transfer.html."""

    @classmethod
    def defaults(cls, argv: Sequence[str]) -> Self:
        """Return the defaults of ``normlab.transfer``, whose first seed is not the configuration's."""
        return replace(super().defaults(argv), seed=FIRST_SEED, budget=_default_budget(argv, cls.budget))

    def run(self) -> None:
        """Raises SystemExit with the code ``FAILS`` if the rate does not carry, and KeyboardInterrupt, after
        the answer so far, if the trials were interrupted.
        """
        from normlab.scaling.sweep import SHIFTS
        from normlab.scaling.transfer import transfer

        since, command, budget_s = time.monotonic(), command_line(), _budget_s(self.budget)
        with self._family() as family, progress_line() as progress:
            answer = transfer(
                family,
                steps=self.flags.train.steps,
                seeds=self.seeds,
                budget_s=budget_s,
                rates=self.rates,
                decays=self.decays,
                target=self.target,
                factor=self.factor,
                seed=self.seed,
                folder=self.folder,
                progress=progress,
                announce=errors.write,
                since=since,
            )
        values = {**to_plain(answer.to_dict()), "command": command}
        if self.as_json:
            self.print_json([values])
        else:
            _print_transfer(TransferResult.of(values))
        if self.out is not None:
            from normlab.report.transfer import transfer_page

            self.print_page(transfer_page(values).write(self.out))
        if answer.interrupted:
            raise _interrupted(self.folder)
        if answer.verdict == SHIFTS:
            raise SystemExit(FAILS)

    @contextmanager
    def _family(self) -> Iterator[SetupFamily]:
        """Yield the model in its sizes. Raises UserError for no model, or for flags that would be ignored."""
        from normlab.scaling.family import family_of
        from normlab.setups.function import function_from_file

        self.require_trainable()
        sizes: dict[str, Any] = {"widths": self.widths, "depths": self.depths}
        if self.kind == "recipe":
            from normlab.lab.sized import sized

            yield family_of(sized(self.planned(), self.runs), **sizes)
            return
        if self.kind == "script":
            from normlab.scaling.script import family_of_script
            from normlab.setups.script import Script

            script = Script(self.module or self.source, self.arguments, bool(self.module))
            advice.require_script(script.name, is_module=script.is_module, command=self.command)
            harvest = {"batches": self.flags.train.steps, "seconds": HARVEST * _budget_s(self.budget)}
            errors.write(f"running {script.name} up to its first steps, once for each size and seed")
            with family_of_script(script, **sizes, **harvest, tell=errors.write) as family:
                yield family
            return
        errors.write(f"running {self.source}")
        with function_from_file(self.source, seed=self.seed) as function:
            yield family_of(function, self.source, **sizes)


def _print_transfer(result: TransferResult) -> None:
    """Print the answer with a row for each size and its best rate, with the first weight decay."""
    multiple_column = [">times its own"] if result.scales_itself else []
    table = terminal.table(
        f">{result.axis}", ">parameters", ">best rate", *multiple_column, ">95% interval", ""
    )
    for size, model in zip(result.decays[0].sizes, result.models, strict=True):
        best, multiple = size.best.rate, size.best.multiple.value
        row = [str(size.size), f"{model.parameters:,}", "" if best.value is None else short_rate(best.value)]
        if result.scales_itself:
            row.append("" if multiple is None else f"{multiple:.2g}x")
        table.add_row(*row, _interval(best), size.why)
    cost = result.cost
    spent = f"{count(cost.trials, 'trial')} of {result.steps} steps in {duration(cost.seconds)}"
    _print_answer(result, table, spent)


def _interval(best: Estimate) -> str:
    """Where a best rate lies, as far as one end or both are known."""
    if best.low is not None and best.high is not None:
        return f"{short_rate(best.low)} to {short_rate(best.high)}"
    if best.low is not None:
        return f"above {short_rate(best.low)}"
    return "" if best.high is None else f"below {short_rate(best.high)}"
