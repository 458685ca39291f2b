"""One class per command: its fields are its flags, ``run`` calls one function of the library and prints.

Everything that takes long to import is imported inside ``run``, so that ``--help`` is instant.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Protocol, Self

from tyro.conf import FlagCreatePairsOff, OmitArgPrefixes, Positional, arg

from normlab.cli import failures
from normlab.cli.check import Check
from normlab.cli.common import RUNS, ConfigParts, Imports, Switch, base_of, resolved
from normlab.cli.diagnose import Diagnose
from normlab.cli.flags import ConfigFlags, flags_of, load
from normlab.cli.fold import Fold
from normlab.cli.papers import Papers
from normlab.cli.reproduce import FAILED, Reproduce
from normlab.cli.score import Score
from normlab.cli.translate import Translate
from normlab.cli.trial import Trial
from normlab.comparison.request import CompareRequest
from normlab.comparison.result import Comparison
from normlab.config.config import Config
from normlab.errors import UserError
from normlab.runs import Runs as Store
from normlab.runs.files import blamed, own, read_json, write_output
from normlab.runs.folder import find_run, named_output


class Command(Protocol):
    """A subcommand of ``normlab``. One whose flags' defaults depend on the command line has a class method
    ``defaults(argv)``, which returns the instance that holds them.
    """

    def run(self) -> None:
        """Run the command. Raises UserError or OSError with one sentence for the user."""
        ...


RequestFlags: Any = flags_of(CompareRequest)
RequestParts = Annotated[FlagCreatePairsOff[OmitArgPrefixes[RequestFlags]], arg(name="")]


@dataclass(frozen=True, kw_only=True)
class Compare:
    """Train recipes at several learning rates and seeds, and write one page about them.

    Without any text it runs on the built-in corpus. Runs that are done are not done again: the same command
    goes on where it stopped. The page exists once the first recipe is finished. The exit code is 1 if a run
    ended in an error; one that diverges is a result.
    """

    asked: RequestParts = RequestFlags()
    flags: ConfigParts
    config: str
    """Configuration with the defaults: its name (demo, text, multi30k ...) or a run's config.json."""
    plan: Switch = False
    """Print the runs, what so many seeds will be able to tell and how long they take, and train nothing."""
    imports: Imports = ()

    @classmethod
    def defaults(cls, argv: Sequence[str]) -> Self:
        name, base = base_of(argv)
        return cls(flags=ConfigFlags.of(base), config=name)

    def request(self, command: str = "") -> CompareRequest:
        """Return the request that the flags make."""
        base = self.flags.applied_to(load(self.config))
        return CompareRequest(**vars(self.asked), base=base, command=command)

    def run(self) -> None:
        import shlex

        from normlab.cli import show
        from normlab.comparison import compare, plan
        from normlab.comparison.request import placed

        request = placed(self.request(shlex.join(["normlab", *sys.argv[1:]])))
        if self.plan:
            show.plan(plan.plan(request), jobs=request.jobs)
            return
        from normlab.report.compare import write_compare_page

        def publish(comparison: Comparison) -> None:
            unwritten.clear()
            try:
                write_compare_page(comparison, request.out, page)
            except Exception as error:  # of any kind: the results of a training never hang on a page
                unwritten.append(error)

        unwritten: list[Exception] = []
        page = own(request.out / "comparison.html")
        tried = len(request.lrs) if len(request.lrs) > 1 else 0
        expected = len(request.recipes) * (tried + request.seeds)
        with show.progress(jobs=request.jobs, expected_runs=expected) as progress:
            comparison = compare.compare(request, progress.watch, publish)
        show.comparison(comparison)
        if not unwritten:
            print(f"page: {page}")
        else:
            results = request.out / "comparison.json"
            again = shlex.join(["normlab", "report", str(results)])
            failures.write(
                f"normlab: warning: the page was not written ({unwritten[0]}); the results are in {results}, "
                f"and the page is tried again by: {again}"
            )
        if comparison.failed:
            raise SystemExit(FAILED)


@dataclass(frozen=True)
class Train:
    """Train one recipe, and score its best checkpoint on the test text.

    A run that is done is not done again, and an interrupted one goes on from its last checkpoint.
    """

    recipe: str
    """A placement and what goes with it, such as pre+scalenorm; `normlab recipes` lists the parts."""
    lr: float
    """Peak learning rate."""
    seed: int
    """Seed of the initialisation, the order of the data and dropout."""
    flags: ConfigParts
    out: Path
    """Folder of the run folders."""
    config: str
    """Configuration with the defaults: its name (demo, text, multi30k ...) or a run's config.json."""
    init_from: str = ""
    """Begin with the weights of this run, by its folder or the beginning of its id, where they fit."""
    force: Switch = False
    """Also train a combination that its source does not define; the run is marked."""
    imports: Imports = ()

    @classmethod
    def defaults(cls, argv: Sequence[str]) -> Self:
        name, base = base_of(argv)
        return cls(base.recipe, base.optim.lr, base.seeds.init, ConfigFlags.of(base), RUNS, name)

    def resolved(self) -> Config:
        """The configuration to train. A run's own file is kept as it is, but for what was typed."""
        config = resolved(
            self.config, self.flags, recipe=self.recipe, lr=self.lr, seed=self.seed, force=self.force
        )
        if self.init_from:
            start = replace(config.train, init_from=self.init_from, init_digest="")
            config = replace(config, train=start)
        return config

    def run(self) -> None:
        from normlab.cli import show
        from normlab.tasks.registry import TASKS
        from normlab.training.ranks import leads
        from normlab.training.train import train

        config = self.resolved()
        if not leads():
            train(config, self.out)
            return
        with show.progress() as progress:
            metrics = TASKS[config.task].metrics
            folder = train(config, self.out, progress.watch_one(config, metrics, self.out))
        show.run(folder)


@dataclass(frozen=True)
class Runs:
    """List the runs of a folder with their recipes, progress and scores."""

    runs: Path = RUNS
    """Folder of the run folders."""

    def run(self) -> None:
        from normlab.cli import show

        show.runs(Store(self.runs))


@dataclass(frozen=True)
class Report:
    """Write the page of a comparison again, of a single run, or of the probes of another trainer."""

    of: Annotated[Positional[str], arg(metavar="RUN")] = ""
    """A run's folder, the beginning of its id, a comparison.json, or a probes.jsonl that a callback wrote;
    nothing: the comparison in --runs."""
    page: Path | None = None
    """File for the page; by default beside the data that it shows."""
    runs: Path = RUNS
    """Folder of the run folders."""

    def run(self) -> None:
        print(f"page: {self.write()}")

    def write(self) -> Path:
        """Write the page and return its path."""
        if self.of.endswith(".jsonl"):
            from normlab.report.flight import write_probes_page

            probes = Path(self.of)
            return write_probes_page(probes, self._page(probes, probes.with_suffix(".html")))
        if self.of and not self.of.endswith(".json"):
            from normlab.report.run import run_page

            folder = find_run(self.of, self.runs)
            page = self._page(folder.path, folder.path / "run.html")
            write_output(page, run_page(folder.path))
            return page
        from normlab.config.io import from_plain
        from normlab.report.compare import write_compare_page

        stored = Path(self.of or self.runs / "comparison.json")
        if not stored.is_file():
            raise FileNotFoundError(
                f"there is no comparison in {stored}; make one: normlab compare --out {self.runs}"
            )
        page = self._page(stored, stored.with_suffix(".html"))
        content = read_json(stored)
        with blamed(stored):
            comparison = from_plain(Comparison, content)
        return write_compare_page(comparison, stored.parent, page)

    def _page(self, data: Path, default: Path) -> Path:
        """Return the path of the page of some data. Raises UserError if no page may be written there."""
        if self.page is None:
            return own(default)
        if str(self.page) == "-":
            raise UserError("--page is '-'; type --page /dev/stdout for standard output, or name a file")
        return named_output(self.page, [data])


@dataclass(frozen=True)
class Recipes:
    """List the parts of recipes with their equations and sources, or explain whole recipes."""

    names: Annotated[Positional[tuple[str, ...]], arg(metavar="RECIPE")] = ()
    """Recipes to explain: their parts, initialisation and number of parameters."""
    axis: str = ""
    """List the parts of one axis alone, such as placement or norm."""
    config: str = "demo"
    """Configuration for which recipes are explained: its name or a run's config.json."""
    force: Switch = False
    """Also explain combinations that their source does not define, with the reason."""
    imports: Imports = ()

    def run(self) -> None:
        from normlab.cli import show
        from normlab.training.recipes.grammar import resolve

        if not self.names:
            show.recipes(self.axis)
        base = load(self.config)
        if not base.optim.decay_step:  # schedules that decay at a step are explained with one
            base = replace(base, optim=replace(base.optim, decay_step=base.train.steps // 2))
        for config in [resolve(name, base, force=self.force) for name in self.names]:
            show.recipe(config)


COMMANDS: dict[str, type[Command]] = {
    kind.__name__.lower(): kind
    for kind in (
        Compare,
        Train,
        Translate,
        Score,
        Runs,
        Report,
        Fold,
        Recipes,
        Check,
        Trial,
        Diagnose,
        Papers,
        Reproduce,
    )
}
