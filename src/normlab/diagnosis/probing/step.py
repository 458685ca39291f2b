"""Names of ``normlab.trace`` as the studies of ``preflight`` know them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from normlab.trace.step import Gradients, OptimizerFactory, OptimizerStep

if TYPE_CHECKING:
    from normlab.diagnosis.reading.subject import Subject

OptimiserFactory = OptimizerFactory


class Twin(OptimizerStep):
    """An ``OptimizerStep`` on subjects."""

    def step(self, subject: Subject, known: Gradients | None = None) -> Gradients:
        return super().step(subject.trace(), known)
