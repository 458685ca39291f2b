"""``normlab diagnose``: examine a recipe, a run or any model; findings in the terminal, and a page."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from tyro.conf import Positional, arg

from normlab.cli import failures
from normlab.cli.common import Switch
from normlab.cli.examined import Examined, flags_for_arguments
from normlab.errors import UserError
from normlab.spec.fields import flag_name
from normlab.spec.units import count
from normlab.store.folder import find_run

if TYPE_CHECKING:
    from normlab.diagnosis import Diagnosis
    from normlab.examine.subjects import Case

GATE_CLOSED = 3
"""Exit code where ``--fail-on problem`` was typed and there is a problem."""
STYLES = {"problem": "bold red", "warning": "yellow", "note": "dim"}


@dataclass(frozen=True, kw_only=True)
class Diagnose(Examined):
    """Measure a model before it trains, compare it with theory, and write a page with the findings.

    Examine a recipe at its initialisation, on the built-in corpus or your text, a run through its
    checkpoints, or the setup of a file of yours: normlab diagnose train.py:setup. With --fail-on problem the
    exit code is 3 for a problem.
    """

    source: Annotated[Positional[str], arg(metavar="SOURCE")] = ""
    """train.py:setup, a run's folder, or the beginning of its id; leave it out to examine a recipe."""
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
    page: ClassVar[str] = "diagnosis"

    def run(self) -> None:
        """Raises SystemExit with the code ``GATE_CLOSED`` where ``fail_on`` says so."""
        self._check()
        if self.flight:
            self._say_flight()
            return
        from normlab.report.diagnosis import write_diagnosis
        from normlab.spec.serialise import to_plain

        problems, everything = 0, list[dict[str, Any]]()
        with ExitStack() as stack:
            for case, folder, name in self._cases(stack):
                with flags_for_arguments():
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
        self._require_whole()

    def _say_flight(self) -> None:
        """Print the flight recorder's report on a run that is over or interrupted, and write its page."""
        from normlab.cli import terminal
        from normlab.report.run import run_page
        from normlab.spec.serialise import to_plain
        from normlab.store.folder import write_text_atomic
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
    def _run(self) -> str:
        """The run that is named, if one is."""
        return "" if self._of_file else self.source

    def _cases(self, stack: ExitStack) -> list[tuple[Case, Path, str]]:
        """Return each case to examine, with the folder and the name of its page."""
        from normlab.examine import subjects as diagnose
        from normlab.examine.setups import checkpoints
        from normlab.recipes.grammar import require_known

        if self._of_file:
            return [(self._own(stack), self.out or self.runs, self._named(self.source))]
        if self._run:
            folder = find_run(self._run, self.runs)
            require_known(folder.config())
            wanted: Sequence[str | int] = self.checkpoints or checkpoints(folder)
            if self.step is not None:
                wanted = [*self.checkpoints, self.step]
            return [
                (
                    diagnose.of_run(folder, one, tokens=self.tokens),
                    self.out or folder.path,
                    self._page_of(one),
                )
                for one in wanted
            ]
        config = self._resolved()
        case = diagnose.of_config(config, self.runs, tokens=self.tokens)
        return [(case, self.out or self.runs, self._named(config))]

    def _page_of(self, checkpoint: str | int) -> str:
        if isinstance(checkpoint, int):
            return f"{self.page}-step-{checkpoint}"
        return self.page if checkpoint == "last" else f"{self.page}-{checkpoint}"


def _say(case: Case, diagnosis: Diagnosis, page: Path) -> None:
    """Print the cause, the other findings, and the path of the page."""
    from rich.text import Text

    from normlab.cli import terminal
    from normlab.diagnosis.rules.finding import told
    from normlab.spec.units import duration

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
