"""normlab's own studies by name; each is loaded when it measures, so papers need no torch."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any, Final

from normlab.papers.artefact import Measurement

VERSIONS: Final = {"over_depth": 2, "prefixes": 2, "by_layer": 2}
"""Raised when the same settings give other numbers, so earlier results are stale; 1 for all others."""


@dataclass(frozen=True)
class OwnStudy:
    """A function of ``normlab.papers.studies``."""

    module: str
    __name__: str
    version: int = 1

    def __call__(self, lab: Any, **settings: Any) -> Measurement:
        """Measure by the function."""
        function = getattr(import_module(f"normlab.papers.studies.{self.module}"), self.__name__)
        found: Measurement = function(lab, **settings)
        return found

    @classmethod
    def named(cls, name: str) -> OwnStudy:
        """Return the study of a name like ``gradients.by_layer``: its module and its function there."""
        module, _, function = name.partition(".")
        return cls(module, function, VERSIONS.get(function, 1))


TRAININGS: Final = OwnStudy.named("trained.trainings")
"""The study of artefacts that only take measures of their runs."""
