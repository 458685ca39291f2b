"""``normlab papers``: what the papers claim, what was measured for it, and how to measure it again."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final

from rich.text import Text
from tyro.conf import Positional, arg

from normlab import papers
from normlab.base.io import to_plain
from normlab.base.units import count, seconds_of
from normlab.cli import errors, terminal
from normlab.cli.options import RUNS, Imports, Switch
from normlab.errors import SpentError, UserError
from normlab.lab.config import MachineConfig
from normlab.lab.training.backends import backend
from normlab.lab.training.jobs import Queue, usable_cores
from normlab.papers import words
from normlab.papers.artefact import Artefact, Reproduction
from normlab.papers.claim import Claim, Measure
from normlab.papers.results import (
    ArtefactStatus,
    at_other_scales,
    disagreements,
    folders,
    standing,
    write_reproduction,
)
from normlab.papers.trainings import LAPTOP, Scale

STYLES: Final = {
    "agrees": "green",
    "disagrees": "bold red",
    "undecided": "yellow",
    "stale": "yellow",
    "damaged": "bold red",
}


@dataclass(frozen=True)
class PapersCommand:
    """List the papers' tables and figures with the verdict on each, or show everything about one of them."""

    names: Annotated[Positional[tuple[str, ...]], arg(metavar="ID|KEY")] = ()
    """Artefacts such as liu2020.fig4, or papers: xiong2020, nguyen2019, liu2020, apx; or disputes, for what
    public logs contradict each other about; without any, all."""
    as_json: Annotated[Switch, arg(name="json")] = False
    """Print everything as JSON."""
    scale: Scale = LAPTOP
    """Size of the trainings whose results are shown: laptop, gpu or paper."""
    runs: Path = RUNS
    """Folder whose papers/ holds the results; if it has none, those that come with normlab are shown."""
    imports: Imports = ()

    def run(self) -> None:
        standings = _standings_of(papers.chosen(self.names or ("all",)), self.runs, self.scale)
        if self.as_json:
            print(json.dumps([_plain(s) for s in standings], ensure_ascii=False, allow_nan=False))
        elif len(standings) == 1:
            _show_one(standings[0], at_other_scales([standings[0].artefact], folders(self.runs), self.scale))
        else:
            _show_all(standings)


def _standings_of(artefacts: Iterable[Artefact], runs: Path, scale: Scale = LAPTOP) -> list[ArtefactStatus]:
    """The status of each artefact, from the results below ``runs``, else from the kept ones."""
    return [standing(artefact, folders(runs), scale) for artefact in artefacts]


def _plain(standing: ArtefactStatus) -> dict[str, Any]:
    """An artefact as plain data for JSON; its earlier versions come without their tables."""
    artefact, found, measures = standing.artefact, standing.found, standing.measures
    claims = [
        {
            **to_plain(c),
            "measured": to_plain(measures.get(c.measure)),
            "verdict": c.verdict(measures),
            "runs_to_decide": c.runs_to_decide(measures),
        }
        for c in artefact.claims
    ]
    about = ("id", "paper", "shows", "asserts", "discussion", "study", "version", "date", "reason")
    return {
        **{name: getattr(artefact, name) for name in about},
        "study": artefact.study_name,
        "holds": words.standing_in_words(standing),
        "published": dict(artefact.published),
        "state": standing.state,
        "claims": claims,
        "earlier": [
            {
                **to_plain(replace(one, found=replace(one.found, tables={}))),
                "verdicts": [c.verdict(one.found.measures) for c in one.claims],
            }
            for one in standing.before
        ],
        "scale": standing.scale,
        "fingerprint": artefact.fingerprint(standing.scale),
        "measured_for": None if found is None else found.fingerprint,
        "seconds": None if found is None else found.seconds,
        "file": None if standing.path is None else str(standing.path),
    }


def _show_all(standings: Sequence[ArtefactStatus]) -> None:
    """Print a line for each artefact, cut to the terminal's width, and how many of all claims hold."""
    seconds = words.pace(standings)
    table = terminal.table("artefact", "scale", "claims that hold", "what it shows, or needs")
    for s in standings:
        lacks = words.in_short(s, seconds) if s.trouble or s.found is None else ""
        scale = s.scale if s.scale in s.artefact.trainings else "–"
        hold = Text(words.standing_in_words(s, brief=True), STYLES.get(s.state, "dim"))
        line = Text(lacks or s.artefact.shows, no_wrap=True, overflow="ellipsis")
        table.add_row(Text(s.artefact.id), Text(scale), hold, line)
    totals = words.by_kind(standings).items()
    terminal.write(table, *(f"{counted}: {', '.join(words.overall(some))}" for counted, some in totals))
    terminal.write(*map(Text, disagreements(standings)))


def _show_one(standing: ArtefactStatus, others: Sequence[ArtefactStatus]) -> None:
    artefact = standing.artefact
    hold = words.standing_in_words(standing), STYLES.get(standing.state, "dim")
    terminal.write(Text.assemble((artefact.id, "bold"), ": ", hold))
    terminal.write(Text(artefact.paper, "dim"), Text(artefact.shows), "")
    table = terminal.table("published", "")
    for name, value in artefact.published.items():
        table.add_row(Text(name), Text(words.number(value) if isinstance(value, float) else str(value)))
    terminal.write(table, "", Text(f"To decide: {artefact.asserts}"))
    _print_verdicts(standing)
    terminal.write(*map(Text, words.cautions(standing)))
    for said in filter(None, (artefact.discussion, artefact.finding)):
        terminal.write("", Text(said))
    if standing.scale in artefact.trainings:
        how = words.setting(artefact, standing.scale)
        terminal.write("", Text(f"The {standing.scale} scale: {how}"))
    if standing.path is not None:
        terminal.write("", f"result: {standing.path}")
    for scale in (other.scale for other in others):
        terminal.write("", f"at the {scale} scale: normlab papers show {artefact.id} --scale {scale}")
    again = words.command(artefact, standing.scale) if artefact.study else "No study decides it yet."
    terminal.write("", again)


def _print_verdicts(standing: ArtefactStatus) -> None:
    """Print the claims with their verdicts; if they were changed, also why, and what was found before."""
    artefact = standing.artefact
    _judge(artefact.claims, standing.measures)
    if artefact.version > 1:
        terminal.write(Text(f"version {artefact.version}, {artefact.date}: {artefact.reason}", "dim"))
    for one in standing.before:
        terminal.write(Text(words.earlier(one), "dim"))
        _judge(one.claims, one.found.measures)


def _judge(claims: Sequence[Claim], measures: Mapping[str, Measure]) -> None:
    """Print a line for each claim: verdict, measure, what is allowed, and why just that."""
    for claim in claims:
        verdict, found = claim.verdict(measures), words.measured(measures.get(claim.measure))
        said = [
            f"allowed {claim.allowed()}",
            *([f"published {claim.published}"] if claim.published else []),
            *words.basis(claim, measures),
            *filter(None, [words.undecided(claim, measures)]),
        ]
        terminal.write(
            Text.assemble(
                (f"{verdict:<10}", STYLES.get(verdict, "dim")),
                f"{claim.says}: ",
                *([(found, "bold"), ", "] if found else []),
                ("; ".join(said), "dim"),
            )
        )


FAILED: Final = 1
"""Exit code if something could not be measured."""


@dataclass(frozen=True)
class ReproduceCommand:
    """Measure what artefacts of the papers claim, and write a page about each and one about all.

    Without --again, nothing is measured twice for the same claim, neither what was measured here nor what
    comes with normlab. An artefact that fails does not stop the others; the exit code is then 1.
    """

    names: Annotated[Positional[tuple[str, ...]], arg(metavar="ID|KEY|all")]
    """Artefacts such as liu2020.fig4, or papers such as liu2020, or all, whose artefacts need a study."""
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
    """Artefacts or papers to leave out, such as one whose runs take hours."""
    again: Switch = False
    """Measure again what was already measured for the same claim."""
    imports: Imports = ()

    def run(self) -> None:
        """Raises SystemExit with code 1 if something could not be measured."""
        from normlab.report.papers import write_papers_page

        if not self.names:
            raise UserError("name an artefact, a paper or all, as in: normlab papers reproduce liu2020.fig4")
        if self.data is not None:
            os.environ["NORMLAB_DATA"] = str(self.data.absolute())  # where studies and trainings read it
        backend(self.on)  # reject a wrong name before anything is measured
        budget, wanted = seconds_of(self.budget, "--budget"), self._wanted()
        until = math.inf if budget is None else time.monotonic() + budget
        standings = _standings_of(wanted, self.runs, self.scale)
        fresh = {s.artefact.id for s in standings if s.whole and not self.again}
        for artefact in (a for a in wanted if a.id in fresh):
            self._done(artefact, None)
        open_ = [artefact for artefact in wanted if artefact.id not in fresh]
        failed = self._measure([a for a in open_ if not a.trainings and not a.rests_on], until)
        todo = {a.id: a for a in open_ if self.scale in a.trainings}
        failed += self._train(todo, until) if todo else []
        left = until < math.inf and not all(
            s.whole for s in _standings_of(list(todo.values()), self.runs, self.scale)
        )
        failed += self._measure([a for a in open_ if a.rests_on], -math.inf if left else until)
        page = write_papers_page(
            _standings_of(papers.ARTEFACTS.values(), self.runs),
            folders(self.runs)[0],
            at_other_scales(papers.ARTEFACTS.values(), folders(self.runs)),
        )
        print(f"all artefacts: {page}")
        if failed:
            errors.write(f"normlab: {len(failed)} could not be measured: {', '.join(failed)}")
            raise SystemExit(FAILED)

    def _wanted(self) -> list[Artefact]:
        """Raises UserError if no artefact is left that has a study; one named by its id says so itself."""
        left_out = papers.chosen(self.without)
        found = [artefact for artefact in papers.chosen(self.names) if artefact not in left_out]
        wanted = [a for a in found if a.study or a.id in self.names]
        if not wanted:
            if found != papers.chosen(self.names):
                raise UserError("--without leaves nothing to measure; leave out fewer")
            having = ", ".join(a.id for a in papers.ARTEFACTS.values() if a.study)
            raise UserError(f"no artefact of {', '.join(self.names)} has a study yet; these have: {having}")
        scales = dict.fromkeys(scale for artefact in wanted for scale in artefact.trainings)
        if self.scale not in scales and (self.scale != LAPTOP or all(a.trainings for a in wanted)):
            raise UserError(
                f"--scale is {self.scale}, but {', '.join(self.names)} has no trainings of that scale; it "
                f"has {', '.join(scales) or 'none at all, leave --scale out'}"
            )
        return wanted

    def _measure(self, todo: Sequence[Artefact], until: float) -> list[str]:
        """Measure artefacts that need no training; return the ids of those that could not be measured."""
        from normlab.papers.reproduce import each

        jobs = min(self.jobs or usable_cores(), len(todo))
        asked = each(todo, self.runs, _progress, jobs=jobs, until=until)
        done = {artefact.id: self._done(artefact, measure) for artefact, measure in asked}
        if left := [artefact.id for artefact in todo if artefact.id not in done]:
            print(f"the budget is spent; not measured: {', '.join(left)}; the same command measures them")
        return [id_ for id_, succeeded in done.items() if not succeeded]

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
        for reason in dict.fromkeys(planned.without_text.values()):
            ids = (id_ for id_, own in planned.without_text.items() if own == reason)
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
            if open_ := len(planned.open_runs(id_)):
                whole = count(len(planned.runs(id_)), "run")
                print(f"{id_}: {open_} of {whole} left; type the same command again to continue")
        return [*failed, *(id_ for id_ in planned.cells if lost.keys() & planned.open_runs(id_))]

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
        """Measure an artefact unless it is measured, print its verdicts, write its page; return success."""
        from normlab.report.papers import write_reproduction_page

        folder = folders(self.runs)[0]
        (found,) = _standings_of([artefact], self.runs, self.scale)
        try:
            if measure is None:
                print(f"{artefact.id}: already measured, {found.path}; --again measures it again")
            else:
                write_reproduction(measure(), folder)
                found = standing(artefact, [folder], self.scale)
                terminal.write(Text.assemble((artefact.id, "bold"), f": {artefact.asserts}"))
            _print_verdicts(found)
            page = write_reproduction_page(found, folder)
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
