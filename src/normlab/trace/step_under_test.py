"""The step that properties are tested on: its passes, their comparison, the whole step, and a budget."""

from __future__ import annotations

import gc
import time
from contextlib import suppress
from functools import cached_property

from normlab.setups.setup import Setup
from normlab.trace.comparison import Comparison
from normlab.trace.estimates import Estimates
from normlab.trace.facts import Unknown
from normlab.trace.facts.compared import Compared, compared
from normlab.trace.facts.facts import Facts
from normlab.trace.facts.stacks import Scaled, scaled_streams
from normlab.trace.facts.targets import Targets
from normlab.trace.facts.twins import Twins, find_twins
from normlab.trace.facts.wiring import Scores, Wiring, read_wiring
from normlab.trace.passes import Passes
from normlab.trace.starts import Fresh, constant, parameters_of
from normlab.trace.whole_step import WholeStep


class StepUnderTest(Passes):
    """One step, with what several properties ask of it, computed once.

    Its passes are its own (see ``Passes``); ``comparison`` compares runs of them, ``estimates`` says what
    something will take, ``shared`` holds what is made anew for each group of properties.
    """

    def __init__(self, setup: Setup, *, budget_s: float = 60.0, started: float | None = None) -> None:
        super().__init__(setup)
        self.started = time.monotonic() if started is None else started
        self.budget_s = budget_s
        self.comparison = Comparison(self)
        self.estimates = Estimates(self, budget_s)
        self.shared = SharedByGroup(self, self.comparison)
        self._group = ""

    # --------------------------------------------------------------------------------------------- the check

    def turn_to(self, group: str) -> None:
        """Free what is large and can be made again: records of passes, and copies of the model that another
        group's tests shared.
        """
        self.forget_long_records()
        if self.large and group != self._group:
            self.forget_training()
            self.shared = SharedByGroup(self, self.comparison)
            gc.collect()  # modules and their hooks lead back to each other
        self._group = group

    @property
    def whole_step(self) -> WholeStep:
        """The whole step, on copies of all that it changes."""
        return self.shared.whole_step

    @property
    def rounding(self) -> float:
        """The relative difference that two exact runs may show by rounding alone."""
        return self.comparison.rounding

    @property
    def fresh(self) -> Fresh:
        """The model drawn afresh."""
        return self.shared.fresh

    @property
    def scaled(self) -> Scaled:
        """What streams of two sizes show; nothing if no block passes one on in float64."""
        return self.shared.scaled

    @property
    def ends(self) -> float:
        """When the budget is spent, by ``time.monotonic()``."""
        return self.started + self.budget_s

    @property
    def left_s(self) -> float:
        """How many seconds of the budget are left."""
        return self.ends - time.monotonic()

    # ------------------------------------------------------------------------------------ what was measured

    @cached_property
    def is_trained(self) -> bool:
        """Whether the weights are trained: the loss says so, or most of the initial constants are gone."""
        with suppress(Unknown):
            if self.facts.trained:
                return True
        with suppress(Unknown):
            return self._has_lost_its_constants()
        return False

    def _has_lost_its_constants(self) -> bool:
        """Return whether most vectors that start as constants, such as gains of 1, no longer are.

        Raises Unknown if the model cannot be drawn afresh.
        """
        constants = {name for name, p in parameters_of(self.fresh.one).items() if p.ndim and constant(p)}
        live = parameters_of(self.model)
        moved = [n for n in constants if n in live and live[n].numel() > 1 and not constant(live[n])]
        return len(moved) > len(constants) / 2

    @cached_property
    def wiring(self) -> Wiring:
        """The wiring of the exact model."""
        return read_wiring(self.exact, [block.path for block in self.facts.blocks])

    def scales_by_class(self, scores: Scores) -> bool:
        """Return whether the model's own class scales these scores this way."""
        trace = self.fresh.exact(self.unchanged)
        if trace is None:
            return False
        of_class = read_wiring(trace, [block.path for block in self.facts.blocks]).scores
        return any(other.module == scores.module and other.is_by(scores.factor) for other in of_class)

    @property
    def half(self) -> Targets | None:
        """The targets of the half of the rows with the most counted targets; None if that does not run."""
        return None if self.facts_of_half is None else self.facts_of_half.targets

    @cached_property
    def facts_of_half(self) -> Facts | None:
        """The facts of that half of the rows, whose targets are known; None if there are none."""
        targets, rows = self.facts.targets, self.facts.rows
        if rows < 2 or len(targets.ids) != rows:
            return None
        counts = targets.counted.reshape(rows, -1).sum(1)
        fullest = counts.argsort(descending=True, stable=True)[: rows // 2]
        with suppress(Exception):  # the model may insist on a batch size
            half = self.facts.with_rows(fullest.sort().values)
            facts = Facts(self.exact.again(batch=half), self.declare)
            _ = facts.targets  # raises where there are none
            return facts
        return None

    @cached_property
    def twins(self) -> Twins:
        """The twins of the model that the loss runs. Raises Unknown if there are none."""
        if isinstance(self._twins_or_why_none, str):
            raise Unknown(self._twins_or_why_none)
        return self._twins_or_why_none

    @cached_property
    def _twins_or_why_none(self) -> Twins | str:
        """What is kept of the search: several properties ask for it, and most models have no twin."""
        try:
            return find_twins(self.exact_as_given)
        except Unknown as reason:
            return str(reason)

    @cached_property
    def compared(self) -> Compared:
        """What the loss compares of the model and its twins. Raises Unknown without twins."""
        return compared(self.exact_as_given, self.twins)


class SharedByGroup:
    """What the tests of one group of properties share. It is made anew for the next group if the model is
    large, because it holds further copies of it.
    """

    def __init__(self, passes: Passes, comparison: Comparison) -> None:
        self._passes = passes
        self.whole_step = WholeStep(passes, comparison)

    @cached_property
    def fresh(self) -> Fresh:
        """The model drawn afresh."""
        return Fresh(self._passes.setup)

    @cached_property
    def scaled(self) -> Scaled:
        """What streams of two sizes show; nothing if no block passes one on in float64."""
        if not (self._passes.is_exact and self._passes.facts.stacks):
            return Scaled({}, frozenset(), ())
        return scaled_streams(self._passes.exact, self._passes.facts.entering)
