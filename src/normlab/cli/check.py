"""``normlab check``: test one training step; a checklist in the terminal, and pages and files on request."""

from __future__ import annotations

import json
import shlex
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Self

from tyro.conf import Positional, arg

from normlab.cli import failures
from normlab.cli.common import (
    RUNS,
    ConfigParts,
    Imports,
    Switch,
    base_of,
    config_name,
    flags,
    refuse_moved,
    resolved,
)
from normlab.cli.flags import ConfigFlags, load
from normlab.errors import UserError
from normlab.runs.folder import find_run

if TYPE_CHECKING:
    from normlab.checks.report import Report
    from normlab.config.config import Config
    from normlab.training.setups import Source

FAILS: Final = 3
"""Exit code where a property fails."""
EVERY_SECONDS: Final = 10.0
"""Without a terminal, progress is a line this often."""
STYLES: Final = {
    "failure": "bold red",
    "advice": "",
    "follows": "dim",
    "holds": "green",
    "untestable": "dim",
    "note": "yellow",
}
WHAT: Final = """normlab check tests one training step. Name what to test:

  normlab check train.py:setup          your function that returns normlab.Setup(model, batches, loss=…, …)
  normlab check hf:FOLDER               the model of FOLDER/config.json, drawn anew, and a batch that fits
  normlab check --recipe pre+smallinit  a recipe of normlab's
  normlab check RUN                     a run of normlab's, at its checkpoints"""


@dataclass(frozen=True, kw_only=True)
class Check:
    """Test one training step by properties that hold exactly, or do not.

    SOURCE is train.py:setup, a function of yours that returns normlab.Setup(model, batches, …) and runs with
    your file; hf:FOLDER, a folder with a config.json of Hugging Face; a run's folder, or the beginning of its
    id. Without it --recipe names one. The exit code is 3 where a property fails.
    """

    source: Annotated[Positional[str], arg(metavar="SOURCE")] = ""
    """train.py:setup, hf:FOLDER or a run; leave it out to check --recipe."""
    recipe: str = ""
    """A placement and what goes with it, such as pre+scalenorm; `normlab recipes` lists the parts."""
    lr: float | None = None
    """Peak learning rate of a recipe; by default that of the configuration."""
    seed: int = 1
    """Seed of the weights and of the data."""
    budget_s: float = 60.0
    """Seconds that may be spent; properties that do not fit are reported as untested."""
    declared: str = ""
    """What was meant: a TOML file (causal, pad_id, …, starts by role or path), or a recipe for the starts."""
    baseline: Path | None = None
    """JSON of an earlier check, with whose parameters these are compared."""
    checkpoints: tuple[str, ...] = ()
    """Checkpoints of a run, last, best or average; by default the last, and the best if that is another."""
    step: int | None = None
    """For a run with --keep-checkpoints: test the weights after this step."""
    trust_remote_code: Switch = False
    """For hf: also run code that the folder's configuration names."""
    flags: ConfigParts
    config: str
    """Where a recipe's defaults come from: a configuration's name (demo, text …) or a run's config.json."""
    tokens: int = 512
    """Padded positions of the batch of a recipe or a run."""
    out: Path | None = None
    """File of a page to write, such as check.html."""
    junit: Path | None = None
    """File to write the answers to as JUnit's XML, for a test report."""
    sarif: Path | None = None
    """File to write the failures to as SARIF, for code scanning."""
    as_json: Annotated[Switch, arg(name="json")] = False
    """Print everything as JSON instead of sentences."""
    runs: Path = RUNS
    """Folder of the run folders, where text is also prepared."""
    force: Switch = False
    """Also check a combination that its source does not define."""
    imports: Imports = ()

    @classmethod
    def defaults(cls, argv: Sequence[str]) -> Self:
        """Raises UserError for flags of earlier versions, with what replaces them."""
        refuse_moved(argv)
        gone = {
            **dict.fromkeys(("--blocks", "--branches"), "stacks are found from numbers"),
            "--fail-on": "the exit code is 3 where a property fails",
            "--preset": "--budget-s limits it",
        }
        for old, why in gone.items():
            if flags(argv, old):
                raise UserError(f"check has no {old}: {why}; leave it out")
        name, base = base_of(argv)
        return cls(flags=ConfigFlags.of(base), config=name)

    def run(self) -> None:
        """Raises SystemExit with the code ``FAILS`` where a property fails."""
        command = shlex.join(["normlab", *sys.argv[1:]])  # a file of the user's has arguments of its own
        self._require_one()
        shown, failed = list[dict[str, Any]](), False
        for source, several in self._sources():
            with redirect_stdout(sys.stderr), progress_line() as progress:
                report, setup = self._tested(source, progress)
            plain = self._plain(source, report, setup) | {"command": command}
            shown.append(plain)
            failed = failed or not report.ok
            if not self.as_json:
                _say(source, report)
            if self.out is not None:
                self._write_page(plain, f"-{source.name}" if several else "")
        self._write_for_programs(shown)
        if self.as_json:
            print(json.dumps(shown[0] if len(shown) == 1 else shown, ensure_ascii=False, allow_nan=False))
        if failed:
            raise SystemExit(FAILS)

    # ---------------------------------------------------------------------------------------------- sources
    def _require_one(self) -> None:
        """Raise UserError if nothing is named, or several things are, or flags that nothing reads."""
        base = load(self.config)
        of_recipe = recipe_flags(self, base)
        of_run = ["--checkpoints"] * bool(self.checkpoints) + ["--step"] * (self.step is not None)
        require_one(self.source, of_recipe, WHAT)
        kind = kind_of(self.source)
        if kind != "run" and of_run:
            raise UserError(f"{' and '.join(of_run)} goes with a run, as in normlab check RUN {of_run[0]} …")
        if kind != "hf" and self.trust_remote_code:
            raise UserError("--trust-remote-code goes with hf:FOLDER")

    def _sources(self) -> Iterator[tuple[Source, bool]]:
        """Yield what is to be tested, and whether it is one of several."""
        from normlab.training import setups

        kind = kind_of(self.source)
        if kind == "file":
            failures.write(f"running {self.source}")
            with setups.setup_from_file(self.source, seed=self.seed) as source:
                yield source, False
        elif kind == "hf":
            from normlab.training.pretrained import setup_from_folder

            folder = Path(self.source.removeprefix("hf:"))
            yield setup_from_folder(folder, seed=self.seed, trust_remote_code=self.trust_remote_code), False
        elif kind == "run":
            run = find_run(self.source, self.runs)
            wanted = setups.checkpoints(run, self.checkpoints, self.step)
            for one in wanted:
                yield setups.setup_from_run(run, one, tokens=self.tokens), len(wanted) > 1
        else:
            yield (
                setups.setup_from_config(recipe_of(self, load(self.config)), self.runs, tokens=self.tokens),
                False,
            )

    # ------------------------------------------------------------------------------------------------ answers
    def _tested(self, source: Source, progress: Any) -> tuple[Report, Any]:
        from normlab.checks.check import check
        from normlab.training import baseline
        from normlab.training.declared import declared

        setup, given = source.setup, self.declared
        beside = Path(self.source.removeprefix("hf:")) / "normlab.toml"
        if not given and kind_of(self.source) == "hf" and beside.is_file():
            given = str(beside)
        if given:
            setup = declared(given, setup)
        before = baseline.read_baseline(self.baseline) if self.baseline is not None else None
        report = check(setup, budget_s=self.budget_s, progress=progress)
        if before is not None:
            report = replace(report, failures=(*report.failures, *baseline.changed(setup.model, before)))
        return report, setup

    def _plain(self, source: Source, report: Report, setup: Any) -> dict[str, Any]:
        from normlab.config.io import to_plain
        from normlab.training.baseline import parameters_of
        from normlab.training.setups import sources

        places = {found.module for found in (*report.failures, *report.notes)}
        plain: dict[str, Any] = to_plain(report.to_dict() | {"title": source.title})
        plain["facts"] = {**source.facts, **plain["facts"]}
        return plain | {"sources": sources(setup, places), "parameters": to_plain(parameters_of(setup.model))}

    def _write_page(self, plain: Mapping[str, Any], suffix: str) -> None:
        from normlab.report.check import write_check_page

        page = self.out or Path("check.html")
        page = page.with_name(f"{page.stem}{suffix}{page.suffix or '.html'}")
        print(f"page: {write_check_page(plain, page)}", file=sys.stderr if self.as_json else sys.stdout)

    def _write_for_programs(self, reports: Sequence[Mapping[str, Any]]) -> None:
        from normlab.report.machines import junit, sarif
        from normlab.runs.folder import write_text_atomic

        for path, write in ((self.junit, junit), (self.sarif, sarif)):
            if path is not None:
                write_text_atomic(path, write(reports))


def kind_of(source: str) -> str:
    """What a source is: a recipe, if nothing is named, a file, hf or a run."""
    if not source:
        return "recipe"
    if source.startswith("hf:"):
        return "hf"
    return "file" if ":" in source or source.endswith(".py") else "run"


def require_one(source: str, of_recipe: Sequence[str], what: str) -> None:
    """Raise UserError with ``what`` to type if nothing is named, or if nothing reads a recipe's flags."""
    if not source and not of_recipe:
        raise UserError(what)
    if source and of_recipe:
        raise UserError(f"{source} has a setup of its own, so that nothing reads {' and '.join(of_recipe)}")


def recipe_flags(command: Any, base: Config) -> list[str]:
    """The flags that were typed, of those that only a recipe reads."""
    flags = ["--recipe"] * bool(command.recipe) + ["--lr"] * (command.lr is not None)
    flags += command.flags.differing_from(base)
    return flags + ["--config"] * (command.config != config_name(())) + ["--force"] * command.force


def recipe_of(command: Any, base: Config) -> Config:
    """The configuration of a command's recipe, rate, seed and flags."""
    return resolved(
        command.config,
        command.flags,
        recipe=command.recipe or base.recipe,
        lr=base.optim.lr if command.lr is None else command.lr,
        seed=command.seed,
        force=command.force,
    )


@contextmanager
def progress_line() -> Iterator[Any]:
    """Yield what shows the property that is being tested: a line that changes, or one every so often."""
    from rich.console import Console

    console, last = Console(stderr=True), time.monotonic()
    with console.status("") as status:

        def show(name: str, done: int, of: int) -> None:
            nonlocal last
            status.update(f"{done + 1} of {of}: {name}")
            if not console.is_terminal and time.monotonic() - last > EVERY_SECONDS:
                last = time.monotonic()
                failures.write(f"{done + 1} of {of}: {name}")

        yield show


def _say(source: Source, report: Report) -> None:
    """Print the failures, what holds, and what could not be tested."""
    from rich.text import Text

    from normlab.cli import terminal
    from normlab.config.units import duration

    console = terminal.console()
    for line in report.lines():
        console.print(Text(line.text, STYLES[line.kind]))
    facts = {**source.facts, **report.facts}
    about = "; ".join(f"{name} {value}" for name, value in facts.items())
    console.print(Text(source.title, "bold"), Text(about, "dim"), sep="\n")
    print(f"{len(report.seconds)} properties in {duration(sum(report.seconds.values()))}")
