"""A text generated token by token with a cache, which must give what one pass over all of it gives."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

from normlab.trace.facts import Unknown
from normlab.trace.trace import Trace

GENERATED: Final = 24
"""Number of tokens in a sequence that is generated with a cache; the first of them are read at once."""


def generated(trace: Trace, ids: Tensor, name: str) -> tuple[Tensor, Tensor]:
    """Return the logits of a full pass over ids `[B, T]`, which the model takes under a ``name``, and of
    generating them with a cache.

    Raises Unknown for a model that has no cache.
    """
    model, cache, logits = trace.model, None, list[Tensor]()
    ids = ids[:2, :GENERATED].to(next(model.parameters()).device)
    prompt = max(ids.shape[1] // 6, 1)
    with trace.running():
        full = _attribute(model(**{name: ids, "use_cache": False}), "logits")
        for part in (ids[:, :prompt], *ids[:, prompt:].split(1, dim=1)):
            output = model(**{name: part.contiguous(), "past_key_values": cache, "use_cache": True})
            cache = _attribute(output, "past_key_values")
            logits.append(_attribute(output, "logits"))
    return full, torch.cat(logits, 1)


def _attribute(output: Any, name: str) -> Any:
    value = getattr(output, name, None)
    if value is None:
        raise Unknown(f"its output has no {name}")
    return value
