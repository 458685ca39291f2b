"""What all ranks read together, as the batches of one process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from normlab.base.units import count
from normlab.parallel.job import Named, RankStep


@dataclass(frozen=True)
class Union:
    """The different batches that all ranks read together."""

    batches: Sequence[Named]
    described: str
    cannot: str = ""
    """Why there are none that one process could compute."""
    is_of_parts: bool = False
    """Whether the ranks read parts of each sequence, which were put together."""


def is_same(a: Named, b: Named) -> bool:
    """Return whether two batches have the same tensors under the same names."""
    return a.keys() == b.keys() and all(torch.equal(x, b[name]) for name, x in a.items())


def union_of(ranks: Sequence[RankStep], serial: Sequence[Named]) -> Union:
    """Return the batches that the ranks read, each of them once: ranks that compute one together all read it.

    ``serial`` are the batches of the script in one process: their names and shapes say what a batch is.
    """
    batches: list[Named] = []
    for rank in ranks:
        for batch in rank.batches:
            if not any(is_same(batch, known) for known in batches):
                batches.append(batch)
    described = f"{count(len(batches), 'batch')} that {count(len(ranks), 'rank')} read"
    for batch in batches:
        if batch.keys() != serial[0].keys():
            there, here = ", ".join(batch), ", ".join(serial[0])
            return Union([], described, f"a rank's batch is {there}, and that of one process is {here}")
        for name, x in batch.items():
            if x.shape[1:] == serial[0][name].shape[1:]:
                continue
            if x.ndim > 1 and _is_part_of_sequence(len(ranks), x, serial[0][name]):
                joined = _joined_sequences(batches, serial)
                return joined or Union(
                    [],
                    described,
                    f"each rank reads a part of every sequence of {name}, in an order that nothing says; "
                    "hand the whole of it to context_parallel, or read all of it and slice it after that",
                )
    return Union(batches, described)


def _is_part_of_sequence(ranks: int, part: torch.Tensor, whole: torch.Tensor) -> bool:
    axes = [i for i in range(1, part.ndim) if part.shape[i] != whole.shape[i]]
    return len(axes) == 1 and part.shape[axes[0]] * ranks == whole.shape[axes[0]]


def _joined_sequences(batches: Sequence[Named], serial: Sequence[Named]) -> Union | None:
    """Return the batch of one process, if its sequences are those of the ranks one after the other."""
    for name, x in serial[0].items():
        pieces = [batch[name] for batch in batches]
        axes = [i for i in range(x.ndim) if pieces[0].shape[i] != x.shape[i]]
        if axes and not torch.equal(torch.cat(pieces, axes[0]), x):
            return None
    return Union(list(serial), "one batch whose sequences the ranks read in parts", is_of_parts=True)
