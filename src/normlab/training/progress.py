"""How far a run is, and how a checkpoint says it."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from normlab.errors import UserError
from normlab.optim import ValDecay
from normlab.spec.allowed import COUNT, check
from normlab.spec.serialise import from_plain
from normlab.store.sealed import STATE, SealError
from normlab.training.scaling import scaling_of


@dataclass
class Position:
    """How far a run is: what a checkpoint keeps beside the weights."""

    step: int = 0
    tokens: int = 0
    positions: int = 0
    seconds: float = 0.0
    best_step: int | None = None
    best_dev: dict[str, float] = field(default_factory=dict)
    """The dev scores at ``best_step``, by metric name."""
    val_decay: ValDecay = ValDecay()
    waited: int = 0
    """Validations since the best one."""
    stopped: str = ""
    """Why the run ends here, before its last step."""

    def __post_init__(self) -> None:
        check(self, {COUNT: "step tokens positions waited"})


@dataclass(frozen=True)
class Saved:
    """What the state of a run's last checkpoint says."""

    position: Position = field(default_factory=Position)
    pending: tuple[tuple[float, tuple[float, float, float]], ...] = ()
    """Learning rate, and loss, likelihood and gradient norm, of the steps that are in no row yet."""
    scaling: dict[str, Any] = field(default_factory=dict)
    rows: dict[str, int] = field(default_factory=dict)
    """Bytes of each file of rows."""


@dataclass(frozen=True)
class Made:
    """When the weights of a checkpoint were made; every kind of checkpoint says it."""

    step: int
    steps: tuple[int, ...] = ()
    """Those that an average is of."""
    val_decay: ValDecay = ValDecay()


def saved_of(state: Mapping[str, Any], checkpoint: Path) -> Saved:
    """What the state of a run's last checkpoint says. Raises SealError where somebody else wrote it."""
    with _understood(state, checkpoint):
        beside = _of_fields(Saved, {name: state[name] for name in state if name != "position"})
        position = from_plain(Position, {k: v for k, v in state.items() if k not in beside})
        saved: Saved = from_plain(Saved, beside)
        scaling = scaling_of(saved.scaling)
    return replace(saved, position=position, scaling=scaling)


def made_of(state: Mapping[str, Any], checkpoint: Path) -> Made:
    """When weights were made, by their checkpoint's state. Raises as ``saved_of``."""
    with _understood(state, checkpoint):
        made: Made = from_plain(Made, _of_fields(Made, state))
    return made


def _of_fields(of: type, state: Mapping[str, Any]) -> dict[str, Any]:
    return {f.name: state[f.name] for f in fields(of) if f.name in state}


@contextmanager
def _understood(state: Mapping[str, Any], checkpoint: Path) -> Generator[None]:
    try:
        if "step" not in state:
            raise UserError("step is missing")
        yield
    except UserError as error:
        raise SealError(checkpoint, f"{checkpoint / STATE}: {error}") from error
