"""The coordinate check: how starts, rates, activations and updates change with a model's width or depth."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Final

from normlab.base.io import Count, Size, from_plain, to_plain
from normlab.base.units import count, duration
from normlab.errors import UserError
from normlab.scaling import ALL
from normlab.scaling.exponents import FACTS, NEAR, Axis, Row, rows_of
from normlab.scaling.family import SetupFamily
from normlab.scaling.one_model import Measured, measure
from normlab.scaling.parametrisation import Parametrisation, built_with
from normlab.scaling.wording import reason
from normlab.setups.setup import Setup
from normlab.trace.restore import same_globals, same_random_state
from normlab.trace.tensors import unwrap
from normlab.trials.journal import Journal

CHECK_STEPS: Final = 10
CHECK_SEEDS: Final = 3
SHARE: Final = 0.1
"""The check may take at most this share of the budget."""
CHECK: Final = "coordinates"
"""The name of the check in a journal."""
LEAST_SEEDS: Final = 2
"""With fewer, no measured slope has an interval."""


@dataclass(frozen=True)
class Coordinates:
    """How a model's quantities change with its size, and the first that does not change as intended.

    It says whether every part of the model starts alike at every size, and is changed alike by its updates.
    It decides nothing about the best learning rate, which may move all the same.
    """

    axis: Axis
    sizes: tuple[int, ...]
    seeds: tuple[int, ...]
    steps: int
    parametrisation: str
    """The one that was declared, or that the model brings with it; empty if there is none."""
    rows: tuple[Row, ...]

    @property
    def fault(self) -> Row | None:
        """The first row that is not as intended, causes first, with a module of the largest model."""
        wrong = [row for row in self.rows if row.right is False and row.module != ALL]
        if not wrong:
            return None
        first = min(wrong, key=lambda row: row.step)
        if self.parametrisation:
            # a wrong fact is a cause of what is measured, even where it shows only at a later step
            first = next((row for row in wrong if row.quantity in FACTS), first)
        return replace(first, module=first.path)

    def sentence(self) -> str:
        """Why a rate would not carry, and what to do; or that nothing suggests that it would not."""
        row = self.fault
        if row is None:
            if all(row.right is None for row in self.rows):
                return f"nothing could be measured over {self.axis}"
            seeds = count(len(self.seeds), "seed")
            return f"starts and updates are alike at every {self.axis}, as far as {seeds} can tell"
        return reason(row, self.rows, self.axis, self.parametrisation)

    @property
    def notes(self) -> tuple[str, ...]:
        """What is legitimate but worth knowing, because references differ on it."""
        rates = {row.parameter: row.slope for row in self.rows if row.quantity == "rate" and row.parameter}
        products: dict[str, float] = {}
        for row in self.rows:
            if row.quantity == "decay" and row.right is None and row.parameter in rates:
                products[row.role] = row.slope + rates[row.parameter]
        return tuple(
            f"rate × decay of {role} goes with {self.axis} as m^{power:.2g}; microsoft/mup and CompleteP "
            "keep it the same, nanoGPT-mup does not"
            for role, power in products.items()
            if abs(power) > NEAR
        )

    def to_dict(self) -> dict[str, Any]:
        """The same facts as plain values."""
        names = ("axis", "sizes", "seeds", "steps", "parametrisation")
        fault = self.fault
        return {
            **{name: getattr(self, name) for name in names},
            "rows": [row.to_dict() for row in self.rows],
            "fault": None if fault is None else fault.to_dict(),
            "sentence": self.sentence(),
            "notes": list(self.notes),
        }


@dataclass(frozen=True)
class _KeptRow:
    """A ``Row`` among plain values, where None stands for what is not finite."""

    role: str
    module: str
    quantity: str
    step: Count
    slope: float | None
    low: float | None
    high: float | None
    expected: float | None
    expected_low: float | None
    right: bool | None
    kind: str
    parameter: str
    path: str
    values: tuple[float | None, ...]


@dataclass(frozen=True)
class _KeptAnswer:
    """``Coordinates`` among plain values, as a journal keeps them."""

    axis: Axis
    sizes: tuple[int, ...]
    seeds: tuple[int, ...]
    steps: Size
    parametrisation: str
    rows: tuple[_KeptRow, ...]
    fault: _KeptRow | None
    sentence: str
    notes: tuple[str, ...]


@dataclass
class Check:
    r"""A coordinate check: it measures models one at a time, all sizes with one seed, then with the next.

    One size with one seed is a *unit*; docs/coordinates.md explains what is measured and why.

    Each setup is trained for ``steps`` steps by its own step at its peak rates, on copies. What is measured
    are root mean squares: of every parameter at the start; of the outputs of modules, the scores of attention
    and the logits, before the first step and after each; and of what the updates :math:`W_t - W_0` of each
    parameter change: :math:`(W_t - W_0) x_t` for a matrix, the stream for a table, the logits for the head.
    The rate, decay, eps and betas of each parameter's group are recorded too.

    The ``parametrisation`` of the family, or what its setups declare, names one of
    ``nn.Parametrisation.registry``, whose exponents the starts and groups then must have; normlab's own
    models bring theirs. Without one, only what a rate needs to carry is judged.

    Raises UserError for an unknown parametrisation, and for a setup that cannot be trained.
    """

    family: SetupFamily
    seeds: Sequence[int]
    steps: int = CHECK_STEPS
    unit_s: dict[int, float] = field(default_factory=dict, init=False)
    """By size, the seconds of a unit: to make the model, to read it, and for each step with the look that
    follows it.
    """
    _kind: type[Parametrisation] | None = field(default=None, init=False)
    _models: dict[tuple[int, int], Measured] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self._kind = _named(self.family.parametrisation)

    @property
    def seed_s(self) -> float:
        """Seconds of all sizes with one seed: a lower bound until every size was timed."""
        untimed = len(self.family.sizes) - len(self.unit_s)
        return sum(self.unit_s.values()) + max(self.unit_s.values(), default=0.0) * untimed

    def estimate(self, until: float = math.inf) -> None:
        """Time a unit of each size by one step of it, from the smallest size on, as long as ``LEAST_SEEDS``
        could still end by ``until`` on the monotonic clock.
        """
        for size in self.family.sizes:
            start = time.monotonic()
            if start + LEAST_SEEDS * self.seed_s >= until:
                return
            step_s = self._unit(size, self.seeds[0], 1).step_s
            self.unit_s[size] = time.monotonic() - start + (self.steps - 1) * step_s

    def run(self, until: float = math.inf) -> None:
        """Measure. A seed counts only with all its sizes, so a unit is begun only if it and the sizes that
        are left for its seed would end by ``until``, on the monotonic clock.
        """
        for seed in self.seeds:
            for i, size in enumerate(self.family.sizes):
                start = time.monotonic()
                rest_s = sum(self.unit_s.get(later, 0.0) for later in self.family.sizes[i:])
                if start + rest_s > until:
                    return
                self._models[size, seed] = self._unit(size, seed, self.steps)
                self.unit_s[size] = time.monotonic() - start

    def _unit(self, size: int, seed: int, steps: int) -> Measured:
        with same_globals(), same_random_state():
            setup = self.family.build(size, seed)
            declared = _named(setup.declare.parametrisation)
            self._kind = self._kind or declared or built_with(unwrap(setup.model))
            return measure(setup, steps, seed)

    @property
    def done(self) -> tuple[int, ...]:
        """The seeds with which every size was measured."""
        return tuple(
            seed for seed in self.seeds if all((size, seed) in self._models for size in self.family.sizes)
        )

    def answer(self) -> Coordinates:
        """What the finished seeds show."""
        seeds = self.done
        finished = {(size, seed): model for (size, seed), model in self._models.items() if seed in seeds}
        return Coordinates(
            axis=self.family.axis,
            sizes=self.family.sizes,
            seeds=seeds,
            steps=self.steps,
            parametrisation="" if self._kind is None else self._kind.name,
            rows=tuple(rows_of(finished, self.family.axis, self._kind)),
        )


def _named(parametrisation: str) -> type[Parametrisation] | None:
    """The parametrisation of this name, if it has one. Raises UserError for an unknown one."""
    return Parametrisation.registry[parametrisation] if parametrisation else None


@dataclass
class BudgetCheck:
    """A check that ends in time; what the budget does not hold, or what raises, is left out with a reason."""

    family: SetupFamily
    seed: int
    budget_s: float
    journal: Journal
    answer: dict[str, Any] = field(default_factory=dict, init=False)
    """What it shows, as plain values, or why it was ``left_out``; empty until that is known."""
    seconds: float = field(default=0.0, init=False)
    """How long it will take."""

    @cached_property
    def check(self) -> Check:
        """What is measured."""
        return Check(replace(self.family, make=self._make), range(self.seed, self.seed + CHECK_SEEDS))

    def _make(self, size: int, seed: int) -> Setup:
        self.journal.mark()  # before each unit, during which the process may be killed
        return self.family.make(size, seed)

    def plan(self) -> None:
        """Use the check that is kept for these sizes, or find out for how many seeds the budget lasts.

        Raises UserError if the journal holds something else in place of an answer.
        """
        self.answer = self._kept_answer()
        if self.answer:
            return
        until = self._until()
        self._try(lambda: self.check.estimate(until))
        if self.answer:  # it failed
            return
        seed_s, left_s = self.check.seed_s, until - time.monotonic()
        if not 0 < LEAST_SEEDS * seed_s <= left_s:
            self._leave_out(LEAST_SEEDS * seed_s)
            return
        affordable = int(min(left_s / seed_s, len(self.check.seeds)))
        self.check.seeds = self.check.seeds[:affordable]
        self.seconds = seed_s * len(self.check.seeds)

    def _kept_answer(self) -> dict[str, Any]:
        """The last answer for these sizes that the journal holds; empty if there is none."""
        answer: dict[str, Any] = {}
        for row in self.journal.rows:
            if row.get("check") == CHECK:
                kept: _KeptAnswer = from_plain(_KeptAnswer, row["answer"], f"answer in {self.journal.path}")
                if kept.sizes == self.family.sizes:
                    answer = to_plain(kept)
        return answer

    def run(self) -> None:
        """Measure what was planned, and keep the answer."""
        if self.answer:
            return
        start, until = self.journal.seconds, self._until()
        self._try(lambda: self.check.run(until))
        if len(self.check.done) >= LEAST_SEEDS:
            self._try(lambda: self.answer.update(self.check.answer().to_dict()))
        elif not self.answer:
            self._leave_out(LEAST_SEEDS * self.check.seed_s)
        if "left_out" not in self.answer:
            seconds = self.journal.seconds - start
            self.journal.append({"check": CHECK, "answer": self.answer, "seconds": seconds})

    def _until(self) -> float:
        """When a check that begins now must end, on the monotonic clock."""
        return time.monotonic() + min(SHARE * self.budget_s, self.budget_s - self.journal.seconds)

    def _try(self, part: Callable[[], None]) -> None:
        """Run a part of the check. If it fails, which does not matter to the trials, ``answer`` says why, and
        that ends the check.
        """
        try:
            part()
        except UserError as error:
            self.answer = {"left_out": str(error)}
        except Exception as error:  # any model may raise anything
            self.answer = {"left_out": f"it raised {type(error).__name__}: {error}"}

    def _leave_out(self, need_s: float) -> None:
        """Say what time it needs, and what budget that takes; ``need_s`` is 0 if no time was left for it."""
        most = "a tenth of the budget is the most"
        if not need_s:
            self.answer = {"left_out": f"no time is left for it, and {most}"}
            return
        budget = duration(max(need_s / SHARE, self.journal.seconds + need_s))
        takes = f"{LEAST_SEEDS} seeds take {duration(need_s)} or more"
        self.answer = {"left_out": f"{takes}, and {most}; a budget of {budget} would hold it"}
