"""What a call of ``transfer`` asks for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from normlab.errors import UserError
from normlab.scaling import BUDGET_S, FACTOR, FIRST_SEED, SEEDS, STEPS
from normlab.scaling.optimum import RATES
from normlab.scaling.sweep import Decay
from normlab.setups.setup import positive, shown
from normlab.trials.attempts import Plan


@dataclass(frozen=True)
class Request(Plan):
    """What was asked for, besides the sizes: the plan of the first seed's trials, and the rest."""

    steps: int = STEPS
    budget_s: float = BUDGET_S
    seed: int = FIRST_SEED
    seeds: int = SEEDS
    """How many, counting up from ``seed``."""
    decays: Sequence[str | float] = (1.0,)
    target: int | None = None
    factor: float = FACTOR
    since: float | None = None
    """When the budget's clock began, by ``time.monotonic()``; by default when the first model is built."""

    def __post_init__(self) -> None:
        """Raises UserError for a value that makes no sense."""
        super().__post_init__()
        for name, least in (("seeds", 2), ("target", 1)):
            value = getattr(self, name)
            if value is None:
                continue
            is_whole = isinstance(value, int) and not isinstance(value, bool)
            if not is_whole or value < least:
                raise UserError(f"{name} is {shown(value)}, but must be a whole number of {least} at least")
        if not positive(self.factor) or self.factor <= 1:
            raise UserError(f"factor is {shown(self.factor)}, but must be a number above 1, such as {FACTOR}")
        if self.rates and len(set(self.rates)) < RATES:
            raise UserError(f"rates has {shown(list(self.rates))}, but must hold {RATES} rates at least")
        if not self.decays:
            raise UserError("decays is empty, but must hold factors on the weight decay, such as 0 1 4")

    @property
    def ways(self) -> list[Decay]:
        """The weight decays to try, the first of which gives the answer."""
        return list(dict.fromkeys(map(Decay.of, self.decays)))

    @property
    def every_seed(self) -> range:
        """The seeds, of models and of data."""
        return range(self.seed, self.seed + self.seeds)
