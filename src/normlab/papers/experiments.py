"""Trains the runs that a ``regime.toml`` plans and that have no line in ``runs.jsonl`` yet.

A regime is a folder. Its ``regime.toml`` is written by hand before the first run: the question, the cells,
the seeds, and everything that must be fixed beforehand. Each finished run leaves one line in ``runs.jsonl``,
with metrics alone. A configuration that has a line is not trained again.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import math
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import torch

from normlab.base.files import read_json, regular, row_line, sync, write_json_atomic
from normlab.base.locks import RunBusyError, reserved
from normlab.base.rows import read_lines
from normlab.errors import UserError, nearest
from normlab.lab.config import Config, MachineConfig, SeedConfig, numbers
from normlab.lab.recipes.grammar import resolve
from normlab.lab.runs.folder import Row, RunFolder, read_scores
from normlab.lab.tasks.task import Task
from normlab.lab.tasks.translation import Translation
from normlab.lab.training.devices import hardware
from normlab.lab.training.train import train
from normlab.nn.norm import Norm, ScaleNorm
from normlab.papers.bases import BERT_SHORT, MULTI30K_WIDTH_64
from normlab.papers.end_measures import MEASURES, UPDATES, measure_run
from normlab.papers.finding import Finding
from normlab.papers.nguyen2019.bases import GL_EN_SMALL, PAST_BEST
from normlab.papers.regimes import REGIME_FILE, Book, Plan, read_plan, read_source
from normlab.papers.studies.trained_models import OUTPUT, ROLES, TrainedModel
from normlab.papers.trainings import changed

READY, PILOT_FIRST = "ready", "pilot first"
PILOT_SEED: Final = 1000
"""The seed of pilots, which never count."""
MOST_POINTS: Final = 100
"""Most points of the curve of the training loss that a line keeps."""
BASES: Final[Mapping[str, Callable[[], Config]]] = {
    "bert_short": lambda: BERT_SHORT,
    "gl_en_5e-4": lambda: GL_EN_SMALL,
    "multi30k_width_64": lambda: MULTI30K_WIDTH_64,
    "past_best": lambda: PAST_BEST["laptop"].base,
}
"""Configurations that a regime may start from, by name, besides the presets of ``normlab train``."""


@dataclass(frozen=True, kw_only=True)
class Experiment(Plan):
    """A plan whose runs are trained here."""

    name: str
    """Its folder below the results, with slashes."""
    presets: Mapping[str, Callable[[], Config]] = field(default_factory=dict, repr=False)
    """More configurations that it may start from."""

    def __post_init__(self) -> None:
        needed = ("question", "base", "status", "pilot", "fixed")
        if lacking := ", ".join(entry for entry in needed if not getattr(self, entry)):
            raise UserError(f"{self.name} cannot be trained: its {REGIME_FILE} lacks {lacking}; add that")
        if self.status not in (READY, PILOT_FIRST):
            raise UserError(f"{self.name}: status is {READY!r} or {PILOT_FIRST!r}, not {self.status!r}")
        bases = {**self.presets, **BASES}
        if self.base not in bases:
            raise UserError(f"{self.name}: there is no base {self.base!r}{nearest(self.base, bases)}")
        for measure in self.measure:
            if measure not in (*MEASURES, UPDATES):
                known = nearest(measure, (*MEASURES, UPDATES))
                raise UserError(f"{self.name}: there is no measure {measure!r}{known}")

    def configs(self) -> Iterator[tuple[str, int, Config]]:
        """Each cell and seed with its resolved configuration: all cells of a seed before the next seed.

        An interrupted regime then has about as many runs of each cell.
        """
        for seed in self.seeds:
            for cell, changes in self.cells.items():
                yield cell, seed, self._config(changes, seed)

    def pilot_configs(self) -> Iterator[tuple[str, int, Config]]:
        """Each pilot's cell with its resolved configuration."""
        for cell, changes in self.pilots.items():
            yield cell, PILOT_SEED, self._config(changes, PILOT_SEED)

    def missing(self, *files: Path) -> list[tuple[str, int, Config]]:
        """The runs that have no line in any of some files. Raises UserError if it waits for its pilot."""
        if self.status == PILOT_FIRST:
            raise UserError(f"{self.name} waits for its pilot: {self.pilot.strip()}")
        finished = {id_ for file in files for id_ in kept(file)}
        return [(cell, seed, config) for cell, seed, config in self.configs() if key(config) not in finished]

    def _config(self, changes: Mapping[str, Any], seed: int) -> Config:
        base = {**self.presets, **BASES}[self.base]()
        config = changed(changed(base, self.changes), changes)
        # "auto" is another precision on another machine
        if config.train.precision == "auto":
            raise UserError(f"{self.name} has to say its train.precision, fp32 or bf16")
        if self.measure and not issubclass(Task.registry[config.task], Translation):
            raise UserError(
                f"{self.name} has the task {config.task}, but only translation is measured; leave measure out"
            )
        steps = ",".join(map(str, self.measure_at))
        machine = MachineConfig("cpu", threads=1, probes="", keep_checkpoints=steps)
        return resolve(config.recipe, replace(config, seeds=SeedConfig.of(seed), machine=machine))


def read_experiment(folder: Path, name: str, presets: Mapping[str, Callable[[], Config]]) -> Experiment:
    """Read ``folder/name/regime.toml``, whose runs are trained here. Raises UserError for what cannot be
    trained.
    """
    return Experiment(name=name, presets=presets, **vars(read_plan(folder / name / REGIME_FILE)))


def planned_for(
    findings: Iterable[Finding], book: Book, presets: Mapping[str, Callable[[], Config]]
) -> list[Experiment]:
    """The experiments with missing runs among the sources of the regimes that findings name, each once. One
    that has all of its runs may have been trained elsewhere, and says too little to be trained here.
    """
    pieces = [piece for finding in findings for piece in (*finding.evidence, *finding.left_out)]
    regimes = [book.regime(piece.regime) for piece in pieces]
    experiments = []
    for name in dict.fromkeys(source for regime in regimes for source in regime.sources):
        source = read_source(name, book.roots)
        if source.planned - {(run.cell, run.seed) for run in source.runs}:
            folder = next(root for root in book.roots if (root / name / REGIME_FILE).is_file())
            experiments.append(read_experiment(folder, name, presets))
    return experiments


def key(config: Config) -> str:
    """A digest of what decides the numbers of a run, without the data's contents."""
    return hashlib.sha256(json.dumps(numbers(config), sort_keys=True).encode()).hexdigest()[:12]


def kept(file: Path) -> dict[str, Row]:
    """The lines of a file of runs, by key."""
    rows: dict[str, Row] = {}
    for number, row in read_lines(file) if file.exists() else ():
        run = row.get("key")
        if not isinstance(run, str):
            raise UserError(
                f"{file}, line {number}, has no key, so no training here wrote it; move it to a regime that "
                "is not trained here"
            )
        rows[run] = row
    return rows


def train_missing(
    missing: Iterable[tuple[str, int, Config]],
    runs: Path,
    file: Path,
    measure: tuple[str, ...] = (),
    made_by: Mapping[str, str] | None = None,
    log: Callable[[str], None] = print,
) -> Iterator[Row]:
    """Train configurations one after the other; append a line to the file for each, and yield it.

    An interrupted run goes on from its last checkpoint. The weights of a run stay below ``runs`` until its
    line is written. ``made_by`` says what code trains. Several processes may train the same configurations,
    if they have the same ``runs``: each leaves out what another trains, which ``log`` gets in words, and what
    another has trained meanwhile.
    """
    for cell, seed, config in missing:
        run = key(config)
        try:
            # whoever has the lock trains this run and writes its line before the lock ends
            with reserved(place := runs / "taken" / run):
                if run in kept(file):  # another process has trained it since these were listed
                    continue
                made = _made_by(place, made_by or {})
                folder = train(config, runs)
                row = {**experiment_line(cell, seed, config, folder), **made}
                if measure:
                    row["measured"] = measure_run(folder, measure)
                append_line(file, row)
                (place / "begun.json").unlink()
                for weights in (folder.last, folder.previous, folder.best, folder.steps):
                    shutil.rmtree(weights, ignore_errors=True)
        except RunBusyError as busy:
            log(f"{file.parent.name} {cell} {seed} left out: {busy}")
            continue
        yield row


def _made_by(place: Path, now: Mapping[str, str]) -> dict[str, str]:
    """What code trains a run and since when; of one that other code began, ``A; finished by B``.

    ``place`` keeps what began the run, until its line is written.
    """
    file = place / "begun.json"
    if not file.is_file():
        write_json_atomic(file, {**now, "started": _now()})
    begun: dict[str, str] = read_json(file)
    for name, value in now.items():
        if begun.get(name) != value:
            begun[name] = f"{begun[name]}; finished by {value}" if name in begun else value
    return begun


def append_line(file: Path, row: Row) -> None:
    """Append a run's line to a file of runs, and wait until it is on the disk.

    Several processes append to one file, each for another run: a lock of the file keeps their lines apart. It
    also keeps away from a line that is being written, so an unfinished last line is one that a killed process
    left. Readers leave that out, but with another line behind it the file would be damaged: it is cut off.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    with open(file, "a+b", opener=regular) as lines:
        fcntl.flock(lines, fcntl.LOCK_EX)
        lines.seek(0)
        content = lines.read()
        last = content.rpartition(b"\n")[2]
        try:
            json.loads(last)
        except ValueError:  # unfinished, or empty behind a newline
            lines.truncate(len(content) - len(last))
        else:  # whole but for its newline, as some editors leave it
            lines.write(b"\n")
        lines.write(row_line(row).encode())
        lines.flush()
        os.fsync(lines.fileno())
    sync(file.parent)  # the file may be new


def experiment_line(cell: str, seed: int, config: Config, folder: RunFolder) -> Row:
    """What is kept of a finished run."""
    status, scores = folder.status(), read_scores(folder.scores)
    return {
        "key": key(config),
        "cell": cell,
        "seed": seed,
        "outcome": status.outcome.state if status.outcome else "",
        "test": {name: round(value, 3) for name, value in scores.items() if isinstance(value, float)},
        **_scales(folder),
        "seconds": round(status.train_seconds),
        "data": folder.config().data.digest[:8],
        **made_at(),
        # a run that was interrupted may have gone on elsewhere
        **({"hardware": status.hardware} if status.hardware else {}),
        "run": folder.path.name,
        "steps": status.step,
        "best_step": status.best_step,
        "evidence": status.outcome.evidence if status.outcome else "",
        "dev": dev_curve(folder),
        "train": train_curve(folder),
    }


def made_at() -> dict[str, str]:
    """Date and hardware of a measurement."""
    return {"date": _now(), "hardware": hardware(torch.device("cpu"))}


def _now() -> str:
    """The minute, in UTC."""
    return datetime.now(UTC).strftime("%Y-%m-%d %H:%M")


def _scales(folder: RunFolder) -> dict[str, Any]:
    """The learned scales by kind of sublayer, first layer first, of a model that has such."""
    if Norm.registry[folder.config().model.norm] is not ScaleNorm:
        return {}
    model = TrainedModel(folder)
    roles = {role: [round(float(g), 3) for g in model.by_layer(role)] for role in ROLES}
    return {"scales": {**roles, "output": round(model.scales[OUTPUT], 3)}}


def dev_curve(folder: RunFolder) -> list[list[float | None]]:
    """Step, NLL and BLEU of each validation; no BLEU for a task that has none."""
    curve: list[list[float | None]] = []
    for row in folder.metrics():
        if row["kind"] == "dev":
            bleu = round(row["bleu"], 2) if "bleu" in row else None
            curve.append([row["step"], round(row["nll"], 4), bleu])
    return curve


def train_curve(folder: RunFolder) -> list[list[float]]:
    """Step, mean NLL since the point before, and the largest gradient norm that was logged since then."""
    rows = [row for row in folder.metrics() if row["kind"] == "train"]
    size = math.ceil(len(rows) / MOST_POINTS)
    curve = []
    for start in range(0, len(rows), max(size, 1)):
        group = rows[start : start + size]
        nll = sum(row["nll"] for row in group) / len(group)
        # of a run that diverges the last norm is NaN, which max would pass over
        norm = max((row["grad_norm_l2"] for row in group), key=lambda norm: (math.isnan(norm), norm))
        curve.append([group[-1]["step"], round(nll, 4), float(f"{norm:.4g}")])
    return curve
