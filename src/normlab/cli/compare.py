"""``normlab compare``: train recipes at several learning rates and seeds; answer, table and page."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Self

from rich.text import Text
from tyro.conf import FlagCreatePairsOff, OmitArgPrefixes, Positional, arg

from normlab.base.files import regular_or_new
from normlab.base.io import flag_name
from normlab.base.metric import amount
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
from normlab.cli.run import FORCED, forced_lines
from normlab.cli.terminal import STYLES, ProgressDisplay
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

  normlab compare --config demo      three recipes on the built-in corpus, in minutes
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
            if not value or value.startswith("--"):  # or the rates by default would be taken for it
                raise UserError("a comparison needs at least one of lrs, but got none; type --lrs 1e-3 2e-3")
        untyped = RequestFlags(lrs=())  # recipes and files have rates of their own by default
        return cls(asked=untyped, flags=ConfigFlags.of(base), config=name)

    def request(self, command: str = "") -> CompareRequest:
        """Return the request that the flags make. Raises UserError for flags that would be ignored."""
        base = load(self.config)
        kept = tuple(self.flags.changed(base))
        unread = [name for name in map(flag_name, kept) if name not in READ_BY_SETUPS]
        if self.asked.recipes != RequestFlags().recipes:
            unread.insert(0, "--recipes")
        if self.files and unread:
            raise UserError(
                f"{self.files[0]} has a model, data and an optimizer of its own, so normlab would ignore "
                f"{' and '.join(unread)}; leave that out"
            )
        asked = vars(self.asked)
        if not self.files and not self.asked.lrs:
            asked = asked | {"lrs": RequestFlags().lrs}
        return CompareRequest(
            **asked, setup=self.files, base=self.flags.applied_to(base), kept=kept, command=command
        )

    def run(self) -> None:
        from normlab.lab.comparison import compare, plan
        from normlab.lab.comparison.grid import on_backend
        from normlab.lab.recipes import build, grammar

        request = on_backend(self.request(command_line()))
        if not request.setup:
            own_flags = {"force": request.force, "kept": request.kept}
            configs = [grammar.resolve(name, request.base, **own_flags) for name in request.recipes]
            for note in build.notes(configs, request.kept, request.base):
                errors.write(note)
        if self.plan:
            _print_plan(plan.plan(request), jobs=request.jobs)
            return
        from normlab.report.compare import write_compare_page

        def publish(comparison: Comparison) -> None:
            unwritten.clear()
            try:
                write_compare_page(comparison, request.out, page)
            except Exception as error:  # of any kind: no page may cost the results of a training
                unwritten.append(error)

        unwritten: list[Exception] = []
        page = regular_or_new(request.out / "comparison.html")
        tried = len(request.lrs or AROUND) if len(request.lrs) != 1 else 0
        expected = len(request.recipes) * (tried + request.seeds)
        with ProgressDisplay(jobs=request.jobs, expected_runs=expected) as shown:
            comparison = compare.compare(request, shown.watch, publish)
        print_comparison(comparison)
        if not unwritten:
            print(f"page: {page}")
        else:
            results = request.out / "comparison.json"
            again = shlex.join(["normlab", "run", "report", str(results)])
            errors.write(
                f"normlab: warning: the page was not written ({unwritten[0]}); the results are in {results}, "
                f"and to try the page again, type: {again}"
            )
        if comparison.failed:
            raise SystemExit(FAILED)


def _print_plan(planned: ComparePlan, *, jobs: int) -> None:
    table = terminal.table(planned.noun, ">lr", ">seed", "run", "")
    for run in planned.sweep:
        table.add_row(run.recipe, rate(run.lr), str(run.seed), run.run, "done" if run.done else "to train")
    seconds, metric = planned.seconds, planned.metric
    terminal.write(
        *([table] if planned.sweep else []),
        *(f"{name}: {meaning}" for name, meaning in planned.resolves_to.items()),
        f"{'then ' if planned.sweep else ''}{count(planned.seed_runs, 'run')} with the reported seeds "
        f"at each {planned.noun}'s best learning rate\n{seconds.step * 1000:.0f} ms a step, "
        f"{duration(seconds.run)} a run, about {duration(planned.total_seconds)} in all with {jobs} at "
        "a time",
    )
    if not planned.power:
        return
    terminal.write(
        "", f"The smallest difference between two {planned.noun}s that would be found with 80% power:"
    )
    tells = terminal.table(">seeds", f">{metric.label}", ">deviations over seeds", ">runs", ">time")
    for power in planned.power:
        size = metric.amount(power.difference) if power.difference is not None else "?"
        tells.add_row(str(power.seeds), size, f"{power.sd:.1f}", str(power.runs), duration(power.seconds))
    terminal.write(tells, planned.basis)


def _costs(recipe: RecipeResult) -> tuple[str, str]:
    """The parameters and the FLOPs for a token, as far as they are recorded."""
    if recipe.cost is None:
        return "", ""
    each = recipe.cost.flops_per_token
    return amount(recipe.cost.parameters), "" if each is None else amount(each)


def print_comparison(result: Comparison) -> None:
    """Print what was found, the result table, and the answer about every pair."""
    headline, *others = result.tested or result.metrics[:1]
    scores = [f">{metric.label}" for metric in others]
    counted = COSTS if any(recipe.cost for recipe in result.recipes) else ()
    header = [result.noun, ">lr", f">{headline.label}", ">95% interval", f">{headline.label} by seed"]
    header += [">trained", "outcomes", *scores, *counted, ">time a run"]
    rows: list[Sequence[str | Text]] = []
    for recipe in result.ranked:
        mean = recipe.means.get(headline.name)
        states = [Text(part, STYLES.get(part.rpartition(" ")[0], "")) for part in recipe.states.split(", ")]
        cells = (
            f"{recipe.name} ({FORCED})" if recipe.forced else recipe.name,
            rate(recipe.lr),
            headline.shown(recipe.value(headline)),
            f"{headline.shown(mean.low)} to {headline.shown(mean.high)}"
            if mean and mean.low is not None
            else "",
            recipe.by_seed(headline),
            f"{recipe.trained} of {recipe.ended}",
            Text(", ").join(states),
            *(metric.shown(recipe.value(metric)) for metric in others),
            *_costs(recipe)[: len(counted)],
            duration(recipe.train_seconds),
        )
        rows.append(cells)
    spare = (">time a run", *COSTS, *reversed(scores), "outcomes", ">95% interval", ">lr")
    table = terminal.fitted(header, rows, spare)
    terminal.write(*(Text(sentence, "bold") for sentence in result.sentences), "", table)
    for d in result.differences:
        terminal.write(d.sentence, *([Text(f"  {d.costs}", "dim")] if d.costs else []))
    terminal.write(*filter(None, [result.noise_floor]))
    terminal.write(*(d.trains_sentence for d in result.differences if d.trains_sentence))
    models = [d for d in result.differences if d.models is not None and d.p_models is not None]
    if models:
        about = terminal.table("these very models", f">{headline.label}", ">p")
        for d in models:
            about.add_row(f"{d.a} - {d.b}", headline.signed(d.models or 0.0), p_value(d.p_models or 0.0))
        terminal.write(
            "", about, f"p by exchanging outputs, not corrected: about these models, not their {result.noun}s"
        )
    terminal.write(*(f"failed: {reason}" for reason in result.failed))
    terminal.write(*forced_lines({recipe.name: recipe.forced for recipe in result.recipes if recipe.forced}))
    terminal.write(*filter(None, [result.seen_before]))
