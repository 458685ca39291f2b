"""``normlab papers reproduce``: train and measure what artefacts of the papers claim."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

from tyro.conf import Positional, arg

from normlab.cli import errors
from normlab.cli.options import RUNS, Imports, Switch
from normlab.cli.papers import print_verdicts, standings_of
from normlab.config.units import count, seconds_of
from normlab.errors import SpentError, UserError
from normlab.papers.results import at_other_scales, folders, standing, write_reproduction
from normlab.papers.trainings import LAPTOP, Scale

if TYPE_CHECKING:
    from normlab.papers.artefact import Artefact, Reproduction

FAILED: Final = 1
"""Exit code where something could not be measured."""


@dataclass(frozen=True)
class ReproduceCommand:
    """Measure what artefacts of the papers claim, and write a page about each and one about all.

    What was measured for the same claim, here or for the results kept by normlab, is not measured again
    without --again. An artefact that fails does not stop the others; the exit code is then 1.
    """

    names: Annotated[Positional[tuple[str, ...]], arg(metavar="ID|KEY|all")]
    """Artefacts such as liu2020.fig4, papers such as liu2020, or all; of several those with a study."""
    runs: Path = RUNS
    """Folder for results: papers/<id>.json, papers/<id>.html and papers/papers.html below it."""
    data: Path | None = None
    """Folder of local data sets; without it $NORMLAB_DATA."""
    jobs: int = 0
    """Artefacts that are measured, or runs that are trained, at the same time; 0: one for each usable core;
    on Ray one run for each CPU.
    """
    on: str = "local"
    """Where runs are trained: local (this machine), or ray: the Ray cluster at RAY_ADDRESS, else the one that
    runs on this machine, else a new one on this machine alone. Artefacts without trainings are measured here.
    """
    scale: Scale = LAPTOP
    """Size of the trainings: laptop (two cores), gpu (one accelerator and the papers' models), or paper."""
    device: str = ""
    """Device of the trainings, such as cpu or cuda; without it cpu at the laptop scale, else cuda."""
    budget: str = ""
    """Time for all, such as 2h or 90min, after which nothing else is started; the same command goes on."""
    without: tuple[str, ...] = ()
    """Artefacts or papers to leave out, such as one whose runs take hours."""
    again: Switch = False
    """Also measure what was measured for the same claim already."""
    imports: Imports = ()

    def run(self) -> None:
        """Raises SystemExit with code 1 where something could not be measured."""
        from normlab.papers import ARTEFACTS
        from normlab.report.papers import write_papers_page
        from normlab.training.backends import backend

        if not self.names:
            raise UserError("name an artefact, a paper or all, as in: normlab papers reproduce liu2020.fig4")
        if self.data is not None:
            os.environ["NORMLAB_DATA"] = str(self.data.absolute())  # where trainings read it
        backend(self.on)  # a wrong name is said before anything is measured
        until, wanted = self._end(), self._wanted()
        standings = standings_of(wanted, self.runs, self.scale)
        fresh = {s.artefact.id for s in standings if s.whole and not self.again}
        for artefact in (a for a in wanted if a.id in fresh):
            self._done(artefact, None)
        open_ = [artefact for artefact in wanted if artefact.id not in fresh]
        failed = self._measure([a for a in open_ if not a.trainings and not a.rests_on], until)
        todo = {a.id: a for a in open_ if self.scale in a.trainings}
        failed += self._train(todo, until) if todo else []
        left = until < math.inf and not all(
            s.whole for s in standings_of(list(todo.values()), self.runs, self.scale)
        )
        failed += self._measure([a for a in open_ if a.rests_on], -math.inf if left else until)
        page = write_papers_page(
            standings_of(ARTEFACTS.values(), self.runs),
            self._folder(),
            at_other_scales(ARTEFACTS.values(), folders(self.runs)),
        )
        print(f"all artefacts: {page}")
        if failed:
            errors.write(f"normlab: {len(failed)} could not be measured: {', '.join(failed)}")
            raise SystemExit(FAILED)

    def _wanted(self) -> list[Artefact]:
        """Raises UserError where none of several has a study; one named by its id says so itself."""
        from normlab.papers import ARTEFACTS, chosen

        left_out = chosen(self.without)
        found = [artefact for artefact in chosen(self.names) if artefact not in left_out]
        wanted = [a for a in found if a.study or a.id in self.names]
        if not wanted:
            if found != chosen(self.names):
                raise UserError("--without leaves nothing to measure; leave out fewer")
            having = ", ".join(a.id for a in ARTEFACTS.values() if a.study)
            raise UserError(f"no artefact of {', '.join(self.names)} has a study yet; these have: {having}")
        scales = dict.fromkeys(scale for artefact in wanted for scale in artefact.trainings)
        if self.scale != LAPTOP and self.scale not in scales:
            raise UserError(
                f"--scale is {self.scale}, and {', '.join(self.names)} has no trainings of that scale; it "
                f"has {', '.join(scales) or 'none at all, leave --scale out'}"
            )
        return wanted

    def _end(self) -> float:
        """The time of ``time.monotonic`` at which the budget is spent."""
        budget = seconds_of(self.budget, "--budget")
        return math.inf if budget is None else time.monotonic() + budget

    def _measure(self, todo: Sequence[Artefact], until: float = math.inf) -> list[str]:
        """Measure artefacts that need no training; return the ids of those that could not be measured."""
        from normlab.papers.reproduce import each
        from normlab.training.jobs import usable_cores

        jobs = min(self.jobs or usable_cores(), len(todo))
        done, failed = list[str](), list[str]()
        for artefact, measure in each(todo, self._texts(), self.runs, _progress, jobs=jobs, until=until):
            (done if self._done(artefact, measure) else failed).append(artefact.id)
        left = [artefact.id for artefact in todo if artefact.id not in {*done, *failed}]
        if left:
            print(f"the budget is spent; {', '.join(left)}: not measured, the same command measures them")
        return failed

    def _train(self, todo: Mapping[str, Artefact], until: float) -> list[str]:
        """Train what the artefacts need, and measure each as soon as its runs have ended; return the ids of
        those that could not be measured.
        """
        from normlab.config.config import MachineConfig
        from normlab.papers.planning import PlanTrainer, plan
        from normlab.papers.reproduce import reproduce
        from normlab.training.backends import backend
        from normlab.training.jobs import Queue

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
        training = PlanTrainer(planned, self.runs, jobs, until, _progress, start=where.start)

        def ended(id_: str) -> None:
            runs = planned.whole(id_)
            texts, given = self._texts(), {"scale": self.scale, "runs": runs, "queue": queue}
            measure = partial(reproduce, todo[id_], texts, self.runs, _progress, **given)
            if not self._done(todo[id_], measure):
                failed.append(id_)

        training.run(ended)
        for run, reason in training.failed.items():
            errors.write(f"normlab: run {run} could not be trained: {reason}")
        for id_ in planned.cells:
            open_ = len(planned.open_runs(id_))
            if open_:
                whole = count(len(planned.runs(id_)), "run")
                print(f"{id_}: {open_} of {whole} left; the same command goes on")
        return [*failed, *(id_ for id_ in planned.cells if training.failed.keys() & planned.open_runs(id_))]

    def _require_device(self, device: str, runs: int) -> None:
        """Raise UserError where so many runs are to be trained here on an accelerator, and there is none."""
        from torch import cuda

        if runs and self.on == "local" and device.startswith("cuda") and not cuda.is_available():
            slow = "" if self.scale == LAPTOP else ", which may take weeks"
            raise UserError(
                f"{count(runs, 'run')} of the {self.scale} scale would be trained on {device}, and torch sees"
                f" none here; type --device cpu to train them on this processor{slow}, or --on ray for a "
                "cluster that has one"
            )

    def _texts(self) -> Path | None:
        return Path(given) if (given := os.environ.get("NORMLAB_DATA")) else None

    def _folder(self) -> Path:
        return folders(self.runs)[0]

    def _done(self, artefact: Artefact, measure: Callable[[], Reproduction] | None) -> bool:
        """Measure an artefact unless that was done, print its verdicts, write its page; return success."""
        from rich.text import Text

        from normlab.cli import terminal
        from normlab.report.papers import write_reproduction_page

        console, folder = terminal.console(), self._folder()
        (found,) = standings_of([artefact], self.runs, self.scale)
        try:
            if measure is None:
                print(f"{artefact.id}: measured already, {found.path}; --again measures it anew")
            else:
                write_reproduction(measure(), folder)
                found = standing(artefact, [folder], self.scale)
                console.print(Text.assemble((artefact.id, "bold"), f": {artefact.asserts}"))
            print_verdicts(console, found)
            page = write_reproduction_page(found, folder)
        except SpentError as spent:
            print(f"{artefact.id}: {spent}; the same command goes on")
            return True
        except Exception as error:  # the artefacts that follow are measured all the same
            errors.report(error, ["papers", "reproduce", artefact.id])
            return False
        print(f"page: {page}")
        return True


def _progress(line: str) -> None:
    errors.write(f"  {line}")
