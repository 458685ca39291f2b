"""Comparisons that are made by hand."""

from __future__ import annotations

from dataclasses import replace

import torch

from normlab.parallel.comparison import Comparison
from normlab.parallel.job import RankStep, SerialStep, Step


def tensors(seed):
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=generator, dtype=torch.float64)
        for name, shape in {"words": (6, 4), "up": (4, 8), "bias": (8,)}.items()
    }


def step(**changed):
    """A step of SGD at a rate of 1."""
    before, gradients = tensors(0), tensors(1)
    made = Step(
        before=before,
        backward=gradients,
        at_step=gradients,
        after={name: x - gradients[name] for name, x in before.items()},
        ties={"head": "words"},
        norms=(2.0,),
        rates=dict.fromkeys(before, 1.0),
    )
    return replace(made, **changed)


def rank(number, *, batch=None, **changed):
    """A rank that reads data of its own."""
    ids = torch.arange(12).reshape(3, 4) + 100 * number if batch is None else batch
    made = RankStep(number, step(), [{"ids": ids}], [ids], [], [], ["DistributedDataParallel"])
    return replace(made, **changed)


def comparison(*ranks, **serial):
    """Ranks beside one process, all of them sound unless they are changed."""
    alone = SerialStep(
        gradients=tensors(1),
        ties={"head": "words"},
        passes=1,
        dtype="float64",
        title="Decoder",
        union="2 batches that 2 ranks read",
    )
    return Comparison(list(ranks) or [rank(0), rank(1)], replace(alone, **serial), step())
