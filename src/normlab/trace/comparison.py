"""The comparison of two runs of a step: what is compared, what rounding may do to it, and what changes it."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from functools import cached_property
from typing import Any, Final

import torch
from torch import Tensor

from normlab.trace.compare import Located, Part, blame, distance, rounding_of, unnoted_distance
from normlab.trace.copies import copied_model
from normlab.trace.facts import Unknown
from normlab.trace.facts.stacks import stream_of
from normlab.trace.facts.targets import Logits, Targets, tapped
from normlab.trace.functions import Narrowings
from normlab.trace.passes import Passes
from normlab.trace.restore import random_states, same_random_state
from normlab.trace.tensors import Place, map_tensors, replaced
from normlab.trace.trace import Trace
from normlab.trace.trail import note_runs

EXACT: Final = 1e-9
"""Relative difference that rounding may leave in float64 after some hundred layers."""
SEEDS: Final = tuple(range(1, 17))
"""The seeds by which a training pass that draws random numbers is run again."""


class Comparison:
    """Compares runs of the exact step with each other, up to rounding."""

    def __init__(self, passes: Passes) -> None:
        self._passes = passes

    # ------------------------------------------------------------------------------------ what is compared

    def logits(self, trace: Trace) -> Tensor:
        """Return what the loss is computed from: the logits if they are known, else the main output.

        Raises Unknown if the loss no longer gets it.
        """
        try:
            logits = self._passes.facts.logits
        except Unknown:
            return self._main_output(trace)
        value = logits.value if trace is self._passes.exact else logits.of(trace)
        if value is None:
            raise Unknown("the loss is computed differently after the change")
        return value

    def _main_output(self, trace: Trace) -> Tensor:
        """Return the first tensor that the model puts out or, if the loss calls only parts of it, the last
        that the loss gets from them.
        """
        output = self._passes.facts.output
        if output is not None:
            value = tapped(trace, output)
        else:
            value = next(iter(trace.outputs[self._main_place :]), None)
        if value is None:
            raise Unknown("the loss gets no tensor from the model that could be compared")
        return value

    @cached_property
    def _main_place(self) -> int:
        """Which of the tensors that the loss gets from the model is the main output: the first that holds
        several numbers in the step itself. Of one row alone it may hold a single one, as a reward does.
        """
        outputs = self._passes.exact.outputs
        for place, x in enumerate(outputs):
            if x.is_floating_point() and x.numel() > 1:
                return place
        return len(outputs)

    def difference(self, a: Trace, b: Trace, part: Part) -> Located | None:
        """Return the largest difference of two runs in a part of the logits, relative to the largest entry;
        None if they agree up to rounding.

        The module is the first, in order of completion, whose inputs agree in that part but whose outputs do
        not. Raises Unknown if the logits have no such part.
        """
        of_first = self.logits(a)
        x, y = part(of_first), part(self.logits(b))
        if x is None or y is None:
            raise Unknown("the output has no axis for positions, or holds nothing that can be compared there")
        size = unnoted_distance(x, y)
        differs = size > self.rounding
        module = blame(a, b, part, self.rounding) if differs else ""
        numbers = (x.numel(), of_first.numel())
        note_runs(a, b, numbers=numbers, size=size, limit=self.rounding, module=module)
        return Located(size, module) if differs else None

    # ------------------------------------------------------------------------------------- what rounding does

    @cached_property
    def narrowed(self) -> frozenset[torch.dtype]:
        """The types in which a pass in float64 computes in part, whatever is asked of it."""
        seen = Narrowings()
        for training in (False, True):
            with suppress(Exception), seen:  # what cannot be dispatched to Python
                self._passes.exact.again(training=training, taps=()).once()
        return frozenset(seen.types)

    @cached_property
    def rounding(self) -> float:
        """The relative difference that two runs may show by rounding alone."""
        if not self._passes.is_exact:
            return rounding_of(self._passes.exact, self.logits)
        return max((EXACT, *map(self._off_in, self.narrowed)))

    def _off_in(self, dtype: torch.dtype) -> float:
        """Return how far the whole step in a type may be from the same step in float64."""
        exact = self._passes.exact
        model = copied_model(exact.model).to(dtype)
        batch = map_tensors(exact.batch, lambda _, x: x.to(dtype) if x.is_floating_point() else x)
        apart = []
        for training in (False, True):
            wide = exact.again(training=training)
            if distance(wide.loss, wide.again(seed=1).loss):
                continue  # two types draw two sequences of random numbers
            narrow = wide.again(model=model, batch=batch, exact=False)
            apart.append(distance(self.logits(wide), self.logits(narrow)))
        return 4 * max(apart, default=0.0)

    # ------------------------------------------------------------------------------------ what changes a run

    @cached_property
    def draws(self) -> bool:
        """Whether a training pass depends on the random state although every dropout of torch is off.

        A choice among a few may come out the same twice, so a pass that draws is run with several seeds.
        """
        training = self._passes.training
        seeds = SEEDS if self._takes_random_numbers() else SEEDS[:1]
        losses = (training.again(seed=seed).loss for seed in seeds)
        return any(distance(training.loss, loss) > self.rounding for loss in losses)

    def _takes_random_numbers(self) -> bool:
        """Return whether a training pass draws from the generators of torch, Python or numpy."""
        training = self._passes.training
        return _states_after(training) != _states_before(training)

    @cached_property
    def outputs_are_drawn(self) -> bool:
        """Whether the outputs depend on the random state in evaluation mode."""
        exact = self._passes.exact
        return distance(self.logits(exact), self.logits(exact.again(seed=1))) > self.rounding

    def draws_the_same(self, trace: Trace) -> bool:
        """Return whether a pass draws the random numbers of the exact one, and some: as many of them, from
        the same generators in the same states.
        """
        exact = self._passes.exact
        return _states_before(exact) != _states_after(exact) == _states_after(trace)

    def uses(self, path: str, call: int = 0) -> bool:
        """Return whether the loss depends on the output of a call of a module."""
        with self._passes.exact.with_graph(events=True) as passed:
            calls = (event for event in passed.events if (event.module, event.call) == (path, call))
            output = next((stream_of(event.outputs) for event in calls), None)
            if output is None or not output.requires_grad or passed.loss is None:
                return True
            return torch.autograd.grad(passed.loss, output, allow_unused=True)[0] is not None

    def sees(self, ahead: int, scored: tuple[Logits, Targets] | None = None) -> bool:
        """Return whether a counted prediction depends on the token at this distance from its position; of
        these logits, or of the main ones.
        """
        facts = self._passes.facts
        rows, width = facts.tokens.ids.shape
        logits, asked = scored or facts.scored
        first = facts.before(asked)  # positions of the logits that have no token
        counted = asked.counted.any(0).nonzero()[:, 0]
        are_words = facts.exchangeable().any(0)
        tokens = counted - first + ahead
        at_words = counted[are_words[tokens.clamp(0, width - 1)]]
        if len(at_words):
            counted = at_words
        place = int(counted[len(counted) // 2])
        token = place - first + ahead
        if not 0 <= token < width:
            return ahead <= 0
        at_token = (torch.arange(width) == token).expand(rows, width)
        changed = logits.of(self._passes.exact.again(batch=facts.other_tokens(at_token)))
        if changed is None or changed.shape != logits.value.shape:
            raise Unknown("the loss is computed differently after the change")
        return distance(logits.value[:, place], changed[:, place]) > self.rounding

    def moves(self, place: Place, others: Iterable[Tensor] | None = None) -> bool | None:
        """Return whether an entry of the batch moves the outputs or the loss when it has one of these values,
        or of others of its kind if none are given; None if the step runs with none of them.
        """
        exact, ran = self._passes.exact, False
        values = self._passes.facts.other_values(place) if others is None else others
        for value in values:
            with suppress(Exception):  # a value that the model does not accept
                changed = exact.again(batch=replaced(exact.batch, place, value))
                pairs = [(exact.loss, changed.loss), *zip(exact.outputs, changed.outputs, strict=False)]
                ran = True
                if any(x.is_floating_point() and distance(x, y) > 0 for x, y in pairs):
                    return True
        return False if ran else None


def _states_before(trace: Trace) -> list[Any]:
    with same_random_state(trace.seed):
        return random_states()


def _states_after(trace: Trace) -> list[Any]:
    with trace.with_graph(graph=False):
        return random_states()
