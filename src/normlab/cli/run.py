"""``normlab run list``, ``report``, ``fold`` and ``export``: the runs there are, pages, and plain models."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, arg

from normlab.base.files import blame, read_json, regular_or_new, write_output
from normlab.base.io import from_plain
from normlab.base.metric import Metric, in_words, selection_metric
from normlab.base.units import duration, rate, steps_named
from normlab.cli import terminal
from normlab.cli.options import RUNS, RunFlags
from normlab.cli.progress import state_of
from normlab.errors import UserError
from normlab.lab.comparison.result import Comparison
from normlab.lab.config import Config
from normlab.lab.runs import RunFolder, Runs
from normlab.lab.runs.folder import Status, find_run, named_output, read_scores
from normlab.lab.runs.manifest import committed, read_state

STALE = "stale"
FORCED = "forced"


@dataclass(frozen=True)
class ListCommand:
    """List the runs of a folder with their recipes, progress and scores."""

    runs: Path = RUNS
    """Folder of the run folders."""

    def run(self) -> None:
        print_runs(Runs(self.runs))


@dataclass(frozen=True)
class ReportCommand:
    """Write the page of a comparison again, or that of a single run or of the probes of another trainer."""

    of: Annotated[Positional[str], arg(metavar="RUN")] = ""
    """A run's folder or the start of its id, comparison.json or watch.jsonl; by default that of --runs."""
    page: Path | None = None
    """File for the page; by default beside the data that it shows."""
    runs: Path = RUNS
    """Folder of the run folders."""

    def run(self) -> None:
        print(f"page: {self.write()}")

    def write(self) -> Path:
        """Write the page of what is named; return its path."""
        if self.of.endswith(".jsonl"):
            return self._write_probes(Path(self.of))
        if self.of and not self.of.endswith(".json"):
            return self._write_run(find_run(self.of, self.runs))
        return self._write_comparison()

    def _write_probes(self, probes: Path) -> Path:
        from normlab.report.watch import write_probes_page

        return write_probes_page(probes, self._page(probes, probes.with_suffix(".html")))

    def _write_run(self, folder: RunFolder) -> Path:
        from normlab.report.run import run_page

        page = self._page(folder.path, folder.path / "run.html")
        write_output(page, run_page(folder.path))
        return page

    def _write_comparison(self) -> Path:
        from normlab.report.compare import write_compare_page

        stored = Path(self.of or self.runs / "comparison.json")
        if not stored.is_file():
            raise FileNotFoundError(
                f"there is no comparison in {stored}; make one: normlab compare --out {self.runs}"
            )
        page = self._page(stored, stored.with_suffix(".html"))
        content = read_json(stored)
        with blame(stored):
            comparison = from_plain(Comparison, content)
        return write_compare_page(comparison, stored.parent, page)

    def _page(self, data: Path, default: Path) -> Path:
        """Return the path of the page of some data. Raises UserError if no page may be written there."""
        if self.page is None:
            return regular_or_new(default)
        if str(self.page) == "-":
            raise UserError("--page is '-'; type --page /dev/stdout for standard output, or name a file")
        return named_output(self.page, [data])


@dataclass(frozen=True, kw_only=True)
class FoldCommand(RunFlags):
    """Rewrite a trained model as the plainest model that computes the same, in a run folder of its own.

    Factors of the method (Admin's omega, ReZero's alpha, LayerScale's lambda ...) are multiplied into the
    weights beside them. First the logits of dev batches and the greedy translations of both are compared; a
    model that differs by more than rounding explains is refused.
    """

    out: Path | None = None
    """Folder to write; by default plain-RUN beside the run."""
    max_positions: int | None = None
    """Longest input of a plain model that has a table of positions; by default as in the run's config."""

    def run(self) -> None:
        from normlab.lab.training.fold import BOUND, fold

        folder = self.folder()
        out = self.out or folder.path.with_name(f"plain-{folder.path.name}")
        folded = fold(folder, out, weights=self.weights or "", max_positions=self.max_positions)
        allowed = BOUND * folded.largest_logit
        print(f"rewrote {folded.before} as {folded.after} ({folded.weights}) in {folded.run}")
        for sentence in folded.kept:
            print(f"  {sentence}")
        print(
            f"largest difference of logits on {folded.batches} dev batches: {folded.float32:.2g} in float32, "
            f"{folded.float64:.2g} in float64 (largest logit {folded.largest_logit:.3g}; allowed in float32: "
            f"{allowed:.2g})"
        )
        if folded.outputs:
            print(f"greedy outputs on dev: {folded.equal_outputs:,} of {folded.outputs:,} are equal")
        print(f"parameters: {folded.parameters_before:,} before, {folded.parameters_after:,} after")
        if folded.positions:
            print(f"longest input: {folded.positions:,} positions")
        print(f"run: {out}")


@dataclass(frozen=True, kw_only=True)
class ExportCommand(RunFlags):
    """Write the language model of a run as a folder that AutoModelForCausalLM.from_pretrained loads.

    First the logits of the folder's model are compared with the run's; a model that differs by more than
    rounding explains is refused. A recipe that fits no family is refused, and the reason given.
    """

    to: Literal["huggingface"] = "huggingface"
    """The library that will load it."""
    out: Path | None = None
    """Folder to write; by default huggingface-RUN beside the run."""

    def run(self) -> None:
        from normlab.lab.training.export import export

        folder = self.folder()
        out = self.out or folder.path.with_name(f"{self.to}-{folder.path.name}")
        written = export(folder, out, weights=self.weights or "")
        print(f"exported {folder.path.name} as {written.kind} ({written.weights})")
        print(
            f"largest difference of logits in float32: {written.float32:.2g} (largest logit "
            f"{written.largest_logit:.3g})"
        )
        print(f"tokenizer: {written.tokenizer}")
        print(f"model: {out}")


def print_run(folder: RunFolder) -> None:
    """Print the outcome and the scores of a run."""
    status, metrics = folder.status(), folder.task_metrics()
    selection = selection_metric(metrics, folder.config().train.best_by)
    if folder.start.exists():
        terminal.write(read_json(folder.start)["sentence"])
    if status.outcome:
        terminal.write(f"{status.outcome.state} at step {status.outcome.step}: {status.outcome.evidence}")
    if status.stopped:
        terminal.write(_stopped(status))
    for report in folder.flights():
        terminal.write(f"flight recorder: {report['verdict']['sentence']}")
    if status.best_step is not None:
        dev = selection.with_label(status.best_dev.get(selection.name))
        terminal.write(f"best checkpoint: step {status.best_step}, dev {dev}")
    _print_scores(folder, metrics, selection)
    terminal.write(f"{duration(status.train_seconds)} of training; run folder: {folder.path}")


def _print_scores(folder: RunFolder, metrics: Sequence[Metric], selection: Metric) -> None:
    """Print the test scores: of an average of checkpoints, if there is one, beside those of the best."""
    if folder.best_scores.exists():
        terminal.write(f"test {in_words(metrics, read_scores(folder.best_scores))}")
        average = read_state(committed(folder.average))
        dev = selection.with_label(average["dev"].get(selection.name))
        terminal.write(f"average of {steps_named(average['average']['steps'])}: dev {dev}")
        terminal.write(f"its test {in_words(metrics, read_scores(folder.scores))}")
    elif folder.scores.exists():
        terminal.write(f"test {in_words(metrics, read_scores(folder.scores))}")


def _stopped(status: Status) -> str:
    return f"ended at step {status.step:,}: {status.stopped}"


def print_runs(store: Runs) -> None:
    """Print one row per run, and the reason for each folder that cannot be read."""
    header = ("run", "recipe", ">lr", ">seed", ">step", "state", ">dev", ">test", ">time")
    rows: list[list[str]] = []
    forced: dict[str, str] = {}
    damaged: list[str] = []
    stopped: list[str] = []
    for folder in store:
        try:
            rows.append(_run_cells(folder))
            config, status = folder.config(), folder.status()
            if status.stopped:
                stopped.append(f"{folder.path.name}: {_stopped(status)}")
            if config.forced:
                forced[config.recipe] = config.forced
        except (UserError, OSError) as error:
            damaged.append(f"{folder.path.name}: {error}")
    if rows:
        terminal.write(terminal.fitted(header, rows, (">time", ">step", ">dev", ">seed")))
    elif not damaged:
        terminal.write(f"no runs in {store.root}; `normlab train` or `normlab compare` makes some")
    if any(STALE in row[header.index("state")] for row in rows):
        terminal.write("stale: made by older code; the current code would give other numbers and another id")
    terminal.write(*forced_lines(forced), *stopped, *damaged)


def forced_lines(reasons: Mapping[str, str]) -> list[str]:
    """One line for each recipe marked as forced, with the reason."""
    return [f"{FORCED}: {recipe}: {reason}" for recipe, reason in reasons.items()]


def _run_cells(folder: RunFolder) -> list[str]:
    config, status, metrics = folder.config(), folder.status(), folder.task_metrics()
    selection = selection_metric(metrics, config.train.best_by)
    return [
        folder.path.name,
        config.recipe,
        rate(config.optim.lr),
        str(config.seeds.init),
        f"{status.step:,}/{config.train.steps:,}",
        ", ".join(_states(folder, config, status)),
        selection.with_label(status.best_dev.get(selection.name)),
        in_words(metrics[:1], read_scores(folder.scores)),
        duration(status.train_seconds),
    ]


def _states(folder: RunFolder, config: Config, status: Status) -> Iterator[str]:
    """Yield the state of a run, and what marks its numbers."""
    host = folder.elsewhere() if status.state == "running" else ""
    yield f"running on {host}" if host else state_of(status)
    if folder.stale():
        yield STALE
    if config.forced:
        yield FORCED
