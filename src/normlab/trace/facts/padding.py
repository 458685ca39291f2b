"""Which of the ids that a model reads only fill up rows, and the same tokens under other padding."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normlab.trace.facts import Unknown
from normlab.trace.facts.tokens import Tokens
from normlab.trace.tensors import Place

if TYPE_CHECKING:
    from normlab.trace.facts.facts import Facts


Columns = Callable[[int], Tensor]
"""Maps the width of a tensor to the columns `[B, W]` that are taken from each of its rows."""


class Arranged(NamedTuple):
    """Some rows of a batch, perhaps with their columns in another order, or other columns."""

    rows: Tensor
    columns: Columns | None = None
    batch: Any = None
    """The batch, if it is not the step's own."""


class Padding(NamedTuple):
    """Where the tokens `[B, T]` are real, and who says so."""

    real: Tensor
    """`[B, T]`, True at tokens."""
    source: str
    """A batch entry's name, "pad_id", "padding_idx", "config" or "runs"."""
    mask: Place | None
    """The place of the mask in the batch, if it holds one."""
    pad_id: int | None
    """The id that fills up rows, if there is one."""

    @property
    def side(self) -> str:
        """The end at which rows are filled up, "left", "right" or "both"; "none" without padding."""
        left, right = bool((~self.real[:, 0]).any()), bool((~self.real[:, -1]).any())
        names = {(True, False): "left", (False, True): "right", (True, True): "both"}
        return names.get((left, right), "none")

    def arranged(self) -> dict[str, Arranged]:
        """Return the same tokens under other padding, by name, without what this batch does not allow.

        "cut" is one row without its padding; "more" has one more column of it, in the rows that end in
        padding, else in those that begin with it; "moved" has all of it at the other end, "moved on" one more
        column there.
        """
        left, right = end_runs(~self.real)
        lead, trail, width = left.sum(1), right.sum(1), self.real.shape[1]
        whole = (self.real == ~(left | right)).all(1) & self.real.any(1)
        some = (whole & ~self.real.all(1)).nonzero()[:1, 0]
        ends = bool((whole & (trail > 0)).any())
        rows = (whole & ((trail if ends else lead) > 0)).nonzero()[:, 0]
        plain = (whole & ((lead > 0) != (trail > 0))).nonzero()[:, 0]
        first, length, shift = lead[some], int(self.real[some].sum()), (trail - lead)[plain, None]

        def beside(columns: Tensor, *, last: bool) -> Tensor:
            return torch.cat([columns, columns[:, -1:]] if last else [columns[:, :1], columns], 1)

        def moved(wide: int) -> Tensor:
            return (torch.arange(wide) - shift) % wide

        arranged = {
            "cut": Arranged(some, lambda wide: first[:, None] + torch.arange(length + wide - width)),
            "more": Arranged(rows, lambda wide: beside(torch.arange(wide).expand(len(rows), -1), last=ends)),
            "moved": Arranged(plain, moved),
            "moved on": Arranged(plain, lambda wide: beside(moved(wide), last=not ends)),
        }
        return {name: own for name, own in arranged.items() if len(own.rows)}


def padding_of(facts: Facts, tokens: Tokens) -> Padding:
    """Find the padding of the tokens, or of other ids of the step. Raises Unknown if nothing tells.

    A mask in the batch is a tensor over the tokens with two values, one of which lies at the ends of rows,
    always over the same id. Without a mask, the padding id is the declared one, that of the embedding
    (``padding_idx``), that of the model's configuration, or one that fills one end of several rows in runs
    and occurs nowhere else.
    """
    declared = facts.declared.pad_id
    for place, entry in facts.entries.items():
        if place == tokens.place:
            continue
        real = _as_mask(entry, tokens, declared)
        if real is not None:
            fill = torch.unique(tokens.ids[~real])
            pad = int(fill[0]) if len(fill) == 1 else declared
            return Padding(real, str(place[-1]) if place else "mask", place, pad)
    tables = (m.padding_idx for m in facts.trace.model.modules() if isinstance(m, nn.Embedding))
    index = next((i for i in tables if i is not None), None)
    configured, ends = (facts.configured(f"{name}_token_id") for name in ("pad", "eos"))
    for pad, source in ((declared, "pad_id"), (index, "padding_idx"), (configured, "config")):
        if isinstance(pad, int) and (tokens.ids == pad).any():
            real = real_tokens(tokens.ids, pad, ends=pad in (facts.declared.eos_id, ends))
            if not real.all():
                return Padding(real, source, None, pad)
    pad = _run(tokens.ids)
    if pad is not None:
        return Padding(real_tokens(tokens.ids, pad), "runs", None, pad)
    if declared is not None:
        raise Unknown(f"no token of the batch is padding (pad_id {declared})")
    raise Unknown(
        "nothing says that the batch has padding: declare pad_id, or hand a mask over with the batch"
    )


def end_runs(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return where the rows of a mask `[B, T]` are True from the left end on, and up to the right end."""
    return x.long().cumprod(1).bool(), x.flip(1).long().cumprod(1).flip(1).bool()


def real_tokens(ids: Tensor, pad: int, *, ends: bool = False) -> Tensor:
    """Return `[B, T]`, False in the runs of padding at either end of each row; if the id also ends a text,
    the first of a run on the right is that end.
    """
    filled = ids == pad
    left, right = end_runs(filled)
    if ends:
        right = right & F.pad(right[:, :-1], (1, 0))
    if ends or bool(filled[:, 0].all()):  # where every row begins with it, it is a start
        return ~right
    return ~(right | (left & ~filled.all(1, keepdim=True)))


def _as_mask(entry: Tensor, tokens: Tokens, declared: int | None) -> Tensor | None:
    """Return `[B, T]`, True at tokens, if this entry of the batch is such a mask and hides something."""
    flat = _flattened(entry.cpu(), tokens)
    if flat is None:
        return None
    values = torch.unique(flat)
    if len(values) != 2:
        return None
    for shut in values:
        hidden = flat == shut
        (left, right), fill = end_runs(hidden), torch.unique(tokens.ids[hidden])
        at_an_end = hidden.equal(left | right) and not hidden.all(1).any()
        if at_an_end and len(fill) == 1 and declared in (None, int(fill[0])):
            return ~hidden
    return None


def _flattened(entry: Tensor, tokens: Tokens) -> Tensor | None:
    """Return an entry `[B, T]`, `[B, 1, 1, T]` or `[B, 1, T]` as `[B, T]`, in the columns of the ids."""
    rows, width = tokens.ids.shape
    if entry.ndim > 2 and entry.shape[0] == rows and entry.numel() == rows * entry.shape[-1]:
        entry = entry.reshape(rows, entry.shape[-1])
    if entry.ndim == 2 and tokens.transposed and entry.shape[1] == rows:
        entry = entry.T
    if entry.ndim != 2 or entry.shape[0] != rows or entry.shape[1] < width:
        return None
    return entry[:, tokens.columns]


def _run(ids: Tensor) -> int | None:
    """Return the id that fills several rows at one end, in runs of two or more, and occurs nowhere else."""
    for end in (-1, 0):
        for pad in torch.unique(ids[:, end]).tolist():
            real = real_tokens(ids, pad)
            lengths = (~real).sum(1)
            elsewhere = (ids[real] == pad).any() or (lengths == ids.shape[1]).any()
            if (lengths >= 2).sum() >= 2 and not elsewhere:
                return int(pad)
    return None
