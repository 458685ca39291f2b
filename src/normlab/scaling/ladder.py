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
from normlab.scaling.result import Transfer
from normlab.scaling.sweep import INDEPENDENT, LEAST_SIZES, Decay, Sweep
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


class TrialKey(NamedTuple):
    """What identifies a trial."""

    size: int
    seed: int
    octave: float
    """By how many octaves the rate is above the setup's own at this size."""
    decay: float
    """The factor on the weight decay."""


@dataclass(frozen=True)
class Plan:
    """What the budget holds."""

    sizes: tuple[int, ...]
    """The sizes that are tried."""
    steps: int
    """The steps of a trial."""
    fits: bool
    """Whether all trials of these sizes end within the budget."""
    has_begun: bool
    """Whether the journal holds trials of the same request, whose steps then stay."""
    left_s: float
    """The seconds of the budget that are left."""
    enough_s: float
    """A budget in seconds that would do for all that was asked for."""
    kept: int = 0
    """How many trials the journal holds."""
    missing: int = 0
    """About how many are still to be made."""

    @property
    def is_too_short(self) -> bool:
        """Whether nothing is tried: the budget does not hold even the fewest sizes at the fewest steps."""
        return not self.fits and not self.has_begun


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
    tried: dict[TrialKey, Trial] = field(default_factory=dict, init=False)
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
        plan = self._planned()
        sentence = self._sentence(plan)
        self.expected = plan.kept + plan.missing
        if self.request.announce is not None:
            self.request.announce(sentence)
        if plan.is_too_short:
            return self._answer(plan.steps, sentence, ended_by=sentence)
        ended_by = ""
        try:
            self.check.run()
            for key in self._wanted(plan.sizes):
                trial = self._kept(key, plan.steps) or self._trial(key, plan.steps)
                if isinstance(trial, str):
                    ended_by = trial
                    break
                self.tried[key] = trial
        except KeyboardInterrupt:
            self.journal.mark(every_s=0.0)
            if not self.tried:
                raise
            ended_by = INTERRUPTED
        return self._answer(plan.steps, sentence, ended_by)

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
        of_first_seed = self.attempts.get(size)
        name = f"{self.family.axis} {size}" if of_first_seed is None else self._name(size, seed, decay)
        return Attempts(
            Variant(self._setup(size, seed), name, options),
            replace(self.request, seed=seed),
            self._batches(seed),
            self.journal,
            self.request.budget_s,
            measured_by=of_first_seed,
        )

    def _name(self, size: int, seed: int, decay: float) -> str:
        """The name of the trials in the journal."""
        return f"{self.family.axis} {size}, seed {seed}" + (f", decay x{decay:g}" if decay != 1 else "")

    # -------------------------------------------------------------------------------------------- planning
    def _planned(self) -> Plan:
        """Decide on sizes and steps, and note the steps in the journal.

        To fit the budget, steps become fewer, down to ``1 / SHORTEST`` of those that were asked for; then
        sizes are left out. Once trials have begun, their steps stay, and no size that has some is left out.
        """
        asked = self.request.steps
        begun = self.journal.row(planned=asked)
        left_s = self.request.budget_s - self.journal.seconds
        fewest_steps = max(LEAST_STEPS, asked // SHORTEST) if begun is None else int(begun["steps"])
        sizes = self._affordable_sizes(fewest_steps, left_s)
        fits = self._cost(sizes, fewest_steps) <= left_s
        most_steps = asked if begun is None else fewest_steps
        enough_s = self.journal.seconds + self._cost(self.family.sizes, most_steps)
        plan = Plan(sizes, fewest_steps, fits, begun is not None, left_s, enough_s)
        if plan.is_too_short:
            return plan
        if begun is None:
            plan = replace(plan, steps=self._affordable_steps(sizes, left_s))
            self.journal.append({"planned": asked, "steps": plan.steps})
        kept = sum(self._number_kept(size, plan.steps) for size in sizes)
        if self._all_kept(sizes, plan.steps):
            return replace(plan, kept=kept, fits=True)
        missing = sum(self._missing(size, plan.steps) for size in sizes)
        return replace(plan, kept=kept, missing=max(round(missing), 1))

    def _sentence(self, plan: Plan) -> str:
        """Say which trials will be made, and what is left out."""
        needed = duration(plan.enough_s)
        if plan.is_too_short:
            return (
                f"too short to tell: {_budget(plan.left_s)} is not enough for trials of {plan.steps} steps "
                f"at {self._names(plan.sizes)}; a budget of {needed} would do for all"
            )
        sentence = self._sentence_of_trials(plan)
        if not plan.fits:
            sentence += f"; trials go on until it ends, and {needed} would do for all"
        elif left_out := self._left_out(plan):
            sentence += f"; {left_out} would take a budget of {needed}"
        if self.has_decay and self.request.ways == [Decay()]:
            sentence += f"; the weight decay is not swept: decays 1 {INDEPENDENT} would do that as well"
        return sentence

    def _sentence_of_trials(self, plan: Plan) -> str:
        sizes, steps = plan.sizes, plan.steps
        if not plan.missing:
            trials = f"all {plan.kept} trials of {steps} steps at {self._names(sizes)}"
            return f"{trials} are kept: none is left to train"
        enough = "enough" if plan.fits else "not enough"
        beside = f" beside the {plan.kept} that are kept" if plan.kept else ""
        return (
            f"{_budget(plan.left_s)} is {enough} for {self._names(sizes)} at {RATES} rates or more and "
            f"{self.request.seeds} seeds: about {plan.missing} trials of {steps} steps{beside}, "
            f"{duration(self._cost(sizes, steps))}"
        )

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

    def _left_out(self, plan: Plan) -> str:
        """What of the request is left out: sizes, steps or both; empty if nothing is."""
        parts = list[str]()
        if others := [size for size in self.family.sizes if size not in plan.sizes]:
            parts.append(self._names(others))
        if not plan.has_begun and plan.steps < self.request.steps:
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
        """About how many trials a size still takes."""
        request = self.request
        searched = SEARCHED if size == self.family.sizes[0] else SEARCHED / 2
        rates = len(request.rates) or RATES + searched
        # weight decays share the trials in which they are equal: with `1 independent` those at today's rate,
        # so that two decays take 9 trials where one takes 5
        octaves = [k - WINDOW for k in range(RATES)]
        different = {(octave, way.at(octave)) for octave in octaves for way in request.ways}
        trials_per_rate = len(different) / RATES
        return max(rates * request.seeds * trials_per_rate - self._number_kept(size, steps), 0.0)

    def _number_kept(self, size: int, steps: int) -> int:
        """How many trials of a size the journal holds."""
        # a row has the name of its trial, which has the decay; so all decays that may occur are listed
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
    def _wanted(self, sizes: Sequence[int]) -> Iterator[TrialKey]:
        """Yield what to try next: all sizes with one seed, then with another.

        What comes next depends on how the last trial went. So whoever iterates puts each trial into ``tried``
        before asking for the next, as ``climb`` and ``_all_kept`` do.

        With another seed the best rate may be another, so each round goes through the rates of all its seeds
        again, and yields what has not been tried.
        """
        rounds = range(1, self.request.seeds + 1)
        for way, number_of_seeds, size in product(self.request.ways, rounds, sizes):
            for octave in self._octaves(size, way, number_of_seeds):
                for seed in self.request.every_seed[:number_of_seeds]:
                    key = TrialKey(size, seed, octave, way.at(octave))
                    if key not in self.tried:
                        yield key

    def _octaves(self, size: int, way: Decay, number_of_seeds: int) -> Iterator[float]:
        """Yield the rates to try with the first so many seeds: five around the best, which moves as they are
        tried. Before the next rate is asked for, ``tried`` must hold the trials at the last one.
        """
        if self.request.rates:
            yield from self._given()
            return
        best = self._start(size, way, number_of_seeds)
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
            better = best_of(self._losses(size, way, number_of_seeds, done))
            # if all diverged, a rate below them may train
            best = min(done) - 1 if better is None else better

    def _given(self) -> list[float]:
        """The octaves of the rates that were asked for."""
        today = self.attempts[self.family.sizes[0]].measured.course.rate
        return [math.log2(rate / today) for rate in sorted(self.request.rates)]

    def _start(self, size: int, way: Decay, number_of_seeds: int) -> float:
        """Where to begin: at the best rate with one seed less, else at a smaller size's, else at today's."""
        if number_of_seeds > 1:
            best = best_of(self._losses(size, way, number_of_seeds - 1))
            if best is not None:
                return best
        sizes = self.family.sizes
        for smaller in reversed(sizes[: sizes.index(size)]):
            best = best_of(self._losses(smaller, way, number_of_seeds))
            if best is not None:
                return best
        return 0.0

    def _losses(
        self, size: int, way: Decay, number_of_seeds: int, octaves: set[float] | None = None
    ) -> dict[tuple[float, int], float]:
        """The losses so far by octave and seed: of the first seeds, and of these octaves or all."""
        first_seeds = self.request.every_seed[:number_of_seeds]
        losses: dict[tuple[float, int], float] = {}
        for key, trial in self.tried.items():
            is_of_model = key.size == size and key.seed in first_seeds and key.decay == way.at(key.octave)
            if is_of_model and (octaves is None or key.octave in octaves):
                losses[key.octave, key.seed] = trial.loss
        return losses

    def _rate(self, key: TrialKey) -> float:
        return self.attempts[key.size].measured.course.rate * 2.0**key.octave

    def _kept(self, key: TrialKey, steps: int) -> Trial | None:
        name = self._name(key.size, key.seed, key.decay)
        return kept_trial(self.journal, name, self._rate(key), steps)

    def _trial(self, key: TrialKey, steps: int) -> Trial | str:
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
        first_steps = {size: attempts.measured for size, attempts in self.attempts.items()}
        smallest, largest = self.family.sizes[0], self.family.sizes[-1]
        return Transfer(
            title=self.family.title,
            axis=self.family.axis,
            sizes=self.family.sizes,
            target=self.request.target or largest,
            steps=steps,
            seeds=self.request.seeds,
            rates={size: first.course.rate for size, first in first_steps.items()},
            step_s={size: fmean(first.seconds) for size, first in first_steps.items()},
            parameters=self.parameters,
            sweeps=tuple(self._sweep(way) for way in self.request.ways),
            coordinates=self.check.answer,
            plan=plan,
            ended_by=ended_by,
            seconds=self.journal.seconds,
            facts={"warm-up": first_steps[smallest].course.rising},
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
