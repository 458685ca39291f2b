"""The trainings that artefacts ask for: each distinct run once, the most informative first."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from pathlib import Path, PurePosixPath

from normlab.base.units import count, duration
from normlab.errors import UserError
from normlab.lab.config import Config, DataConfig, MachineConfig, run_id
from normlab.lab.data.text import located
from normlab.lab.recipes.grammar import resolve
from normlab.lab.runs import RunFolder
from normlab.lab.tasks import TASKS
from normlab.lab.training.devices import resolved_precision
from normlab.lab.training.jobs import Process, Queue, Worker
from normlab.papers import results
from normlab.papers.artefact import Artefact
from normlab.papers.bases import LOCAL, paths_of, source_of, text_name
from normlab.papers.lab import quiet
from normlab.papers.trainings import LAPTOP, SCALES, Scale, work

FoldersByCell = dict[str, tuple[RunFolder, ...]]
"""The run folders of each cell of an artefact, one for each seed."""


@dataclass(frozen=True)
class _TrainingPlan:
    """The runs of some artefacts at one scale."""

    cells: Mapping[str, FoldersByCell]
    """The run folders by the artefact's id and its cell."""
    todo: Mapping[str, Config]
    """The configurations still to be trained, by run id, the most informative first."""
    least: Mapping[str, int]
    """The number of seeds that are enough to measure an artefact, by its id."""
    without_text: Mapping[str, str] = field(default_factory=dict)
    """The artefacts that cannot be trained because a text is missing, and what to do about it."""

    def whole(self, id_: str) -> FoldersByCell:
        """Return the runs of an artefact by cell, for the seeds that every cell has finished; none if they
        are too few.
        """
        cells = self.cells[id_]
        seeds = min(len(list(takewhile(_done, folders))) for folders in cells.values())
        if seeds < self.least[id_]:
            return {}
        return {cell: folders[:seeds] for cell, folders in cells.items()}

    def runs(self, id_: str) -> dict[str, RunFolder]:
        """Return the runs of an artefact by id, whether done or not."""
        return {folder.path.name: folder for folders in self.cells[id_].values() for folder in folders}

    def open_runs(self, id_: str) -> list[str]:
        """Return the ids of the runs that an artefact still lacks."""
        return [run for run, folder in self.runs(id_).items() if not _done(folder)]


def _preparing(root: Path) -> Callable[[Config], DataConfig]:
    """Prepare each data set below a folder once; missing data raises the same FileNotFoundError each time,
    because asking the Hub takes long where there is no network.
    """
    prepared: dict[tuple[str, DataConfig], DataConfig | FileNotFoundError] = {}

    def prepare(config: Config) -> DataConfig:
        wanted = config.task, config.data
        if wanted not in prepared:
            task = TASKS[config.task]
            task.check(config)
            try:
                prepared[wanted], corpus = task.prepare(config.data, root / "data")
                task.check_text(config, corpus)
            except FileNotFoundError as error:
                prepared[wanted] = error
        data = prepared[wanted]
        if isinstance(data, FileNotFoundError):
            raise data
        return data

    return prepare


def plan(
    artefacts: Sequence[Artefact], root: Path, *, scale: Scale = LAPTOP, machine: MachineConfig | None = None
) -> _TrainingPlan:
    """Resolve the runs of the artefacts that have trainings at this scale, with the device and the threads of
    ``machine``, and prepare their data.

    A run that is done below ``root``, or that a checkout keeps, is not planned again; one that several
    artefacts share is planned once. Artefacts with the least missing work come first, and within
    an artefact every cell gets its first seed before any gets its second.

    An artefact whose text is missing is left out. Raises UserError for a cell that cannot be built.
    """
    prepare, machine = _preparing(root), machine or MachineConfig()
    cells: dict[str, FoldersByCell] = {}
    missing: dict[str, dict[str, Config]] = {}
    least: dict[str, int] = {}
    without_text: dict[str, str] = {}
    for artefact in artefacts:
        if scale not in artefact.trainings:
            continue
        try:
            runs = _resolved_runs(artefact, scale, prepare, machine)
        except FileNotFoundError as error:
            without_text[artefact.id] = str(error)
            continue
        folders = {run: _folder(run, root) for _, _, run, _ in runs}
        of_cells: dict[str, list[RunFolder]] = {}
        for cell, _, run, _ in runs:
            of_cells.setdefault(cell, []).append(folders[run])
        cells[artefact.id] = {cell: tuple(of_cell) for cell, of_cell in of_cells.items()}
        seed_by_seed = sorted(runs, key=lambda run: run[1])
        missing[artefact.id] = {run: config for _, _, run, config in seed_by_seed if not _done(folders[run])}
        least[artefact.id] = artefact.trainings[scale].least or artefact.trainings[scale].seeds
    return _TrainingPlan(cells, _ordered(missing), least, without_text)


def _resolved_runs(
    artefact: Artefact, scale: Scale, prepare: Callable[[Config], DataConfig], machine: MachineConfig
) -> list[tuple[str, int, str, Config]]:
    """Return cell, seed, id and resolved configuration of every run of an artefact.

    Raises UserError for a cell that cannot be built, and FileNotFoundError that says what to do for a text
    that is missing.
    """
    runs = []
    for cell, seed, asked in artefact.trainings[scale].configs():
        here = replace(asked.machine, device=machine.device, threads=machine.threads)
        try:
            config = resolve(asked.recipe, resolved_precision(replace(asked, machine=here)), force=True)
            config = replace(config, data=prepare(config))
        except UserError as error:
            raise UserError(f"{artefact.id}, {cell}: {error}") from error
        except FileNotFoundError as error:
            raise FileNotFoundError(_missing_data_help(artefact, scale, asked.data, error)) from error
        runs.append((cell, seed, run_id(config), config))
    return runs


def _folder(run: str, root: Path) -> RunFolder:
    """Return the run below ``root``; if it has not begun there, a kept one."""
    begun = RunFolder(root / run)
    if begun.path.exists():
        return begun
    kept = (RunFolder(path.parent) for path in results.RESULTS.glob(f"*/{run}/status.json"))
    return next(kept, begun)


def _done(folder: RunFolder) -> bool:
    return folder.status().state == "done"


def _ordered(missing: Mapping[str, Mapping[str, Config]]) -> dict[str, Config]:
    """Return each missing run once, those of the artefact with the least work first."""
    left, ordered = dict(missing), dict[str, Config]()
    while left:
        works = {
            id_: sum(work(config) for run, config in runs.items() if run not in ordered)
            for id_, runs in left.items()
        }
        id_ = min(left, key=lambda id_: (works[id_], id_))
        ordered |= left.pop(id_)
    return ordered


def train(
    plan: _TrainingPlan,
    root: Path,
    jobs: int,
    ended: Callable[[str], None],
    *,
    until: float = math.inf,
    log: Callable[[str], None] = quiet,
    start: Callable[[Path], Worker] = Process,
) -> Mapping[str, str]:
    """Train a plan; return why runs could not be trained, by run id.

    ``ended`` is called with the id of each artefact as soon as it has all its runs, and in the end with those
    that have enough of them. No run is started that would not end by ``until``, a time of
    ``time.monotonic``, at the pace of those that have ended. ``start`` makes the workers, see ``Queue``.
    """
    began = time.monotonic()
    left = set(plan.cells)
    trained: list[Config] = []

    def stop_in_time(folders: Sequence[RunFolder]) -> None:
        if not queue.waiting:
            return
        now, done = time.monotonic(), sum(map(work, trained))
        next_one = jobs * (now - began) / done * work(queue.waiting[0]) if done else 0.0
        if now + next_one > until:
            queue.waiting.clear()

    def end_whole(among: Iterable[str]) -> None:
        for id_ in sorted(among):
            if not plan.open_runs(id_):
                left.remove(id_)
                ended(id_)

    def after(config: Config) -> None:
        trained.append(config)
        log(_progress(plan, root, trained, time.monotonic() - began))
        end_whole([id_ for id_ in left if run_id(config) in plan.runs(id_)])

    queue = Queue(root, jobs, stop_in_time, start)
    end_whole(list(left))
    for config in plan.todo.values():
        queue.add(config)
    queue.run(after)
    for id_ in sorted(id_ for id_ in left if plan.whole(id_)):
        ended(id_)
    return queue.failed


def _progress(plan: _TrainingPlan, root: Path, trained: Sequence[Config], seconds: float) -> str:
    """Say how the last of the trained runs ended, and how long the others will take."""
    config = trained[-1]
    outcome = RunFolder(root / run_id(config)).status().ended_as
    done, planned = sum(map(work, trained)), sum(map(work, plan.todo.values()))
    left = duration(seconds * (planned - done) / done)
    return (
        f"{len(trained)} of {count(len(plan.todo), 'run')}, {left} left: "
        f"{config.recipe}, lr {config.optim.lr:g}, seed {config.seeds.init}: {outcome}"
    )


def _missing_data_help(artefact: Artefact, scale: Scale, data: DataConfig, error: FileNotFoundError) -> str:
    """Say which text of an artefact is missing, where it would be, where to get it, and what smaller scales
    train on instead.
    """
    home, source = os.environ.get("NORMLAB_DATA"), source_of(data)
    local = dict.fromkeys(path for path in paths_of(data) if path.startswith(LOCAL))
    absent = [PurePosixPath(path) for path in local if not (home and located(path).exists())]
    names = ", ".join(path.name for path in absent)
    where = f"{absent[0].parent} lacks {names} (plain, .gz or .xz)" if absent else str(error)
    parts = [f"the {scale} scale trains on {text_name(data)}, and {where}"]
    if absent and not home:
        parts.append("NORMLAB_DATA is not set; type: export NORMLAB_DATA=/folder/of/data/sets")
    if source:
        parts.append(f"to get it: {source.get}")
    smaller = []
    for other in reversed(SCALES[: SCALES.index(scale)]):
        if other in artefact.trainings:
            text = artefact.trainings[other].base.data
            no_file = "" if paths_of(text) else ", which needs no file"
            smaller.append(f"--scale {other} trains on {text_name(text)}{no_file}")
    if smaller:
        parts.append(f"instead, {' and '.join(smaller)}")
    return "; ".join(parts)
