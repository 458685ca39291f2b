"""Prove that a flow computes what the script computed: on the recorded step, and on the batch of a later one.

The first proof (``Flow.prove``) shows that nothing is missing. It cannot show that the flow takes nothing of
the batch for a constant, such as a length that the script computes in Python: with the same batch, that is
the same. So the flow is also run on the batch of a later step, if one was recorded, and must give the loss
that the script had there (``LaterStep``).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from normlab.errors import UserError
from normlab.setups.arguments import Number
from normlab.setups.flow import Flow, NotRepeatableError, apart
from normlab.setups.micro_batch_flow import flow_of, scaling_calls
from normlab.setups.recording import Escape, MicroBatch, RecordedCall, ancestors
from normlab.setups.setup import Ability, Setup
from normlab.trace.restore import restored
from normlab.trace.tensors import eager


@dataclass(frozen=True, eq=False)
class ProvenFlow:
    """A flow, what cannot be done with it, and why."""

    flow: Flow
    cannot: dict[Ability, str]
    gradients: dict[str, Tensor]
    """Its gradients by the paths of the parameters; none if they cannot be computed again."""


def proven_window(
    window: Sequence[MicroBatch],
    next_pass: MicroBatch | None,
    held: Collection[int],
    known: Mapping[MicroBatch, ProvenFlow],
) -> list[ProvenFlow]:
    """Return the flows of the micro-batches of a step, each with what its proofs say.

    Only the first is asked about other batches: what its flow depends on, the other flows depend on as well.

    Args:
        window: The micro-batches.
        next_pass: The first micro-batch of a later step, if there is one.
        held: The parameters, by ``id``, that the optimizers of the step hold.
        known: Micro-batches that were proven before, and are not proven once more.

    Raises NotRepeatableError if no module with parameters takes part in the loss.
    """
    first = known.get(window[0]) or proven_flow(window[0], held, next_pass)
    scalings = _common_scalings(window[0], next_pass)
    compared = {(escape.name, escape.line) for escape in first.flow.escapes}
    proven = [first]
    for micro_batch in window[1:]:
        repeated, _ = _repeated_flow(micro_batch, held, scalings, [])
        escapes = [escape for escape in repeated.flow.escapes if (escape.name, escape.line) in compared]
        proven.append(replace(repeated, flow=replace(repeated.flow, escapes=tuple(escapes))))
    return proven


def proven_flow(
    micro_batch: MicroBatch, held: Collection[int], next_pass: MicroBatch | None = None
) -> ProvenFlow:
    """Return the flow of one micro-batch with what its proofs say; the arguments are those of
    ``proven_window``.
    """
    not_repeated: list[RecordedCall] = []
    scalings = _common_scalings(micro_batch, next_pass)
    while True:
        proven, unrepeated = _repeated_flow(micro_batch, held, scalings, not_repeated)
        if proven.cannot:
            return proven
        flow = proven.flow
        later = None
        if next_pass is not None:
            later = LaterStep.of(flow, micro_batch, next_pass, held, not_repeated, scalings)
        if later is None or later.differs_in is None or flow.depends_on_model(later.differs_in):
            break
        # it makes the batch out of more than the tensors that it reads, so the batch begins after it
        not_repeated.append(later.differs_in)
    escapes = _mattering_escapes(flow, later, scaling_calls(micro_batch)[:scalings])
    # bools and whole numbers are compared whenever the flow runs on another batch, so they may matter
    compared = [escape for escape in escapes if isinstance(escape.read, int) and escape not in unrepeated]
    reasons = [_sentence(escape) for escape in escapes if escape not in compared]
    if later is not None and later.difference:
        reasons.append(later.difference)
    cannot: dict[Ability, str] = {"batch": reasons[0]} if reasons else {}
    return ProvenFlow(replace(flow, escapes=tuple(compared)), cannot, proven.gradients)


def _repeated_flow(
    micro_batch: MicroBatch, held: Collection[int], scalings: int, not_repeated: list[RecordedCall]
) -> tuple[ProvenFlow, list[Escape]]:
    """Return the flow of a micro-batch as far as it can be repeated, and the escapes that cannot be.

    A call that makes the batch but cannot be repeated, such as one that draws random numbers of its own, is
    added to ``not_repeated``, and the batch begins after it.
    """
    while True:
        flow = flow_of(micro_batch, held, not_repeated, scalings=scalings)
        unrepeated: list[Escape] = []
        try:
            gradients = flow.prove(micro_batch, unrepeated)
        except NotRepeatableError as error:
            if error.call is not None and not flow.depends_on_model(error.call):
                not_repeated.append(error.call)
                continue
            lost: Ability = "gradient" if error.call is None else "loss"
            return ProvenFlow(flow, {lost: str(error)}, {}), unrepeated
        return ProvenFlow(flow, {}, gradients), unrepeated


def _common_scalings(micro_batch: MicroBatch, next_pass: MicroBatch | None) -> int:
    """Return how many of the last calls scale the loss: those that multiply it by the same number in both
    steps. A number that differs comes from the batch, such as a count of targets.
    """
    factors = [factor for _, factor in scaling_calls(micro_batch)]
    if next_pass is None:
        return len(factors)
    next_factors = [factor for _, factor in scaling_calls(next_pass)]
    common = 0
    for factor, next_factor in zip(factors, next_factors, strict=False):
        if factor != next_factor:
            break
        common += 1
    return common


class LaterStep:
    """What a flow gives with the batch of a later step, compared with what the script had there.

    It must be the same loss. If it is, what left torch with another value there does not matter. If not,
    something of the batch is a constant in the flow: what left torch with another value or, if nothing did,
    something that was never seen.

    Args:
        flow: That of the first step.
        later: That of the later step.
        next_pass: Where the later one comes from.
    """

    def __init__(self, flow: Flow, later: Flow, next_pass: MicroBatch) -> None:
        self._flow, self._later, self._next_pass = flow, later, next_pass
        self.differing: list[Escape] = []
        """What left torch with another value there."""
        self.differs_in: RecordedCall | None = None
        """The first call whose result differs, if the script made the same calls, and nothing left torch with
        another value.
        """
        self._is_same_loss = False
        self.difference = self._compare()
        """What differs, in a sentence; empty if the loss is the same, or what left torch explains it."""

    @classmethod
    def of(
        cls,
        flow: Flow,
        micro_batch: MicroBatch,
        next_pass: MicroBatch,
        held: Collection[int],
        not_repeated: Sequence[RecordedCall],
        scalings: int,
    ) -> LaterStep | None:
        """Run a flow on the batch of a later step; None if it is the same one, or has other tensors.

        ``not_repeated`` are calls of the first step; those at the same places of the later one are not
        repeated there.
        """
        calls = ancestors(micro_batch.calls, micro_batch.loss)
        next_calls = ancestors(next_pass.calls, next_pass.loss)
        pairs = zip(calls, next_calls, strict=False)
        not_repeated_there = [there for call, there in pairs if call in not_repeated]
        try:
            later = flow_of(next_pass, held, not_repeated_there, flow.model, scalings)
        except NotRepeatableError:
            return None
        if later.batch.keys() != flow.batch.keys():
            return None
        is_same_batch = all(torch.equal(x, flow.batch[name]) for name, x in later.batch.items())
        return None if is_same_batch else cls(flow, later, next_pass)

    def is_harmless(self, escape: Escape) -> bool:
        """Return whether the loss is known not to depend on what an escape read."""
        return escape in self.differing and self._is_same_loss

    def _compare(self) -> str:
        """Run the flow on the later batch; return what differs, see ``difference``."""
        other_way = self._other_way()
        if other_way and any(call.random_states for call in self._flow.calls):
            return other_way  # nothing says which call drew which random numbers
        draws = [call.random_states for call in (self._flow if other_way else self._later).calls]
        model, batch = self._flow.model, self._later.batch
        setup = Setup(model, self._flow.batch, loss=self._flow.loss_of)
        with restored(setup), self._next_pass.module_state.in_place(), eager(), torch.no_grad():
            try:
                values = self._flow.values(model, batch, draws=draws, escaped=self.differing)
            except UserError as error:
                return "" if self.differing else f"with the batch of the next step, {error}"
        self._is_same_loss = not apart(values[self._flow.loss], self._next_pass.value(self._later.loss))
        if self._is_same_loss or self.differing:
            return ""
        return other_way or self._first_difference(values)

    def _first_difference(self, values: Mapping[Number, Any]) -> str:
        """Say which call is the first whose result differs from that in the later step, and note the call."""
        overwritten = {number for call in self._flow.calls for number in call.overwritten}
        for call, there in zip(self._flow.calls, self._later.calls, strict=True):
            for number, number_there in zip(call.results, there.results, strict=True):
                recorded = self._next_pass.value(number_there)
                if number not in overwritten and recorded is not None and apart(values[number], recorded):
                    self.differs_in = call
                    return (
                        f"{call.name} in {call.line} gives another result with the next step's batch than it "
                        "gave in the script, so it uses a number of the batch that was not followed"
                    )
        return "the loss on the next step's batch differs from the one that the script had there"

    def _other_way(self) -> str:
        """Return where the script went another way in the later step; empty if it made the same calls."""
        calls, later = self._flow.calls, self._later.calls
        for call, there in zip(calls, later, strict=False):
            if (call.name, call.line) != (there.name, there.line):
                return (
                    f"with the batch of the next step the script goes another way: {there.name} in "
                    f"{there.line} comes in place of {call.name} in {call.line}"
                )
        if len(calls) != len(later):
            last = max(calls, later, key=len)[-1]
            return f"only one of two steps comes to {last.name} in {last.line}"
        return ""


def _sentence(escape: Escape) -> str:
    return (
        f"numbers of the batch leave torch by {escape.name} in {escape.line}, and what the script computes "
        "from them there does not follow a changed batch; use item(), which is followed"
    )


def _mattering_escapes(
    flow: Flow, later: LaterStep | None, scaling: Sequence[tuple[RecordedCall, float]]
) -> list[Escape]:
    """Return the escapes of a flow on which its loss may depend.

    Args:
        flow: The flow.
        later: What it gives with another batch, if there is one.
        scaling: The calls that scale the loss for its backward pass.
    """
    if later is not None:
        escapes = [escape for escape in flow.escapes if not later.is_harmless(escape)]
        return [escape for escape in escapes if _may_come_back(escape, flow)]
    calls = [call for call, _ in scaling]
    return [escape for escape in flow.escapes if _may_be_computed_of(escape, flow, calls)]


def _may_come_back(escape: Escape, flow: Flow) -> bool:
    """Return whether what left torch may decide what the flow does after it: as a bool, as a number that its
    calls get from Python, or as a tensor that comes from outside.
    """
    later = [call for call in flow.calls if call.results[0] > escape.number]
    if escape.read is None:
        return any(n > escape.number for n in flow.tensors) or any(not call.reads for call in later)
    if isinstance(escape.read, bool):
        return True
    return any(_is_computed_of(number, escape.read) for number in _constants_of(later))


def _may_be_computed_of(escape: Escape, flow: Flow, scaling: Sequence[RecordedCall]) -> bool:
    """Return the same if no other batch shows what the script computes from what left torch: that may be any
    number that is not whole, and any by which the loss is scaled.
    """
    later = [call for call in flow.calls if call.results[0] > escape.number]
    if any(isinstance(number, float) for number in _constants_of(later)):
        return True
    is_scaled_after = any(call.results[0] > escape.number for call in scaling)
    if escape.read is None and is_scaled_after:
        return True
    return _may_come_back(escape, flow)


def _constants_of(calls: Iterable[RecordedCall]) -> Iterator[float]:
    """Yield the numbers that calls get from Python."""
    for call in calls:
        for part in call.arguments.parts:
            if isinstance(part, (int, float)) and not isinstance(part, bool):
                yield part


def _is_computed_of(number: float, read: float) -> bool:
    """Return whether a number is a whole multiple of what was read, or the inverse of one."""
    if number == 0 or read == 0:
        return number == read
    return (number / read).is_integer() or (1 / (number * read)).is_integer()
