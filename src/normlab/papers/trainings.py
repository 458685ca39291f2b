"""The runs that decide an artefact, as data: cells of a table or figure, with some seeds, at each scale."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, Final, Literal, TypeAlias, get_args

from normlab.errors import UserError, nearest
from normlab.lab.config import Config, SeedConfig

Scale: TypeAlias = Literal["laptop", "gpu", "paper"]
"""``laptop``: two cores and minutes; ``gpu``: one accelerator and hours; ``paper``: the paper's settings."""
LAPTOP: Final[Scale] = "laptop"
SCALES: Final[tuple[Scale, ...]] = get_args(Scale)


@dataclass(frozen=True)
class Trainings:
    """Every cell of an artefact, trained with every seed, at one scale."""

    base: Config
    """The part of the configuration that all cells share."""
    cells: Mapping[str, Mapping[str, Any]]
    """Cell to its recipe, under ``recipe``, and to what else it changes, under names like ``optim.lr``."""
    seeds: int = 3
    """Runs per cell, each with a seed that draws the weights, the order of the data and dropout."""
    differs: str = ""
    """How this scale differs from the paper's settings, and what it keeps of them, in one sentence."""
    least: int = 0
    """Seeds that are enough for a first measurement while others are still missing; 0 means all of them."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the study at this scale, instead of the artefact's."""
    first_seed: int = 1
    """The seeds are this one and those after it; above 1 where the results of earlier ones had been seen."""

    def configs(self) -> Iterator[tuple[str, int, Config]]:
        """Yield each cell and seed with its configuration, whose recipe is a name that is not resolved yet.

        Raises UserError for a cell that changes a field that no configuration has.
        """
        for cell, changes in self.cells.items():
            config = changed(self.base, changes)
            for seed in range(self.first_seed, self.first_seed + self.seeds):
                yield cell, seed, replace(config, seeds=SeedConfig.of(seed))


def work(config: Config) -> float:
    """Return the size of a training, roughly proportional to its time: positions x layers x width."""
    model, train = config.model, config.train
    positions = train.steps * train.grad_accum_steps * train.max_tokens
    return float(positions * (model.encoder_layers + model.decoder_layers) * model.dim)


def changed(config: Config, changes: Mapping[str, Any]) -> Config:
    """Return a configuration with other values under names like ``recipe`` and ``optim.lr``.

    Raises UserError with the nearest name for a field that does not exist.
    """
    names = _values(config).keys()
    sections = {section.name for section in fields(config)}
    for name, value in changes.items():
        if name not in names | sections:
            raise UserError(f"a configuration has no {name!r}{nearest(name, names)}")
        section, _, inner = name.rpartition(".")
        if section:
            config = replace(config, **{section: replace(getattr(config, section), **{inner: value})})
        else:
            config = replace(config, **{name: value})
    return config


def unlike(config: Config, other: Config) -> dict[str, Any]:
    """Return the changes that turn one configuration into another, under names like ``optim.lr``."""
    values, others = _values(config), _values(other)
    return {name: others[name] for name in values if others[name] != values[name]}


def _values(config: Config) -> dict[str, Any]:
    """The values of a configuration under names like ``recipe`` and ``optim.lr``."""
    values: dict[str, Any] = {}
    inner: dict[str, Any] = {}
    for section in fields(config):
        value = getattr(config, section.name)
        if is_dataclass(value):
            inner |= {f"{section.name}.{f.name}": getattr(value, f.name) for f in fields(value)}
        else:
            values[section.name] = value
    return {**values, **inner}


Cells: TypeAlias = Mapping[str, Mapping[str, Any]]
_AT: Final = " at "


def sweep(sides: Cells, rates: Sequence[float]) -> Cells:
    """Return every side, such as a recipe, at every rate, as cells like ``Muon at 0.004``."""
    return {
        f"{side}{_AT}{rate:g}": {**changes, "optim.lr": rate}
        for side, changes in sides.items()
        for rate in rates
    }


def side_of(cell: str) -> str:
    """Return the side of a cell of ``sweep``."""
    return cell.rpartition(_AT)[0]


def at_factor(side: str, factor: float) -> str:
    """Return the cell of a side at a multiple of the best rate of its sweep."""
    return side if factor == 1 else f"{side}, {factor:g} times its rate"


@dataclass(frozen=True)
class ScaledTraining:
    """A training of a paper at one scale; subclasses hold the numbers that its cells are made of."""

    base: Config
    """The part of the configuration that the cells of all artefacts share."""
    differs: str = field(default="", kw_only=True)
    """How it differs from the paper's, and what it keeps, in sentences."""
    seeds: int = field(default=0, kw_only=True)
    """Runs per cell at this scale, if their number differs from the other scales'."""
    first_seed: int = field(default=1, kw_only=True)
    """The first seed of each cell, as in ``Trainings``."""


def for_each_scale(
    cells: Callable[..., Cells],
    *settings: Mapping[Scale, ScaledTraining],
    seeds: int = 3,
    least: int = 0,
    of_studies: Mapping[Scale, Mapping[str, Any]] | None = None,
) -> dict[Scale, Trainings]:
    """Return the trainings at every scale, with the cells that the function gives for the settings there.

    Base and difference are those of the first setting; ``of_studies`` are the study's arguments there.
    """
    arguments = of_studies or {}
    return {
        scale: Trainings(
            first.base,
            cells(*(setting[scale] for setting in settings)),
            first.seeds or seeds,
            first.differs,
            least,
            arguments.get(scale, {}),
            first.first_seed,
        )
        for scale, first in settings[0].items()
    }
