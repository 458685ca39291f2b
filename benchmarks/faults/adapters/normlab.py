"""``normlab.check``, with all that a case hands over."""

from __future__ import annotations

import torch
from training import Finding, PublicCase

PACKAGE = "normlab"
HOW = "`normlab.check` on the model, batch, loss, optimizer, schedule and step of a case; failures count"
ASKS_PLACE = True
"""A failure names a fault only at the modules that the case says."""


def states(check: str) -> tuple[str, ...]:
    """Return the causes that a check states; cases name their causes by our properties."""
    return (check,)


def findings(case: PublicCase) -> list[Finding]:
    """Return the failures of a check."""
    import normlab

    torch.manual_seed(0)
    arguments = case.build()
    arguments.pop("maker", None)
    report = normlab.check(**arguments)
    return [Finding(failure.property, failure.module, failure.evidence) for failure in report.failures]
