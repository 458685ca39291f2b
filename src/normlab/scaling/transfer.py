"""``transfer``: train a model in several sizes at several rates, and say whether the best one carries."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from normlab.base.files import reserved
from normlab.errors import UserError
from normlab.scaling import BUDGET_S, FACTOR, FIRST_SEED, SEEDS, STEPS
from normlab.scaling.family import SetupFamily, Sized, family_of
from normlab.scaling.ladder import Ladder
from normlab.scaling.optimum import RATES
from normlab.scaling.sweep import Decay
from normlab.scaling.verdict import Transfer
from normlab.setups.setup import positive, refuse_unknown, shown
from normlab.trace.restore import same_globals
from normlab.trials.attempts import Plan


def transfer(
    setup: Callable[..., Any] | Sized | SetupFamily,
    *,
    widths: Sequence[int] = (),
    depths: Sequence[int] = (),
    steps: int = STEPS,
    seeds: int = SEEDS,
    budget_s: float = BUDGET_S,
    **rest: Any,
) -> Transfer:
    """Train a model in several widths or depths at several learning rates, and say whether the best rate at
    the smallest is also the best at the largest.

    ``setup(width=, seed=)``, or ``setup(depth=, seed=)``, builds the model in any size and returns a
    ``Setup``; ``normlab.sized(config)`` builds a recipe's configuration in every size. A trial multiplies all
    rates of a setup by one factor, so that what a parametrisation gives each group, or each size, stays.
    Rates are octaves apart, five around the best one at each size, with ``seeds`` seeds from ``seed`` on; all
    sizes and rates see the batches of the smallest size.

    ``rest``: ``factor``, by how much the best rate may move over all sizes; ``target``, a size whose best
    rate is wanted, by default the largest; ``decays``, factors on the weight decay, the first of which gives
    the answer, with ``"independent"`` or ``"independent:4"`` for one that does not depend on the rate;
    ``rates`` instead of the search; ``seed``, ``folder``, ``progress`` and ``announce`` as in ``trial``;
    ``since``, when the budget's clock began (``time.monotonic()``), by default at this call. With a
    ``folder`` the same call, or one with more seeds, more sizes or a larger budget, continues from there.

    Raises UserError for a setup that cannot be built in a size, or does not grow with it, and for a folder
    that another process is at work in.

    >>> answer = normlab.transfer(sized, widths=(8, 16), steps=16, seeds=2)
    >>> answer.verdict in ("carries", "shifts", "cannot say"), answer.page("transfer.html").name
    (True, 'transfer.html')
    """
    names = Request.__dataclass_fields__
    for word in rest:
        refuse_unknown(word, [*names], "transfer")
    request = Request(steps=steps, seeds=seeds, budget_s=budget_s, **rest)
    family = setup if isinstance(setup, SetupFamily) else family_of(setup, widths=widths, depths=depths)
    with reserved(request.folder), same_globals():
        return Ladder(family, request).climb()


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
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < least):
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
