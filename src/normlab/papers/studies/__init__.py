"""normlab's own studies by name; each is loaded when it measures, so papers need no torch."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any, Final

from normlab.papers.artefact import Measurement


@dataclass(frozen=True)
class OwnStudy:
    """A function of ``normlab.papers.studies``."""

    module: str
    __name__: str

    def __call__(self, lab: Any, **settings: Any) -> Measurement:
        """Measure by the function."""
        function = getattr(import_module(f"normlab.papers.studies.{self.module}"), self.__name__)
        found: Measurement = function(lab, **settings)
        return found

    @classmethod
    def named(cls, name: str) -> OwnStudy:
        """Return the study of a name like ``gradients.by_layer``: its module and its function there."""
        module, _, function = name.partition(".")
        return cls(module, function)


TRAININGS: Final = OwnStudy.named("trained.trainings")
"""The study of artefacts that are trainings and no more."""
