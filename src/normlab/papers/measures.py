"""Measures of the weights that runs have trained, each a frozen dataclass of the cells that it reads.

What only needs the scores and curves of runs is an effect (``effects.py``); these need the models themselves.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol, dataclass_transform

from normlab.papers.estimate import Estimate, mean, mean_ratio

ROLES: Final = {
    "encoder attention": ("encoder", 2, 0),
    "encoder feed-forward": ("encoder", 2, 1),
    "decoder attention": ("decoder", 3, 0),
    "decoder-encoder attention": ("decoder", 3, 1),
    "decoder feed-forward": ("decoder", 3, 2),
}
"""Each kind of sublayer: its stack, the sublayers of a layer there, and its place among them."""


class TrainedWeights(Protocol):
    """What is asked of the best weights of a run; ``studies.trained_models`` measures it."""

    def training_loss(self) -> float: ...

    def fold_difference(self) -> float: ...

    def constant_ratio(self, seed: int) -> float: ...

    def scale_growth(self, role: str) -> float: ...

    def scale_at(self, where: str) -> float: ...


class TrainedRuns(Protocol):
    """The finished runs of an artefact; measures are declared without what loads them."""

    def models(self, cell: str) -> Sequence[TrainedWeights]: ...


@dataclass_transform(frozen_default=True)
class OfWeights(ABC):
    """A number taken from the weights of an artefact's runs. Each subclass is a frozen dataclass."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        dataclass(frozen=True)(cls)

    @abstractmethod
    def measure(self, runs: TrainedRuns) -> Estimate:
        """Take the number."""


class TrainPerplexityRatio(OfWeights):
    """The label-smoothed perplexity of ``a`` on its training text over that of ``b``, within seeds, at the
    best weights on dev and without dropout.
    """

    a: str
    b: str

    def measure(self, runs: TrainedRuns) -> Estimate:
        losses = ([model.training_loss() for model in runs.models(cell)] for cell in (self.a, self.b))
        return mean_ratio(math.exp(x - y) for x, y in zip(*losses, strict=True))


class FoldDifference(OfWeights):
    """The largest difference between logits of a run and of its plain form in float32, over the largest
    logit; the largest of all seeds.
    """

    cell: str

    def measure(self, runs: TrainedRuns) -> Estimate:
        return Estimate.exact(max(model.fold_difference() for model in runs.models(self.cell)))


class ConstantRatio(OfWeights):
    """C of Theorem 2 at the best weights on dev over C at initialisation, within seeds (Liu et al. 2020,
    Section 4.2, arXiv 2004.08249).
    """

    cell: str

    def measure(self, runs: TrainedRuns) -> Estimate:
        return mean_ratio(m.constant_ratio(seed) for seed, m in enumerate(runs.models(self.cell), 1))


class ScaleGrowth(OfWeights):
    """The least-squares slope of ln g by layer, for one kind of sublayer, as a mean over seeds."""

    cell: str
    role: str

    def measure(self, runs: TrainedRuns) -> Estimate:
        return mean(model.scale_growth(self.role) for model in runs.models(self.cell))


class ScaleRatio(OfWeights):
    """g in ``a`` over g in ``b``, within seeds: at the ``output``, or its mean over the sublayers in the
    ``late`` third of the decoder.
    """

    a: str
    b: str
    where: str

    def measure(self, runs: TrainedRuns) -> Estimate:
        scales = ([model.scale_at(self.where) for model in runs.models(cell)] for cell in (self.a, self.b))
        return mean_ratio(x / y for x, y in zip(*scales, strict=True))
