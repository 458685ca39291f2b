"""The step of all ranks beside the step of one process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from normlab.parallel.differences import first_difference
from normlab.parallel.job import RankStep, SerialStep, Step


@dataclass(frozen=True)
class Comparison:
    """What properties of ranks are judged by."""

    ranks: Sequence[RankStep]
    """What each rank did, in their order."""
    serial: SerialStep
    """What the loss of the union of all batches gives in one process."""
    again: Step | None
    """What one process makes of the gradients of the union; None if there are none."""

    @property
    def first(self) -> RankStep:
        """Rank 0."""
        return self.ranks[0]

    @cached_property
    def is_synchronous(self) -> bool:
        """Whether all ranks have the same gradients when their last backward pass ends, as plans of torch
        leave them; a script that reduces them by hand does that later.
        """
        steps = [rank.step.backward for rank in self.ranks]
        return all(first_difference(gradients, steps[0]) is None for gradients in steps[1:])

    def batch_mates(self, rank: int) -> set[int]:
        """Return the ranks that compute one batch with this one, by plans for tensors and for context."""
        groups = [set(group) for each in self.ranks for group in (*each.tensors, *each.contexts)]
        # a mate by tensors may have mates by context, so groups are joined until none adds a rank
        mates, earlier = {rank}, set[int]()
        while mates != earlier:
            earlier = mates
            mates = mates.union(*(group for group in groups if not group.isdisjoint(mates)))
        return mates

    def share_sequences(self, rank: RankStep, other: RankStep) -> bool:
        """Return whether two ranks have parts of the same sequences."""
        return any({rank.rank, other.rank} <= set(group) for group in rank.contexts)
