"""``normlab check``: test one training step; a checklist in the terminal, and pages and files on request."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final

from rich.text import Text
from tyro.conf import UseAppendAction, arg

from normlab.base.files import write_text_atomic
from normlab.base.io import to_plain
from normlab.base.units import duration, seconds_of
from normlab.checks.allowed import allowed_here
from normlab.checks.property import OF_RANKS, require_property
from normlab.cli import advice, errors, terminal
from normlab.cli.options import Switch, command_line, progress_line, title_lines
from normlab.cli.sources import ExaminedFlags
from normlab.errors import UserError
from normlab.report import contract

if TYPE_CHECKING:
    from normlab.checks.report import Report
    from normlab.setups.named import NamedSetup
    from normlab.setups.setup import Setup

STYLES: Final = {
    "undecided": "bold yellow",
    "failure": "bold red",
    "advice": "",
    "follows": "dim",
    "holds": "green",
    "untestable": "dim",
    "note": "yellow",
}
BUDGET: Final = (
    "Time to spend at most, such as 2min, or a number of seconds; what does not fit is reported as untested."
)
ALLOW: Final = (
    "A property that may fail: it is shown, but does not count. May be given several times, or as "
    "allow = […] under [tool.normlab.check] in the current folder's pyproject.toml."
)

TRACE: Final = "Test this property alone, and print in order what led to the verdict."


@dataclass(frozen=True, kw_only=True)
class CheckCommand(ExaminedFlags):
    """Test one training step against properties that either hold exactly or fail.

    A script runs unchanged up to its first steps; its weights and files stay as they are. The exit code is 0
    if what could be judged holds, 3 if a property fails, and 4 if too little could be judged.
    """

    WHAT: ClassVar[str] = """check tests one training step; type one of:

  normlab check train.py -- --lr 3e-4   your training script as it is, with its own arguments
  normlab check -m package.train        the same, as a module
  normlab check train.py --ranks 2      its first step on two processes beside the same step in one
  normlab check train.py:setup          your function that returns normlab.Setup(model, batches, …)
  normlab check hf:FOLDER               the model of FOLDER/config.json, newly drawn, with a fitting batch
  normlab check hf:ORG/NAME             the same of a model on the Hub, by its configuration alone
  normlab check --recipe pre+smallinit  a recipe of normlab's
  normlab check RUN                     a run of normlab's, at its checkpoints"""

    budget: Annotated[str, arg(help=BUDGET)] = "1min"
    declared: str = ""
    """What you meant: a TOML file (causal, pad_id, …, starts by kind or path), or a recipe for the starts."""
    allow: Annotated[UseAppendAction[tuple[str, ...]], arg(metavar="PROPERTY", help=ALLOW)] = ()
    baseline: Path | None = None
    """JSON of an earlier check, to compare the parameters with."""
    trust_remote_code: Switch = False
    """For hf: also run code that the configuration names."""
    shrink: Switch = False
    """For hf: check a smaller such model; the default above 200 million weights."""
    no_shrink: Switch = False
    """For hf: check the model in its own size."""
    tokens: int = 512
    """Padded positions in the batch of a recipe or a run."""
    ranks: int | None = None
    """Compare a script's step on this many processes with that of one process."""
    out: Path | None = None
    """Write a page to this file, such as check.html."""
    junit: Path | None = None
    """Write the answers to this file as JUnit's XML, for test reports."""
    sarif: Path | None = None
    """Write the failures to this file as SARIF, for code scanning."""
    trace: Annotated[str, arg(metavar="PROPERTY", help=TRACE)] = ""

    @property
    def budget_s(self) -> float:
        """The seconds of ``--budget``. Raises UserError for anything but a time or a number."""
        with suppress(ValueError):
            return float(self.budget)
        return seconds_of(self.budget, "--budget") or 0.0

    def run(self) -> None:
        """Raises SystemExit with the exit code of the verdicts, unless that is 0."""
        command = command_line()
        self._require_flags()
        _ = self.budget_s  # reject what is no time before anything runs
        if self.trace:
            self._trace(command)
            return
        allowed = (*self.allow, *allowed_here(Path.cwd()))
        if self.ranks is not None:
            self._write([self._compared(self.ranks, command, allowed)])
            return
        reports = list[dict[str, Any]]()
        for source, is_one_of_several in self.sources():
            with progress_line() as progress:
                report, setup = self._tested(source, progress, allowed)
            values = self._plain(source, report, setup) | {"command": command}
            reports.append(values)
            if not self.as_json:
                _print(source.title, source.facts, report)
            self._write_page(values, f"-{source.name}" if is_one_of_several else "")
        self._write(reports)

    def _trace(self, command: str) -> None:
        """Print what led to the verdict on one property. Raises SystemExit as ``run`` does."""
        from normlab.checks.tracing import trace_property
        from normlab.cli.tracing import lines

        documents, verdicts = list[dict[str, Any]](), list[str]()
        for source, _ in self.sources():
            traced = trace_property(self.trace, self._declared_setup(source), budget_s=self.budget_s)
            named = {"title": source.title, "command": command, **traced.to_plain()}
            documents.append(contract.trace_document(named))
            verdicts.append(traced.verdict)
            if not self.as_json:
                terminal.write(source.title, *lines(traced))
        if self.as_json:
            self.print_json(documents)
        code = contract.exit_code(verdicts)
        if code:
            raise SystemExit(code)

    def _write_page(self, values: dict[str, Any], suffix: str = "") -> None:
        """Write the page of a report, if one is asked for."""
        if self.out is not None:
            from normlab.report.check import check_page

            page = self.out.with_name(f"{self.out.stem}{suffix}{self.out.suffix or '.html'}")
            self.print_page(check_page(values).write(page))

    def _write(self, reports: list[dict[str, Any]]) -> None:
        """Write reports as programs read them. Raises SystemExit with their exit code, unless that is 0."""
        if self.junit or self.sarif:
            from normlab.report.ci_formats import junit, sarif

            for path, write in ((self.junit, junit), (self.sarif, sarif)):
                if path is not None:
                    write_text_atomic(path, write(reports))
        if self.as_json:
            self.print_json([contract.document(values) for values in reports])
        code = contract.exit_code(values["verdict"] for values in reports)
        if code:
            raise SystemExit(code)

    # ---------------------------------------------------------------------------------------------- sources
    def _require_flags(self) -> None:
        """Raise UserError if nothing is named, or if flags are typed that would be ignored."""
        self.require_one()
        for name in self.allow:
            require_property(name, "--allow")
        if self.trace:
            self._require_flags_of_trace()
        if self.ranks is not None:
            self._require_flags_of_ranks()
            return
        of_run = ["--checkpoints"] * bool(self.checkpoints) + ["--step"] * (self.step is not None)
        if self.kind != "run" and of_run:
            raise UserError(f"{' and '.join(of_run)} needs a run, as in normlab check RUN {of_run[0]} …")
        of_hf = {
            "--trust-remote-code": self.trust_remote_code,
            "--shrink": self.shrink,
            "--no-shrink": self.no_shrink,
        }
        ignored = [flag for flag, typed in of_hf.items() if typed]
        if self.kind != "hf" and ignored:
            raise UserError(f"{ignored[0]} needs hf:FOLDER or hf:ORG/NAME")
        if self.shrink and self.no_shrink:
            raise UserError("--shrink and --no-shrink exclude each other; type one of them")

    def _require_flags_of_trace(self) -> None:
        """Raise UserError for all but a property of one process, and for flags that a trace would ignore."""
        require_property(self.trace, "--trace")
        if self.trace in OF_RANKS:
            raise UserError(f"--trace takes a property of one process, and {self.trace} is one of --ranks")
        ignored = {
            "--allow": bool(self.allow),
            "--baseline": self.baseline is not None,
            "--ranks": self.ranks is not None,
            "--out": self.out is not None,
            "--junit": self.junit is not None,
            "--sarif": self.sarif is not None,
        }
        typed = [flag for flag, is_typed in ignored.items() if is_typed]
        if typed:
            raise UserError(f"--trace would ignore {' and '.join(typed)}; leave that out, or --trace")

    def _require_flags_of_ranks(self) -> None:
        """Raise UserError for anything but a script, or for flags that ranks would ignore."""
        if self.kind != "script":
            raise UserError(
                "--ranks needs a script, which each rank runs, and not a setup, a model or a run: type it "
                "as in normlab check train.py --ranks 2"
            )
        ignored = {
            "--declared": bool(self.declared),
            "--baseline": self.baseline is not None,
            "--optimizer": self.optimizer != 1,
            "--checkpoints": bool(self.checkpoints),
            "--step": self.step is not None,
            "--trust-remote-code": self.trust_remote_code,
            "--shrink": self.shrink,
            "--no-shrink": self.no_shrink,
        }
        typed = [flag for flag, is_typed in ignored.items() if is_typed]
        if typed:
            raise UserError(f"--ranks would ignore {' and '.join(typed)}; leave that out, or --ranks")

    def sources(self) -> Iterator[tuple[NamedSetup, bool]]:
        """Yield what is to be tested, and whether it is one of several."""
        if self.kind != "hf":
            yield from super().sources()
            return
        from normlab.setups.huggingface import setup_from_configuration

        shrink = None  # only large models are shrunk
        if self.shrink or self.no_shrink:
            shrink = self.shrink
        named = setup_from_configuration(
            self.source.removeprefix("hf:"),
            seed=self.seed,
            trust_remote_code=self.trust_remote_code,
            shrink=shrink,
        )
        if "shrunk" in named.facts and not self.shrink:
            errors.write("checking a smaller model of the same architecture; --no-shrink checks its own size")
        yield named, False

    # ------------------------------------------------------------------------------------------------ answers
    def _tested(self, source: NamedSetup, progress: Any, allowed: tuple[str, ...]) -> tuple[Report, Setup]:
        from normlab.checks.baseline import changed_parameters, read_baseline
        from normlab.checks.check import check

        setup = self._declared_setup(source)
        # a baseline that cannot be read is refused before anything is tested
        baseline = read_baseline(self.baseline) if self.baseline is not None else None
        report = check(setup, budget_s=self.budget_s, progress=progress, allow=allowed)
        if baseline is not None:
            report = replace(report, failures=(*report.failures, *changed_parameters(setup.model, baseline)))
        return report, setup

    def _declared_setup(self, source: NamedSetup) -> Setup:
        """The setup of a source, with what was declared."""
        from normlab.checks.declared import declared

        declaration = self._declaration()
        return declared(declaration, source.setup) if declaration else source.setup

    def _declaration(self) -> str:
        """What was declared; by default the normlab.toml beside a configuration of Hugging Face's."""
        beside = Path(self.source.removeprefix("hf:")) / "normlab.toml"
        if not self.declared and self.kind == "hf" and beside.is_file():
            return str(beside)
        return self.declared

    def _compared(self, ranks: int, command: str, allowed: tuple[str, ...]) -> dict[str, Any]:
        """Compare a script's step on several ranks with that of one process; print the report, and return it
        as plain values.
        """
        from normlab.parallel.check import check_ranks

        script, is_module = self.module or self.source, bool(self.module)
        advice.require_script(script, is_module=is_module, command=self.command)
        errors.write(f"running {script} on {ranks} ranks, then in one process")
        with progress_line() as progress:
            report = check_ranks(
                script,
                self.arguments,
                ranks=ranks,
                module=is_module,
                seed=self.seed,
                budget_s=self.budget_s,
                progress=progress,
                allow=allowed,
            )
        title = f"{report.model} of {script}"
        if not self.as_json:
            _print(title, {}, report)
        values: dict[str, Any] = to_plain(report.to_dict() | {"title": title, "command": command})
        self._write_page(values)
        return values

    def _plain(self, source: NamedSetup, report: Report, setup: Setup) -> dict[str, Any]:
        from normlab.checks.baseline import parameters_of
        from normlab.setups.named import sources

        places = {finding.module for finding in (*report.failures, *report.notes)}
        values: dict[str, Any] = to_plain(report.to_dict() | {"title": source.title})
        values["facts"] = {**source.facts, **values["facts"]}
        return values | {
            "sources": sources(setup, places),
            "parameters": to_plain(parameters_of(setup.model)),
        }


def _print(title: str, facts: Mapping[str, str], report: Report) -> None:
    terminal.write(
        *(Text(line.text, STYLES[line.kind]) for line in report.lines()),
        *title_lines(title, {**facts, **report.facts}),
        f"{len(report.seconds)} properties in {duration(sum(report.seconds.values()))}",
    )
