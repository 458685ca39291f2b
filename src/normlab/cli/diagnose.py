"""``normlab diagnose``: examine a recipe, a run or any model; findings in the terminal, and a page."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, cast

from tyro.conf import Positional, arg

from normlab.cli import failures
from normlab.cli.common import Switch
from normlab.cli.examined import Examined, flags_for_arguments
from normlab.errors import UserError
from normlab.spec.fields import flag_name
from normlab.spec.units import count
from normlab.store.folder import find_run

if TYPE_CHECKING:
    from rich.console import Console

    from normlab.diagnosis import Diagnosis
    from normlab.diagnosis.diagnose import Options
    from normlab.diagnosis.plan import Plan
    from normlab.examine.subjects import Case
    from normlab.forecast.answer import Answer

GATE_CLOSED = {"problem": 3, "warning": 4}
"""Exit codes by the severity of the gravest finding, where it is as severe as ``--fail-on``."""
SHOWN = 3
"""Reasons of a forecast, and runs near to a model, that are printed; the page has more."""
STYLES = {"problem": "bold red", "warning": "yellow", "note": "dim"}


@dataclass(frozen=True, kw_only=True)
class Diagnose(Examined):
    """Measure a model before it trains, compare it with theory, and write a page with the findings.

    Examine a recipe at its initialisation, on the built-in corpus or your text, a run through its
    checkpoints, or any torch module of yours: --model my_package.my_module:build --batch
    my_package.my_module:batch. With --fail-on the exit code is 3 for a problem and 4 for a warning.
    """

    run_folder: Annotated[Positional[str], arg(metavar="RUN")] = ""
    """A run's folder, or the beginning of its id; leave it out to examine a recipe or --model."""
    preset: Literal["preflight", "cheap", "standard", "full"] = "standard"
    """preflight: what needs no theory; cheap: a few passes; standard: everything but second derivatives;
    full: everything.
    """
    declared: str = ""
    """The initialisation that was meant: a recipe, or a TOML file (by role or path, clipping, warm-up)."""
    baseline: Path | None = None
    """JSON of another diagnosis, such as preflight.json, with whose weights these are compared."""
    checkpoints: tuple[Literal["last", "best", "average"], ...] = ()
    """Checkpoints of a run; by default the last, and the best if that is another."""
    step: int | None = None
    """For a run with --keep-checkpoints: examine the weights after this step."""
    flight: Switch = False
    """For a run: repeat its steps with every module watched, and name the first one that went wrong."""
    fail_on: Literal["", "warning", "problem"] = ""
    """Exit with code 3 for a problem, or 4 for a warning, if there is a finding as severe as this."""
    junit: Path | None = None
    """File to write the findings to as JUnit's XML, for a test report."""
    sarif: Path | None = None
    """File to write the findings to as SARIF, for code scanning."""
    page: ClassVar[str] = "diagnosis"

    def run(self) -> None:
        """Raises SystemExit with a code of ``GATE_CLOSED`` where ``fail_on`` says so."""
        self._check()
        if self.flight:
            self._say_flight()
            return
        from normlab.examine.sources import sources
        from normlab.report.diagnosis import write_diagnosis
        from normlab.spec.serialise import to_plain

        worst, everything = list[str](), list[dict[str, Any]]()
        for case, folder, name in self._cases():
            self._require_another(folder / f"{name}.json")
            with flags_for_arguments():
                planned = replace(case, plan=cast("Options", {**case.plan, **self._plan(case)}))
                diagnosis = planned.diagnosed(self.preset, blocks=self.blocks, branches=self.branches)
            plain = to_plain(diagnosis.to_plain() | {"title": case.title, "case": dict(case.facts)})
            command = shlex.join(["normlab", *sys.argv[1:]])
            page = write_diagnosis(plain | {"command": command}, folder, name)
            found = sources(case.model, {finding.module for finding in diagnosis.findings})
            everything.append(plain | {"sources": found})
            if not self.as_json:
                _say(case, diagnosis, page)
            if self.fail_on:
                worst.extend(finding.severity for finding in diagnosis.at_least(self.fail_on))
        self._write_for_programs(everything)
        if self.as_json:
            shown = everything[0] if len(everything) == 1 else everything
            print(json.dumps(shown, ensure_ascii=False, allow_nan=False))
        if worst:
            failures.write(f"normlab: {count(len(worst), 'finding')} as severe as {self.fail_on!r}")
            raise SystemExit(GATE_CLOSED["problem" if "problem" in worst else "warning"])

    def _require_another(self, written: Path) -> None:
        """Raise UserError where the baseline is the file that this diagnosis writes."""
        if self.baseline is not None and self.baseline.resolve() == written.resolve():
            raise UserError(
                f"--baseline is {self.baseline}, which this diagnosis writes anew, so that nothing would "
                "ever differ from it; copy it to another name, such as baselines/preflight.json, and give "
                "that"
            )

    def _plan(self, case: Case) -> Plan:
        """The training to come, as files or a recipe declare it."""
        from normlab.diagnosis.plan import Plan, read_baseline
        from normlab.examine.declaring import declared_by

        plan = declared_by(self.declared, case.model, case.batch) if self.declared else Plan()
        if self.baseline is not None:
            plan["baseline"] = read_baseline(self.baseline)
        return plan

    def _write_for_programs(self, diagnoses: Sequence[Mapping[str, Any]]) -> None:
        from normlab.report.machines import junit, sarif
        from normlab.store.folder import write_text_atomic

        for path, write in ((self.junit, junit), (self.sarif, sarif)):
            if path is not None:
                write_text_atomic(path, write(diagnoses))

    def _check(self) -> None:
        """Raise UserError if the flags name several subjects, or half of one."""
        if self.run_folder and self.model:
            raise UserError("both a run and --model were given; leave one of them out")
        typed = {"fail_on": self.fail_on, "checkpoints": self.checkpoints, "step": self.step is not None}
        ignored = [flag_name(name) for name, value in typed.items() if value]
        if self.flight and ignored:
            raise UserError(
                f"--flight makes no diagnosis, so that {' and '.join(ignored)} says nothing; leave it out"
            )
        if self.run_folder and self.lr is not None:
            raise UserError(
                "a run has its own learning rate; leave --lr out, or name a recipe instead of the run"
            )
        if self.run_folder and (unused := self._of_a_recipe()):
            raise UserError(
                f"a run has its own configuration, so that nothing reads {' and '.join(unused)}; leave that "
                "out, or name a recipe instead"
            )
        if self.flight and not self.run_folder:
            raise UserError(
                "--flight does a run's steps again; name the run, as in normlab diagnose RUN --flight"
            )
        if self.step is not None and not self.run_folder:
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

        folder = find_run(self.run_folder, self.runs)
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

    def _cases(self) -> list[tuple[Case, Path, str]]:
        """Return each case to examine, with the folder and the name of its page."""
        from normlab.examine import subjects as diagnose
        from normlab.recipes.grammar import require_known

        if self.model:
            return [(self._own(), self.out or self.runs, self._named(self.model))]
        if self.run_folder:
            folder = find_run(self.run_folder, self.runs)
            require_known(folder.config())
            wanted: Sequence[str | int] = self.checkpoints or diagnose.checkpoints(folder)
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


@dataclass(frozen=True, kw_only=True)
class Preflight(Diagnose):
    """Check a model before its first step: what is declared against what is there.

    Weights, buffers, ties, gradients, masks, dropout, the loss and the first step of an optimiser are
    compared with what the configuration, a declaration (--declared init.toml) or another version of the model
    (--baseline preflight.json) says. It is normlab diagnose with --preset preflight and --fail-on problem:
    the exit code is 3 for a problem and, with --fail-on warning, 4 for a warning.
    """

    preset: Literal["preflight", "cheap", "standard", "full"] = "preflight"
    """preflight: what needs no theory; cheap: a few passes; standard: everything but second derivatives;
    full: everything.
    """
    fail_on: Literal["", "warning", "problem"] = "problem"
    """Exit with code 3 for a problem, or 4 for a warning, if there is a finding as severe as this."""
    page: ClassVar[str] = "preflight"


def _say(case: Case, diagnosis: Diagnosis, page: Path) -> None:
    """Print the cause, what follows from it and the other findings, and the path of the page."""
    from rich.text import Text

    from normlab.cli import terminal
    from normlab.diagnosis.rules.finding import Finding, consequences, told
    from normlab.spec.units import duration

    console, cause = terminal.console(), diagnosis.cause
    facts = {**diagnosis.facts, **case.facts}
    about = [f"{name} {value}" for name, value in facts.items() if name not in ("recipe", "run")]
    _say_forecast(console, diagnosis.forecast)
    console.print(Text(diagnosis.verdict, STYLES[cause.severity] if cause else "bold green"))
    folded = list[Finding]() if cause is None else consequences(diagnosis.findings, cause)
    if folded:
        names = ", ".join(dict.fromkeys(finding.name.replace("_", " ") for finding in folded))
        console.print(Text(f"{'':8}what follows from it: {names}", "dim"))
    console.print(Text(case.title, "bold"), Text("; ".join(about), "dim"), sep="\n")
    for finding in (f for f in diagnosis.findings if f is not cause and f not in folded):
        line = Text.assemble((f"{finding.severity:<8}", STYLES[finding.severity]), told(finding))
        unmoved = diagnosis.moves_forecast(finding) is False and finding.severity != "note"
        still = "it does not move the forecast" if unmoved else ""
        support = "; ".join(filter(None, (finding.evidence, finding.reference, still)))
        console.print(line)
        if support:
            console.print(Text(f"{'':8}{support}", "dim"))
    memory = diagnosis.peak_memory_bytes / 2**30
    cost = f"{duration(sum(diagnosis.seconds.values()))}, {memory:.2f} GiB at most; "
    print(f"{cost if diagnosis.seconds else ''}page: {page}")


def _say_forecast(console: Console, forecast: Answer | None) -> None:
    """Print the answer of a forecast, what it rests on, and the nearest runs of its table."""
    if forecast is None:
        return
    from rich.text import Text

    console.print(Text(forecast.sentence, "bold green" if forecast.kind == "train" else "bold"))
    lines = [f"from {forecast.rests_on}"]
    if forecast.effects:
        lines.append(f"moved most by: {'; '.join(map(str, forecast.effects[:SHOWN]))}")
    for near in forecast.nearest[:SHOWN]:
        lines.append(f"a near run: {near.model}, at {near.lr:.2g}: {near.outcome}")
    console.print(*(Text(f"{'':8}{line}", "dim") for line in lines), sep="\n")
