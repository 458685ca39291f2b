"""What may be asked of a transfer, besides its sizes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from normlab.errors import UserError
from normlab.scaling import BUDGET_S, FACTOR, FIRST_SEED, SEEDS, STEPS
from normlab.scaling.decay import Decay
from normlab.scaling.optimum import RATES
from normlab.trace.setup import positive, shown
from normlab.trials.attempts import Plan, Progress


@dataclass(frozen=True)
class Request:
    """What was asked for, besides the sizes."""

    steps: int = STEPS
    seeds: int = SEEDS
    """How many, counting up from ``seed``."""
    budget_s: float = BUDGET_S
    seed: int = FIRST_SEED
    decays: Sequence[str | float] = (1.0,)
    target: int | None = None
    factor: float = FACTOR
    rates: Sequence[float] = ()
    folder: str | Path | None = None
    progress: Progress | None = None
    announce: Callable[[str], None] | None = None
    since: float | None = None
    """When the budget's clock began, by ``time.monotonic()``; by default when the first model is built."""

    def __post_init__(self) -> None:
        """Raises UserError for a value that makes no sense."""
        self.plan(self.seed)
        for name, least in (("seeds", 2), ("target", 1)):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < least):
                raise UserError(f"{name} is {shown(value)}, but must be a whole number of {least} at least")
        if not positive(self.factor) or self.factor <= 1:
            raise UserError(f"factor is {shown(self.factor)}, but must be a number above 1, such as {FACTOR}")
        if self.rates and len(set(self.rates)) < RATES:
            raise UserError(f"rates has {shown(list(self.rates))}, but must hold {RATES} rates at least")
        if not self.decays:
            raise UserError("decays is empty, but must hold factors on the weight decay, such as 0 1 4")

    def plan(self, seed: int) -> Plan:
        """The plan of a seed's trials."""
        return Plan(self.steps, self.budget_s, tuple(self.rates), seed, progress=self.progress)

    @property
    def ways(self) -> list[Decay]:
        """The weight decays to try, the first of which gives the answer."""
        return list(dict.fromkeys(map(Decay.of, self.decays)))

    @property
    def every_seed(self) -> range:
        """The seeds, of models and of data."""
        return range(self.seed, self.seed + self.seeds)
