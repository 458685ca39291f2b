"""``normlab diagnose``: examine a recipe, a run or any model; findings in the terminal, and a page."""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from tyro.conf import Positional, arg

from normlab.cli import failures
from normlab.cli.common import (
    RUNS,
    ConfigParts,
    Imports,
    Switch,
    base_of,
    config_name,
    refuse_moved,
    resolved,
)
from normlab.cli.flags import ConfigFlags, load
from normlab.config.config import Config, run_id
from normlab.config.fields import flag_name
from normlab.config.units import count
from normlab.errors import UserError
from normlab.runs.folder import find_run

if TYPE_CHECKING:
    from normlab.diagnosis import Diagnosis
    from normlab.training.subjects import Case

GATE_CLOSED = 3
"""Exit code where ``--fail-on problem`` was typed and there is a problem."""
PAGE = "diagnosis"
"""First part of the names of a page and of the JSON file beside it."""
FLAGS = {"blocks=": "--blocks encoder.layer", "branches=": "--branches attn mlp"}
"""Arguments in Python, and the flags that replace them on the command line."""
STYLES = {"problem": "bold red", "warning": "yellow", "note": "dim"}


@dataclass(frozen=True, kw_only=True)
class Diagnose:
    """Measure a model before it trains, compare it with theory, and write a page with the findings.

    Examine a recipe at its initialisation, on the built-in corpus or your text, a run through its
    checkpoints, or the setup of a file of yours: normlab diagnose train.py:setup. With --fail-on problem the
    exit code is 3 for a problem.
    """

    source: Annotated[Positional[str], arg(metavar="SOURCE")] = ""
    """train.py:setup, a run's folder, or the beginning of its id; leave it out to examine a recipe."""
    blocks: tuple[str, ...] = ()
    """The container of your model's repeated blocks, or globs for them, if they are not found."""
    branches: tuple[str, ...] = ()
    """Modules inside a block whose outputs are added to the stream, if the sums are not seen."""
    recipe: str
    """A placement and what goes with it, such as pre+scalenorm; `normlab recipes` lists the parts."""
    lr: float | None = None
    """Learning rate of the training to come; by default that of the configuration."""
    seed: int
    """Seed of the initialisation and the data."""
    flags: ConfigParts
    config: str
    """Where defaults come from: a configuration's name (demo, text, multi30k ...) or a run's config.json."""
    tokens: int = 2048
    """Padded source + target positions of the batch that is examined."""
    out: Path | None = None
    """Folder of the page; by default --runs, or a run's own folder."""
    runs: Path = RUNS
    """Folder of the run folders, where text is also prepared."""
    as_json: Annotated[Switch, arg(name="json")] = False
    """Print everything as JSON instead of sentences."""
    force: Switch = False
    """Also examine a combination that its source does not define."""
    imports: Imports = ()
    """A module of yours that registers placements, norms, studies and so on; may be given several times."""
    preset: Literal["cheap", "standard", "full"] = "standard"
    """cheap: a few passes; standard: everything but second derivatives; full: everything."""
    checkpoints: tuple[Literal["last", "best", "average"], ...] = ()
    """Checkpoints of a run; by default the last, and the best if that is another."""
    step: int | None = None
    """For a run with --keep-checkpoints: examine the weights after this step."""
    flight: Switch = False
    """For a run: repeat its steps with every module watched, and name the first one that went wrong."""
    fail_on: Literal["", "problem"] = ""
    """Exit with code 3 if there is a problem."""

    @classmethod
    def defaults(cls, argv: Sequence[str]) -> Self:
        refuse_moved(argv)
        name, base = base_of(argv)
        return cls(recipe=base.recipe, seed=base.seeds.init, flags=ConfigFlags.of(base), config=name)

    def run(self) -> None:
        """Raises SystemExit with the code ``GATE_CLOSED`` where ``fail_on`` says so."""
        self._check()
        if self.flight:
            self._say_flight()
            return
        from normlab.config.io import to_plain
        from normlab.report.diagnosis import write_diagnosis

        problems, everything = 0, list[dict[str, Any]]()
        with ExitStack() as stack:
            for case, folder, name in self._cases(stack):
                with _flags_for_arguments():
                    diagnosis = case.diagnosed(self.preset, blocks=self.blocks, branches=self.branches)
                plain = to_plain(diagnosis.to_plain() | {"title": case.title, "case": dict(case.facts)})
                command = shlex.join(["normlab", *sys.argv[1:]])
                page = write_diagnosis(plain | {"command": command}, folder, name)
                everything.append(plain)
                if not self.as_json:
                    _say(case, diagnosis, page)
                problems += len(diagnosis.at_least("problem")) if self.fail_on else 0
        if self.as_json:
            shown = everything[0] if len(everything) == 1 else everything
            print(json.dumps(shown, ensure_ascii=False, allow_nan=False))
        if problems:
            failures.write(f"normlab: {count(problems, 'problem')}")
            raise SystemExit(GATE_CLOSED)

    def _check(self) -> None:
        """Raise UserError if the flags name several subjects, or half of one."""
        typed = {"fail_on": self.fail_on, "checkpoints": self.checkpoints, "step": self.step is not None}
        ignored = [flag_name(name) for name, value in typed.items() if value]
        if self.flight and ignored:
            raise UserError(
                f"--flight makes no diagnosis, so that {' and '.join(ignored)} says nothing; leave it out"
            )
        if self._run and self.lr is not None:
            raise UserError(
                "a run has its own learning rate; leave --lr out, or name a recipe instead of the run"
            )
        if self.flight and not self._run:
            raise UserError(
                "--flight does a run's steps again; name the run, as in normlab diagnose RUN --flight"
            )
        if self.step is not None and not self._run:
            raise UserError(
                f"--step is {self.step}, which is one of a run's; name the run, as in normlab diagnose RUN "
                f"--step {self.step}"
            )
        if self.source and (unused := self._of_a_recipe()):
            raise UserError(
                f"{self.source} has a configuration or a setup of its own, so that nothing reads "
                f"{' and '.join(unused)}; leave that out, or name a recipe instead"
            )

    def _of_a_recipe(self) -> list[str]:
        """Return the flags that were typed and that only a recipe reads."""
        base = load(self.config)
        seeded = not self._of_file and self.seed != base.seeds.init
        typed = {"--recipe": self.recipe != base.recipe, "--seed": seeded}
        found = [name for name, there in (typed | {"--force": self.force}).items() if there]
        found += self.flags.differing_from(base)
        return found or ["--config"] * (self.config != config_name(()))

    def _resolved(self) -> Config:
        """The configuration of the recipe."""
        lr = load(self.config).optim.lr if self.lr is None else self.lr
        return resolved(self.config, self.flags, recipe=self.recipe, lr=lr, seed=self.seed, force=self.force)

    def _say_flight(self) -> None:
        """Print the flight recorder's report on a run that is over or interrupted, and write its page."""
        from normlab.cli import terminal
        from normlab.config.io import to_plain
        from normlab.report.run import run_page
        from normlab.runs.folder import write_text_atomic
        from normlab.training.replay import examine

        folder = find_run(self._run, self.runs)
        made = folder.status().step
        failures.write(
            f"repeating the {made:,} steps of {folder.path.name}, with every module watched in the last ones"
        )
        report = to_plain(examine(folder.path))
        page = (self.out or folder.path) / "run.html"
        write_text_atomic(page, run_page(folder.path))
        if self.as_json:
            print(json.dumps(report, ensure_ascii=False, allow_nan=False))
            return
        evidence = (f"  {line}" for line in report["verdict"]["evidence"])
        terminal.write(report["verdict"]["sentence"], *evidence)
        print(f"page: {page}")

    @property
    def _of_file(self) -> bool:
        """Whether the setup of a file of the user's is examined."""
        return ":" in self.source or self.source.endswith(".py")

    @property
    def _run(self) -> str:
        """The run that is named, if one is."""
        return "" if self._of_file else self.source

    def _cases(self, stack: ExitStack) -> list[tuple[Case, Path, str]]:
        """Return each case to examine, with the folder and the name of its page."""
        from normlab.training import setups, subjects

        if self._of_file:  # it is at home on ``sys.path`` until the stack is closed
            failures.write(f"running {self.source}")
            source = stack.enter_context(setups.setup_from_file(self.source, seed=self.seed))
            return [(subjects.of_setup(source, self.lr), self.out or self.runs, self._named(self.source))]
        if self._run:
            folder = find_run(self._run, self.runs)
            wanted = setups.checkpoints(folder, self.checkpoints, self.step)
            cases = ((one, subjects.of_run(folder, one, tokens=self.tokens)) for one in wanted)
            return [(case, self.out or folder.path, self._page_of(one)) for one, case in cases]
        config = self._resolved()
        case = subjects.of_config(config, self.runs, tokens=self.tokens)
        return [(case, self.out or self.runs, self._named(config))]

    def _named(self, subject: str | Config) -> str:
        """Return the name of the page of a model or a configuration, which is never that of another one."""
        if isinstance(subject, Config):
            subject = f"{subject.recipe}-{run_id(subject)[:8]}"
        return f"{PAGE}-{re.sub(r'[^A-Za-z0-9_.]+', '-', subject)[-100:]}"

    def _page_of(self, checkpoint: str | int) -> str:
        if isinstance(checkpoint, int):
            return f"{PAGE}-step-{checkpoint}"
        return PAGE if checkpoint == "last" else f"{PAGE}-{checkpoint}"


@contextmanager
def _flags_for_arguments() -> Iterator[None]:
    """Add the flags to type to a UserError that names arguments in Python."""
    try:
        yield
    except UserError as error:
        typed = ", ".join(flag for python, flag in FLAGS.items() if python in str(error))
        if not typed:
            raise
        raise UserError(f"{error}. On the command line: {typed}") from error


def _say(case: Case, diagnosis: Diagnosis, page: Path) -> None:
    """Print the cause, the other findings, and the path of the page."""
    from rich.text import Text

    from normlab.cli import terminal
    from normlab.config.units import duration
    from normlab.diagnosis.rules.finding import told

    console, cause = terminal.console(), diagnosis.cause
    facts = {**diagnosis.facts, **case.facts}
    about = [f"{name} {value}" for name, value in facts.items() if name not in ("recipe", "run")]
    console.print(Text(diagnosis.verdict, STYLES[cause.severity] if cause else "bold green"))
    console.print(Text(case.title, "bold"), Text("; ".join(about), "dim"), sep="\n")
    for finding in (f for f in diagnosis.findings if f is not cause):
        line = Text.assemble((f"{finding.severity:<8}", STYLES[finding.severity]), told(finding))
        support = "; ".join(filter(None, (finding.evidence, finding.reference)))
        console.print(line)
        if support:
            console.print(Text(f"{'':8}{support}", "dim"))
    memory = diagnosis.peak_memory_bytes / 2**30
    cost = f"{duration(sum(diagnosis.seconds.values()))}, {memory:.2f} GiB at most; "
    print(f"{cost if diagnosis.seconds else ''}page: {page}")
