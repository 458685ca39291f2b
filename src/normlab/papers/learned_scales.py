"""Measures of the scales g that ScaleNorm learns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from normlab.papers.claim import Measure
from normlab.papers.measures import OfRuns

if TYPE_CHECKING:
    from normlab.papers.studies.trained import Trained


@dataclass(frozen=True)
class ScaleGrowth(OfRuns):
    """The slope of ln g by layer, for one kind of sublayer, by least squares; its mean over seeds."""

    cell: str
    role: str

    def measure(self, runs: Trained) -> Measure:
        return runs.mean(runs.scale_growths(self.cell, self.role))


@dataclass(frozen=True)
class ScaleChange(OfRuns):
    """g in ``a`` minus g in ``b`` within seeds: at the ``output``, or its mean over the sublayers in the
    ``late`` third of the decoder.
    """

    a: str
    b: str
    where: str

    def measure(self, runs: Trained) -> Measure:
        both = zip(runs.scales(self.a, self.where), runs.scales(self.b, self.where), strict=True)
        return runs.mean(x - y for x, y in both)
