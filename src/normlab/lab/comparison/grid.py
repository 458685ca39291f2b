"""The runs of a comparison by recipe, or by setup of the user's own, learning rate and seed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
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
"""The outputs of so many test examples are shown."""


def on_backend(request: CompareRequest) -> CompareRequest:
    """Return the request with as many jobs, and threads for each, as suit the place where it runs."""
    machine = request.base.machine
    jobs, threads = backend(request.on).share(request.jobs, machine)
    return replace(request, jobs=jobs, base=replace(request.base, machine=replace(machine, threads=threads)))


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
    def known(self) -> dict[str, Any]:
        """The fields of ``Comparison`` that do not depend on any run."""

    @abstractmethod
    def recipe(self, name: str) -> dict[str, Any]:
        """The fields of ``RecipeResult`` that do not depend on any run."""

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
        short = "{!r} and {!r} have the same short name; give one of them another"
        for key_of, words in ((keys, message), (labels, short)):
            seen: dict[str, str] = {}
            for name, key in key_of.items():
                if (other := seen.setdefault(key, name)) != name:
                    raise UserError(words.format(other, name))

    def sweeps(self) -> list[tuple[str, float]]:
        """Each name with each rate of its sweep: the first rate of all names, then the second, and so on."""
        names = self.request.recipes
        by_place = zip_longest(*([(name, lr) for lr in self.sweep(name)] for name in names))
        return [one for place in by_place for one in place if one is not None]

    def folder(self, name: str, lr: float, seed: int) -> RunFolder:
        return RunFolder(self.request.out / run_id(self.config(name, lr, seed)))

    def sweep(self, name: str) -> dict[float, RunFolder]:
        """The folders of the sweep by rate; none if there is nothing to choose."""
        rates, seed = self.rates(name), self.request.sweep_seed
        return {lr: self.folder(name, lr, seed) for lr in rates} if len(rates) > 1 else {}

    def trials(self, name: str) -> tuple[SweepRun, ...]:
        return tuple(SweepRun.of(f.path.name, lr, f.status()) for lr, f in self.sweep(name).items())

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
    """Recipes, on one task."""

    def __init__(self, request: CompareRequest) -> None:
        super().__init__(request)
        request = self.request
        self.task = TASKS[request.base.task]
        base = resolved_precision(request.base)
        resolved = [resolve(n, base, force=request.force, kept=request.kept) for n in request.recipes]
        for config in resolved:
            self.task.check(config)
        data, self.corpus = self.task.prepare(request.base.data, request.out / "data")
        self.base = {c.recipe: replace(c, data=data) for c in resolved}
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

    def known(self) -> dict[str, Any]:
        corpus, task = self.corpus, self.task
        return {
            "task": task.name,
            "best_by": selection_metric(self.metrics, self.request.base.train.best_by).name,
            "data": corpus.facts,
            "test_is_dev": self._test_is_dev(),
            "overlap": getattr(corpus, "overlap", {}),
            "unigram_entropy_nats": corpus.unigram_entropy_nats,
            "sample_labels": task.example_labels,
        }

    def _test_is_dev(self) -> bool:
        """Whether all of the test text is dev text: its sentences are the same, or no test text was given."""
        if getattr(self.corpus, "overlap", {}).get("test in dev") == 1:
            return True
        given = [name for name in self.task.texts if getattr(self.request.base.data, name)]
        return any(n.startswith("train_") for n in given) and not any(n.startswith("test_") for n in given)

    def recipe(self, name: str) -> dict[str, Any]:
        config = self.base[name]
        _, short, recipe = name.partition("=")
        resolves_to = f"{recipe.strip()}: {describe(config)}" if short else describe(config)
        how = {"resolves_to": resolves_to, "forced": config.forced, "explained": explain(config)}
        return how | {"cost": self._cost(name)}

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
        examples = []
        for i in spread:
            source, reference = map(printable, expected[i])
            shown = {name: printable(lines[i]) for name, lines in outputs.items()}
            examples.append(Sample(source, reference, shown))
        return tuple(examples)

    def seconds(self) -> Seconds:
        return measure_side_by_side(list(self.base.values()), self.request.out, self.request.jobs)

    def start(self, root: Path) -> Worker:
        return backend(self.request.on).start(root)


class SetupGrid(Grid):
    """Setups of the user's own. All use the batches, and the held-out batches, of the first."""

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
        super().__init__(replace(request, jobs=request.jobs if self.are_files else 1, base=base))
        digests = {name: seen.digest for name, seen in self.seen.items()}
        self._refuse_same(digests, "{} and {} are the same, file by file; change one of them")
        if len({seen.batches for seen in self.seen.values()}) > 1:
            raise UserError(
                f"{self.first} draws other batches each time from the same seed, but all runs of "
                "a seed must see the same: take seed as an argument of setup(), and seed every generator"
            )
        if len(metrics := {own_runs.metric_of(seen.scale).label for seen in self.seen.values()}) > 1:
            raise UserError(
                f"the losses have different units, {' and '.join(sorted(metrics))}: one is just a "
                "cross-entropy, and another is not; let loss= return the same in each file"
            )

    def rates(self, name: str) -> tuple[float, ...]:
        own = self.seen[name].course.rate
        return tuple(self.request.lrs) or tuple(float(f"{own * factor:.6g}") for factor in AROUND)

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

    def known(self) -> dict[str, Any]:
        seen = self.seen[self.first]
        first, steps = self.label(self.first), self.request.base.train.steps
        scored = "the mean loss of the last tenth of the steps, each before its step"
        if seen.held_out:
            scored = count(seen.held_out, "batch")
        facts = {
            "batches": f"those of {first}, for all",
            "held out": f"{scored}; every second one chooses rates, the others are reported",
        }
        if (planned := seen.planned_steps) and planned != steps:
            facts["steps"] = f"{steps:,}, where {first} plans {planned:,}: its schedule does not end"
        if compiled := [self.label(name) for name, one in self.seen.items() if one.compiled]:
            facts["compiled"] = f"{', '.join(compiled)}, and trained as written: no time is of compiled code"
        return {
            "task": OWN_TASK,
            "best_by": "",
            "data": facts,
            "test_is_dev": seen.held_out == 1,
            "unigram_entropy_nats": seen.scale.unigram,
        }

    def recipe(self, name: str) -> dict[str, Any]:
        seen, label = self.seen[name], self.label(name)
        file = f"{self.setups[name]}: " if self.are_files and label != self.setups[name] else ""
        return {
            "resolves_to": f"{file}{seen.kind}, own rate {short_rate(seen.course.rate)}",
            "cost": seen.cost,
        }

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
