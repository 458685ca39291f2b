"""``transfer``: train a model in several sizes at several rates, and say whether the best one carries."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from normlab.base.locks import reserved
from normlab.scaling import BUDGET_S, SEEDS, STEPS
from normlab.scaling.family import SetupFamily, Sized, family_of
from normlab.scaling.ladder import Ladder
from normlab.scaling.request import Request
from normlab.scaling.result import Transfer
from normlab.setups.setup import refuse_unknown
from normlab.trace.restore import same_globals


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
    for word in rest:
        refuse_unknown(word, [*Request.__dataclass_fields__], "transfer")
    request = Request(steps=steps, seeds=seeds, budget_s=budget_s, **rest)
    family = setup if isinstance(setup, SetupFamily) else family_of(setup, widths=widths, depths=depths)
    with reserved(request.folder), same_globals():
        return Ladder(family, request).climb()
