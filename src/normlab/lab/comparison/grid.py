"""The runs of a comparison, by recipe (or setup of the user's own), learning rate and seed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any, Final

from normlab.base.metric import NLL, Cost, Metric, selection_metric
from normlab.base.units import count, printable, short_rate
from normlab.errors import UserError
from normlab.lab.comparison.result import AROUND, CompareRequest, Sample, SweepRun, choose
from normlab.lab.config import OWN_TASK, Config, OptimConfig, SeedConfig, TrainConfig, run_id
from normlab.lab.recipes.baselines import alias_of
from normlab.lab.recipes.build import explain
from normlab.lab.recipes.grammar import describe, resolve
from normlab.lab.runs.folder import RunFolder
from normlab.lab.tasks import TASKS
from normlab.lab.training import own_runs
from normlab.lab.training.backends import backend
from normlab.lab.training.cost import cost_of
from normlab.lab.training.devices import prepare_process, resolved_precision
from normlab.lab.training.jobs import Process, Worker
from normlab.lab.training.own_setups import files_of
from normlab.lab.training.timing import Seconds, measure_side_by_side

SAMPLES: Final = 8
"""The number of test examples whose outputs are shown."""


def on_backend(request: CompareRequest) -> CompareRequest:
    """Return the request with as many jobs, and threads for each, as suit the place where it runs."""
    machine = request.base.machine
    jobs, threads = backend(request.on).share(request.jobs, machine)
    return replace(request, jobs=jobs, base=replace(request.base, machine=replace(machine, threads=threads)))


@dataclass(frozen=True)
class Background:
    """The fields of a ``Comparison`` that do not depend on any run."""

    task: str
    best_by: str
    data: dict[str, str]
    test_is_dev: bool
    unigram_entropy_nats: float | None
    overlap: dict[str, float] = field(default_factory=dict)
    sample_labels: tuple[str, str] = ("source", "reference")


@dataclass(frozen=True)
class RecipeFacts:
    """The fields of a ``RecipeResult`` that do not depend on any run."""

    resolves_to: str
    cost: Cost | None
    forced: str = ""
    explained: dict[str, str] = field(default_factory=dict)


class Grid(ABC):
    """The configurations of a comparison, by the name of a recipe or setup, learning rate and seed."""

    metrics: tuple[Metric, ...]
    """The scores of a run, the headline first."""
    rate_metric: Metric
    """The dev metric by which rates are chosen."""

    def __init__(self, request: CompareRequest) -> None:
        self.request = on_backend(request)
        self.seeds = tuple(range(request.first_seed, request.first_seed + request.seeds))

    @abstractmethod
    def rates(self, name: str) -> tuple[float, ...]:
        """The rates to choose from; if there is just one, nothing is chosen."""

    @abstractmethod
    def config(self, name: str, lr: float, seed: int) -> Config:
        """The configuration of one run."""

    @abstractmethod
    def background(self) -> Background:
        """What is known of the comparison before any run."""

    @abstractmethod
    def facts(self, name: str) -> RecipeFacts:
        """What is known of a recipe or setup before any run."""

    @abstractmethod
    def seconds(self) -> Seconds:
        """The time of one run, measured on a few of its steps and averaged over the names."""

    @abstractmethod
    def start(self, root: Path) -> Worker:
        """Return a new worker, which trains below ``root``."""

    def samples(self, outputs: Mapping[str, Sequence[str]]) -> tuple[Sample, ...]:
        """Examples with the outputs of each recipe."""
        return ()

    def label(self, name: str) -> str:
        """The name on pages."""
        return name

    def _refuse_same(self, keys: Mapping[str, str], message: str) -> None:
        """Raise UserError with both names if two have the same key, or the same short name."""
        labels = {name: self.label(name) for name in self.request.recipes}
        same_label = "{!r} and {!r} have the same short name; give one of them another"
        for key_of, words in ((keys, message), (labels, same_label)):
            first_with: dict[str, str] = {}
            for name, key in key_of.items():
                first = first_with.setdefault(key, name)
                if first != name:
                    raise UserError(words.format(first, name))

    def sweeps(self) -> list[tuple[str, float]]:
        """Each name with each rate of its sweep: the first rate of all names, then the second, and so on."""
        sweeps = [[(name, lr) for lr in self.sweep(name)] for name in self.request.recipes]
        runs: list[tuple[str, float]] = []
        for nth_of_each in zip_longest(*sweeps):
            runs += [run for run in nth_of_each if run is not None]
        return runs

    def folder(self, name: str, lr: float, seed: int) -> RunFolder:
        return RunFolder(self.request.out / run_id(self.config(name, lr, seed)))

    def sweep(self, name: str) -> dict[float, RunFolder]:
        """The folders of the sweep by rate; none if there is nothing to choose."""
        rates = self.rates(name)
        if len(rates) == 1:
            return {}
        return {lr: self.folder(name, lr, self.request.sweep_seed) for lr in rates}

    def trials(self, name: str) -> tuple[SweepRun, ...]:
        folders = self.sweep(name).items()
        return tuple(SweepRun.of(folder.path.name, lr, folder.status()) for lr, folder in folders)

    def chosen_lr(self, name: str) -> float:
        """Return the learning rate that the sweep chose, see ``choose``, or the only one."""
        trials = self.trials(name)
        return choose(trials, self.rate_metric) if trials else self.rates(name)[0]

    def open_seed_runs(self, name: str) -> int:
        """Return how many runs with the reported seeds are left, whichever learning rate is chosen."""
        if any(folder.status().state != "done" for folder in self.sweep(name).values()):
            return len(self.seeds)
        lr = self.chosen_lr(name)
        return sum(self.folder(name, lr, seed).status().state != "done" for seed in self.seeds)


def grid_of(request: CompareRequest, setups: Mapping[str, Any] | None = None) -> Grid:
    """The runs that a request asks for; it may name which of the ``setups`` it compares."""
    if setups:
        names = request.setup or tuple(setups)
        return SetupGrid(replace(request, setup=names), {name: setups[name] for name in names})
    if request.setup:
        return SetupGrid(request, files_of(request.setup))
    return RunGrid(request)


class RunGrid(Grid):
    """The grid of a comparison of recipes on one task."""

    def __init__(self, request: CompareRequest) -> None:
        super().__init__(request)
        request = self.request
        self.task = TASKS[request.base.task]
        base = resolved_precision(request.base)
        resolved = [resolve(name, base, force=request.force, kept=request.kept) for name in request.recipes]
        for config in resolved:
            self.task.check(config)
        data, self.corpus = self.task.prepare(request.base.data, request.out / "data")
        self.base = {config.recipe: replace(config, data=data) for config in resolved}
        for config in self.base.values():
            self.task.check_text(config, self.corpus)
        ids = {name: run_id(config) for name, config in self.base.items()}
        self._refuse_same(ids, "the recipes {!r} and {!r} are the same; keep one of them")
        self.metrics = self.task.metrics_on(self.corpus)
        self.rate_metric = selection_metric((NLL, *self.metrics), self.task.rate_metric.name)
        self._costs: dict[str, Cost] = {}

    def rates(self, name: str) -> tuple[float, ...]:
        return tuple(self.request.lrs)

    def config(self, name: str, lr: float, seed: int) -> Config:
        base = self.base[name]
        return replace(base, optim=replace(base.optim, lr=lr), seeds=SeedConfig.of(seed))

    def background(self) -> Background:
        corpus, task = self.corpus, self.task
        return Background(
            task=task.name,
            best_by=selection_metric(self.metrics, self.request.base.train.best_by).name,
            data=corpus.facts,
            test_is_dev=self._test_is_dev(),
            unigram_entropy_nats=corpus.unigram_entropy_nats,
            overlap=getattr(corpus, "overlap", {}),
            sample_labels=task.example_labels,
        )

    def _test_is_dev(self) -> bool:
        """Whether all of the test text is dev text: its sentences are the same, or no test text was given."""
        if getattr(self.corpus, "overlap", {}).get("test in dev") == 1:
            return True
        given = [name for name in self.task.texts if getattr(self.request.base.data, name)]
        trains = any(name.startswith("train_") for name in given)
        tests = any(name.startswith("test_") for name in given)
        return trains and not tests

    def facts(self, name: str) -> RecipeFacts:
        config = self.base[name]
        description = describe(config)
        _, has_alias, recipe = name.partition("=")
        if has_alias:
            description = f"{recipe.strip()}: {description}"
        return RecipeFacts(description, self._cost(name), config.forced, explain(config))

    def label(self, name: str) -> str:
        return alias_of(name)

    def _cost(self, name: str) -> Cost:
        if name not in self._costs:
            config = self.base[name]
            task = self.task(config, self.corpus, prepare_process(config.machine))
            batch = task.batch(0)
            self._costs[name] = cost_of(task.build(), lambda m: task.loss(m, batch).loss, batch.tokens)
        return self._costs[name]

    def samples(self, outputs: Mapping[str, Sequence[str]]) -> tuple[Sample, ...]:
        """Test examples on which the recipes disagree, evenly spread over the text."""
        expected = self.task.test_examples(self.request.base, self.corpus)
        if not outputs or not expected:
            return ()
        disputed = [i for i in range(len(expected)) if len({lines[i] for lines in outputs.values()}) > 1]
        rows = disputed or list(range(len(expected)))
        spread = rows[:: max(1, len(rows) // SAMPLES)][:SAMPLES]
        samples = []
        for row in spread:
            source, reference = map(printable, expected[row])
            of_recipes = {name: printable(lines[row]) for name, lines in outputs.items()}
            samples.append(Sample(source, reference, of_recipes))
        return tuple(samples)

    def seconds(self) -> Seconds:
        return measure_side_by_side(list(self.base.values()), self.request.out, self.request.jobs)

    def start(self, root: Path) -> Worker:
        return backend(self.request.on).start(root)


class SetupGrid(Grid):
    """The grid of a comparison of setups of the user's own. All use the batches, and the held-out batches, of
    the first.
    """

    def __init__(self, request: CompareRequest, setups: Mapping[str, Any]) -> None:
        if request.on != "local":
            raise UserError(
                f"--on is {request.on!r}, but setups of your own run on this machine; leave it out"
            )
        self.setups = setups
        self.are_files = all(isinstance(value, str) for value in setups.values())
        self.seen = {name: own_runs.read(setups, name, request.sweep_seed) for name in setups}
        self.first = next(iter(self.seen))
        first = self.seen[self.first]
        self.rate_metric = own_runs.metric_of(first.scale)
        self.metrics = (self.rate_metric,)
        base = replace(request.base, machine=replace(request.base.machine, device=first.device))
        jobs = request.jobs if self.are_files else 1  # functions run in this process
        super().__init__(replace(request, jobs=jobs, base=base))
        self._require_comparable()

    def _require_comparable(self) -> None:
        """Raise UserError if two setups are the same, or do not see the same batches or have one unit."""
        digests = {name: seen.digest for name, seen in self.seen.items()}
        self._refuse_same(digests, "{} and {} are the same, file by file; change one of them")
        if len({seen.batches for seen in self.seen.values()}) > 1:
            raise UserError(
                f"{self.first} draws other batches each time from the same seed, but all runs of "
                "a seed must see the same: take seed as an argument of setup(), and seed every generator"
            )
        units = {own_runs.metric_of(seen.scale).label for seen in self.seen.values()}
        if len(units) > 1:
            raise UserError(
                f"the losses have different units, {' and '.join(sorted(units))}: one is just a "
                "cross-entropy, and another is not; let loss= return the same in each file"
            )

    def rates(self, name: str) -> tuple[float, ...]:
        if self.request.lrs:
            return tuple(self.request.lrs)
        rate = self.seen[name].course.rate
        return tuple(float(f"{rate * factor:.6g}") for factor in AROUND)  # six digits, as they are shown

    def config(self, name: str, lr: float, seed: int) -> Config:
        train, machine = self.request.base.train, self.request.base.machine
        return Config(
            recipe=name,
            task=OWN_TASK,
            own_code=self.seen[name].digest,
            optim=OptimConfig(lr=lr),
            train=TrainConfig(steps=train.steps, validate_every_steps=train.validate_every_steps),
            seeds=SeedConfig.of(seed),
            machine=machine,
        )

    def background(self) -> Background:
        seen = self.seen[self.first]
        first, steps = self.label(self.first), self.request.base.train.steps
        scored = "the mean loss of the last tenth of the steps, each before its step"
        if seen.held_out:
            scored = count(seen.held_out, "batch")
        facts = {
            "batches": f"those of {first}, for all",
            "held out": f"{scored}; every second one chooses rates, the others are reported",
        }
        planned = seen.planned_steps
        if planned and planned != steps:
            facts["steps"] = f"{steps:,}, where {first} plans {planned:,}: its schedule does not end"
        compiled = [self.label(name) for name, setup in self.seen.items() if setup.compiled]
        if compiled:
            facts["compiled"] = f"{', '.join(compiled)}, and trained as written: no time is of compiled code"
        return Background(
            task=OWN_TASK,
            best_by="",
            data=facts,
            test_is_dev=seen.held_out == 1,
            unigram_entropy_nats=seen.scale.unigram,
        )

    def facts(self, name: str) -> RecipeFacts:
        seen = self.seen[name]
        description = f"{seen.kind}, own rate {short_rate(seen.course.rate)}"
        if self.are_files and self.label(name) != self.setups[name]:
            description = f"{self.setups[name]}: {description}"
        return RecipeFacts(description, seen.cost)

    def label(self, name: str) -> str:
        return alias_of(name) if self.are_files and self.setups[name] != name else name

    def seconds(self) -> Seconds:
        seed = self.request.sweep_seed
        configs = [self.config(name, self.rates(name)[0], seed) for name in self.seen]
        if self.are_files:
            return measure_side_by_side(configs, self.request.out, self.request.jobs, self.request.setup)
        return Seconds.mean([Seconds(*own_runs.rehearse(config, self.setups)) for config in configs])

    def start(self, root: Path) -> Worker:
        return Process(root, self.request.setup) if self.are_files else own_runs.Here(root, self.setups)
