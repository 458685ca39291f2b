"""``normlab compare``: a learning rate tuned for each recipe, then seeds, then one honest table."""

from __future__ import annotations

import datetime
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median

from normlab.comparison.significance import bleu_interval, differences, sentence_statistics
from normlab.data.prepare import Corpus
from normlab.data.text import read_lines
from normlab.errors import UserError
from normlab.jobs.queue import Queue, Watch
from normlab.recipes.explain import explain
from normlab.recipes.grammar import describe, resolve
from normlab.spec.comparison import Comparison, Interval, RecipeResult, Sample, Trial
from normlab.spec.config import Config, SeedConfig, run_id
from normlab.spec.request import CompareRequest, usable_cores
from normlab.spec.serialise import to_json
from normlab.store.folder import RunFolder, read_json, write_text_atomic
from normlab.tasks.translation import Translation
from normlab.training.devices import hardware, prepare_process, resolved_precision
from normlab.training.measure import Seconds, measure


@dataclass(frozen=True)
class PlannedRun:
    """One run that a comparison will make, or finds made."""

    recipe: str
    lr: float
    seed: int
    run: str
    done: bool


@dataclass(frozen=True)
class ComparePlan:
    """What a comparison would train and how long that takes on this machine."""

    sweep: tuple[PlannedRun, ...]
    """Every recipe at every learning rate, with the first seed."""
    seed_runs: int
    """Runs with the other seeds, at learning rates that the sweep will choose."""
    resolves_to: dict[str, str]
    seconds: Seconds
    """Of one run, measured on a few steps of the first recipe."""
    total_seconds: float
    """Of everything that is not done yet, over ``jobs`` processes; stuck runs that stop early make it
    shorter.
    """


class _Grid:
    """The configurations of a comparison, by recipe, learning rate and seed."""

    def __init__(self, request: CompareRequest) -> None:
        if request.base.task != Translation.name:
            raise UserError(
                f"a comparison scores translations, and the configuration's task is {request.base.task}; "
                f"train its recipes one by one with `normlab train`, `normlab runs` shows their test scores"
            )
        self.request = request
        self.seeds = tuple(range(request.first_seed, request.first_seed + request.seeds))
        threads = request.base.machine.threads or max(1, usable_cores() // request.jobs)
        machine = replace(request.base.machine, threads=threads)
        base = resolved_precision(request.base)
        resolved = [resolve(name, base, force=request.force) for name in request.recipes]
        for config in resolved:
            Translation.check(config)
        data, self.corpus = Translation.prepare(request.base.data, request.out / "data")
        self.base = {c.recipe: replace(c, data=data, machine=machine) for c in resolved}
        for config in self.base.values():
            Translation.check_text(config, self.corpus)
        self._refuse_same()

    def _refuse_same(self) -> None:
        """Two names of one recipe would train the same run twice at the same time."""
        names: dict[str, str] = {}
        for name, config in self.base.items():
            other = names.setdefault(run_id(config), name)
            if other != name:
                raise UserError(f"the recipes {other!r} and {name!r} are the same; keep one of them")

    def config(self, recipe: str, lr: float, seed: int) -> Config:
        base = self.base[recipe]
        return replace(base, optim=replace(base.optim, lr=lr), seeds=SeedConfig(seed, seed, seed))

    def folder(self, recipe: str, lr: float, seed: int) -> RunFolder:
        return RunFolder(self.request.out / run_id(self.config(recipe, lr, seed)))

    def trial(self, recipe: str, lr: float) -> Trial:
        """The run of the first seed, as the sweep sees it."""
        folder = self.folder(recipe, lr, self.seeds[0])
        status = folder.status()
        outcome = status.outcome.state if status.outcome else status.state
        return Trial(lr, folder.path.name, status.best_dev.get("bleu"), status.best_dev.get("nll"), outcome)

    def chosen_lr(self, recipe: str) -> float:
        """Of the learning rates that trained, or of all where none did, the one with the best dev score; of
        equal ones that with the lower dev likelihood loss, then the smaller.
        """
        by_nll = Translation.decides(self.request.base).name == "nll"

        def merit(trial: Trial) -> tuple[bool, float, float, float]:
            bleu = -1.0 if trial.dev_bleu is None else trial.dev_bleu
            nll = math.inf if trial.dev_nll is None or math.isnan(trial.dev_nll) else trial.dev_nll
            score = -nll if by_nll else bleu
            return (trial.outcome == "trained", score, -nll, -trial.lr)

        return max((self.trial(recipe, lr) for lr in self.request.lrs), key=merit).lr

    def open_seed_runs(self, recipe: str) -> int:
        """How many runs with the other seeds are left, whatever learning rate they will have."""
        states = [self.folder(recipe, lr, self.seeds[0]).status().state for lr in self.request.lrs]
        if any(state != "done" for state in states):
            return len(self.seeds) - 1
        lr = self.chosen_lr(recipe)
        return sum(self.folder(recipe, lr, seed).status().state != "done" for seed in self.seeds[1:])


def plan(request: CompareRequest) -> ComparePlan:
    """What ``compare`` would do: the runs by name and the time they take, measured on a few real steps."""
    grid = _Grid(request)
    sweep = tuple(
        PlannedRun(recipe, lr, grid.seeds[0], folder.path.name, folder.status().state == "done")
        for recipe in request.recipes
        for lr in request.lrs
        for folder in [grid.folder(recipe, lr, grid.seeds[0])]
    )
    seed_runs = len(request.recipes) * (len(grid.seeds) - 1)
    seconds = measure(next(iter(grid.base.values())), grid.corpus)
    open_runs = sum(not p.done for p in sweep) + sum(map(grid.open_seed_runs, request.recipes))
    rounds = -(-open_runs // request.jobs)
    return ComparePlan(
        sweep=sweep,
        seed_runs=seed_runs,
        resolves_to={name: describe(config) for name, config in grid.base.items()},
        seconds=seconds,
        total_seconds=rounds * seconds.run,
    )


def compare(request: CompareRequest, watch: Watch = lambda folders: None) -> Comparison:
    """Train every recipe at every learning rate, its other seeds at the best one, and compare them on the
    test text.

    Each recipe's learning rate is chosen on dev with the first seed. A run that diverges, is stuck or fails
    is a result and stops nothing; runs that are done are not done again. Writes ``comparison.json`` into
    ``request.out``.
    """
    grid = _Grid(request)
    work = Queue(request.out, request.jobs, watch)
    open_trials = {recipe: set(request.lrs) for recipe in request.recipes}

    def after(config: Config) -> None:
        trials = open_trials[config.recipe]
        if config.optim.lr in trials and config.seeds.init == grid.seeds[0]:
            trials.remove(config.optim.lr)
            if not trials:
                lr = grid.chosen_lr(config.recipe)
                for seed in grid.seeds[1:]:
                    work.add(grid.config(config.recipe, lr, seed))

    for lr in request.lrs:
        for recipe in request.recipes:
            work.add(grid.config(recipe, lr, grid.seeds[0]))
    work.run(after)
    comparison = _conclude(grid, work.failed)
    write_text_atomic(request.out / "comparison.json", to_json(comparison))
    return comparison


def _conclude(grid: _Grid, failed: dict[str, str]) -> Comparison:
    request = grid.request
    chosen = {recipe: grid.chosen_lr(recipe) for recipe in request.recipes}
    folders = {r: [grid.folder(r, chosen[r], seed) for seed in grid.seeds] for r in request.recipes}
    translated = {r: [f for f in runs if f.outputs.exists()] for r, runs in folders.items()}
    systems = {r: [read_lines(f.outputs) for f in runs] for r, runs in translated.items() if runs}
    references, language = grid.corpus.test_text.target, request.base.data.target_lang
    intervals = {
        recipe: bleu_interval(
            sentence_statistics(outputs, references, target_lang=language), resamples=request.resamples
        )
        for recipe, outputs in systems.items()
    }
    due = _repeated(references)
    repeated = {
        recipe: tuple(share if share > due else 0.0 for share in map(_repeated, outputs))
        for recipe, outputs in systems.items()
    }
    device = prepare_process(next(iter(grid.base.values())).machine)
    return Comparison(
        title=request.title,
        command=request.command,
        date=datetime.date.today().isoformat(),
        machine=f"{hardware(device)}, {request.jobs} runs at a time",
        data=grid.corpus.facts,
        seeds=grid.seeds,
        lrs=tuple(request.lrs),
        recipes=tuple(
            _recipe_result(
                *(grid, recipe, chosen[recipe], folders[recipe]),
                bleu=intervals.get(recipe),
                repeated=repeated.get(recipe, ()),
            )
            for recipe in request.recipes
        ),
        differences=differences(systems, references, resamples=request.resamples, target_lang=language),
        samples=_samples(grid.corpus, {recipe: runs[0] for recipe, runs in systems.items()}),
        failed=tuple(f"{run}: {reason}" for run, reason in failed.items()),
        test_is_dev=bool(request.base.data.train_src) and not request.base.data.test_src,
        unigram_entropy_nats=grid.corpus.unigram_entropy_nats,
        **_signatures(run for runs in translated.values() for run in runs),
    )


def _recipe_result(
    grid: _Grid,
    recipe: str,
    lr: float,
    folders: Sequence[RunFolder],
    *,
    bleu: Interval | None,
    repeated: tuple[float, ...],
) -> RecipeResult:
    statuses = [f.status() for f in folders]
    scores = [read_json(f.scores) for f in folders if f.scores.exists()] if bleu else []
    dev = [s.best_dev.get("bleu") for s in statuses if s.best_dev.get("bleu") is not None]
    sweep = [grid.folder(recipe, other, grid.seeds[0]) for other in grid.request.lrs]
    every = {f.path: f for f in [*sweep, *folders]}.values()
    return RecipeResult(
        name=recipe,
        resolves_to=describe(grid.base[recipe]),
        trials=tuple(grid.trial(recipe, rate) for rate in grid.request.lrs),
        lr=lr,
        runs=tuple(f.path.name for f in folders),
        outcomes=tuple(s.outcome.state if s.outcome else s.state for s in statuses),
        bleu=bleu,
        chrf=fmean(s["chrf"] for s in scores) if scores else None,
        bleu_tokenised=fmean(s["bleu_tokenised"] for s in scores) if scores else None,
        dev_bleu=fmean(dev) if dev else None,
        train_seconds=median(s.train_seconds for s in statuses),
        total_seconds=sum(f.status().train_seconds for f in every),
        forced=grid.base[recipe].forced,
        explained=explain(grid.base[recipe]),
        repeated=repeated,
    )


def _repeated(lines: Sequence[str]) -> float:
    """The share that the commonest line has."""
    return max(Counter(lines).values()) / len(lines)


def _signatures(folders: Iterable[RunFolder]) -> dict[str, str]:
    """sacreBLEU's signatures, the same for every run of a comparison; empty where no run ended."""
    for folder in folders:
        said = read_json(folder.scores)["signatures"]
        return dict(zip(("signature", "signature_chrf", "signature_tokenised"), said.values(), strict=True))
    return {"signature": ""}


def _samples(corpus: Corpus, outputs: dict[str, list[str]], count: int = 8) -> tuple[Sample, ...]:
    """Test sentences on which the recipes disagree, evenly spread over the text."""
    pairs = corpus.test_text
    if not outputs:
        return ()
    disputed = [i for i in range(len(pairs)) if len({lines[i] for lines in outputs.values()}) > 1]
    rows = disputed or list(range(len(pairs)))
    spread = rows[:: max(1, len(rows) // count)][:count]
    return tuple(
        Sample(pairs.source[i], pairs.target[i], {name: lines[i] for name, lines in outputs.items()})
        for i in spread
    )
