"""The trials of a model at several sizes, from the smallest up, within a budget."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise, product
from statistics import fmean
from typing import Any, Final, NamedTuple

from normlab.base.units import duration
from normlab.errors import UserError
from normlab.scaling.coordinates import BudgetCheck
from normlab.scaling.family import SetupFamily
from normlab.scaling.optimum import RATES, WINDOW, best_of
from normlab.scaling.request import Request
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

SEARCHED: Final = 2
"""So many more rates are tried to find the best one at the smallest size; at others half as many."""
SHORTEST: Final = 4
"""To fit a budget, the steps of a trial are divided by up to this; after that, sizes are left out."""


class Key(NamedTuple):
    """What identifies a trial."""

    size: int
    seed: int
    octave: float
    """Of the rate, above the setup's own at this size."""
    decay: float
    """The factor on the weight decay."""


@dataclass
class Ladder:
    """The trials of a family, from its smallest size up."""

    family: SetupFamily
    request: Request
    journal: Journal = field(init=False)
    attempts: dict[int, Attempts] = field(default_factory=dict, init=False)
    """By size, the attempts of the first seed, whose first steps were measured."""
    parameters: dict[int, int] = field(default_factory=dict, init=False)
    built_s: dict[int, float] = field(default_factory=dict, init=False)
    """By size, the seconds that building a setup takes."""
    tried: dict[Key, Trial] = field(default_factory=dict, init=False)
    batches: dict[int, Callable[[int], list[Any]]] = field(default_factory=dict, init=False)
    last_built: tuple[tuple[int, int], Setup] | None = field(default=None, init=False)
    """The last setup that was built, after its size and seed: memory is for one at a time."""
    check: BudgetCheck = field(init=False)
    has_decay: bool = field(default=False, init=False)
    """Whether the optimizer has a weight decay."""
    expected: int = field(default=0, init=False)
    """About how many trials there will be, those that are kept included: what progress is told."""

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
            for key in self._wanted(sizes):
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
        request, first_seed = self.request, self.request.seed
        since = time.monotonic() if request.since is None else request.since
        marks: dict[str, str] = {}
        for size in self.family.sizes:
            start = time.monotonic()
            setup = self._setup(size, first_seed)
            self.built_s[size] = time.monotonic() - start
            self.parameters[size] = sum(p.numel() for p in setup.model.parameters())
            if request.folder is not None:
                marks |= self._marks(setup, size)
        self._require_growth()
        self._require_seeds_to_differ()
        self._require_decay()
        self.journal = Journal(request.folder, marks, since)
        for size in self.family.sizes:
            attempts = self._attempts_of(size, first_seed, 1.0)
            with self.family.named(size):
                attempts.measured  # noqa: B018 (computes it now, before the first trial)
            self.attempts[size] = attempts
        self.journal.mark()
        self.check = BudgetCheck(self.family, first_seed, request.budget_s, self.journal)

    def _marks(self, setup: Setup, size: int) -> dict[str, str]:
        """By name, digests of the parts of a setup: a folder continues only what has the same."""
        request = self.request
        batches = self._batches(request.seed)(request.steps)
        marks = fingerprint(
            setup, batches, steps=request.steps, seed=request.seed, rates=tuple(request.rates)
        )
        return {f"{name} at {self.family.axis} {size}": mark for name, mark in marks.items()}

    def _require_growth(self) -> None:
        axis = self.family.axis
        for small, large in pairwise(self.family.sizes):
            if self.parameters[small] >= self.parameters[large]:
                raise UserError(
                    f"{self.family.title} has {self.parameters[large]:,} parameters at {axis} {large} and "
                    f"{self.parameters[small]:,} at {axis} {small}: use {axis} where it makes the model"
                )

    def _require_seeds_to_differ(self) -> None:
        smallest, (first, second) = self.family.sizes[0], self.request.every_seed[:2]
        of_first = list(self.family.build(smallest, first).model.parameters())
        of_second = list(self.family.build(smallest, second).model.parameters())
        if all(a.equal(b) for a, b in zip(of_first, of_second, strict=True)):
            raise UserError(
                f"{self.family.title} draws the same model from every seed: {self.family.seed_hint}"
            )

    def _require_decay(self) -> None:
        """Find out whether there is a weight decay. Raises UserError if there is none to sweep."""
        setup = self._setup(self.family.sizes[0], self.request.seed)
        with restored(setup):
            groups = groups_of(copied(setup)[1])
        self.has_decay = any(group.get("weight_decay") for group in groups)
        if not self.has_decay and self.request.ways != [Decay()]:
            raise UserError(
                "decays is for an optimizer with weight decay, but this one has none; leave it out"
            )

    def _setup(self, size: int, seed: int) -> Setup:
        if self.last_built is None or self.last_built[0] != (size, seed):
            self.last_built = (size, seed), self.family.build(size, seed)
        return self.last_built[1]

    def _batches(self, seed: int) -> Callable[[int], list[Any]]:
        """The batches of the smallest size, which all sizes see."""
        if seed not in self.batches:
            self.batches[seed] = batches_of(self._setup(self.family.sizes[0], seed), seed)
        return self.batches[seed]

    def _attempts_of(self, size: int, seed: int, decay: float) -> Attempts:
        """The attempts of one model. Those of the first seed are measured; the others reuse that."""
        options = dict[str, Any]()
        if decay != 1:
            options["weight_decay"] = lambda today: today * decay
        measured = self.attempts.get(size)
        name = f"{self.family.axis} {size}" if measured is None else self._name(size, seed, decay)
        return Attempts(
            Variant(self._setup(size, seed), name, options),
            replace(self.request, seed=seed),
            self._batches(seed),
            self.journal,
            self.request.budget_s,
            measured_by=measured,
        )

    def _name(self, size: int, seed: int, decay: float) -> str:
        """The name of the trials in the journal."""
        return f"{self.family.axis} {size}, seed {seed}" + (f", decay x{decay:g}" if decay != 1 else "")

    # -------------------------------------------------------------------------------------------- planning
    def _planned(self) -> tuple[tuple[int, ...], int, str]:
        """The sizes and the steps for which the budget lasts, and a sentence that says so. Once trials have
        begun, their steps stay, and no size that has some is left out.
        """
        asked = self.request.steps
        begun = self.journal.row(planned=asked)
        left_s = self.request.budget_s - self.journal.seconds
        steps = max(LEAST_STEPS, asked // SHORTEST) if begun is None else int(begun["steps"])
        sizes = self._affordable_sizes(steps, left_s)
        fits = self._cost(sizes, steps) <= left_s
        needed = duration(
            self.journal.seconds + self._cost(self.family.sizes, asked if begun is None else steps)
        )
        if begun is None:
            if not fits:
                return (), steps, self._too_short(sizes, steps, left_s, needed)
            steps = self._affordable_steps(sizes, left_s)
            self.journal.append({"planned": asked, "steps": steps})
        kept = sum(self._number_kept(size, steps) for size in sizes)
        if self._all_kept(sizes, steps):
            self.expected, fits = kept, True
            trials = f"all {kept} trials of {steps} steps at {self._names(sizes)}"
            sentence = f"{trials} are kept: none is left to train"
        else:
            missing = max(round(sum(self._missing(size, steps) for size in sizes)), 1)
            self.expected = kept + missing
            enough = "enough" if fits else "not enough"
            beside = f" beside the {kept} that are kept" if kept else ""
            sentence = (
                f"{_budget(left_s)} is {enough} for {self._names(sizes)} at {RATES} rates or more and "
                f"{self.request.seeds} seeds: about {missing} trials of {steps} steps{beside}, "
                f"{duration(self._cost(sizes, steps))}"
            )
        if not fits:
            sentence += f"; trials go on until it ends, and {needed} would do for all"
        elif left_out := self._left_out(sizes, steps, begun=begun is not None):
            sentence += f"; {left_out} would take a budget of {needed}"
        if self.has_decay and self.request.ways == [Decay()]:
            sentence += f"; the weight decay is not swept: decays 1 {INDEPENDENT} would do that as well"
        return sizes, steps, sentence

    def _affordable_sizes(self, steps: int, left_s: float) -> tuple[int, ...]:
        """The sizes without the largest ones that a budget does not hold, unless they have trials already."""
        sizes = self.family.sizes
        fewest = min(LEAST_SIZES, len(sizes))
        while len(sizes) > fewest and self._cost(sizes, steps) > left_s:
            untried = [size for size in sizes if not self._number_kept(size, steps)]
            if not untried:
                break
            sizes = tuple(size for size in sizes if size != untried[-1])
        return sizes

    def _affordable_steps(self, sizes: Sequence[int], left_s: float) -> int:
        """The steps that were asked for, or as many as a budget holds: the cost grows in proportion."""
        fixed_s = self._cost(sizes, 0)
        step_s = self._cost(sizes, 1) - fixed_s
        affordable = (left_s - fixed_s) / step_s
        return self.request.steps if affordable >= self.request.steps else int(affordable)

    def _too_short(self, sizes: Sequence[int], steps: int, left_s: float, needed: str) -> str:
        return (
            f"too short to tell: {_budget(left_s)} is not enough for trials of {steps} steps at "
            f"{self._names(sizes)}; a budget of {needed} would do for all"
        )

    def _left_out(self, sizes: Sequence[int], steps: int, *, begun: bool) -> str:
        """What of the request is left out: sizes, steps or both; empty if nothing is."""
        parts = list[str]()
        if others := [size for size in self.family.sizes if size not in sizes]:
            parts.append(self._names(others))
        if not begun and steps < self.request.steps:
            parts.append(f"{self.request.steps} steps")
        return " and ".join(parts)

    def _names(self, sizes: Sequence[int]) -> str:
        return f"{self.family.axis}s {', '.join(map(str, sizes))}"

    def _cost(self, sizes: Sequence[int], steps: int) -> float:
        """Seconds of the missing trials, with their setups, and of the coordinate check."""
        total = self.check.seconds
        for size in sizes:
            if missing := self._missing(size, steps):
                built_s = self.built_s[size] * self.request.seeds
                total += missing * steps * self.attempts[size].measured.seconds[0] + built_s
        return total

    def _missing(self, size: int, steps: int) -> float:
        """About how many trials a size still takes; weight decays share those in which they are equal."""
        request = self.request
        searched = SEARCHED if size == self.family.sizes[0] else SEARCHED / 2
        rates = len(request.rates) or RATES + searched
        octaves = [k - WINDOW for k in range(RATES)]
        different = {(octave, way.at(octave)) for octave in octaves for way in request.ways}
        ways = len(different) / RATES
        return max(rates * request.seeds * ways - self._number_kept(size, steps), 0.0)

    def _number_kept(self, size: int, steps: int) -> int:
        """How many trials of a size the journal holds."""
        octaves = self._given() or range(-FARTHEST, FARTHEST + 1)
        decays = {way.at(octave) for way in self.request.ways for octave in octaves}
        names = {self._name(size, seed, decay) for seed in self.request.every_seed for decay in decays}
        return sum(row.get("trial") in names and row["steps"] == steps for row in self.journal.rows)

    def _all_kept(self, sizes: Sequence[int], steps: int) -> bool:
        """Take the next trials from the journal; return whether it has them all."""
        for key in self._wanted(sizes):
            if (trial := self._kept(key, steps)) is None:
                return False
            self.tried[key] = trial
        return True

    # ---------------------------------------------------------------------------------------------- trials
    def _wanted(self, sizes: Sequence[int]) -> Iterator[Key]:
        """What to try next, given what was tried so far: all sizes with one seed, then with another."""
        for way, seeds, size in product(self.request.ways, range(1, self.request.seeds + 1), sizes):
            for octave in self._octaves(size, way, seeds):
                for seed in self.request.every_seed[:seeds]:
                    key = Key(size, seed, octave, way.at(octave))
                    if key not in self.tried:
                        yield key

    def _octaves(self, size: int, way: Decay, seeds: int) -> Iterator[float]:
        """The rates to try with so many seeds: five around the best, which moves as they are tried."""
        if self.request.rates:
            yield from self._given()
            return
        best = self._start(size, way, seeds)
        done = set[float]()
        while True:
            around = [best + k - WINDOW for k in range(RATES)]
            missing = [octave for octave in around if octave not in done and abs(octave) <= FARTHEST]
            if not missing:
                return
            # the nearest to the best one; of two as near, the higher rate
            octave = min(missing, key=lambda x: (abs(x - best), -x))
            yield octave
            done.add(octave)
            better = best_of(self._losses(size, way, seeds, done))
            # if all diverged, a rate below them may train
            best = min(done) - 1 if better is None else better

    def _given(self) -> list[float]:
        """The octaves of the rates that were asked for."""
        today = self.attempts[self.family.sizes[0]].measured.course.rate
        return [math.log2(rate / today) for rate in sorted(self.request.rates)]

    def _start(self, size: int, way: Decay, seeds: int) -> float:
        """Where to begin: at the best rate with fewer seeds, else at a smaller size's, else at today's."""
        sizes = self.family.sizes
        smaller = reversed(sizes[: sizes.index(size)])
        sources = [(size, seeds - 1), *((other, seeds) for other in smaller)]
        for source, number in sources:
            if not number:
                continue
            best = best_of(self._losses(source, way, number))
            if best is not None:
                return best
        return 0.0

    def _losses(
        self, size: int, way: Decay, seeds: int, octaves: set[float] | None = None
    ) -> dict[tuple[float, int], float]:
        """The losses so far by octave and seed: of the first seeds, and of these octaves or all."""
        first_seeds = self.request.every_seed[:seeds]
        losses: dict[tuple[float, int], float] = {}
        for key, trial in self.tried.items():
            is_of_model = key.size == size and key.seed in first_seeds and key.decay == way.at(key.octave)
            if is_of_model and (octaves is None or key.octave in octaves):
                losses[key.octave, key.seed] = trial.loss
        return losses

    def _rate(self, key: Key) -> float:
        return self.attempts[key.size].measured.course.rate * 2.0**key.octave

    def _kept(self, key: Key, steps: int) -> Trial | None:
        name = self._name(key.size, key.seed, key.decay)
        return kept_trial(self.journal, name, self._rate(key), steps)

    def _trial(self, key: Key, steps: int) -> Trial | str:
        """The trial, or why the budget does not hold it."""
        attempts = self._attempts_of(key.size, key.seed, key.decay)
        progress = self.request.progress
        self.journal.mark()

        def tell(line: str) -> None:
            if progress is not None:
                done = len(self.tried)
                progress(f"{self.family.axis} {key.size}, {line}", done, max(self.expected, done + 1))

        return attempts.trial(self._rate(key), steps, tell=tell)

    # ---------------------------------------------------------------------------------------------- answer
    def _answer(self, steps: int, plan: str, ended_by: str) -> Transfer:
        measured = {size: attempts.measured for size, attempts in self.attempts.items()}
        smallest, largest = self.family.sizes[0], self.family.sizes[-1]
        return Transfer(
            title=self.family.title,
            axis=self.family.axis,
            sizes=self.family.sizes,
            target=self.request.target or largest,
            steps=steps,
            seeds=self.request.seeds,
            rates={size: first.course.rate for size, first in measured.items()},
            step_s={size: fmean(first.seconds) for size, first in measured.items()},
            parameters=self.parameters,
            sweeps=tuple(self._sweep(way) for way in self.request.ways),
            coordinates=self.check.answer,
            plan=plan,
            ended_by=ended_by,
            seconds=self.journal.seconds,
            facts={"warm-up": measured[smallest].course.rising},
        )

    def _sweep(self, way: Decay) -> Sweep:
        """The trials with one weight decay."""
        trials: dict[int, dict[tuple[float, int], Trial]] = {size: {} for size in self.family.sizes}
        for key, trial in self.tried.items():
            if key.decay == way.at(key.octave):
                trials[key.size][key.octave, key.seed] = trial
        scales = {size: attempts.measured.scale for size, attempts in self.attempts.items()}
        return Sweep(way, trials, scales, self.request.factor)


def _budget(left_s: float) -> str:
    return "a budget without limit" if math.isinf(left_s) else duration(max(left_s, 0.0))
