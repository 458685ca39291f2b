"""Trainings that count for findings: ``NORMLAB_DATA=... python tools/experiments.py REGIME ...``.

A regime is a folder ``results/REGIME`` with a hand-written ``regime.toml``, which is committed before its
runs: what it asks, the cells that it trains, the seeds, and what has to be fixed beforehand. Each finished
run leaves one line in ``runs.jsonl`` beside it, with metrics alone. A configuration that has a line is
skipped, and an interrupted run goes on from its last checkpoint. The weights of a run stay in the folder of
``--runs`` until its line is written. Without names the regimes are listed, with how many of their runs are
there. With ``--pilot`` the pilots of a regime are trained instead, with a seed that never counts, into
``pilots.jsonl``.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import subprocess
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from normlab.base.files import row_line
from normlab.cli.presets import CONFIGS
from normlab.errors import UserError
from normlab.lab.config import Config, MachineConfig, SeedConfig
from normlab.lab.recipes.grammar import resolve
from normlab.lab.runs.folder import Row, RunFolder
from normlab.lab.training.train import train
from normlab.papers.bases import BERT_SHORT
from normlab.papers.end_measures import measure_run
from normlab.papers.nguyen2019.bases import GL_EN_SMALL, PAST_BEST
from normlab.papers.trainings import changed
from pilots import FIRST_SEED, HOME, REAL, key, line, provenance

RESULTS: Final = HOME / "results"
REGIME_FILE: Final = "regime.toml"
RUNS_FILE: Final = "runs.jsonl"
PILOTS_FILE: Final = "pilots.jsonl"
READY, PILOT_FIRST = "ready", "pilot first"
MOST_POINTS: Final = 100
"""Most points of the curve of the training loss that a line keeps."""
BASES: Final[Mapping[str, Callable[[], Config]]] = {
    **CONFIGS,
    "bert_short": lambda: BERT_SHORT,
    "gl_en_5e-4": lambda: GL_EN_SMALL,
    "multi30k_width_64": lambda: REAL,
    "past_best": lambda: PAST_BEST["laptop"].base,
}
"""The configurations that a regime may start from, by name."""


@dataclass(frozen=True)
class Regime:
    """What ``regime.toml`` says."""

    name: str
    question: str
    findings: tuple[str, ...]
    """The findings that it serves, by the numbers of the findings' table, such as N3."""
    artefacts: tuple[str, ...] = field(default=(), kw_only=True)
    """Figures and tables that it serves besides, by their ids."""
    base: str
    """A name of ``BASES``."""
    changes: Mapping[str, Any]
    """What all cells change of the base, under names like ``optim.lr``."""
    cells: Mapping[str, Mapping[str, Any]]
    """What each cell changes besides, its recipe included."""
    seeds: tuple[int, ...]
    used_before: tuple[int, ...]
    """Seeds of earlier runs of the same text, whose results were known when the regime was written."""
    status: str
    """``ready``; or ``pilot first``, and then no run counts yet."""
    pilot: str
    """What pilots showed, or have to show."""
    fixed: str
    """What is fixed before the runs, besides the fields here."""
    pilots: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Cells that a pilot trains, as in ``cells``."""
    margins: Mapping[str, float] = field(default_factory=dict)
    """Metric to the margin within which two cells count as equal."""
    paired_with: str = ""
    """Another regime whose seeds it shares on purpose."""
    measure: tuple[str, ...] = ()
    """What is measured on the weights of a finished run, by the names of ``papers.end_measures``."""
    measure_at: tuple[int, ...] = ()
    """Steps whose weights are measured, besides the best ones on dev."""

    def __post_init__(self) -> None:
        if self.status not in (READY, PILOT_FIRST):
            raise UserError(f"{self.name}: status is {READY!r} or {PILOT_FIRST!r}, not {self.status!r}")
        if self.base not in BASES:
            raise UserError(f"{self.name}: there is no base {self.base!r}; there are {', '.join(BASES)}")

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
            yield cell, FIRST_SEED, self._config(changes, FIRST_SEED)

    def _config(self, changes: Mapping[str, Any], seed: int) -> Config:
        config = changed(changed(BASES[self.base](), self.changes), changes)
        # "auto" is another precision on another machine
        if config.train.precision == "auto":
            raise UserError(f"{self.name} has to say its train.precision, fp32 or bf16")
        steps = ",".join(map(str, self.measure_at))
        machine = MachineConfig("cpu", threads=1, probes="", keep_checkpoints=steps)
        return resolve(config.recipe, replace(config, seeds=SeedConfig.of(seed), machine=machine))


def read_regime(name: str, results: Path = RESULTS) -> Regime:
    """Read ``results/NAME/regime.toml``. Raises UserError for an entry that a regime does not have."""
    content = tomllib.loads((results / name / REGIME_FILE).read_text(encoding="utf-8"))
    known = {f.name for f in fields(Regime)}
    if unknown := sorted(content.keys() - known):
        raise UserError(f"{name}: a regime has no {', '.join(unknown)}")
    for entry, value in content.items():
        if isinstance(value, list):
            content[entry] = tuple(value)
    return Regime(name=name, **content)


def regimes(results: Path = RESULTS) -> list[str]:
    """The names of all regimes."""
    return sorted(path.parent.name for path in results.glob(f"*/{REGIME_FILE}"))


def kept(file: Path) -> dict[str, Row]:
    """The lines of a file of runs, by key."""
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    return {row["key"]: row for row in map(json.loads, lines)}


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
        norm = max(row["grad_norm_l2"] for row in group)
        curve.append([group[-1]["step"], round(nll, 4), round(norm, 3)])
    return curve


def experiment_line(cell: str, seed: int, config: Config, folder: RunFolder) -> Row:
    """What is kept of a finished run."""
    status = folder.status()
    return {
        **line(cell, seed, config, folder),
        "run": folder.path.name,
        "steps": status.step,
        "best_step": status.best_step,
        "evidence": status.outcome.evidence if status.outcome else "",
        "dev": dev_curve(folder),
        "train": train_curve(folder),
    }


def run(name: str, runs: Path, results: Path = RESULTS) -> None:
    """Train what is missing of a regime. Raises UserError for a regime that waits for its pilot."""
    regime = read_regime(name, results)
    if regime.status == PILOT_FIRST:
        raise UserError(f"{name} waits for its pilot: {regime.pilot}")
    _train_missing(regime, regime.configs(), runs, results / name / RUNS_FILE)


def run_pilots(name: str, runs: Path, results: Path = RESULTS) -> None:
    """Train what is missing of the pilots of a regime."""
    regime = read_regime(name, results)
    _train_missing(regime, regime.pilot_configs(), runs, results / name / PILOTS_FILE)


def _train_missing(
    regime: Regime, configs: Iterable[tuple[str, int, Config]], runs: Path, file: Path
) -> None:
    """Train each configuration that has no line in the file yet, one after the other."""
    # the commit of the code that runs, which the checkout may leave before the last run ends
    commit = provenance()["commit"]
    for cell, seed, config in configs:
        if key(config) in kept(file):
            continue
        started = datetime.now(UTC).strftime("%Y-%m-%d %H:%M")
        folder = train(config, runs)
        row = {**experiment_line(cell, seed, config, folder), "commit": commit, "started": started}
        if regime.measure:
            row["measured"] = measure_run(folder, regime.measure)
        with file.open("a", encoding="utf-8") as lines:
            lines.write(row_line(row))
        for weights in (folder.last, folder.previous, folder.best, folder.steps):
            shutil.rmtree(weights, ignore_errors=True)
        scores = row["dev"][-1:], row["test"], row["seconds"]
        print(regime.name, cell, seed, row["outcome"], *scores, flush=True)


def require_committed(name: str) -> None:
    """Raise UserError if the regime or the code that trains it has changes that are not committed."""
    places = ["src", "tools", str((RESULTS / name / REGIME_FILE).relative_to(HOME))]
    command = ["git", "-C", str(HOME), "status", "--porcelain", "--", *places]
    if changes := subprocess.run(command, capture_output=True, text=True, check=True).stdout:
        raise UserError(f"commit these before the runs of {name}:\n{changes}")


def main() -> None:
    """Run the named regimes, or list all."""
    parser = argparse.ArgumentParser(description="Trainings that count for findings.")
    parser.add_argument("regime", nargs="*", choices=[[], *regimes()], default=[])
    parser.add_argument("--runs", type=Path, default=Path("runs/experiments"), help="folder of run folders")
    parser.add_argument("--pilot", action="store_true", help="train the pilots of the named regimes")
    asked = parser.parse_args()
    for name in asked.regime:
        require_committed(name)
        if asked.pilot:
            run_pilots(name, asked.runs)
        else:
            run(name, asked.runs)
    if not asked.regime:
        for name in regimes():
            regime = read_regime(name)
            configs = list(regime.configs())
            there = sum(key(config) in kept(RESULTS / name / RUNS_FILE) for *_, config in configs)
            waiting = "" if regime.status == READY else f" ({regime.status})"
            print(f"{name}: {there} of {len(configs)}{waiting}; {regime.question}")


if __name__ == "__main__":
    main()
