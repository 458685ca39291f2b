"""Find tokens, masks and padding in a batch, and put other tensors in their places."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor

from normlab.trace.tensors import Place, at, tensors_in

DECODER_INPUTS: Final = ("decoder_input_ids", "target_in", "tgt")
"""Names of the tokens that a decoder reads, which it predicts one after the other."""
MASKS: Final = ("attention_mask", "source_mask", "src_mask")
"""Names of masks that are 1 where there is a token, and 0 where there is padding."""
LEAST_TOKENS: Final = 4
"""Length of a row of integers below which they need not be tokens."""


def replaced(values: Any, place: Place, tensor: Tensor) -> Any:
    """Return nested tuples, lists, mappings and dataclasses with another tensor at a place."""
    if not place:
        return tensor
    key, *rest = place
    inner = replaced(at(values, (key,)), tuple(rest), tensor)
    if isinstance(values, Mapping):
        return {**values, key: inner}
    if not isinstance(values, (tuple, list)):
        return dataclasses.replace(values, **{str(key): inner})
    items = [inner if i == key else item for i, item in enumerate(values)]
    return type(values)(*items) if hasattr(values, "_fields") else type(values)(items)


def others(tokens: Tensor, kept: int = 0) -> Tensor:
    """Return tokens `[B, T]` with other ones of these in their places, from a position on."""
    changed = tokens.clone()
    pool = tokens[tokens >= 0].unique()
    if len(pool) > 1:
        index = torch.searchsorted(pool, tokens[:, kept:].clamp(min=int(pool[0])))
        changed[:, kept:] = pool[(index + 1) % len(pool)]
    return changed


def integers(batch: Any) -> dict[Place, Tensor]:
    """Return the tensors of integers `[B, T]`, masks among them, by their places."""
    found = ((p, x) for p, x in tensors_in(batch) if not x.is_floating_point() and x.dtype != torch.bool)
    return {place: x for place, x in found if x.ndim == 2 and x.shape[1] >= LEAST_TOKENS}


def tokens(batch: Any) -> dict[Place, Tensor]:
    """Return the tensors of tokens or labels `[B, T]` by their places, those that the model reads first:
    ``input_ids`` where there are such, or else the first one.
    """
    found = {place: x for place, x in integers(batch).items() if not named(place, MASKS)}
    return dict(sorted(found.items(), key=lambda one: not named(one[0], ("input_ids",))))


def decoded(batch: Any) -> Place | None:
    """Return the place of the tokens that a decoder reads, where their name says it."""
    return next((place for place in tokens(batch) if named(place, DECODER_INPUTS)), None)


def named(place: Place, names: tuple[str, ...]) -> bool:
    """Whether the last key of a place is one of these."""
    return bool(place) and place[-1] in names


def lengths(rows: Tensor) -> tuple[int | None, Tensor]:
    """Return the token that fills rows `[B, T]` at their ends, and the length of each row before it.

    A token is padding where a row ends with it at least twice and it stands nowhere else.
    """
    whole = torch.full((len(rows),), rows.shape[1], device=rows.device)
    for token in rows[rows[:, -1] == rows[:, -2], -1].unique().tolist():
        inside = (rows != token).flip(1).cummax(1).values.flip(1)
        if bool((inside == (rows != token)).all()) and bool(inside.any(1).all()):
            return token, inside.sum(1)
    return None, whole
