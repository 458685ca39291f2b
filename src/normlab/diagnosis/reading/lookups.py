"""Find what the embeddings of a model look up, and which of it is words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from torch import Tensor, nn

from normlab.diagnosis.reading.batches import MASKS, integers, named, tokens
from normlab.diagnosis.reading.subject import Subject
from normlab.trace.tensors import Place, forward_hooks

OTHERS: Final = ("position_ids", "token_type_ids", "segments")
"""Names of what is looked up and is no word."""


class Lookup(NamedTuple):
    """What an embedding looks up first in a pass: ids `[B, T]`, and the place in the batch where these are
    words; None for positions, types of tokens and all else that the model makes by itself.
    """

    ids: Tensor
    words: Place | None


def lookups(subject: Subject) -> dict[str, Lookup]:
    """Return what each ``nn.Embedding`` looks up in one pass, by its path, those without ids `[B, T]` left
    out.
    """
    tables = {p: m for p, m in subject.model.named_modules() if isinstance(m, nn.Embedding)}
    read: dict[str, Tensor] = {}

    def see(path: str, side: str, values: Any) -> None:
        for ids in integers(values).values() if side == "input" else ():
            read.setdefault(path, ids)

    if tables:
        with forward_hooks(tables, see):
            subject.calls().once()
    given = {p: x for p, x in tokens(subject.batch).items() if not named(p, OTHERS)}
    return {
        path: Lookup(ids, next((p for p, x in given.items() if same(x, ids)), None))
        for path, ids in read.items()
    }


def word_places(subject: Subject, looked_up: Mapping[str, Lookup]) -> list[Place]:
    """Return the places in the batch of the words that embeddings look up, in the order of the batch; that of
    the first tokens for a model without an ``nn.Embedding``.
    """
    if not any(isinstance(m, nn.Embedding) for m in subject.model.modules()):
        return list(tokens(subject.batch))[:1]
    found = {lookup.words for lookup in looked_up.values()}
    return [place for place in tokens(subject.batch) if place in found]


def attended(batch: Any, ids: Tensor) -> Tensor | None:
    """Return where a mask of the batch says that there is a token, `[B, T]`; None without one."""
    masks = (x for p, x in integers(batch).items() if named(p, MASKS) and x.shape == ids.shape)
    mask = next(masks, None)
    return None if mask is None else mask != 0


def same(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors hold the same numbers; most that do not are told by their first ones."""
    if x is y or x.shape != y.shape or not x.ndim or not x.numel():
        return x is y or (x.shape == y.shape and bool((x == y).all()))
    first = (0,) * (x.ndim - 1)
    return bool((x[first] == y[first]).all()) and bool((x == y).all())
