"""The trials of a model at several sizes, from the smallest up, within a budget."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any, Final

from normlab.config.units import duration
from normlab.errors import UserError
from normlab.scaling import BUDGET_S, FACTOR, SEEDS, STEPS
from normlab.scaling.answer import LEAST_SIZES, Sweep, Transfer
from normlab.scaling.coordinates import coordinates
from normlab.scaling.decay import Decay
from normlab.scaling.family import SetupFamily
from normlab.scaling.optimum import WINDOW, best_of
from normlab.trace.optimizers import copied
from normlab.trace.rehearsal import groups_of
from normlab.trace.setup import Setup, positive, shown
from normlab.trace.untouched import untouched
from normlab.trials.attempts import LEAST_STEPS, Attempts, Plan, Progress, batches_of
from normlab.trials.change import Variant
from normlab.trials.journal import Journal, fingerprint
from normlab.trials.search import FARTHEST
from normlab.trials.trials import INTERRUPTED, Trial

RATES: Final = int(2 * WINDOW) + 1
"""Rates about the best that are tried at each size."""
SEARCHED: Final = 2
"""Rates that finding the best one takes beside these at the smallest size; at others half as many."""
SHORTEST: Final = 4
"""The steps of a trial may be divided by so much for a budget; then sizes are left out."""
CHECK_STEPS: Final = 10
CHECK_SEEDS: Final = 3
"""Of the coordinate check."""
CHECK_SHARE: Final = 0.1
"""The most of the budget that the coordinate check may take."""
Key = tuple[int, int, float, float]
"""Size, seed, octave of the rate, and factor on the weight decay: what tells a trial apart."""


@dataclass(frozen=True)
class Request:
    """What was asked for, beside the sizes."""

    steps: int = STEPS
    seeds: int = SEEDS
    """How many, from ``seed`` on."""
    budget_s: float = BUDGET_S
    seed: int = 0
    decays: Sequence[str | float] = (1.0,)
    target: int | None = None
    factor: float = FACTOR
    rates: Sequence[float] = ()
    folder: str | Path | None = None
    progress: Progress | None = None
    announce: Callable[[str], None] | None = None

    def __post_init__(self) -> None:
        """Raises UserError for a value that means nothing."""
        self.plan(self.seed)
        for name, least in (("seeds", 2), ("target", 1)):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < least):
                raise UserError(f"{name} is {shown(value)}, and must be a whole number of {least} at least")
        if not positive(self.factor) or self.factor <= 1:
            raise UserError(f"factor is {shown(self.factor)}, and must be a number above 1, such as {FACTOR}")
        if self.rates and len(set(self.rates)) < RATES:
            raise UserError(f"rates has {shown(list(self.rates))}, and must hold {RATES} rates at least")
        if not self.decays:
            raise UserError("decays is empty, and must hold factors on the weight decay, such as 0 1 4")

    def plan(self, seed: int) -> Plan:
        """That of the trials of a seed."""
        return Plan(self.steps, self.budget_s, tuple(self.rates), seed, progress=self.progress)

    @property
    def ways(self) -> list[Decay]:
        """The weight decays to try, the first of which gives the answer."""
        return list(dict.fromkeys(map(Decay.of, self.decays)))

    @property
    def every_seed(self) -> range:
        """The seeds, of models and of data."""
        return range(self.seed, self.seed + self.seeds)


@dataclass
class Ladder:
    """The trials of a family, from its smallest size up."""

    family: SetupFamily
    request: Request
    journal: Journal = field(init=False)
    own: dict[int, Attempts] = field(default_factory=dict, init=False)
    """By size, the attempts of the first seed, which were measured."""
    parameters: dict[int, int] = field(default_factory=dict, init=False)
    tried: dict[Key, Trial] = field(default_factory=dict, init=False)
    batches: dict[int, Callable[[int], list[Any]]] = field(default_factory=dict, init=False)
    held: tuple[tuple[int, int], Setup] | None = field(default=None, init=False)
    """The last setup that was built: one at a time is kept."""
    about: int = field(default=0, init=False)

    def climb(self) -> Transfer:
        """Measure, plan, check the coordinates, train, and answer."""
        self._begin()
        sizes, steps, sentence = self._planned()
        if self.request.announce is not None:
            self.request.announce(sentence)
        coordinates = self._coordinates() if sizes else {}
        cut = "" if sizes else sentence
        try:
            for key in self._wanted(sizes, steps):
                trial = self._trial(key, steps)
                if isinstance(trial, str):
                    cut = trial
                    break
                self.tried[key] = trial
        except KeyboardInterrupt:
            if not self.tried:
                raise
            cut = INTERRUPTED
        return self._answer(steps, sentence, cut, coordinates)

    # ------------------------------------------------------------------------------------------- beginning
    def _begin(self) -> None:
        """Build each size once, open the journal, and measure. Raises UserError for sizes that are alike."""
        request, first, held = self.request, self.request.seed, dict[str, str]()
        for size in self.family.sizes:
            setup = self._setup(size, first)
            self.parameters[size] = sum(p.numel() for p in setup.model.parameters())
            if request.folder is not None:
                asked = {"steps": request.steps, "seed": first, "rates": tuple(request.rates)}
                marks = fingerprint(setup, self._batches(first)(request.steps), **asked)
                held |= {f"{name} at {self.family.axis} {size}": mark for name, mark in marks.items()}
        self._require_growth()
        self.journal = Journal(request.folder, held)
        for size in self.family.sizes:
            self.own[size] = self._attempts(size, first, 1.0)
            self.own[size].measured  # noqa: B018 (it is computed here, before the first trial)

    def _require_growth(self) -> None:
        axis, sizes = self.family.axis, self.family.sizes
        for small, large in pairwise(sizes):
            if self.parameters[small] >= self.parameters[large]:
                raise UserError(
                    f"{self.family.title} has {self.parameters[large]:,} parameters at {axis} {large} and "
                    f"{self.parameters[small]:,} at {axis} {small}: use {axis} where it makes the model"
                )
        first, second = self.request.every_seed[:2]
        every = [list(self.family.build(sizes[0], seed).model.parameters()) for seed in (first, second)]
        if all(a.equal(b) for a, b in zip(*every, strict=True)):
            raise UserError(
                f"{self.family.title} draws the same model from every seed: declare seed, as in "
                f"def setup({axis}, seed=0), and call torch.manual_seed(seed) before the model is made"
            )
        if not any(g.get("weight_decay") for g in self._groups()) and self.request.ways != [Decay()]:
            raise UserError(
                "decays is for an optimizer with weight decay, and this one has none; leave it out"
            )

    def _groups(self) -> list[dict[str, Any]]:
        setup = self._setup(self.family.sizes[0], self.request.seed)
        with untouched(setup):
            return groups_of(copied(setup)[1])

    def _setup(self, size: int, seed: int) -> Setup:
        if self.held is None or self.held[0] != (size, seed):
            self.held = (size, seed), self.family.build(size, seed)
        return self.held[1]

    def _batches(self, seed: int) -> Callable[[int], list[Any]]:
        """Those of the smallest size, which all sizes see."""
        if seed not in self.batches:
            self.batches[seed] = batches_of(self._setup(self.family.sizes[0], seed), seed)
        return self.batches[seed]

    def _attempts(self, size: int, seed: int, decay: float) -> Attempts:
        """The attempts of one model. Those of the first seed are measured, and the others take that over."""
        request, name = self.request, f"{self.family.axis} {size}"
        batches, options = self._batches(seed), dict[str, Any]()
        if decay != 1:
            options["weight_decay"] = lambda own: own * decay
        if size in self.own:
            name += f", seed {seed}" + (f", decay x{decay:g}" if decay != 1 else "")
        variant = Variant(self._setup(size, seed), name, options)
        made = Attempts(variant, request.plan(seed), batches, self.journal, request.budget_s)
        if size in self.own:
            made.measured = self.own[size].measured
        return made

    # -------------------------------------------------------------------------------------------- planning
    def _planned(self) -> tuple[tuple[int, ...], int, str]:
        """The sizes and the steps that the budget holds, and a sentence that says so. Of trials that were
        begun the steps stay, and no size is left out.
        """
        asked, sizes, axis = self.request.steps, self.family.sizes, self.family.axis
        row = self.journal.row(planned=asked) or {"began": self.journal.seconds}
        left = self.request.budget_s - float(row["began"])
        fewest = int(row.get("sizes", min(LEAST_SIZES, len(sizes))))
        shortest = int(row.get("steps", max(LEAST_STEPS, asked // SHORTEST)))
        while len(sizes) > fewest and self._cost(sizes, shortest) > left:
            sizes = sizes[:-1]
        need = duration(float(row["began"]) + self._cost(self.family.sizes, asked))
        held, some = duration(max(left, 0.0)), f"{axis}s {', '.join(map(str, sizes))}"
        fits = self._cost(sizes, shortest) <= left
        if not fits and "steps" not in row:
            few = f"too short to tell: {held} is not enough for trials of {shortest} steps at {some}"
            return (), shortest, f"{few}; a budget of {need} would do for all"
        if "steps" not in row:
            fixed, each = self._cost(sizes, 0), self._cost(sizes, 1)
            row |= {"steps": min(asked, int((left - fixed) / (each - fixed))), "sizes": len(sizes)}
            self.journal.append({"planned": asked, **row})
        steps = int(row["steps"])
        self.about = round(sum(self._rates(size) for size in sizes) * self.request.seeds * self._ways())
        text = (
            f"{held} is {'' if fits else 'not '}enough for {some} at {RATES} rates or more and "
            f"{self.request.seeds} seeds: about {self.about} trials of {steps} steps, "
            f"{duration(self._cost(sizes, steps))}"
        )
        if not fits:
            return sizes, steps, f"{text}; trials go on until it ends, and {need} would do for all"
        lacks = [f"{axis}s {', '.join(map(str, rest))}"] if (rest := self.family.sizes[len(sizes) :]) else []
        lacks += [f"{asked} steps"] if steps < asked else []
        return sizes, steps, f"{text}; {' and '.join(lacks)} would take a budget of {need}" if lacks else text

    def _cost(self, sizes: Sequence[int], steps: int) -> float:
        """Seconds that the trials take, and the coordinate check."""
        each = {size: self._rates(size) * steps * self.own[size].measured.seconds[0] for size in sizes}
        return sum(each.values()) * self.request.seeds * self._ways() + self._check_s()

    def _rates(self, size: int) -> float:
        """How many rates a size takes."""
        if self.request.rates:
            return len(self.request.rates)
        return RATES + (SEARCHED if size == self.family.sizes[0] else SEARCHED / 2)

    def _ways(self) -> float:
        """How many times the trials are done: weight decays share those in which they are the same."""
        octaves = [k - WINDOW for k in range(RATES)]
        return len({(k, way.at(k)) for k in octaves for way in self.request.ways}) / RATES

    # ------------------------------------------------------------------------------------------- the check
    def _check_s(self) -> float:
        """Seconds of the coordinate check; 0 where it is left out."""
        steps = sum(CHECK_SEEDS * CHECK_STEPS * self.own[s].measured.seconds[0] for s in self.family.sizes)
        return steps if steps <= CHECK_SHARE * self.request.budget_s else 0.0

    def _coordinates(self) -> dict[str, Any]:
        """The coordinate check as plain values; none where the budget does not hold it."""
        if (row := self.journal.row(check="coordinates")) is not None:
            return dict(row["answer"])
        if not self._check_s():
            return {}
        start, family = self.journal.seconds, self.family
        seeds = tuple(range(self.request.seed, self.request.seed + CHECK_SEEDS))
        answer = dict[str, Any]()
        with suppress(UserError):  # the trials need none of it
            answer = coordinates(
                family.build,
                family.sizes,
                axis=family.axis,
                seeds=seeds,
                steps=CHECK_STEPS,
                parametrisation=family.parametrisation,
            ).to_dict()
        self.journal.append(
            {"check": "coordinates", "answer": answer, "seconds": self.journal.seconds - start}
        )
        return answer

    # ---------------------------------------------------------------------------------------------- trials
    def _wanted(self, sizes: Sequence[int], steps: int) -> Iterator[Key]:
        """What is to be tried next, by what was tried so far: all sizes with one seed, then with another."""
        for way in self.request.ways if steps else ():
            for n in range(1, self.request.seeds + 1):
                for size in sizes:
                    for octave in self._octaves(size, way, n):
                        for seed in self.request.every_seed[:n]:
                            key = (size, seed, octave, way.at(octave))
                            if key not in self.tried:
                                yield key

    def _octaves(self, size: int, way: Decay, seeds: int) -> Iterator[float]:
        """The rates to try with so many seeds: five about the best, which moves as they are tried."""
        if self.request.rates:
            yield from (math.log2(rate / self._today()) for rate in sorted(self.request.rates))
            return
        best, done = self._start(size, way, seeds), set[float]()
        while True:
            about = [best + k - WINDOW for k in range(RATES)]
            missing = [x for x in about if x not in done and abs(x) <= FARTHEST]
            if not missing:
                return
            octave = min(missing, key=lambda x: (abs(x - best), -x))
            yield octave
            done.add(octave)
            losses = self._losses(size, way, seeds, done)
            better = best_of(losses)
            best = min(done) - 1 if better is None else better

    def _start(self, size: int, way: Decay, seeds: int) -> float:
        """Where to begin: at the best rate with fewer seeds, or at that of a smaller size, or at today's."""
        sizes = self.family.sizes
        smaller = reversed(sizes[: sizes.index(size)])
        for known, number in ((size, seeds - 1), *((s, seeds) for s in smaller)):
            if number and (best := best_of(self._losses(known, way, number))) is not None:
                return best
        return 0.0

    def _losses(
        self, size: int, way: Decay, seeds: int, octaves: set[float] | None = None
    ) -> dict[tuple[float, int], float]:
        own = set(self.request.every_seed[:seeds])
        return {
            (x, seed): t.loss
            for (s, seed, x, decay), t in self.tried.items()
            if s == size and seed in own and decay == way.at(x) and (octaves is None or x in octaves)
        }

    def _trial(self, key: Key, steps: int) -> Trial | str:
        size, seed, octave, decay = key
        attempts, progress = self._attempts(size, seed, decay), self.request.progress

        def tell(line: str) -> None:
            if progress is not None:
                done = len(self.tried)
                progress(f"{self.family.axis} {size}, {line}", done, max(self.about, done + 1))

        return attempts.trial(attempts.measured.course.rate * 2.0**octave, steps, tell=tell)

    def _today(self) -> float:
        return self.own[self.family.sizes[0]].measured.course.rate

    # ---------------------------------------------------------------------------------------------- answer
    def _answer(self, steps: int, plan: str, cut: str, coordinates: dict[str, Any]) -> Transfer:
        measured = {size: one.measured for size, one in self.own.items()}
        scales = {size: one.scale for size, one in measured.items()}
        sweeps = list[Sweep]()
        for way in self.request.ways:
            mine = [(k, t) for k, t in self.tried.items() if k[3] == way.at(k[2])]
            by_size = {size: {(k[2], k[1]): t for k, t in mine if k[0] == size} for size in self.family.sizes}
            sweeps.append(Sweep(way, by_size, scales, self.request.factor))
        first = measured[self.family.sizes[0]]
        return Transfer(
            title=self.family.title,
            axis=self.family.axis,
            sizes=self.family.sizes,
            target=self.request.target or self.family.sizes[-1],
            steps=steps,
            seeds=self.request.seeds,
            rates={size: one.course.rate for size, one in measured.items()},
            step_s={size: fmean(one.seconds) for size, one in measured.items()},
            parameters=self.parameters,
            sweeps=tuple(sweeps),
            coordinates=coordinates,
            plan=plan,
            cut=cut,
            seconds=self.journal.seconds,
            facts={**self.family.facts, "warm-up": first.course.rising},
        )
