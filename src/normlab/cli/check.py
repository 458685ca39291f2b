"""``normlab check``: test one training step; a checklist in the terminal, and pages and files on request."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final

from rich.text import Text

from normlab.base.files import write_text_atomic
from normlab.base.io import to_plain
from normlab.base.units import duration
from normlab.cli import terminal
from normlab.cli.options import FAILS, Switch, command_line, progress_line, title_lines
from normlab.cli.sources import ExaminedFlags
from normlab.errors import UserError

if TYPE_CHECKING:
    from normlab.checks.report import Report
    from normlab.setups.named import NamedSetup
    from normlab.setups.setup import Setup

STYLES: Final = {
    "failure": "bold red",
    "advice": "",
    "follows": "dim",
    "holds": "green",
    "untestable": "dim",
    "note": "yellow",
}


@dataclass(frozen=True, kw_only=True)
class CheckCommand(ExaminedFlags):
    """Test one training step against properties that either hold exactly or fail.

    SOURCE is train.py, your training script, with its own arguments after --; it runs unchanged up to its
    first steps, and changes no weight. Or it is train.py:setup, a function of yours that returns
    normlab.Setup(model, batches, …); hf:FOLDER, a folder with Hugging Face's config.json; or a run's folder,
    or the beginning of its id. Without SOURCE, --recipe names a recipe. The exit code is 3 if a property
    fails.
    """

    WHAT: ClassVar[str] = """check tests one training step; type one of:

  normlab check train.py -- --lr 3e-4   your training script as it is, with its own arguments
  normlab check -m package.train        the same, as a module
  normlab check train.py:setup          your function that returns normlab.Setup(model, batches, loss=…, …)
  normlab check hf:FOLDER               the model of FOLDER/config.json, newly drawn, with a batch that fits
  normlab check --recipe pre+smallinit  a recipe of normlab's
  normlab check RUN                     a run of normlab's, at its checkpoints"""

    budget_s: float = 60.0
    """Seconds to spend at most; properties that do not fit are reported as untested."""
    declared: str = ""
    """What you meant: a TOML file (causal, pad_id, …, starts by role or path), or a recipe for the starts."""
    baseline: Path | None = None
    """JSON of an earlier check; the parameters are compared with those in it."""
    trust_remote_code: Switch = False
    """For hf: also run code that the folder's configuration names."""
    tokens: int = 512
    """Padded positions in the batch of a recipe or a run."""
    out: Path | None = None
    """File of a page to write, such as check.html."""
    junit: Path | None = None
    """File to write the answers to as JUnit's XML, for a test report."""
    sarif: Path | None = None
    """File to write the failures to as SARIF, for code scanning."""

    def run(self) -> None:
        """Raises SystemExit with the code ``FAILS`` if a property fails."""
        command = command_line()
        self._require_flags()
        shown, failed = list[dict[str, Any]](), False
        for source, several in self.sources():
            with progress_line() as progress:
                report, setup = self._tested(source, progress)
            plain = self._plain(source, report, setup) | {"command": command}
            shown.append(plain)
            failed = failed or not report.ok
            if not self.as_json:
                _print(source, report)
            if self.out is not None:
                from normlab.report.check import check_page

                suffix = f"-{source.name}" if several else ""
                page = self.out.with_name(f"{self.out.stem}{suffix}{self.out.suffix or '.html'}")
                self.print_page(check_page(plain).write(page))
        if self.junit or self.sarif:
            from normlab.report import check

            for path, write in ((self.junit, check.junit), (self.sarif, check.sarif)):
                if path is not None:
                    write_text_atomic(path, write(shown))
        if self.as_json:
            self.print_json(shown)
        if failed:
            raise SystemExit(FAILS)

    # ---------------------------------------------------------------------------------------------- sources
    def _require_flags(self) -> None:
        """Raise UserError if nothing is named, or if flags are typed that would be ignored."""
        self.require_one()
        of_run = ["--checkpoints"] * bool(self.checkpoints) + ["--step"] * (self.step is not None)
        if self.kind != "run" and of_run:
            raise UserError(f"{' and '.join(of_run)} needs a run, as in normlab check RUN {of_run[0]} …")
        if self.kind != "hf" and self.trust_remote_code:
            raise UserError("--trust-remote-code needs hf:FOLDER")

    def sources(self) -> Iterator[tuple[NamedSetup, bool]]:
        """Yield what is to be tested, and whether it is one of several."""
        if self.kind != "hf":
            yield from super().sources()
            return
        from normlab.setups.huggingface import setup_from_folder

        folder = Path(self.source.removeprefix("hf:"))
        yield setup_from_folder(folder, seed=self.seed, trust_remote_code=self.trust_remote_code), False

    # ------------------------------------------------------------------------------------------------ answers
    def _tested(self, source: NamedSetup, progress: Any) -> tuple[Report, Setup]:
        from normlab.checks.baseline import changed_parameters, read_baseline
        from normlab.checks.check import check
        from normlab.checks.declared import declared

        setup, given = source.setup, self.declared
        beside = Path(self.source.removeprefix("hf:")) / "normlab.toml"
        if not given and self.kind == "hf" and beside.is_file():
            given = str(beside)
        if given:
            setup = declared(given, setup)
        before = read_baseline(self.baseline) if self.baseline is not None else None
        report = check(setup, budget_s=self.budget_s, progress=progress)
        if before is not None:
            report = replace(report, failures=(*report.failures, *changed_parameters(setup.model, before)))
        return report, setup

    def _plain(self, source: NamedSetup, report: Report, setup: Setup) -> dict[str, Any]:
        from normlab.checks.baseline import parameters_of
        from normlab.setups.named import sources

        places = {found.module for found in (*report.failures, *report.notes)}
        plain: dict[str, Any] = to_plain(report.to_dict() | {"title": source.title})
        plain["facts"] = {**source.facts, **plain["facts"]}
        return plain | {"sources": sources(setup, places), "parameters": to_plain(parameters_of(setup.model))}


def _print(source: NamedSetup, report: Report) -> None:
    terminal.write(
        *(Text(line.text, STYLES[line.kind]) for line in report.lines()),
        *title_lines(source.title, {**source.facts, **report.facts}),
        f"{len(report.seconds)} properties in {duration(sum(report.seconds.values()))}",
    )
