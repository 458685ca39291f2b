"""What must hold of a step on several ranks, each one small function; docs/parallel.md explains them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

import torch

from normlab.base.registry import Registry
from normlab.base.units import told_apart
from normlab.checks.property import Violation, fail, needs
from normlab.parallel.comparison import Comparison
from normlab.parallel.differences import (
    Difference,
    common_factor,
    differences,
    first_difference,
    norm_of,
    where_known,
)
from normlab.parallel.job import Named, RankStep, Step
from normlab.parallel.union import is_same
from normlab.trace.facts import Unknown

Test = Callable[[Comparison], Iterator[Violation]]
"""Yields what fails; raises ``Unknown`` if it cannot be tested."""


@dataclass(frozen=True)
class RanksProperty:
    """One property of a step on several ranks, and those whose failures it explains."""

    name: str
    test: Test
    explains: tuple[str, ...]

    @property
    def statement(self) -> str:
        """What it states, in one sentence."""
        return " ".join((self.test.__doc__ or "").split("\n\n")[0].split())


PROPERTIES: Final[Registry[RanksProperty]] = Registry("property of ranks")
"""By name, causes before consequences."""


def property_of_ranks(*explains: str) -> Callable[[Test], Test]:
    """Register a function of a ``Comparison`` as a property by its name; its docstring is the statement."""
    return PROPERTIES.register_made(lambda test: RanksProperty(test.__name__, test, explains))


# ------------------------------------------------------------------------------------------ before it


@property_of_ranks()
def ranks_data(step: Comparison) -> Iterator[Violation]:
    """Ranks read different data, but for those that compute one batch together, which read the same."""
    for rank in step.ranks:
        needs(not rank.unseen, rank.unseen)
    for i, rank in enumerate(step.ranks):
        for other in step.ranks[i + 1 :]:
            yield from _data_of_two(step, rank, other)


def _data_of_two(step: Comparison, rank: RankStep, other: RankStep) -> Iterator[Violation]:
    is_same_batch = len(rank.batches) == len(other.batches) and all(map(is_same, rank.batches, other.batches))
    name = next(iter(rank.batches[0]))
    if other.rank in step.batch_mates(rank.rank):
        if not is_same_batch and not _are_parts(step, rank):
            yield fail(
                _differing_entry(rank, other),
                f"ranks {rank.rank} and {other.rank} compute one batch together, but read different ones",
                "Read the data by the rank in the mesh of data, which is the same for all ranks of a group "
                "of tensors or of context.",
            )
        elif is_same_batch and step.share_sequences(rank, other) and _is_same_input(rank, other):
            yield fail(
                name,
                f"ranks {rank.rank} and {other.rank} both compute whole sequences, of which each was to have "
                "a part",
                "Hand context_parallel all tensors that have the axis of the sequence as its buffers, and "
                "their axes as buffer_seq_dims.",
            )
    elif is_same_batch and _is_same_input(rank, other):
        yield fail(
            name,
            f"ranks {rank.rank} and {other.rank} read the same batch, so that the work of one is lost",
            "Give the loader a DistributedSampler, or read the data by the rank.",
        )


def _are_parts(step: Comparison, rank: RankStep) -> bool:
    """Whether the batch of a rank is a part of each sequence, which the union has put together."""
    return step.serial.is_of_parts and bool(rank.batches)


def _is_same_input(rank: RankStep, other: RankStep) -> bool:
    pairs = zip(rank.inputs, other.inputs, strict=False)
    same = all(a.shape == b.shape and bool((a == b).all()) for a, b in pairs)
    return len(rank.inputs) == len(other.inputs) and same


def _differing_entry(rank: RankStep, other: RankStep) -> str:
    for batch, there in zip(rank.batches, other.batches, strict=False):
        for name, x in batch.items():
            if name not in there or x.shape != there[name].shape or not bool((x == there[name]).all()):
                return name
    return next(iter(rank.batches[0]))


@property_of_ranks("ranks_gradients", "ranks_clipping", "ranks_update")
def ranks_ties(step: Comparison) -> Iterator[Violation]:
    """A weight that is one in one process is one on each rank."""
    needs(step.serial.ties, "no two parameters are tied")
    for name, first in step.serial.ties.items():
        for rank in step.ranks:
            if rank.step.ties.get(name) != first and {name, first} <= rank.step.before.keys():
                yield fail(
                    name,
                    f"it is {first} in one process, and a weight of its own on rank {rank.rank}",
                    "Tie the weights again after the plan was applied, before the optimizer is made; or "
                    "shard the module that holds both as one.",
                )
                return


@property_of_ranks("ranks_gradients", "ranks_clipping", "ranks_update")
def ranks_weights(step: Comparison) -> Iterator[Violation]:
    """All ranks begin a step with the same weights."""
    for rank in step.ranks[1:]:
        difference = first_difference(rank.step.before, step.first.step.before)
        if difference is not None:
            yield fail(
                difference.name,
                f"on rank {rank.rank} it is {difference.beside('what it is on rank 0')}",
                "Draw weights before the model is wrapped or shared out, or with the same seed on all ranks.",
            )
            return


# ------------------------------------------------------------------------------------------ the step


@property_of_ranks("ranks_clipping", "ranks_update", "ranks_agree")
def ranks_gradients(step: Comparison) -> Iterator[Violation]:
    """The gradient on each rank is that of the loss of the union of what all ranks read."""
    again = _required_again(step)
    # a script that reduces gradients by hand has them only at its optimizer
    expected = step.serial.gradients if step.is_synchronous else again.at_step
    for rank in step.ranks:
        actual = rank.step.backward if step.is_synchronous else rank.step.at_step
        difference = first_difference(actual, expected)
        if difference is not None:
            yield fail(
                difference.name,
                _of_gradient(difference, actual, expected, rank),
                _advice(actual, expected, step),
            )
            return


def _of_gradient(difference: Difference, actual: Named, expected: Named, rank: RankStep) -> str:
    """Say how the gradients of a rank differ; ``difference`` is that of the first one that does."""
    several = sum(1 for _ in differences(actual, expected))
    sentence = f"its gradient on rank {rank.rank} is {difference.beside('that of one process')}"
    if several == 1:
        return f"{sentence}; all other gradients are the same"
    if common_factor(actual, expected) is not None:
        return f"{sentence}, as {'all' if several == len(expected) else several} are"
    return f"{sentence}; {several} of {len(expected)} gradients differ"


def _advice(actual: Named, expected: Named, step: Comparison) -> str:
    if not step.is_synchronous:
        return (
            "The script reduces gradients by hand: look at what it divides them by, and at the norm by which "
            "it clips, which is that of the reduced gradient."
        )
    factor = common_factor(actual, expected)
    ranks = len(step.ranks)
    if factor is not None and math.isclose(factor, ranks, rel_tol=1e-3):
        return (
            "Gradients are added up over ranks where a mean is meant: divide by the number of ranks once, or "
            "let the wrapper average them."
        )
    if factor is not None and math.isclose(factor * ranks, 1.0, rel_tol=1e-3):
        return (
            "Gradients are divided by the number of ranks once too often: DistributedDataParallel and "
            "fully_shard average them already."
        )
    if factor is not None:
        return "Look at what the loss is divided by: it is another number on ranks than in one process."
    return (
        "Look at what reduces this gradient over ranks, and at what the loss of a rank is a mean over: ranks "
        "that count other numbers of targets need weights."
    )


@property_of_ranks("ranks_update", "ranks_agree")
def ranks_clipping(step: Comparison) -> Iterator[Violation]:
    """What is done to gradients before the optimizer gets them is what one process does to them, on each
    rank; the norm by which they are clipped is that of the whole gradient.
    """
    again = _required_again(step)
    for rank in step.ranks:
        difference = first_difference(rank.step.at_step, again.at_step)
        if difference is not None:
            yield fail(
                difference.name,
                f"what the optimizer of rank {rank.rank} gets as its gradient is "
                f"{difference.beside('that of one process')}{_norms(step, rank)}",
                "Compute the norm of the whole gradient, on every rank the same: squares of shards are added "
                "up over the ranks that hold them, and what all ranks hold is counted once.",
            )
            return
    for rank in step.ranks:
        for norm, wanted in zip(rank.step.norms, again.norms, strict=False):
            if not math.isclose(norm, wanted, rel_tol=_norm_tolerance(step)):
                a, b = told_apart(norm, wanted)
                yield fail(
                    "step",
                    f"clip_grad_norm_ takes {a} for the norm of all gradients on rank {rank.rank}, and {b} "
                    "in one process",
                    "Clip after gradients were reduced, by the norm of the whole of them.",
                )
                return


def _norms(step: Comparison, rank: RankStep) -> str:
    again = _required_again(step)
    if rank.step.norms and again.norms:
        a, b = told_apart(rank.step.norms[-1], again.norms[-1])
        if a != b:
            return f": it clips by the norm {a}, which is {b} in one process"
    a, b = told_apart(norm_of(rank.step.at_step), norm_of(again.at_step))
    return f": the norm of all is {a}, and {b} in one process" if a != b else ""


def _norm_tolerance(step: Comparison) -> float:
    return math.sqrt(torch.finfo(getattr(torch, step.serial.dtype)).eps)


@property_of_ranks("ranks_agree")
def ranks_update(step: Comparison) -> Iterator[Violation]:
    """The update of each parameter is that of one process."""
    again = _required_again(step)
    for rank in step.ranks:
        actual = where_known(rank.step.update, again.at_step)
        difference = first_difference(actual, where_known(again.update, again.at_step))
        if difference is not None:
            yield fail(
                difference.name,
                f"its update on rank {rank.rank} is {difference.beside('that of one process')}",
                "Look for what the optimizer computes of a shard that it should compute of the whole, such "
                "as a norm or an orthogonal matrix.",
            )
            return


@property_of_ranks()
def ranks_agree(step: Comparison) -> Iterator[Violation]:
    """All ranks end a step with the same weights."""
    needs(
        all(first_difference(r.step.before, step.first.step.before) is None for r in step.ranks),
        "ranks begin it with different ones",
    )
    for rank in step.ranks[1:]:
        difference = first_difference(rank.step.after, step.first.step.after)
        if difference is not None:
            yield fail(
                difference.name,
                f"after the step it is on rank {rank.rank} {difference.beside('what it is on rank 0')}",
                "Give the optimizer of every rank the same gradient, the same state and the same rate.",
            )
            return


def _required_again(step: Comparison) -> Step:
    """Return what one process makes of the step. Raises Unknown if nothing says that."""
    if step.serial.cannot or step.again is None:
        raise Unknown(step.serial.cannot or "nothing says what one process makes of the step")
    return step.again
