"""The property of low precision: what rounding explains, and what it does not."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from normlab.checks.property import Note, Untestable, Violation, fail, property_of
from normlab.checks.step import Step
from normlab.trace.twins import roundings


@property_of("round trips", explains=["overfit"], passes=12)
def precision(step: Step) -> Iterator[Violation | Note]:
    """Each module in low precision gives what its twin in float32 gives on the same inputs, up to rounding.

    One rounding of its inputs and of its output moves the output by some error. The operations inside round,
    too, each by itself: n of them explain the root of n times that error, and what lies above is lost by the
    order of the computation, as in angles or sums that are kept in low precision.
    """
    types = {p.dtype for p in step.model.parameters()} & {torch.bfloat16, torch.float16}
    if not types:
        raise Untestable("no parameter is in low precision")
    trace = step.plain.again(model=step.copy())
    for path, ratio, count in roundings(trace, max(torch.finfo(t).eps for t in types)):
        if ratio > count**0.5:
            say = f"its output is {ratio:.0f} roundings off its twin in float32, whose {count} operations"
            why = f"{say} explain {count**0.5:.1f}"
            yield fail(path, why, "compute angles, positions and norms in float32")
            return
