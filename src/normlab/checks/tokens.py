"""Properties of tokens: which positions, rows and documents a prediction may depend on, and does."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from normlab.checks.property import Note, Untestable, Violation, fail, property_of
from normlab.checks.step import Step


@property_of("tokens", explains=["reach", "order", "overfit", "cache", "documents"], passes=6)
def causality(step: Step) -> Iterator[Violation | Note]:
    """No prediction depends on its target or on a later token.

    The ids after a position are exchanged for others; the logits at it and before it, where the loss counts
    them, must stay. They are judged in float64 on a model whose branches are all awake.
    """
    facts = step.facts
    if not facts.causal:
        raise Untestable(
            "the targets are not the next tokens; declare causal=True if the model must look back only"
        )
    width = facts.tokens.ids.shape[1]
    counted = facts.targets.counted if facts.targets.ids.ndim == 2 else None
    for cut in dict.fromkeys((width // 2, 0, width - 2, width // 4)):
        if not 0 <= cut < width - 1:
            continue
        first = 0
        if counted is not None:
            here = counted[:, : cut + 1].any(0)
            if not here.any():
                continue
            first = int(here.nonzero()[0])
        later = (torch.arange(width) > cut).expand(facts.tokens.ids.shape)
        changed = step.exact.again(batch=facts.other_tokens(later))
        found = step.difference(step.exact, changed, step.part(positions=slice(first, cut + 1)))
        if found is not None:
            yield fail(
                found.module,
                f"logits up to position {cut} move by {found.size:.1e} of their size when only later tokens change",
                "mask the keys after each query, and mix and normalize over features only",
            )
            return
