"""The trainings of an artefact at every scale, from one function that gives their cells."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from normlab.config.config import Config
from normlab.papers.trainings import Scale, Trainings

Cells: TypeAlias = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Setting:
    """A training of a paper at one scale; subclasses hold the numbers that its cells are made of."""

    base: Config
    """The part of the configuration that the cells of all artefacts share."""
    differs: str
    """How it differs from the paper's, and what it keeps, in sentences."""
    seeds: int = field(default=0, kw_only=True)
    """Runs a cell at this scale, where they are not as many as at the others."""


def at_each(
    cells: Callable[..., Cells],
    *settings: Mapping[Scale, Setting],
    seeds: int = 3,
    least: int = 0,
    of_studies: Mapping[Scale, Mapping[str, Any]] | None = None,
    laptop: str = "",
    gpu: str = "",
    paper: str = "",
) -> dict[Scale, Trainings]:
    """Return the trainings at every scale, whose cells are those of the function for the settings there.

    Base and difference are those of the first setting; ``laptop``, ``gpu`` and ``paper`` are said after the
    difference there.
    """
    adds: Mapping[Scale, str] = {"laptop": laptop, "gpu": gpu, "paper": paper}
    own = of_studies or {}
    return {
        scale: Trainings(
            first.base,
            cells(*(setting[scale] for setting in settings)),
            first.seeds or seeds,
            first.differs + adds[scale],
            least,
            own.get(scale, {}),
        )
        for scale, first in settings[0].items()
    }
