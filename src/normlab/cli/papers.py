"""``normlab papers``: what the papers claim, what was measured for it, and how to measure it again."""

from __future__ import annotations

import difflib
import json
import math
import os
import shlex
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby, takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

from rich.text import Text
from tyro.conf import Positional, arg

from normlab import papers
from normlab.base.io import to_plain
from normlab.base.units import count, seconds_of
from normlab.cli import errors, terminal
from normlab.cli.options import RUNS, Imports, Switch
from normlab.cli.presets import CONFIGS
from normlab.errors import SpentError, UserError
from normlab.lab.config import MachineConfig
from normlab.lab.training.backends import backend
from normlab.lab.training.jobs import Queue, usable_cores
from normlab.papers import phrases
from normlab.papers.adding import add_paper
from normlab.papers.artefact import Artefact, Reproduction
from normlab.papers.finding import Evidence, Finding, Reviewed, faults, known_findings, reviewed
from normlab.papers.named import Named, artefacts_of, named, of_paper
from normlab.papers.regimes import RUNS_FILE, Book, read_book
from normlab.papers.results import (
    RESULTS,
    ArtefactStatus,
    at_other_scales,
    disagreements,
    folders,
    standing,
    write_reproduction,
)
from normlab.papers.trainings import LAPTOP, Scale

if TYPE_CHECKING:
    from normlab.papers.experiments import Experiment

STYLES: Final = {
    "measured": "green",
    "not all runs": "yellow",
    "another text": "yellow",
    "damaged": "bold red",
}
"""The style of each state of an artefact. The two tables below hold those of answers and of readings."""
ANSWER_STYLES: Final = {
    "supported": "green",
    "partly": "yellow",
    "contradicted": "bold red",
    "not tested here": "dim",
}
READING_STYLES: Final = {"agrees": "green", "contradicts": "bold red", "open": "yellow", "waits": "dim"}
WIDE: Final = 100
"""From so many columns on the list of findings shows an effect of each; in fewer, answers would be cut."""
MOST_NAMED: Final = 3
"""How many of many artefacts an error names."""


@dataclass(frozen=True)
class PapersCommand:
    """Which of the papers' findings hold here, in which regime, and what was measured."""

    names: Annotated[Positional[tuple[str, ...]], arg(metavar="ID|KEY")] = ()
    """Findings (X1), tables and figures (liu2020.fig4), papers (liu2020) or disputes; default: findings."""
    as_json: Annotated[Switch, arg(name="json")] = False
    """Print everything as JSON."""
    scale: Scale = LAPTOP
    """Size of the trainings whose results are shown: laptop, gpu or paper."""
    runs: Path = RUNS
    """Folder whose papers/ holds results of yours; if it has none, those that come with normlab are shown."""
    paper: tuple[Path, ...] = ()
    """TOML files of papers of yours, with regimes and findings."""
    imports: Imports = ()

    def run(self) -> None:
        """Show what is asked for, and then check the user's own papers.

        Raises UserError for a name that is neither a finding, an artefact nor a paper, and for an answer in
        one of the user's papers that does not follow from its intervals, once these are shown.
        """
        _add_papers(self.paper)
        book = read_book(roots=(self.runs, RESULTS))
        known = known_findings()
        wanted, artefacts = _wanted(self.names or ("all",), known)
        findings = [reviewed(finding, book) for finding in wanted]
        # the list of all findings does not wait for the results of all artefacts
        statuses = _statuses_of(artefacts, self.runs, self.scale) if self.names or self.as_json else []
        if self.as_json:
            print(json.dumps(_plain_all(findings, statuses, known), ensure_ascii=False, allow_nan=False))
        elif len(findings) == 1 and not statuses:
            _show_finding(findings[0])
            lines = self._how_to_train(findings[0], book)
            if lines:
                terminal.write("", *lines)
        elif len(statuses) == 1 and not findings:
            (status,) = statuses
            others = at_other_scales([status.artefact], folders(self.runs), self.scale)
            resting = [finding for finding in known.values() if status.artefact.id in finding.artefacts]
            _show_artefact(status, others, [reviewed(finding, book) for finding in resting], self._options())
        else:
            if findings:
                _list_findings(findings)
            if findings and statuses:
                terminal.write("")
            if statuses:
                _list_artefacts(statuses)
        _require_answers_that_follow(self.paper, known, book)

    def _how_to_train(self, review: Reviewed, book: Book) -> list[str]:
        """Say how to train the runs that a finding lacks, or why they cannot be trained yet; nothing if it
        lacks none.
        """
        pieces = (*review.evidence, *review.left_out)
        lacking = tuple(evidence.piece for evidence in pieces if evidence.missing)
        if not lacking:
            return []
        from normlab.papers.experiments import PILOT_FIRST, planned_for  # which imports torch

        try:
            planned = planned_for([replace(review.finding, evidence=lacking, left_out=())], book, CONFIGS)
        except UserError as error:  # a regime.toml can say enough to be read and too little to be trained
            return [f"The runs that are missing cannot be trained: {error}"]
        lines = [
            f"{experiment.name} waits for its pilot, and its runs cannot be trained before"
            for experiment in planned
            if experiment.status == PILOT_FIRST
        ]
        if len(lines) < len(planned):
            lines.append(f"To train the runs that are missing: {self._reproduce(review.finding)}")
        return lines

    def _reproduce(self, finding: Finding) -> str:
        """The command that trains what a finding lacks, with the files that this one was given."""
        return shlex.join(["normlab", "papers", "reproduce", finding.id, *self._options()])

    def _options(self) -> list[str]:
        """The options with which another command sees what this one sees."""
        words: list[str] = []
        if self.runs != RUNS:
            words += ["--runs", str(self.runs)]
        if self.paper:
            words += ["--paper", *map(str, self.paper)]
        for module in self.imports:
            words += ["--import", module]
        return words


def _add_papers(files: Iterable[Path]) -> None:
    """Add the user's own papers to those that are known."""
    for file in files:
        add_paper(file)


def _wanted(
    names: Iterable[str], known: Mapping[str, Finding]
) -> tuple[Iterable[Finding], Iterable[Artefact]]:
    """The findings and artefacts that are to be shown, each once; a paper stands for all of both."""
    findings: dict[str, Finding] = {}
    artefacts: dict[str, Artefact] = {}
    for thing in named(names, known):
        match thing:
            case Finding():
                findings[thing.id] = thing
            case Artefact():
                artefacts[thing.id] = thing
            case key:
                findings |= {id_: finding for id_, finding in known.items() if finding.paper == key}
                artefacts |= {artefact.id: artefact for artefact in of_paper(key)}
    return findings.values(), artefacts.values()


def _require_answers_that_follow(files: Iterable[Path], known: Mapping[str, Finding], book: Book) -> None:
    """Raise UserError with all that is wrong with the findings of the user's own papers."""
    sentences = [
        f"{file}: {finding.id}: {sentence}"
        for file in files
        for finding in known.values()
        if finding.paper == file.stem
        for sentence in faults(reviewed(finding, book))
    ]
    if sentences:
        raise UserError("\n".join(sentences))


def _print_measured(status: ArtefactStatus) -> None:
    """Print the trained cells of an artefact with every seed, and the measures of its study."""
    cells = phrases.cells_of(status)
    if cells:
        metric = phrases.metric_of(next(iter(cells.values())))
        measured = terminal.table("cell", f"{metric} [95%]", phrases.SEEDS, "trained")
        for name, row in cells.items():
            texts = (name, phrases.score(row), row["seeds"], row["trained"])
            measured.add_row(*map(Text, texts))
        terminal.write("", measured)
    if status.measures:
        measures = terminal.table("measure", "[95%]")
        for name, value in status.measures.items():
            measures.add_row(Text(name), Text(phrases.estimated(value)))
        terminal.write("", measures)


def _plain_all(
    findings: Sequence[Reviewed], statuses: Sequence[ArtefactStatus], known: Mapping[str, Finding]
) -> dict[str, Any]:
    """Findings, the regimes that they name, and artefacts as plain data for JSON."""
    regimes: dict[str, Any] = {}
    for review in findings:
        for evidence in (*review.evidence, *review.left_out):
            regimes[evidence.regime.name] = phrases.plain_regime(evidence)
    return {
        "schema_version": phrases.SCHEMA_VERSION,
        "findings": [phrases.plain(review) for review in findings],
        "regimes": list(regimes.values()),
        "artefacts": [_plain(status, known) for status in statuses],
    }


def _list_findings(findings: Sequence[Reviewed]) -> None:
    """Print a line for each finding, paper by paper, and how many have which answer.

    Ids, answers and counts are never cut. The width decides about the column of effects, and not what is in
    it, so that one long cell does not take it away.
    """
    names = ["", "finding", "answer", "a/c/o"]
    if terminal.console().width >= WIDE:
        names.append("first effect [95%] (expected)")
    table = terminal.table(*names)
    table.collapse_padding = True  # so that a finding has one line of a hundred columns
    for column in table.columns:
        column.no_wrap = column.header in ("", "answer", "a/c/o")  # rich shrinks those that may wrap first

    def add_row(*cells: Text) -> None:
        table.add_row(*cells[: len(names)])  # the effect comes last

    empty = Text()
    for paper, group in groupby(findings, key=lambda review: review.finding.paper):
        add_row(empty, _cut(papers.PAPERS[paper].authors, "bold"), empty, empty, empty)
        for review in group:
            finding = review.finding
            answer = Text(phrases.answer_in_short(review), ANSWER_STYLES[finding.answer])
            counts = "/".join(str(review.counts[reading]) for reading in ("agrees", "contradicts", "open"))
            effect = _cut(phrases.beside_expected(review))
            add_row(Text(finding.id), _cut(finding.short), answer, Text(counts), effect)
    terminal.write(table, "", f"{phrases.counted(findings)}.")
    terminal.write("a/c/o: how many effects agree with the sentence, contradict it, and are open.")
    terminal.write("Everything about one: normlab papers show X1")


def _cut(text: str, style: str = "") -> Text:
    """A cell that is cut off where its column ends, and never continues on the next line."""
    return Text(text, style, no_wrap=True, overflow="ellipsis")


def _show_finding(review: Reviewed) -> None:
    """Print a finding: the sentence, the answer, and every effect, regime by regime."""
    finding = review.finding
    paper = papers.PAPERS[finding.paper]
    style = ANSWER_STYLES[finding.answer]
    answer = phrases.answer(review), style
    terminal.write(
        Text.assemble((finding.id, "bold"), f": {finding.short}: ", answer, f" ({phrases.tally(review)})")
    )
    terminal.write(Text(f"{paper.authors}, {finding.where}", "dim"), "")
    terminal.write(Text(finding.says), Text(f"The paper has: {finding.published}"), "")
    terminal.write(Text(finding.because))
    if finding.needs:
        terminal.write(Text(f"To test it: {finding.needs}"))
    _show_evidence(review.evidence)
    if review.left_out:
        terminal.write("", Text("Measured, and not counted", "bold"))
        _show_evidence(review.left_out)
    if finding.artefacts:
        terminal.write("", Text(f"Tables and figures: {', '.join(finding.artefacts)}", "dim"))


def _show_evidence(pieces: Sequence[Evidence]) -> None:
    """Print pieces under their regimes: what each says, the estimate, and what was expected of it."""
    for group in phrases.by_regime(pieces).values():
        regime = group[0].regime
        terminal.write("", Text.assemble((regime.name, "bold"), f": {regime.setting.says} {regime.says}"))
        terminal.write(Text(regime.setting.scale, "dim"))
        for piece in group:
            reading = f"{piece.reading:<11}", READING_STYLES[piece.reading]
            because = f"; not counted: {piece.piece.because}" if piece.piece.because else ""
            estimate = phrases.of_evidence(piece), "bold"
            why = phrases.reading(piece).removeprefix(piece.reading).replace(":", ";")
            expected = f"; {phrases.expected(piece)}{why}{because}", "dim"
            terminal.write(Text.assemble("  ", reading, f" {piece.piece.says}: ", estimate, expected))


def _statuses_of(artefacts: Iterable[Artefact], runs: Path, scale: Scale = LAPTOP) -> list[ArtefactStatus]:
    """The status of each artefact, from the results below ``runs``, else from the kept ones."""
    return [standing(artefact, folders(runs), scale) for artefact in artefacts]


def _plain(status: ArtefactStatus, findings: Mapping[str, Finding]) -> dict[str, Any]:
    """An artefact as plain data for JSON, without its tables."""
    artefact, reproduction = status.artefact, status.found
    return {
        "id": artefact.id,
        "paper": artefact.paper,
        "shows": artefact.shows,
        "discussion": artefact.discussion,
        "study": artefact.study_name,
        "published": dict(artefact.published),
        "state": status.state,
        "scale": status.scale,
        "measures": {name: to_plain(value) for name, value in status.measures.items()},
        "runs": [] if reproduction is None else [row["run"] for row in reproduction.tables.get("runs", ())],
        "findings": [id_ for id_, finding in findings.items() if artefact.id in finding.artefacts],
        "seconds": None if reproduction is None else reproduction.seconds,
        "file": None if status.path is None else str(status.path),
    }


def _list_artefacts(statuses: Sequence[ArtefactStatus]) -> None:
    """Print a line for each artefact, cut to the terminal's width."""
    table = terminal.table("table or figure", "scale", "measured", "what it shows")
    for status in statuses:
        artefact = status.artefact
        scale = status.scale if status.scale in artefact.trainings else "–"
        line = _cut(status.trouble or artefact.shows)
        state = Text(phrases.state(status), STYLES.get(status.state, "dim"))
        table.add_row(Text(artefact.id), Text(scale), state, line)
    terminal.write(table)
    terminal.write(*map(Text, disagreements(statuses)))


def _show_artefact(
    status: ArtefactStatus,
    others: Sequence[ArtefactStatus],
    findings: Sequence[Reviewed],
    options: Sequence[str],
) -> None:
    """Print an artefact: what is in print, what was measured, and the findings that rest on it. The commands
    at the end have the ``options`` of this one.
    """
    artefact = status.artefact
    state = phrases.state(status), STYLES.get(status.state, "dim")
    terminal.write(Text.assemble((artefact.id, "bold"), ": ", state))
    terminal.write(Text(artefact.paper, "dim"), Text(artefact.shows), "")
    table = terminal.table("", "published", "here [95%]")
    for name, value in artefact.published.items():
        table.add_row(Text(name), Text(str(value)), Text(phrases.here(status, name)))
    terminal.write(table)
    terminal.write(*map(Text, phrases.cautions(status)))
    _print_measured(status)
    for review in findings:
        answer = phrases.answer(review), ANSWER_STYLES[review.finding.answer]
        terminal.write("", Text.assemble((review.finding.id, "bold"), f": {review.finding.short}: ", answer))
    if artefact.discussion:
        terminal.write("", Text(artefact.discussion))
    if status.scale in artefact.trainings:
        how = artefact.trainings[status.scale].differs
        terminal.write("", Text(f"The {status.scale} scale: {how}"))
    if status.path is not None:
        terminal.write("", f"result: {status.path}")
    for scale in (other.scale for other in others):
        shown = ["normlab", "papers", "show", artefact.id, "--scale", scale, *options]
        terminal.write("", f"at the {scale} scale: {shlex.join(shown)}")
    if artefact.study:
        terminal.write("", phrases.command(artefact, status.scale, options))


FAILED: Final = 1
"""Exit code if something could not be measured."""


@dataclass(frozen=True)
class ReproduceCommand:
    """Measure tables and figures of the papers, and write a page about each and one about all findings.

    Without --again, nothing is measured twice, neither what was measured here nor what comes with normlab.
    For a finding, the runs that were planned for it and are not there yet are trained last, one after the
    other. What fails does not stop the others; the exit code is then 1.
    """

    names: Annotated[Positional[tuple[str, ...]], arg(metavar="ID|KEY|all")]
    """Tables and figures (liu2020.fig4), findings (X1: all that they rest on), papers (liu2020), or all."""
    runs: Path = RUNS
    """Folder for results: papers/<id>.json, papers/<id>.html and papers/papers.html below it."""
    data: Path | None = None
    """Folder of local data sets; by default $NORMLAB_DATA."""
    jobs: int = 0
    """How many artefacts to measure, or runs to train, at the same time; 0: one for each usable core, or on
    Ray one run for each CPU.
    """
    on: str = "local"
    """Where to train runs: local (this machine), or ray: the Ray cluster at RAY_ADDRESS, else the one that
    runs on this machine, else a new one on this machine alone. Artefacts without trainings are measured here.
    """
    scale: Scale = LAPTOP
    """Size of the trainings: laptop (two cores), gpu (one accelerator and the papers' models), or paper."""
    device: str = ""
    """Device of the trainings, such as cpu or cuda; by default cpu at the laptop scale, else cuda."""
    budget: str = ""
    """Time for all, such as 2h or 90min. After it nothing new is started; the same command continues."""
    without: tuple[str, ...] = ()
    """Artefacts, findings or papers to leave out, such as one whose runs take hours."""
    again: Switch = False
    """Measure again what was already measured."""
    paper: tuple[Path, ...] = ()
    """TOML files of papers of yours, with regimes and findings."""
    imports: Imports = ()

    def run(self) -> None:
        """Raises SystemExit with code 1 if something could not be measured."""
        from normlab.papers.experiments import planned_for

        if not self.names:
            raise UserError("name an artefact, a paper or all, as in: normlab papers reproduce liu2020.fig4")
        if self.data is not None:
            os.environ["NORMLAB_DATA"] = str(self.data.absolute())  # where studies and trainings read it
        backend(self.on)  # reject a wrong name before anything is measured
        _add_papers(self.paper)
        book = read_book(roots=(self.runs, RESULTS))
        known = known_findings()
        asked, left_out = named(self.names, known), named(self.without, known)
        # regimes are planned at the laptop scale alone
        findings = [
            thing
            for thing in asked
            if isinstance(thing, Finding) and thing not in left_out and self.scale == LAPTOP
        ]
        experiments = planned_for(findings, book, CONFIGS)
        budget = seconds_of(self.budget, "--budget")
        until = math.inf if budget is None else time.monotonic() + budget
        wanted = self._wanted(asked, left_out, having_more=bool(experiments))
        missing, failed = self._not_measured(wanted)
        failed += self._measure([artefact for artefact in missing if not artefact.trainings], until)
        to_train = {artefact.id: artefact for artefact in missing if self.scale in artefact.trainings}
        if to_train:
            failed += self._train(to_train, until)
        for artefact in missing:
            if artefact.trainings and artefact.id not in to_train:
                print(f"{artefact.id}: left out, it has no trainings of the {self.scale} scale")
        for experiment in experiments:
            if not self._train_planned(experiment, until):
                failed.append(experiment.name)
        print(f"all findings: {self._write_page()}")
        if failed:
            errors.write(f"normlab: {len(failed)} could not be measured: {', '.join(failed)}")
            raise SystemExit(FAILED)

    def _not_measured(self, wanted: Sequence[Artefact]) -> tuple[list[Artefact], list[str]]:
        """Write the pages of what is measured; return the artefacts that are not, and the ids of those whose
        page could not be written.
        """
        statuses = _statuses_of(wanted, self.runs, self.scale)
        measured = {status.artefact.id for status in statuses if status.whole and not self.again}
        failed = [
            artefact.id for artefact in wanted if artefact.id in measured and not self._done(artefact, None)
        ]
        return [artefact for artefact in wanted if artefact.id not in measured], failed

    def _write_page(self) -> Path:
        """Write the page about all findings, with what was measured now; return its path."""
        from normlab.report.papers import write_papers_page

        book = read_book(roots=(self.runs, RESULTS))
        return write_papers_page(
            [reviewed(finding, book) for finding in known_findings().values()],
            _statuses_of(papers.ARTEFACTS.values(), self.runs),
            folders(self.runs)[0],
            at_other_scales(papers.ARTEFACTS.values(), folders(self.runs)),
        )

    def _wanted(
        self, asked: Sequence[Named], left_out: Sequence[Named], *, having_more: bool
    ) -> list[Artefact]:
        """Return the artefacts to measure: those that have a study, and those named by their ids, which say
        themselves that they have none.

        Raises UserError if none is left, unless there are planned runs to train (``having_more``).
        """
        in_all, without = artefacts_of(asked), artefacts_of(left_out)
        not_left_out = [artefact for artefact in in_all if artefact not in without]
        wanted = [artefact for artefact in not_left_out if artefact.study or artefact in asked]
        if having_more and not wanted:
            return []
        if not wanted:
            if not_left_out != in_all or any(thing in left_out for thing in asked):
                raise UserError("--without leaves nothing to measure; leave out fewer")
            raise UserError(self._without_study(in_all))
        self._require_scale(wanted)
        return wanted

    def _without_study(self, artefacts: Sequence[Artefact]) -> str:
        """Say that these have nothing that could be measured, and name the nearest that have a study."""
        name = artefacts[0].id if artefacts else self.names[0]
        having = [artefact.id for artefact in papers.ARTEFACTS.values() if artefact.study]
        close = difflib.get_close_matches(name, having, MOST_NAMED, cutoff=0)
        return (
            f"{', '.join(self.names)} has no table or figure with a study yet, and no planned runs of the "
            f"{self.scale} scale that are missing; the nearest that have a study: {', '.join(close)}; "
            "normlab papers all lists all of them"
        )

    def _require_scale(self, wanted: Sequence[Artefact]) -> None:
        """Raise UserError if none of these has trainings of the scale. An artefact that needs no training can
        be measured at the laptop scale.
        """
        scales = dict.fromkeys(scale for artefact in wanted for scale in artefact.trainings)
        needs_trainings = self.scale != LAPTOP or all(artefact.trainings for artefact in wanted)
        if needs_trainings and self.scale not in scales:
            raise UserError(
                f"--scale is {self.scale}, but {', '.join(self.names)} has no trainings of that scale; it "
                f"has {', '.join(scales) or 'none at all, leave --scale out'}"
            )

    def _measure(self, artefacts: Sequence[Artefact], until: float) -> list[str]:
        """Measure artefacts that need no training; return the ids of those that could not be measured."""
        from normlab.papers.reproduce import each

        jobs = min(self.jobs or usable_cores(), len(artefacts))
        succeeded = {
            artefact.id: self._done(artefact, measure)
            for artefact, measure in each(artefacts, self.runs, _progress, jobs=jobs, until=until)
        }
        left = [artefact.id for artefact in artefacts if artefact.id not in succeeded]
        if left:
            print(f"the budget is spent; not measured: {', '.join(left)}; the same command measures them")
        return [id_ for id_, is_measured in succeeded.items() if not is_measured]

    def _train(self, todo: Mapping[str, Artefact], until: float) -> list[str]:
        """Train what the artefacts need; measure each when its runs have ended; return those that failed."""
        from normlab.papers.planning import plan, train
        from normlab.papers.reproduce import reproduce

        where = backend(self.on)
        machine = MachineConfig(device=self.device or ("cpu" if self.scale == LAPTOP else "cuda"))
        jobs, threads = where.share(self.jobs, machine)
        machine = replace(machine, threads=threads)
        planned = plan(list(todo.values()), self.runs, scale=self.scale, machine=machine)
        failed = list(planned.without_text)
        by_reason: dict[str, list[str]] = {}
        for id_, reason in planned.without_text.items():
            by_reason.setdefault(reason, []).append(id_)
        for reason, ids in by_reason.items():
            errors.write(f"normlab: {', '.join(ids)}: {reason}")
        self._require_device(machine.device, len(planned.todo))
        queue = partial(Queue, jobs=jobs, start=where.start, until=until)

        def ended(id_: str) -> None:
            given = {"scale": self.scale, "runs": planned.whole(id_), "queue": queue}
            if not self._done(todo[id_], partial(reproduce, todo[id_], self.runs, _progress, **given)):
                failed.append(id_)

        lost = train(planned, self.runs, jobs, ended, until=until, log=_progress, start=where.start)
        for run, reason in lost.items():
            errors.write(f"normlab: run {run} could not be trained: {reason}")
        for id_ in planned.cells:
            left = planned.open_runs(id_)
            if left:
                number = count(len(planned.runs(id_)), "run")
                print(f"{id_}: {len(left)} of {number} left; type the same command again to continue")
            if lost.keys() & left:
                failed.append(id_)
        return failed

    def _train_planned(self, experiment: Experiment, until: float) -> bool:
        """Train the runs of an experiment that are neither kept nor below ``runs``; return whether nothing
        failed.
        """
        from normlab.papers.experiments import PILOT_FIRST, train_missing

        if experiment.status == PILOT_FIRST:
            print(f"{experiment.name}: not planned to the end; it waits for its pilot")
            return True
        file = self.runs / experiment.name / RUNS_FILE
        files = [RESULTS / experiment.name / RUNS_FILE, file]
        in_time = takewhile(lambda _: time.monotonic() <= until, experiment.missing(*files))
        try:
            for row in train_missing(in_time, self.runs, file, experiment.measure, log=_progress):
                _progress(f"{experiment.name}: {row['cell']}, seed {row['seed']}: {row['outcome']}")
        except Exception as error:  # the other experiments are still trained
            errors.report(error, ["papers", "reproduce", experiment.name])
            return False
        # another process may have trained some of them meanwhile
        planned, left = len(list(experiment.configs())), len(experiment.missing(*files))
        more = "; the same command trains them" if left else ""
        print(f"{experiment.name}: {left} of {count(planned, 'run')} left{more}")
        return True

    def _require_device(self, device: str, runs: int) -> None:
        """Raise UserError if runs are to be trained here on an accelerator, but there is none."""
        from torch import cuda

        if runs and self.on == "local" and device.startswith("cuda") and not cuda.is_available():
            slow = "" if self.scale == LAPTOP else ", which may take weeks"
            raise UserError(
                f"{count(runs, 'run')} of the {self.scale} scale would be trained on {device}, but torch sees"
                f" none here; type --device cpu to train them on this processor{slow}, or --on ray for a "
                "cluster that has one"
            )

    def _done(self, artefact: Artefact, measure: Callable[[], Reproduction] | None) -> bool:
        """Measure an artefact unless it is measured, print its measures, write its page; return success."""
        from normlab.report.reproduction import write_reproduction_page

        folder = folders(self.runs)[0]
        (status,) = _statuses_of([artefact], self.runs, self.scale)
        try:
            if measure is None:
                print(f"{artefact.id}: already measured, {status.path}; --again measures it again")
            else:
                write_reproduction(measure(), folder)
                status = standing(artefact, [folder], self.scale)
                terminal.write(Text.assemble((artefact.id, "bold"), f": {artefact.shows}"))
                for name, value in status.measures.items():
                    terminal.write(f"  {name}: {phrases.estimated(value)}")
            page = write_reproduction_page(status, folder)
        except SpentError as spent:
            print(f"{artefact.id}: {spent}; type the same command again to continue")
            return True
        except Exception as error:  # the other artefacts are still measured
            errors.report(error, ["papers", "reproduce", artefact.id])
            return False
        print(f"page: {page}")
        return True


def _progress(line: str) -> None:
    errors.write(f"  {line}")
