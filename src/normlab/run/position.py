"""How far a run is."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from normlab.optim import ValDecay
from normlab.spec.serialise import from_plain
from normlab.store.sealed import STATE, SealError


@dataclass
class Position:
    """How far a run is: what a checkpoint keeps beside the weights."""

    step: int = 0
    tokens: int = 0
    positions: int = 0
    seconds: float = 0.0
    best_step: int | None = None
    best_dev_bleu: float | None = None
    best_dev_nll: float | None = None
    val_decay: ValDecay = ValDecay()
    waited: int = 0
    """Validations since the best one."""
    stopped: str = ""
    """Why the run ends here, before its last step."""


def position_of(state: dict[str, Any], checkpoint: Path) -> Position:
    """What a checkpoint's state says. Raises SealError where somebody else wrote it."""
    try:
        if "step" not in state:
            raise ValueError("step is missing")
        position: Position = from_plain(Position, state)
    except ValueError as error:
        raise SealError(checkpoint, f"{checkpoint / STATE}: {error}") from error
    return position
