"""The trials of a model at several sizes, from the smallest up, within a budget."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from statistics import fmean
from typing import TYPE_CHECKING, Any, Final

from normlab.base.units import duration
from normlab.errors import UserError
from normlab.scaling.coordinates import BudgetCheck
from normlab.scaling.family import SetupFamily
from normlab.scaling.optimum import RATES, WINDOW, best_of
from normlab.scaling.sweep import INDEPENDENT, LEAST_SIZES, Decay, Sweep
from normlab.scaling.verdict import Transfer
from normlab.setups.setup import Setup
from normlab.trace.dry_run import groups_of
from normlab.trace.optimizers import copied
from normlab.trace.restore import restored
from normlab.trials.attempts import LEAST_STEPS, Attempts, batches_of, kept_trial
from normlab.trials.change import Variant
from normlab.trials.fingerprint import fingerprint
from normlab.trials.journal import Journal
from normlab.trials.search import FARTHEST
from normlab.trials.verdict import INTERRUPTED, Trial

if TYPE_CHECKING:
    from normlab.scaling.transfer import Request

SEARCHED: Final = 2
"""So many more rates are tried to find the best one at the smallest size; at others half as many."""
SHORTEST: Final = 4
"""To fit a budget, the steps of a trial are divided by up to this; after that, sizes are left out."""
Key = tuple[int, int, float, float]
"""What identifies a trial: size, seed, octave of the rate, and factor on the weight decay."""


@dataclass
class Ladder:
    """The trials of a family, from its smallest size up."""

    family: SetupFamily
    request: Request
    journal: Journal = field(init=False)
    own: dict[int, Attempts] = field(default_factory=dict, init=False)
    """By size, the attempts of the first seed, whose first steps were measured."""
    parameters: dict[int, int] = field(default_factory=dict, init=False)
    built_s: dict[int, float] = field(default_factory=dict, init=False)
    """By size, the seconds that building a setup takes."""
    tried: dict[Key, Trial] = field(default_factory=dict, init=False)
    batches: dict[int, Callable[[int], list[Any]]] = field(default_factory=dict, init=False)
    held: tuple[tuple[int, int], Setup] | None = field(default=None, init=False)
    """The last setup that was built: only one is kept at a time."""
    check: BudgetCheck = field(init=False)
    decays: bool = field(default=False, init=False)
    """Whether the optimizer has a weight decay."""
    about: int = field(default=0, init=False)
    """How many trials are expected."""

    def climb(self) -> Transfer:
        """Measure, plan, check the coordinates, train, and answer."""
        self._begin()
        self.check.plan()
        sizes, steps, sentence = self._planned()
        if self.request.announce is not None:
            self.request.announce(sentence)
        ended_by = "" if sizes else sentence
        try:
            if sizes:
                self.check.run()
            for key in self._wanted(sizes, steps):
                trial = self._kept(key, steps) or self._trial(key, steps)
                if isinstance(trial, str):
                    ended_by = trial
                    break
                self.tried[key] = trial
        except KeyboardInterrupt:
            self.journal.mark(every_s=0.0)
            if not self.tried:
                raise
            ended_by = INTERRUPTED
        return self._answer(steps, sentence, ended_by)

    # ------------------------------------------------------------------------------------------- beginning
    def _begin(self) -> None:
        """Build each size once, open the journal, and measure. Raises UserError for sizes that are alike."""
        request, first, held = self.request, self.request.seed, dict[str, str]()
        since = time.monotonic() if request.since is None else request.since
        for size in self.family.sizes:
            start = time.monotonic()
            setup = self._setup(size, first)
            self.built_s[size] = time.monotonic() - start
            self.parameters[size] = sum(p.numel() for p in setup.model.parameters())
            if request.folder is not None:
                asked = {"steps": request.steps, "seed": first, "rates": tuple(request.rates)}
                marks = fingerprint(setup, self._batches(first)(request.steps), **asked)
                held |= {f"{name} at {self.family.axis} {size}": mark for name, mark in marks.items()}
        self._require_growth()
        self.journal = Journal(request.folder, held, since)
        for size in self.family.sizes:
            own = self._attempts(size, first, 1.0)
            with self.family.named(size):
                own.measured  # noqa: B018 (computes it now, before the first trial)
            self.own[size] = own
        self.journal.mark()
        self.check = BudgetCheck(self.family, first, request.budget_s, self.journal)

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
                f"{self.family.title} draws the same model from every seed: {self.family.seed_hint}"
            )
        setup = self._setup(sizes[0], first)
        with restored(setup):
            self.decays = any(group.get("weight_decay") for group in groups_of(copied(setup)[1]))
        if not self.decays and self.request.ways != [Decay()]:
            raise UserError(
                "decays is for an optimizer with weight decay, but this one has none; leave it out"
            )

    def _setup(self, size: int, seed: int) -> Setup:
        if self.held is None or self.held[0] != (size, seed):
            self.held = (size, seed), self.family.build(size, seed)
        return self.held[1]

    def _batches(self, seed: int) -> Callable[[int], list[Any]]:
        """The batches of the smallest size, which all sizes see."""
        if seed not in self.batches:
            self.batches[seed] = batches_of(self._setup(self.family.sizes[0], seed), seed)
        return self.batches[seed]

    def _attempts(self, size: int, seed: int, decay: float) -> Attempts:
        """The attempts of one model. Those of the first seed are measured; the others reuse that."""
        request, batches, options = self.request, self._batches(seed), dict[str, Any]()
        if decay != 1:
            options["weight_decay"] = lambda own: own * decay
        name = self._name(size, seed, decay) if size in self.own else f"{self.family.axis} {size}"
        variant = Variant(self._setup(size, seed), name, options)
        made = Attempts(variant, replace(request, seed=seed), batches, self.journal, request.budget_s)
        if size in self.own:
            made.measured = self.own[size].measured
        return made

    def _name(self, size: int, seed: int, decay: float) -> str:
        """The name of the trials in the journal."""
        return f"{self.family.axis} {size}, seed {seed}" + (f", decay x{decay:g}" if decay != 1 else "")

    # -------------------------------------------------------------------------------------------- planning
    def _planned(self) -> tuple[tuple[int, ...], int, str]:
        """The sizes and the steps for which the budget lasts, and a sentence that says so. Once trials have
        begun, their steps stay, and no size that has some is left out.
        """
        asked, sizes, axis = self.request.steps, self.family.sizes, self.family.axis
        row, left = self.journal.row(planned=asked), self.request.budget_s - self.journal.seconds
        shortest = int(row["steps"]) if row else max(LEAST_STEPS, asked // SHORTEST)
        while len(sizes) > min(LEAST_SIZES, len(self.family.sizes)) and self._cost(sizes, shortest) > left:
            new = [size for size in sizes if not self._number_kept(size, shortest)]
            if not new:
                break
            sizes = tuple(size for size in sizes if size != new[-1])
        fits, some = self._cost(sizes, shortest) <= left, f"{axis}s {', '.join(map(str, sizes))}"
        whole = self._cost(self.family.sizes, shortest if row else asked)
        need = duration(self.journal.seconds + whole)
        held = "a budget without limit" if math.isinf(left) else duration(max(left, 0.0))
        if not fits and row is None:
            few = f"too short to tell: {held} is not enough for trials of {shortest} steps at {some}"
            return (), shortest, f"{few}; a budget of {need} would do for all"
        steps = shortest
        if row is None:
            fixed, each = self._cost(sizes, 0), self._cost(sizes, 1)
            room = (left - fixed) / (each - fixed)
            steps = asked if room >= asked else int(room)
            self.journal.append({"planned": asked, "steps": steps})
        kept = sum(self._number_kept(size, steps) for size in sizes)
        if self._all_kept(sizes, steps):
            self.about, fits = kept, True
            text = f"all {kept} trials of {steps} steps at {some} are kept: none is left to train"
        else:
            missing = max(round(sum(self._missing(size, steps) for size in sizes)), 1)
            self.about = kept + missing
            text = (
                f"{held} is {'' if fits else 'not '}enough for {some} at {RATES} rates or more and "
                f"{self.request.seeds} seeds: about {missing} trials of {steps} steps"
                f"{f' beside the {kept} that are kept' if kept else ''}, {duration(self._cost(sizes, steps))}"
            )
        rest = [str(size) for size in self.family.sizes if size not in sizes]
        lacks = [f"{axis}s {', '.join(rest)}"] * bool(rest) + [f"{asked} steps"] * (not row and steps < asked)
        more = f"; {' and '.join(lacks)} would take a budget of {need}" if lacks else ""
        if not fits:
            more = f"; trials go on until it ends, and {need} would do for all"
        if self.decays and self.request.ways == [Decay()]:
            more += f"; the weight decay is not swept: decays 1 {INDEPENDENT} would do that as well"
        return sizes, steps, text + more

    def _cost(self, sizes: Sequence[int], steps: int) -> float:
        """Seconds of the missing trials, with their setups, and of the coordinate check."""
        total = self.check.seconds
        for size in sizes:
            if missing := self._missing(size, steps):
                built_s = self.built_s[size] * self.request.seeds
                total += missing * steps * self.own[size].measured.seconds[0] + built_s
        return total

    def _missing(self, size: int, steps: int) -> float:
        """About how many trials a size still takes; weight decays share those in which they are equal."""
        request, smallest = self.request, size == self.family.sizes[0]
        rates = len(request.rates) or RATES + (SEARCHED if smallest else SEARCHED / 2)
        octaves = [k - WINDOW for k in range(RATES)]
        ways = len({(k, way.at(k)) for k in octaves for way in request.ways}) / RATES
        return max(rates * request.seeds * ways - self._number_kept(size, steps), 0.0)

    def _number_kept(self, size: int, steps: int) -> int:
        """How many trials of a size the journal holds."""
        octaves = self._given() or range(-FARTHEST, FARTHEST + 1)
        decays = {way.at(octave) for way in self.request.ways for octave in octaves}
        names = {self._name(size, seed, decay) for seed in self.request.every_seed for decay in decays}
        return sum(row.get("trial") in names and row["steps"] == steps for row in self.journal.rows)

    def _all_kept(self, sizes: Sequence[int], steps: int) -> bool:
        """Take the next trials from the journal; return whether it has them all."""
        for key in self._wanted(sizes, steps):
            if (trial := self._kept(key, steps)) is None:
                return False
            self.tried[key] = trial
        return True

    # ---------------------------------------------------------------------------------------------- trials
    def _wanted(self, sizes: Sequence[int], steps: int) -> Iterator[Key]:
        """What to try next, given what was tried so far: all sizes with one seed, then with another."""
        for way in self.request.ways if steps else ():
            for n in range(1, self.request.seeds + 1):
                for size in sizes:
                    for octave in self._octaves(size, way, n):
                        for seed in self.request.every_seed[:n]:
                            key = (size, seed, octave, way.at(octave))
                            if key not in self.tried:
                                yield key

    def _octaves(self, size: int, way: Decay, seeds: int) -> Iterator[float]:
        """The rates to try with so many seeds: five around the best, which moves as they are tried."""
        if self.request.rates:
            yield from self._given()
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

    def _given(self) -> list[float]:
        """The octaves of the rates that were asked for."""
        today = self.own[self.family.sizes[0]].measured.course.rate
        return [math.log2(rate / today) for rate in sorted(self.request.rates)]

    def _start(self, size: int, way: Decay, seeds: int) -> float:
        """Where to begin: at the best rate with fewer seeds, else at a smaller size's, else at today's."""
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

    def _kept(self, key: Key, steps: int) -> Trial | None:
        size, seed, octave, decay = key
        rate = self.own[size].measured.course.rate * 2.0**octave
        return kept_trial(self.journal, self._name(size, seed, decay), rate, steps)

    def _trial(self, key: Key, steps: int) -> Trial | str:
        size, seed, octave, decay = key
        attempts, progress = self._attempts(size, seed, decay), self.request.progress
        self.journal.mark()

        def tell(line: str) -> None:
            if progress is not None:
                done = len(self.tried)
                progress(f"{self.family.axis} {size}, {line}", done, max(self.about, done + 1))

        return attempts.trial(attempts.measured.course.rate * 2.0**octave, steps, tell=tell)

    # ---------------------------------------------------------------------------------------------- answer
    def _answer(self, steps: int, plan: str, ended_by: str) -> Transfer:
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
            coordinates=self.check.answer,
            plan=plan,
            ended_by=ended_by,
            seconds=self.journal.seconds,
            facts={"warm-up": first.course.rising},
        )
