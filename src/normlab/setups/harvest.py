"""Record a script's first steps, and let it go on for the batches of later ones.

Two steps are recorded whole, as by a ``Recorder``. If more batches are wanted, the script then goes on: the
flow of the first step tells which tensors of a later step are its batch, and everything else is dropped. At
the end, models and optimizers are put back into the state that the second step found.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Final, TypeAlias

from torch import Tensor
from torch.optim import Optimizer

from normlab.errors import UserError
from normlab.setups.arguments import Number
from normlab.setups.ending import EnoughSeen
from normlab.setups.flow import Flow, NotRepeatableError
from normlab.setups.micro_batch_flow import flow_of
from normlab.setups.optimizers import ids_held_by
from normlab.setups.proof import ProvenFlow, proven_flow
from normlab.setups.recorder import Recorder
from normlab.setups.recording import Event, MicroBatch, Recording
from normlab.setups.setup import Setup
from normlab.setups.window import WindowStep, joined, side_by_side
from normlab.trace.restore import same

RECORDED: Final = 2
"""How many steps are recorded whole: the second shows what a loop does after its first step, as with a
schedule, which belongs to the first.
"""
Batch: TypeAlias = dict[str, Tensor]


class Harvester(Recorder):
    """Records as a ``Recorder`` does, and gathers the batches of later steps.

    Args:
        batches: How many batches are wanted, with that of the first step.
        seconds: How long may be spent on those of later steps.
        optimizer: The number of the optimizer whose steps are recorded, in the order in which they step.

    Raises UserError if several batches of another optimizer than the first are wanted.
    """

    def __init__(self, batches: int = 1, seconds: float = float("inf"), optimizer: int = 1) -> None:
        if batches > 1 and optimizer > 1:
            raise UserError(
                "several batches are those of the first optimizer; leave out the number of another one"
            )
        super().__init__(RECORDED, optimizer)
        self._wanted, self._seconds = batches, seconds
        self._deadline = float("inf")
        self._state = ExitStack()
        """Puts back the state of the second step."""
        self._first: _FirstStep | None = None
        """What batches are found by, once the first steps are recorded, if several are wanted."""
        self._windows: list[list[Batch]] = []
        """Of each step after the first, the batches of its micro-batches."""
        self._step_began = 0
        """The values of the step that is under way have this number or a higher one."""
        self.ended_by = "the script ended"
        """Why there are fewer batches than were asked for; empty if there are as many."""

    def _leave_out(self, optimizer: Optimizer) -> None:
        """Note a step in place of making it. Raises EnoughSeen when there are enough steps and batches."""
        try:
            super()._leave_out(optimizer)
            if self._first is None:
                return  # still recording the first steps
        except EnoughSeen:
            if self._first is None:
                self._end_first_steps()
        if self._first is None:  # one batch is enough, or none can be found
            self.ended_by = ""
            raise EnoughSeen
        self._take_batches(self._first)
        if 1 + len(self._windows) >= self._wanted:
            self.ended_by = ""
            raise EnoughSeen
        if time.monotonic() > self._deadline:
            self.ended_by = "there was no time for more"
            raise EnoughSeen

    def _end_first_steps(self) -> None:
        """Keep the state that the second step found, and find out how to get batches if they are wanted."""
        self._deadline = time.monotonic() + self._seconds
        with self.paused():
            calls = [call for micro_batch in self.recording.micro_batches for call in micro_batch.calls]
            modules = [call.module for call in calls if call.module is not None]
            changing = (*modules, *self.recording.optimizers, *self.recording.schedulers)
            self._state.enter_context(same(*changing, parameters=self._wanted > 1))
            if self._wanted > 1:
                self._first = _FirstStep.of(self.recording)

    def _take_batches(self, first: _FirstStep) -> None:
        """Take the batches of the steps since the first, and let go of how they came about."""
        recording = self.recording
        with self.paused():
            for _, window in recording.windows[1:]:
                batches = [first.batch_of(micro_batch) for micro_batch in window]
                self._windows.append([batch for batch in batches if batch is not None])
        read = {n for each in recording.micro_batches for call in each.calls for n in call.reads}
        del recording.micro_batches[first.micro_batches :]
        for place, event in enumerate(recording.events):
            if event.kind == "backward" and event.subject not in recording.micro_batches:
                recording.events[place] = Event("backward")
        self._forget(read)

    def _forget(self, read: set[Number]) -> None:
        """Let go of the values that were seen, but for those that were made in this step for the next one."""
        self.values.loaded = {n for n in self.values.loaded - read if n >= self._step_began}
        of_calls = {n for call in self._calls for n in (*call.reads, *call.results)}
        self.values.forget(self.values.loaded | of_calls)
        self._scaled.clear()
        self._step_began = self.values.next_number()

    @property
    def proven(self) -> Mapping[MicroBatch, ProvenFlow]:
        """The flows that were proven while the script ran."""
        first = self._first
        return {} if first is None else {self.recording.first_window[0]: first.proven}

    def end(self) -> None:
        """End recording, in the state of the second step, whatever came after it."""
        self._state.close()
        super().end()

    def batches_like(self, setup: Setup) -> list[Batch]:
        """Return the batch of a setup and those of the same form that later steps had: all rows of their
        micro-batches, or the tensors of each side by side, where the setup's step takes such.
        """
        step = setup.step
        if isinstance(step, WindowStep) and step.joined is None:  # of several shapes
            batches: list[Batch] = [step.batch]
            for window in filter(None, self._windows):
                is_whole = len(window) == len(step.flows)
                batches.append(side_by_side(window) if is_whole else window[0])
        else:
            batches = [setup.batch]
            for window in filter(None, self._windows):
                batches.append(joined(window) or window[0])
        return [batch for batch in batches if batch.keys() >= setup.batch.keys()]


@dataclass(frozen=True)
class _FirstStep:
    """What the batches of later steps are found by."""

    proven: ProvenFlow
    """That of its first micro-batch."""
    held: frozenset[int]
    """The parameters, by ``id``, that its optimizers hold."""
    is_plain: bool
    """Whether its batch is found without a proof, too. A proof may show that calls cannot be repeated, and
    that the batch begins after them.
    """
    micro_batches: int
    """How many it has."""

    @classmethod
    def of(cls, recording: Recording) -> _FirstStep | None:
        """Return what was recorded of the first step; None if it cannot be computed again."""
        window = recording.first_window
        held = frozenset(ids_held_by(recording.optimizers_of_first_step))
        if not window:
            return None
        try:
            proven = proven_flow(window[0], held, recording.first_of_next_step(window))
            plain = flow_of(window[0], held, model=proven.flow.model)
        except NotRepeatableError:
            return None
        is_plain = proven.flow.batch.keys() == plain.batch.keys()
        return cls(proven, held, is_plain, len(window))

    def batch_of(self, micro_batch: MicroBatch) -> Batch | None:
        """Return a copy of the batch of a micro-batch; None if its loss does not come from a model."""
        try:
            flow = self._flow_of(micro_batch)
        except NotRepeatableError:
            return None
        return {name: x.detach().clone() for name, x in flow.batch.items()}

    def _flow_of(self, micro_batch: MicroBatch) -> Flow:
        if self.is_plain:
            return flow_of(micro_batch, self.held, model=self.proven.flow.model)
        return proven_flow(micro_batch, self.held).flow
