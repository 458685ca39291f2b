"""Regimes: named bodies of runs and measurements that findings compare, read from the results; no torch.

``findings/regimes.toml`` names them. A regime's sources are read by ``read_source``:

- ``papers/ARTEFACT``: what an artefact's study measured, with the table of its runs; of several results the
  one that ``results.standing`` takes
- a folder with ``regime.toml``: the runs that its ``runs.jsonl`` has so far
- a folder with ``comparison.json``: the runs of each recipe at the rate that was chosen for it, with the dev
  scores that ``dev.jsonl`` beside it has of them
- a file ``NAME.jsonl``: runs that were cut short, with their dev scores; or, if its rows are of no run, the
  table NAME
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, TypeAlias, TypeVar

from normlab.base.files import read_json, read_toml
from normlab.base.io import NOT_FINITE, Count, from_plain
from normlab.base.rows import read_lines
from normlab.errors import UserError, nearest
from normlab.papers import ARTEFACTS
from normlab.papers.artefact import Artefact
from normlab.papers.estimate import Estimate
from normlab.papers.results import RESULTS, best_of

T = TypeVar("T")
Curve: TypeAlias = Sequence[tuple[int, float]]
"""Steps and values, first step first."""
Row: TypeAlias = Mapping[str, Any]
FILE: Final = Path(__file__).parent / "findings" / "regimes.toml"
REGIME_FILE, RUNS_FILE = "regime.toml", "runs.jsonl"
COMPARISON_FILE, DEV_FILE = "comparison.json", "dev.jsonl"
_NO_METRIC: Final = ("cell", "seed", "run", "outcome", "seconds")
"""Columns of a table of runs that are no score."""


@dataclass(frozen=True)
class Run:
    """One training: a row of a regime."""

    cell: str
    seed: int
    id: str
    outcome: str
    """Such as ``trained`` or ``diverged``; empty for a run that was cut short."""
    scores: Mapping[str, float | None]
    """Test scores by metric; None for a run without one."""
    dev: Mapping[str, Curve] = field(default_factory=dict)
    """Dev scores through training, by metric."""
    gradients: Curve = ()
    """Norms of the gradient of the whole model through training."""
    measured: Sequence[Row] = ()
    """What was measured on its weights at some steps, see ``end_measures``."""
    last_loss: float | None = None
    """The training NLL at its last step, of a run that was cut short."""

    @property
    def trained(self) -> bool:
        """Whether its outcome says that it trained; a run that was cut short has none."""
        return self.outcome.startswith("trained")


@dataclass(frozen=True)
class ChosenRate:
    """The learning rate that a comparison chose for a cell, and those that it tried."""

    value: float
    tried: tuple[float, ...]

    @property
    def at_the_edge(self) -> bool:
        """Whether no lower or no higher one was tried, so that a better one may lie beyond."""
        return self.value in (min(self.tried), max(self.tried))


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a ``regime.toml`` says: a regime as it is fixed before its first run.

    A regime whose runs are made elsewhere needs no more than cells, seeds and findings; see
    ``experiments.Experiment`` for what a training needs.
    """

    cells: Mapping[str, Mapping[str, Any]]
    """What each cell changes of the base, besides ``changes``, its recipe included."""
    seeds: tuple[int, ...]
    findings: tuple[str, ...]
    """The findings that it serves, by the numbers of the findings' table, such as N3."""
    margins: Mapping[str, float] = field(default_factory=dict)
    """Metric to the margin within which two cells count as equal."""
    question: str = ""
    artefacts: tuple[str, ...] = ()
    """Figures and tables that it serves besides, by their ids."""
    base: str = ""
    """A name of ``experiments.BASES``, or of a preset."""
    changes: Mapping[str, Any] = field(default_factory=dict)
    """What all cells change of the base, under names like ``optim.lr``."""
    used_before: tuple[int, ...] = ()
    """Seeds of earlier runs of the same text, whose results were known when the regime was written."""
    status: str = ""
    """``ready``; or ``pilot first``, and then no run counts yet."""
    pilot: str = ""
    """What pilots showed, or have to show."""
    fixed: str = ""
    """What is fixed before the runs, besides the fields here."""
    pilots: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Cells that a pilot trains, as in ``cells``."""
    paired_with: str = ""
    """Another regime whose seeds it shares on purpose."""
    measure: tuple[str, ...] = ()
    """What is measured on the weights of a finished run, by the names of ``papers.end_measures``."""
    measure_at: tuple[int, ...] = ()
    """Steps whose weights are measured, besides the best ones on dev."""


def read_plan(file: Path) -> Plan:
    """Read a ``regime.toml``. Raises UserError for an entry that it cannot have, or that it lacks."""
    plan: Plan = from_plain(Plan, read_toml(file), str(file))
    return plan


@dataclass(frozen=True)
class Source:
    """What one place below ``results`` holds."""

    runs: Sequence[Run] = ()
    measures: Mapping[str, Estimate] = field(default_factory=dict)
    """Estimates of a study, by name."""
    tables: Mapping[str, Sequence[Row]] = field(default_factory=dict)
    planned: frozenset[tuple[str, int]] = frozenset()
    """Cells and seeds that were fixed before the first run."""
    findings: tuple[str, ...] = ()
    """The findings for which its runs were planned."""
    margins: Mapping[str, float] = field(default_factory=dict)
    """By metric, the difference within which two cells count as equal; fixed before the first run."""
    rates: Mapping[str, ChosenRate] = field(default_factory=dict)
    """By cell; empty where no rate was chosen by a sweep."""

    @property
    def cells(self) -> set[str]:
        """The names of its cells, including those without a run yet."""
        return {cell for cell, _ in self.planned} | {run.cell for run in self.runs}


@dataclass(frozen=True)
class Setting:
    """What regimes on the same text and model share."""

    short: str
    """A few words for a table."""
    says: str
    """What is trained or measured on what, in a sentence."""
    scale: str
    """What that changes of the papers' settings, and what it therefore cannot tell."""


@dataclass(frozen=True)
class Declaration:
    """An entry of ``regimes.toml``."""

    on: str
    """The name of its setting."""
    sources: tuple[str, ...]
    says: str
    """What its cells are, in a sentence."""
    findings: tuple[str, ...] = ()
    """The findings that it measures, where neither its artefacts nor its ``regime.toml`` name them."""
    rename: Mapping[str, str] = field(default_factory=dict)
    """Other names of cells, so that several sources share one."""


@dataclass(frozen=True)
class Regime:
    """A named body of runs, or of measurements of models that were not trained."""

    name: str
    setting: Setting
    says: str
    sources: tuple[str, ...]
    runs: Sequence[Run]
    measures: Mapping[str, Estimate]
    tables: Mapping[str, Sequence[Row]]
    planned: frozenset[tuple[str, int]]
    findings: frozenset[str]
    """The findings that it measures."""
    margins: Mapping[str, float]
    rates: Mapping[str, ChosenRate] = field(default_factory=dict)

    @property
    def last_falls(self) -> list[tuple[int, float]]:
        """The steps between the last two validations of each run, and by how much the dev loss fell there."""
        falls = []
        for run in self.runs:
            curve = [point for point in run.dev.get("nll", ()) if math.isfinite(point[1])]
            if len(curve) > 1:
                (before, loss_before), (last, loss) = curve[-2:]
                falls.append((last - before, loss_before - loss))
        return falls

    @property
    def cells(self) -> list[str]:
        """The names of its cells, including those without a run yet."""
        return sorted({cell for cell, _ in self.planned} | {run.cell for run in self.runs})

    def cell(self, name: str) -> dict[int, Run]:
        """The runs of a cell by seed. Raises UserError for a cell that it does not have."""
        if name not in self.cells:
            raise UserError(f"the regime {self.name} has no cell {name!r}{nearest(name, self.cells)}")
        return {run.seed: run for run in self.runs if run.cell == name}

    def missing(self, cells: Iterable[str]) -> int:
        """The number of runs of these cells that were planned and are not there yet."""
        there = {(run.cell, run.seed) for run in self.runs}
        wanted = set(cells)
        return sum(cell in wanted and (cell, seed) not in there for cell, seed in self.planned)


@dataclass(frozen=True)
class Book:
    """The regimes of a file ``regimes.toml``, each read when it is first asked for."""

    settings: Mapping[str, Setting]
    regimes: Mapping[str, Declaration]
    roots: tuple[Path, ...] = (RESULTS,)
    """Where sources are looked for, in order."""
    _read: dict[str, Regime] = field(default_factory=dict)

    def regime(self, name: str) -> Regime:
        """Return a regime with its runs so far. Raises UserError for one that is not declared."""
        if name not in self.regimes:
            raise UserError(f"there is no regime {name!r}{nearest(name, self.regimes)}")
        if name not in self._read:
            self._read[name] = self._joined(name)
        return self._read[name]

    def _joined(self, name: str) -> Regime:
        declared = self.regimes[name]
        sources = [read_source(source, self.roots) for source in declared.sources]
        new = declared.rename
        cells = {cell for source in sources for cell in source.cells}
        for cell in new:
            if cell not in cells:
                raise UserError(f"{name} renames {cell!r}, which is no cell of it{nearest(cell, cells)}")
        runs = [replace(run, cell=new.get(run.cell, run.cell)) for source in sources for run in source.runs]
        planned = {(new.get(cell, cell), seed) for source in sources for cell, seed in source.planned}
        return Regime(
            name,
            self.settings[declared.on],
            declared.says,
            declared.sources,
            _each_once(name, runs),
            {key: value for source in sources for key, value in source.measures.items()},
            {key: rows for source in sources for key, rows in source.tables.items()},
            frozenset(planned),
            frozenset(declared.findings).union(*(source.findings for source in sources)),
            {metric: margin for source in sources for metric, margin in source.margins.items()},
            {new.get(cell, cell): rate for source in sources for cell, rate in source.rates.items()},
        )


def _each_once(regime: str, runs: Iterable[Run]) -> list[Run]:
    """The runs of several sources, without a second row of the same run. Raises UserError for two runs of one
    cell and seed: nobody could say which one counts.
    """
    by_place: dict[tuple[str, int], Run] = {}
    for run in runs:
        place = run.cell, run.seed
        other = by_place.setdefault(place, run)
        if other.id != run.id:
            raise UserError(
                f"{regime} has two runs of the cell {run.cell!r} with seed {run.seed}, {other.id} and "
                f"{run.id}; give one of its cells another name"
            )
    return list(by_place.values())


FILES: Final[list[Path]] = [FILE]
"""The files whose regimes are known, those of papers of one's own too."""


def read_book(*files: Path, roots: tuple[Path, ...] = (RESULTS,)) -> Book:
    """Read the settings and regimes of some files, or of all known ones if none is given.

    Raises UserError for an entry that they cannot have, for a name that is taken, and for an unknown setting.
    """
    settings: dict[str, Setting] = {}
    regimes: dict[str, Declaration] = {}
    for file in files or FILES:
        content = read_toml(file)
        new_settings = from_plain(dict[str, Setting], content.get("settings", {}), file.name)
        new_regimes = from_plain(dict[str, Declaration], content.get("regimes", {}), file.name)
        for name in (*(new_settings.keys() & settings), *(new_regimes.keys() & regimes)):
            raise UserError(f"{file}: the name {name!r} is taken; give yours another one")
        settings |= new_settings
        regimes |= new_regimes
    for name, declared in regimes.items():
        if declared.on not in settings:
            raise UserError(f"{name}: there is no setting {declared.on!r}{nearest(declared.on, settings)}")
    return Book(settings, regimes, roots)


def read_source(name: str, roots: Sequence[Path] = (RESULTS,)) -> Source:
    """Read a place below the first of the folders that has it; of an artefact the best of its results, and of
    a regime that was fixed before its runs the runs below all folders. Raises UserError if nothing is there.
    """
    places = [root / name for root in roots]
    results = [place.with_name(f"{place.name}.json") for place in places]
    if any(result.is_file() for result in results):
        return _artefact(results)
    for place in places:
        if (place / REGIME_FILE).is_file():
            return _experiment(place / REGIME_FILE, [folder / RUNS_FILE for folder in places])
        if (place / COMPARISON_FILE).is_file():
            return _comparison(place / COMPARISON_FILE)
        if place.suffix == ".jsonl" and place.is_file():
            return _rows(place)
    raise UserError(f"there are no results {name} below {' or '.join(map(str, roots))}")


@dataclass(frozen=True)
class _Line:
    """A run, as a line of ``runs.jsonl`` or a row of an artefact's table has it."""

    cell: str
    seed: int
    run: str
    outcome: str


@dataclass(frozen=True)
class _CutShortLine:
    """A training that stopped when its time was over, with its last training NLL and its dev scores."""

    cell: str
    seed: int
    run: str
    nll: float
    dev: tuple[tuple[Count, float | None, float | None, float | None], ...]


@dataclass(frozen=True)
class _TrainedLine(_Line):
    test: dict[str, float | None]
    dev: tuple[tuple[Count, float | None, float | None], ...]
    train: tuple[tuple[Count, float | None, float | None], ...]
    measured: tuple[dict[str, Any], ...] = ()


@dataclass(frozen=True)
class _DevLine:
    run: str
    dev: tuple[tuple[Count, float | None, float | None], ...]


@dataclass(frozen=True)
class _Point:
    """A row of a table of curves."""

    cell: str
    seed: int
    step: Count


@dataclass(frozen=True)
class _Gradient(_Point):
    grad_norm_l2: float | None


@dataclass(frozen=True)
class _Recipe:
    """A recipe of a comparison: its runs, by seed."""

    name: str
    runs: tuple[str, ...]
    outcomes: tuple[str, ...]
    scores: dict[str, tuple[float | None, ...]]
    lr: float | None = None
    """The rate that was chosen; None if it was not."""

    def __post_init__(self) -> None:
        if any(len(values) != len(self.runs) for values in (self.outcomes, *self.scores.values())):
            raise UserError(f"{self.name} needs an outcome and scores for each of its {len(self.runs)} runs")


@dataclass(frozen=True)
class _Compared:
    recipes: tuple[_Recipe, ...]
    seeds: tuple[int, ...]
    lrs: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if any(len(recipe.runs) > len(self.seeds) for recipe in self.recipes):
            raise UserError(f"a recipe has more runs than the {len(self.seeds)} seeds")


def _lines(file: Path, kind: type[T]) -> list[tuple[str, T]]:
    """The lines of a file of JSON, if it is there, each with its place, such as ``runs.jsonl, line 3``.

    A line may have more than the fields of its kind. Raises UserError with the place of one that lacks some.
    """
    lines = read_lines(file) if file.is_file() else []
    places = [(f"{file}, line {number}", row) for number, row in lines]
    return [(where, from_plain(kind, row, where, more=True)) for where, row in places]


def _with_numbers(content: Any) -> Any:
    """Plain data of no declared kind, with numbers for the words "nan", "inf" and "-inf" that JSON has."""
    if isinstance(content, dict):
        return {key: _with_numbers(value) for key, value in content.items()}
    if isinstance(content, list):
        return [_with_numbers(value) for value in content]
    return float(content) if content in NOT_FINITE else content


_TABLES_OF_RUNS: Final = {"runs": _Line, "curves": _Point, "gradients": _Gradient}
"""The tables of an artefact that is trained, with the fields that their rows need."""


def _artefact(files: Sequence[Path]) -> Source:
    """Read the best of an artefact's results: its measures, its tables and, if it was trained, its runs.

    Raises UserError if all are damaged.
    """
    id_ = files[0].stem
    # a result whose artefact no module declares is judged by itself
    artefact = ARTEFACTS.get(id_, Artefact(id_, "", "", {}))
    best = best_of(artefact, files)
    if best.found is None:
        raise UserError(best.trouble)
    tables = best.found.tables
    if "runs" not in tables:
        return Source((), best.measures, tables)
    for name, kind in _TABLES_OF_RUNS.items():
        # all rows at once: one by one they take most of the time of `normlab papers`
        from_plain(list[kind], list(tables.get(name, ())), f"{best.path}, {name}", more=True)
    curves = {name: _curves(tables.get(name, ())) for name in ("curves", "gradients")}
    runs = []
    for row in tables["runs"]:
        place = row["cell"], row["seed"]
        scores = {k: v for k, v in row.items() if k not in _NO_METRIC and not k.startswith("dev_")}
        dev = curves["curves"].get(place, {})
        norms = curves["gradients"].get(place, {}).get("grad_norm_l2", ())
        runs.append(Run(*place, row["run"], row["outcome"], scores, dev, norms))
    return Source(runs, best.measures, tables)


def _curves(rows: Iterable[Row]) -> dict[tuple[str, int], dict[str, Curve]]:
    """The columns of a table of curves over its steps, by cell and seed."""
    curves: dict[tuple[str, int], dict[str, list[tuple[int, float]]]] = {}
    for row in rows:
        run = curves.setdefault((row["cell"], row["seed"]), {})
        for name, value in row.items():
            if name not in ("cell", "seed", "step") and value is not None:
                run.setdefault(name, []).append((row["step"], value))
    return {place: dict(columns) for place, columns in curves.items()}


def _experiment(file: Path, run_files: Iterable[Path]) -> Source:
    """Read a regime that was fixed before its runs, with the run of each cell and seed that is there.

    The files complete each other. Where several have a run of one cell and seed, the last file counts, which
    is the one that comes with normlab: so a finding rests on the same runs wherever it is read, and nobody
    chooses between two runs by how they came out.
    """
    plan = read_plan(file)
    planned = frozenset((cell, seed) for cell in plan.cells for seed in plan.seeds)
    runs: dict[tuple[str, int], Run] = {}
    for run_file in run_files:
        runs |= _planned_runs(run_file, planned)
    return Source(list(runs.values()), {}, {}, planned, plan.findings, plan.margins)


def _planned_runs(file: Path, planned: frozenset[tuple[str, int]]) -> dict[tuple[str, int], Run]:
    """Read the lines of ``runs.jsonl``, by cell and seed.

    Raises UserError for a run that was not planned, and for a second one of the same cell and seed.
    """
    runs: dict[tuple[str, int], Run] = {}
    for where, line in _lines(file, _TrainedLine):
        place = line.cell, line.seed
        if place not in planned:
            raise UserError(
                f"{where} is a run of the cell {line.cell!r} with seed {line.seed}, which {REGIME_FILE} does "
                "not plan; delete that line, or plan it there"
            )
        if place in runs:
            raise UserError(
                f"{where} is a second run of the cell {line.cell!r} with seed {line.seed}, and only one can "
                "count; delete that line"
            )
        runs[place] = _trained(line)
    return runs


def _trained(line: _TrainedLine) -> Run:
    return Run(
        line.cell,
        line.seed,
        line.run,
        line.outcome,
        line.test,
        _dev(line.dev, ("nll", "bleu")),
        [(step, norm) for step, _, norm in line.train if norm is not None],
        [_with_numbers(entry) for entry in line.measured],
    )


def _dev(points: Sequence[Sequence[Any]], metrics: Sequence[str]) -> dict[str, Curve]:
    """Split points of a step and several values into a curve each; a task without BLEU has none."""
    curves: dict[str, list[tuple[int, float]]] = {}
    for step, *values in points:
        for metric, value in zip(metrics, values, strict=True):
            if value is not None:
                curves.setdefault(metric, []).append((step, value))
    return dict(curves)


def _comparison(file: Path) -> Source:
    """Read a comparison: each recipe at its chosen rate, without the seed that chose it."""
    content: _Compared = from_plain(_Compared, read_json(file), str(file), more=True)
    lines = _lines(file.with_name(DEV_FILE), _DevLine)
    curves = {line.run: _dev(line.dev, ("nll", "bleu")) for _, line in lines}
    runs = []
    for recipe in content.recipes:
        for place, (run, outcome) in enumerate(zip(recipe.runs, recipe.outcomes, strict=True)):
            scores = {metric: values[place] for metric, values in recipe.scores.items()}
            seed, dev = content.seeds[place], curves.get(run, {})
            runs.append(Run(recipe.name, seed, run, outcome, scores, dev))
    chosen = {r.name: ChosenRate(r.lr, content.lrs) for r in content.recipes if r.lr and content.lrs}
    return Source(runs, rates=chosen)


def _rows(file: Path) -> Source:
    """Read a file of rows: of trainings that were cut short or, if they are of no run, a table."""
    rows = [_with_numbers(row) for _, row in _lines(file, dict)]
    if not all("run" in row for row in rows):
        return Source(tables={file.stem: rows})
    return Source([_cut_short(line) for _, line in _lines(file, _CutShortLine)])


def _cut_short(line: _CutShortLine) -> Run:
    """Read a line of a training that stopped when its time was over."""
    dev = _dev(line.dev, ("nll", "nll_exchanged", "bleu"))
    return Run(line.cell, line.seed, line.run, "", {}, dev, last_loss=line.nll)
