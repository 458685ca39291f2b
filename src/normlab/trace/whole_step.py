"""The whole step: passes, backward passes, clipping, optimizers and schedule, on copies of all of them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from typing import Any, Final, NamedTuple

from torch import nn
from torch.optim import Optimizer

from normlab.setups.setup import Setup
from normlab.setups.step import plain_step
from normlab.trace.comparison import Comparison
from normlab.trace.dry_run import DryRun, ObservedStep
from normlab.trace.optimizers import copied, held, made_optimizers
from normlab.trace.passes import Passes
from normlab.trace.rates import Rates, rates_of
from normlab.trace.rebinding import step_for_copies

SMALL: Final = 2.0**-40
"""Factor that makes gradients too small for any clipping; a power of two rounds nothing."""


class TwoRuns(NamedTuple):
    """What a step shows when it is run twice from equal weights, with gradients too small to be clipped."""

    exact: bool
    """Whether it ran in float64."""
    first: ObservedStep
    second: ObservedStep
    """On the batch as the first run left it."""


class WholeStep:
    """Runs the user's whole step, or a plain one in its place, on copies of all that it changes."""

    def __init__(self, passes: Passes, comparison: Comparison, setup: Setup | None = None) -> None:
        """Take the step of the passes' own setup, or of another one with the same model, batch and loss."""
        self._passes, self._comparison = passes, comparison
        self._setup = setup or passes.setup

    def with_plain_step(self, optimizer: Callable[[nn.Module], Optimizer]) -> WholeStep:
        """Return a plain step of this model, with other optimizers."""
        setup = replace(self._setup, optimizer=optimizer, step=None)
        return WholeStep(self._passes, self._comparison, setup)

    def dry_run(self, *, exact: bool = False, plain: bool = False) -> DryRun:
        """Return copies of model, optimizers and scheduler, and the user's step for them.

        Args:
            exact: whether the copy of the model is in float64.
            plain: whether a plain step takes the place of the user's own: one pass, one backward pass, and a
                step of each optimizer.

        Raises Unknown without an optimizer, or if they cannot be copied.
        """
        passes, setup = self._passes, self._setup
        if setup.optimizer is not None:  # without one, ``copied`` gives a better reason
            passes.copies.require()
        memo = dict[int, Any]()
        model, optimizers, scheduler = copied(setup, memo=memo)
        step = None if plain else step_for_copies(setup.step, memo)
        if step is None:
            step = plain_step(passes.loss_of)
        were_listed = isinstance(setup.optimizer, (list, tuple))
        return DryRun(
            model,
            optimizers,
            scheduler,
            passes.step_loss,
            step,
            several=were_listed or len(optimizers) > 1,
            exact=exact,
            rewritten=passes.on_whole_batch.rewritten,
            original=passes.model,
        )

    @cached_property
    def model_and_optimizers(self) -> tuple[nn.Module, list[Optimizer]]:
        """A model, and the optimizers of it, to be read and never stepped: the user's own, or copies if a
        function makes the optimizers.

        Raises Unknown without an optimizer, or if they cannot be copied.
        """
        model, setup = self._passes.model, self._setup
        if all(isinstance(each, Optimizer) for each in setup.optimizers):
            return model, setup.optimizers
        if setup.optimizer is not None and not self._passes.copies.may_stand_in:
            return model, made_optimizers(setup.optimizer, model)
        run = self.dry_run()
        return run.model, run.optimizers

    @cached_property
    def two_runs(self) -> TwoRuns:
        """What the step shows when it is run twice, in float64 if it runs there and memory allows."""
        if self._passes.is_exact and not self._passes.large:
            with suppress(Exception):  # the user's step may insist on its own precision
                return self._run_twice(exact=True)
        return self._run_twice(exact=False)

    def _run_twice(self, *, exact: bool) -> TwoRuns:
        run = self.dry_run(exact=exact)
        held(run.model, run.optimizers)  # raises Unknown if they hold nothing of the model
        first = run.run(self._passes.step_batch, scale=SMALL)
        second = run.run(first.batch, scale=SMALL)
        return TwoRuns(exact, first, second)

    @cached_property
    def gradient_rounding(self) -> float:
        """The share of a gradient that rounding may change, if the step runs as in ``two_runs``."""
        if self.two_runs.exact and not self._comparison.narrowed:
            return self._comparison.rounding
        return self.dry_run().rounding(self._passes.step_batch)

    @cached_property
    def rates(self) -> Rates:
        """The rates that the schedule will give."""
        return rates_of(self._setup)
