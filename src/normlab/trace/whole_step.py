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
from normlab.trace.optimizers import copied, held, made_optimizers, rebound
from normlab.trace.passes import Passes
from normlab.trace.rates import Rates, rates_of

SMALL: Final = 2.0**-40
"""Factor that makes gradients too small for any clipping; a power of two rounds nothing."""


class Twice(NamedTuple):
    """What a step shows when it is run twice from equal weights, with gradients too small to be clipped."""

    exact: bool
    """Whether it ran in float64."""
    first: ObservedStep
    second: ObservedStep


class WholeStep:
    """Runs the user's whole step, or a plain one in its place, on copies of all that it changes."""

    def __init__(self, passes: Passes, comparison: Comparison, setup: Setup | None = None) -> None:
        """Run the step of the passes' own setup, or of another one with the same model, batch and loss."""
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
        if setup.optimizer is not None:
            passes.copies.require()
        memo = dict[int, Any]()
        model, optimizers, scheduler = copied(setup, memo=memo)
        users_step = None if plain else rebound(setup.step, memo)
        return DryRun(
            model,
            optimizers,
            scheduler,
            passes.stepped_loss,
            users_step or plain_step(passes.loss_of),
            several=isinstance(setup.optimizer, (list, tuple)) or len(optimizers) > 1,
            exact=exact,
            rewritten=passes.on_whole_batch.rewritten,
            original=passes.model,
        )

    @cached_property
    def handed(self) -> tuple[nn.Module, list[Optimizer]]:
        """The user's own model and optimizers, or copies if a function makes the optimizers.

        That function is given the model itself if copies may not stand in for it: nothing steps these.
        """
        model, optimizer = self._passes.model, self._setup.optimizer
        if all(isinstance(each, Optimizer) for each in self._setup.optimizers):
            return model, self._setup.optimizers
        if optimizer is not None and not self._passes.copies.may_stand_in:
            return model, made_optimizers(optimizer, model)
        run = self.dry_run()
        return run.model, run.optimizers

    @cached_property
    def twice(self) -> Twice:
        """What the step shows when it is run twice, in float64 if it runs there."""
        if self._passes.is_exact and not self._passes.large:
            with suppress(Exception):  # the user's step may insist on its own precision
                return self._run_twice(exact=True)
        return self._run_twice(exact=False)

    def _run_twice(self, *, exact: bool) -> Twice:
        run = self.dry_run(exact=exact)
        held(run.model, run.optimizers)  # raises Unknown if they hold nothing of the model
        first = run.run(self._passes.stepped, scale=SMALL)
        return Twice(exact, first, run.run(first.batch, scale=SMALL))

    @cached_property
    def gradient_rounding(self) -> float:
        """The share of a gradient that rounding may change, if the step runs as in ``twice``."""
        if self.twice.exact and not self._comparison.narrowed:
            return self._comparison.rounding
        return self.dry_run().rounding(self._passes.stepped)

    @cached_property
    def rates(self) -> Rates:
        """The rates that the schedule will give."""
        return rates_of(self._setup)
