"""``normlab diagnose``: examine a recipe, a run or any model; findings in the terminal and on a page."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal

from rich.text import Text

from normlab.base.io import flag_name, to_plain
from normlab.base.units import count, duration
from normlab.cli import errors, terminal
from normlab.cli.advice import find_named_run
from normlab.cli.options import FAILS, Switch, command_line, title_lines
from normlab.cli.sources import ExaminedFlags
from normlab.errors import UserError
from normlab.lab.runs.folder import find_run, write_text_atomic

if TYPE_CHECKING:
    from normlab.diagnosis import Diagnosis
    from normlab.setups.named import NamedSetup

PAGE: Final = "diagnosis"
"""What the names of a page and of the JSON file beside it begin with."""
FLAGS: Final = {"blocks=": "--blocks encoder.layer", "branches=": "--branches attn mlp"}
"""Arguments in Python, and the flags that replace them on the command line."""
STYLES: Final = {"problem": "bold red", "warning": "yellow", "note": "dim"}


@dataclass(frozen=True, kw_only=True)
class DiagnoseCommand(ExaminedFlags):
    """Measure a model before it trains, compare it with theory, and write a page with the findings.

    A script runs unchanged up to its first steps; its weights and files stay as they are. A recipe is
    examined at its initialisation, on the built-in corpus or your text.
    """

    WHAT: ClassVar[str] = """diagnose examines a model in depth; type one of:

  normlab diagnose train.py -- ARGS  your training script as it is, with its own arguments
  normlab diagnose -m package.train  the same, as a module
  normlab diagnose train.py:setup    your function that returns normlab.Setup(model, batches, loss=…, …)
  normlab diagnose --recipe post     a recipe of normlab's, before it trains
  normlab diagnose RUN               a run of normlab's, at its checkpoints
  normlab diagnose RUN --flight      the last steps of a run again, with every module watched"""
    LR_OF: ClassVar[Sequence[str]] = ("recipe", "file")

    blocks: tuple[str, ...] = ()
    """The container of your model's repeated blocks, or globs for them, if normlab does not find them."""
    branches: tuple[str, ...] = ()
    """Modules inside a block whose outputs are added to the stream, if normlab does not see the sums."""
    tokens: int = 2048
    """Padded positions in the batch of a recipe or a run."""
    out: Path | None = None
    """Folder of the page; by default runs, or a run's own folder."""
    preset: Literal["cheap", "standard", "full"] = "standard"
    """cheap: a few passes; standard: everything but second derivatives; full: everything."""
    flight: Switch = False
    """For a run: repeat its steps with every module watched, and name the first one that went wrong."""
    fail_on: Literal["", "problem"] = ""
    """Exit with code 3 if there is a problem."""

    def run(self) -> None:
        """Raises SystemExit with the code ``FAILS`` if ``fail_on`` asks for it and there is a problem."""
        command = command_line()
        self._require_flags()
        if self.flight:
            self._print_flight()
            return
        from normlab.report.diagnosis import write_diagnosis

        problems, diagnoses = 0, list[dict[str, Any]]()
        for source, _ in self.sources():
            diagnosis = self._diagnosed(source)
            problems += len(diagnosis.at_least("problem"))
            values = to_plain(diagnosis.to_plain() | {"title": source.title, "case": dict(source.facts)})
            diagnoses.append(values)
            page = write_diagnosis(values | {"command": command}, *self._place(source))
            if not self.as_json:
                _print(source, diagnosis, page)
        if self.as_json:
            self.print_json(diagnoses)
        if self.fail_on and problems:
            errors.write(f"normlab: {count(problems, 'problem')}")
            raise SystemExit(FAILS)

    def _diagnosed(self, source: NamedSetup) -> Diagnosis:
        """Raises UserError, with flags where it names arguments in Python."""
        from normlab.diagnosis.diagnose import diagnose_named

        lr = self.lr if self.kind == "file" else None  # a recipe's is in its configuration
        try:
            return diagnose_named(source, self.preset, lr, blocks=self.blocks, branches=self.branches)
        except UserError as error:
            flags = [flag for argument, flag in FLAGS.items() if argument in str(error)]
            if flags:
                raise UserError(f"{error}. On the command line: {', '.join(flags)}") from error
            raise

    def _require_flags(self) -> None:
        """Raise UserError if the flags name several subjects, or none, or would be ignored."""
        typed = {"fail_on": self.fail_on, "checkpoints": self.checkpoints, "step": self.step is not None}
        ignored = [flag_name(name) for name, is_typed in typed.items() if is_typed]
        if self.flight and ignored:
            raise UserError(
                f"--flight makes no diagnosis, so it would ignore {' and '.join(ignored)}; leave that out"
            )
        if self.kind != "run":
            for flag, is_typed in {"--flight": self.flight, "--step": self.step is not None}.items():
                if is_typed:
                    raise UserError(f"{flag} is for a run; name the run, as in normlab diagnose RUN {flag}")
        if self.kind == "hf":
            raise UserError("hf: has no optimizer; write a function setup() with one, as in train.py:setup")
        self.require_one()

    def _print_flight(self) -> None:
        """Print the flight recorder's report on a run that is over or interrupted, and write its page."""
        from normlab.lab.training.replay import examine
        from normlab.report.run import run_page

        folder = find_named_run(self.source, self.runs, self.command)
        steps = folder.status().step
        errors.write(
            f"repeating the {steps:,} steps of {folder.path.name}, with every module watched in the last ones"
        )
        report = to_plain(examine(folder.path))
        page = (self.out or folder.path) / "run.html"
        write_text_atomic(page, run_page(folder.path))
        if self.as_json:
            self.print_json([report])
            return
        evidence = (f"  {line}" for line in report["verdict"]["evidence"])
        terminal.write(report["verdict"]["sentence"], *evidence)
        print(f"page: {page}")

    def _place(self, source: NamedSetup) -> tuple[Path, str]:
        """Return the folder and the name of a page."""
        if self.kind == "run":
            folder = self.out or find_run(self.source, self.runs).path
            return folder, PAGE if source.name == "last" else f"{PAGE}-{source.name}"
        name = re.sub(r"[^A-Za-z0-9_.]+", "-", source.name or self.source or self.module)[-100:]
        return self.out or self.runs, f"{PAGE}-{name}"


def _print(source: NamedSetup, diagnosis: Diagnosis, page: Path) -> None:
    """Print the verdict, every other finding with what it rests on, and what the diagnosis took."""
    cause, facts = diagnosis.cause, {**diagnosis.facts, **source.facts}
    about = {name: value for name, value in facts.items() if name not in ("recipe", "run")}
    terminal.write(Text(diagnosis.verdict, STYLES[cause.severity] if cause else "bold green"))
    terminal.write(*title_lines(source.title, about))
    for finding in diagnosis.findings:
        if finding is cause:
            continue
        severity = f"{finding.severity:<8}", STYLES[finding.severity]
        terminal.write(Text.assemble(severity, finding.sentence))
        support = "; ".join(filter(None, (finding.evidence, finding.reference)))
        if support:
            terminal.write(Text(f"{'':8}{support}", "dim"))
    cost = ""
    if diagnosis.seconds:
        memory = diagnosis.peak_memory_bytes / 2**30
        cost = f"{duration(sum(diagnosis.seconds.values()))}, {memory:.2f} GiB at most; "
    terminal.write(f"{cost}page: {page}")
