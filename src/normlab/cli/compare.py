"""``normlab compare``: train recipes at several learning rates and seeds; answer, table and page."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Self

from rich.table import Table
from rich.text import Text
from tyro.conf import FlagCreatePairsOff, OmitArgPrefixes, Positional, arg

from normlab.base.files import regular_or_new
from normlab.base.io import flag_name
from normlab.base.metric import Metric, amount
from normlab.base.units import count, duration, p_value, rate
from normlab.cli import errors, terminal
from normlab.cli.options import (
    ConfigFlags,
    ConfigParts,
    Imports,
    Switch,
    base_of,
    command_line,
    flags_of,
    load,
    typed_values,
)
from normlab.cli.progress import STYLES, ProgressDisplay
from normlab.cli.run import FORCED, forced_lines
from normlab.errors import UserError
from normlab.lab.comparison.result import AROUND, CompareRequest, Comparison, RecipeResult

if TYPE_CHECKING:
    from normlab.lab.comparison.plan import ComparePlan

READ_BY_SETUPS = ("--steps", "--validate-every-steps", "--threads")
"""Flags of a configuration that apply to files of the user's own."""
COSTS = (">parameters", ">FLOPs a token")
FAILED = 1
"""Exit code if a run ended in an error."""
RequestFlags: Any = flags_of(CompareRequest)
RequestParts = Annotated[FlagCreatePairsOff[OmitArgPrefixes[RequestFlags]], arg(name="")]


@dataclass(frozen=True, kw_only=True)
class CompareCommand:
    """Train recipes at several learning rates and seeds, and write one page about them.

    Finished runs are not repeated: the same command continues where it stopped. The page exists once the
    first recipe is finished. The exit code is 1 if a run ended in an error; a run that diverges is a result.
    """

    WHAT: ClassVar[str] = """compare trains recipes and says which is better; type one of:

  normlab compare --config demo      four recipes on the built-in corpus, in minutes
  normlab compare base.py change.py --steps 500            your model and your change, on the same batches
  normlab compare --train-text train.txt --dev-text dev.txt --test-text test.txt --recipes pre pre+qknorm
  normlab compare … --plan           what it would train, how long that takes, and what it can tell"""

    files: Annotated[Positional[tuple[str, ...]], arg(metavar="FILE")] = ()
    """Files of yours to compare instead of recipes, or A=change.py with a short name; each has a setup()."""
    asked: RequestParts = RequestFlags()
    flags: ConfigParts
    config: str
    """Configuration with the defaults: its name (demo, text, multi30k ...) or a run's config.json."""
    plan: Switch = False
    """Train nothing; print the runs, how long they take, and how small a difference they could show."""
    imports: Imports = ()

    @classmethod
    def defaults(cls, argv: Sequence[str]) -> Self:
        name, base = base_of(argv)
        for value in typed_values(argv, "--lrs"):
            if not value or value.startswith("--"):  # else the default rates would be taken
                raise UserError("a comparison needs at least one of lrs, but got none; type --lrs 1e-3 2e-3")
        untyped = RequestFlags(lrs=())  # recipes and files have rates of their own by default
        return cls(asked=untyped, flags=ConfigFlags.of(base), config=name)

    def request(self, command: str = "") -> CompareRequest:
        """Return the request that the flags make. Raises UserError for flags that would be ignored."""
        base = load(self.config)
        typed = tuple(self.flags.changed(base))
        self._require_read(typed)
        asked = dict(vars(self.asked))
        if not self.files and not self.asked.lrs:
            asked["lrs"] = RequestFlags().lrs
        return CompareRequest(
            **asked, setup=self.files, base=self.flags.applied_to(base), kept=typed, command=command
        )

    def _require_read(self, typed: Sequence[str]) -> None:
        """Raise UserError for flags that files of the user's own would ignore; ``typed`` are the fields of
        the configuration that were typed.
        """
        unread = [name for name in map(flag_name, typed) if name not in READ_BY_SETUPS]
        if self.asked.recipes != RequestFlags().recipes:
            unread.insert(0, "--recipes")
        if self.files and unread:
            raise UserError(
                f"{self.files[0]} has a model, data and an optimizer of its own, so normlab would ignore "
                f"{' and '.join(unread)}; leave that out"
            )

    def run(self) -> None:
        """Raises SystemExit with the code ``FAILED`` if a run ended in an error."""
        from normlab.lab.comparison import compare, plan
        from normlab.lab.comparison.grid import on_backend

        request = on_backend(self.request(command_line()))
        if not request.setup:
            _write_notes(request)
        if self.plan:
            _print_plan(plan.plan(request), jobs=request.jobs)
            return
        page = _ComparisonPage(regular_or_new(request.out / "comparison.html"), request.out)
        with ProgressDisplay(jobs=request.jobs, expected_runs=_expected_runs(request)) as display:
            comparison = compare.compare(request, display.watch, page.write)
        print_comparison(comparison)
        page.print_place()
        if comparison.failed:
            raise SystemExit(FAILED)


class _ComparisonPage:
    """The page of a comparison, which is written anew whenever a recipe is finished."""

    def __init__(self, path: Path, out: Path) -> None:
        self.path, self.out = path, out
        self.error: Exception | None = None
        """Why the page could not be written the last time."""

    def write(self, comparison: Comparison) -> None:
        from normlab.report.compare import write_compare_page

        self.error = None
        try:
            write_compare_page(comparison, self.out, self.path)
        except Exception as error:  # of any kind: no page may cost the results of a training
            self.error = error

    def print_place(self) -> None:
        """Print where the page is, or say how to try it again."""
        if self.error is None:
            print(f"page: {self.path}")
            return
        results = self.out / "comparison.json"
        again = shlex.join(["normlab", "run", "report", str(results)])
        errors.write(
            f"normlab: warning: the page was not written ({self.error}); the results are in {results}, "
            f"and to try the page again, type: {again}"
        )


def _write_notes(request: CompareRequest) -> None:
    """Say which flags a recipe has no use for. Raises UserError for a recipe that cannot be built."""
    from normlab.lab.recipes import build, grammar

    configs = [
        grammar.resolve(name, request.base, force=request.force, kept=request.kept)
        for name in request.recipes
    ]
    for note in build.notes(configs, request.kept, request.base):
        errors.write(note)


def _expected_runs(request: CompareRequest) -> int:
    """The number of runs of the sweep and of the reported seeds; a single rate needs no sweep."""
    swept = 0 if len(request.lrs) == 1 else len(request.lrs or AROUND)
    return len(request.recipes) * (swept + request.seeds)


def _print_plan(planned: ComparePlan, *, jobs: int) -> None:
    """Print the runs of the sweep, how long everything takes, and what it can tell."""
    if planned.sweep:
        sweep = terminal.table(planned.noun, ">lr", ">seed", "run", "")
        for run in planned.sweep:
            state = "done" if run.done else "to train"
            sweep.add_row(run.recipe, rate(run.lr), str(run.seed), run.run, state)
        terminal.write(sweep)
    terminal.write(*(f"{name}: {meaning}" for name, meaning in planned.resolves_to.items()))
    seconds = planned.seconds
    terminal.write(
        f"{'then ' if planned.sweep else ''}{count(planned.seed_runs, 'run')} with the reported seeds "
        f"at each {planned.noun}'s best learning rate\n{seconds.step * 1000:.0f} ms a step, "
        f"{duration(seconds.run)} a run, about {duration(planned.total_seconds)} in all with {jobs} at "
        "a time"
    )
    if planned.power:
        _print_power(planned)


def _print_power(planned: ComparePlan) -> None:
    """Print how small a difference so many seeds would find."""
    metric = planned.metric
    terminal.write(
        "", f"The smallest difference between two {planned.noun}s that would be found with 80% power:"
    )
    table = terminal.table(">seeds", f">{metric.label}", ">deviations over seeds", ">runs", ">time")
    for power in planned.power:
        size = metric.amount(power.difference) if power.difference is not None else "?"
        table.add_row(str(power.seeds), size, f"{power.sd:.1f}", str(power.runs), duration(power.seconds))
    terminal.write(table, planned.basis)


def print_comparison(result: Comparison) -> None:
    """Print what was found, the result table, and the answer about every pair."""
    terminal.write(*(Text(sentence, "bold") for sentence in result.sentences), "", _table(result))
    for difference in result.differences:
        terminal.write(difference.sentence)
        if difference.costs:
            terminal.write(Text(f"  {difference.costs}", "dim"))
    if result.noise_floor:
        terminal.write(result.noise_floor)
    terminal.write(*(d.trains_sentence for d in result.differences if d.trains_sentence))
    _print_models(result)
    terminal.write(*(f"failed: {reason}" for reason in result.failed))
    terminal.write(*forced_lines({recipe.name: recipe.forced for recipe in result.recipes if recipe.forced}))
    if result.seen_before:
        terminal.write(result.seen_before)


def _table(result: Comparison) -> Table:
    """A row for each recipe, the best first; columns that do not fit are left out."""
    headline, *others = _metrics(result)
    scores = [f">{metric.label}" for metric in others]
    costs = COSTS if any(recipe.cost for recipe in result.recipes) else ()
    header = [result.noun, ">lr", f">{headline.label}", ">95% interval", f">{headline.label} by seed"]
    header += [">trained", "outcomes", *scores, *costs, ">time a run"]
    rows: list[Sequence[str | Text]] = []
    for recipe in result.ranked:
        row: list[str | Text] = [
            f"{recipe.name} ({FORCED})" if recipe.forced else recipe.name,
            rate(recipe.lr),
            headline.shown(recipe.value(headline)),
            _interval(recipe, headline),
            recipe.by_seed(headline),
            f"{recipe.trained} of {recipe.ended}",
            _outcomes(recipe),
        ]
        row += [metric.shown(recipe.value(metric)) for metric in others]
        if costs:
            row += _costs(recipe)
        row.append(duration(recipe.train_seconds))
        rows.append(row)
    spare = (">time a run", *COSTS, *reversed(scores), "outcomes", ">95% interval", ">lr")
    return terminal.fitted(header, rows, spare)


def _metrics(result: Comparison) -> Sequence[Metric]:
    """The metrics that are shown: those of the test text, else the first of the task."""
    return result.tested or result.metrics[:1]


def _interval(recipe: RecipeResult, metric: Metric) -> str:
    mean = recipe.means.get(metric.name)
    if mean is None or mean.low is None:
        return ""
    return f"{metric.shown(mean.low)} to {metric.shown(mean.high)}"


def _outcomes(recipe: RecipeResult) -> Text:
    """The outcomes of the seeds, each in the colour of its kind: ``trained (2), stuck (1)``."""
    parts = recipe.states.split(", ")
    return Text(", ").join(Text(part, STYLES.get(part.rpartition(" ")[0], "")) for part in parts)


def _costs(recipe: RecipeResult) -> tuple[str, str]:
    """The parameters and the FLOPs for a token, as far as they are recorded."""
    if recipe.cost is None:
        return "", ""
    flops = recipe.cost.flops_per_token
    return amount(recipe.cost.parameters), "" if flops is None else amount(flops)


def _print_models(result: Comparison) -> None:
    """Print what is known of pairs of the very models that were trained, if anything is."""
    metric = _metrics(result)[0]
    table = terminal.table("the trained models themselves", f">{metric.label}", ">p")
    for d in result.differences:
        if d.models is not None and d.p_models is not None:
            table.add_row(f"{d.a} - {d.b}", metric.signed(d.models), p_value(d.p_models))
    if table.row_count:
        note = f"p by exchanging outputs, not corrected: about these models, not their {result.noun}s"
        terminal.write("", table, note)
