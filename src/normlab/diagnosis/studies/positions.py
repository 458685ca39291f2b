"""Find whether a model sees the order of its tokens, and rotary embeddings that are not relative."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from normlab.diagnosis.reading.batches import replaced, tokens
from normlab.diagnosis.reading.calls import ModuleCall, calls, first_change
from normlab.diagnosis.reading.subject import Subject, undisturbed
from normlab.diagnosis.reading.taps import Side, activations, call_model, call_of, watching
from normlab.diagnosis.rules.finding import Finding, Tables
from normlab.diagnosis.study import SMALL_BATCH, Study
from normlab.diagnosis.table import Row, Table

SEEN: Final = 100.0
"""Change of an output, in last digits of its largest entry, that rounding does not make."""
CLEAR: Final = 1e4
"""Change by other tokens, in last digits, from which an order without any effect is not a small effect."""
ABSOLUTE: Final = 1e4
"""The same for other angles of a rotary embedding, whose cosines and sines are rounded."""
SHIFT: Final = 7
"""Number of positions by which the tokens of a rotary embedding are moved."""

ROTATE: Final = {
    "": "rotate queries and keys alike, by the same angles, before their product",
    "halves": "rotate queries and keys alike, by the same angles: its table has the same ones for the "
    "columns i and i + w/2, the two halves of a head, which rotate_half pairs",
    "neighbours": "rotate queries and keys alike, by the same angles: its table is interleaved, with the "
    "same ones for the columns 2i and 2i + 1, so that the rotation must pair these, and not the two halves "
    "of a head as rotate_half does",
}
"""What to do, by the columns that a table of angles pairs."""

MOVES: Final[Mapping[str, tuple[float, Callable[[Tensor], Tensor]]]] = {
    "rotary": (ABSOLUTE, lambda at: at + SHIFT),
    "stretched": (SEEN, lambda at: torch.where(at > at.max() // 2, 2 * at, at)),
}
"""Where positions are moved to, and the change of an output, in last digits, that counts."""


@dataclass(frozen=True)
class _Pair:
    """Two batches whose outputs are compared from a position on."""

    kind: str
    begin: int
    least: float
    """Change, in last digits, from which an output counts as changed."""
    batches: tuple[Any, Any]


def positions(subject: Subject) -> Table:
    """Exchange the first two tokens of each row, and compare the outputs at the others (``order``); put other
    tokens in their places, without which an order is not missed (``content``); move all positions of a rotary
    embedding, which is to change nothing, because scores depend on distances alone (``rotary``; Su et al.
    2021, Section 3.2.2, arXiv 2104.09864); and double those of the second half (``stretched``).

    ``change`` is the largest change of the model's output in last digits of its largest entry, and ``module``
    the innermost module whose output changes there while the stream that it reads does not. ``pairs`` says
    which columns of a rotary table have the same angles: ``halves``, i and i + w/2, or ``neighbours``, 2i and
    2i + 1; empty where neither do. Models in half precision and batches of one row are not tested.
    """
    place, read = next(iter(tokens(subject.batch).items()), ((), torch.zeros(0, 0)))
    half = any(p.dtype in (torch.float16, torch.bfloat16) for p in subject.model.parameters())
    if len(read) < 2 or read.shape[1] <= 2 or half:
        return Table("positions", ())
    begins = {"order": read[:, [1, 0]], "content": read[:, :2].roll(1, 0)}
    pairs = [
        _Pair(
            kind, 2, SEEN, (subject.batch, replaced(subject.batch, place, torch.cat([first, read[:, 2:]], 1)))
        )
        for kind, first in begins.items()
        if not torch.equal(first, read[:, :2])
    ]
    for kind, (least, to) in MOVES.items():
        if (moved := _moved(subject, read, to)) is not None:
            pairs.append(_Pair(kind, 0, least, moved))
    return Table("positions", tuple(_compared(subject, pair, len(read)) for pair in pairs))


def _moved(subject: Subject, read: Tensor, to: Callable[[Tensor], Tensor]) -> tuple[Any, Any] | None:
    """The batch with the positions 0, 1, … and with those that these are moved to, for a model with a rotary
    embedding that takes them.
    """
    if call_of(subject.model) is not None:  # which need not pass on positions
        return None
    takes = inspect.signature(subject.model.forward).parameters
    rotary = any(path.endswith("inv_freq") for path, _ in subject.model.named_buffers())
    if not (rotary and "position_ids" in takes and isinstance(subject.batch, Mapping)):
        return None
    first = torch.arange(read.shape[1], device=read.device)[None]
    batch = {**subject.batch}
    if "attention_mask" in takes:  # without one, positions that are not 0, 1, … are those of packed texts
        batch.setdefault("attention_mask", torch.ones_like(read))
    return {**batch, "position_ids": first}, {**batch, "position_ids": to(first)}


def _compared(subject: Subject, pair: _Pair, rows: int) -> Row:
    """Compare the outputs for two batches of so many rows."""

    def keep(x: Tensor) -> Tensor | None:
        later = x.ndim > 2 and len(x) == rows and x.shape[1] > pair.begin
        return x.detach()[:, pair.begin :].clone() if later else None

    def outputs(batch: Any) -> list[ModuleCall]:
        with torch.no_grad(), undisturbed(subject.model), calls(subject.model, keep) as found:
            call_model(subject.model, batch)
        return found

    before, after = (outputs(batch) for batch in pair.batches)
    module, change = first_change(before, after, pair.least)
    return {"kind": pair.kind, "module": module, "change": change, "pairs": _pairs(subject, pair)}


def _pairs(subject: Subject, pair: _Pair) -> str:
    """How the columns of the first rotary table are paired that a module with ``inv_freq`` puts out."""
    if pair.kind != "rotary":
        return ""
    tables: list[Tensor] = []
    modules = dict(subject.model.named_modules())
    turning = {
        p: m for p, m in modules.items() if any(b.endswith("inv_freq") for b, _ in m.named_buffers("", False))
    }

    def see(_: str, side: Side, values: object) -> None:
        if side == "output":
            tables.extend(x for _, x in activations(values) if x.ndim > 1 and not x.shape[-1] % 2)

    with torch.no_grad(), undisturbed(subject.model), watching(turning, see):
        call_model(subject.model, pair.batches[0])
    for x in tables[:1]:
        if torch.equal(x[..., 0::2], x[..., 1::2]):
            return "neighbours"
        if torch.equal(*x.chunk(2, -1)):
            return "halves"
    return ""


def order(tables: Tables) -> Iterator[Finding]:
    """Say that a model does not see the order of its tokens."""
    table = tables.table("positions")
    seen = any(float(row["change"] or 0) > CLEAR for row in table.where(kind="content"))
    for row in table.where(kind="order"):
        if seen and float(row["change"] or 0) <= SEEN:
            yield Finding(
                "no_positions",
                "problem",
                "the first two tokens can be exchanged without any effect on the outputs at the others: the "
                "model sees which tokens there are, but not their order",
                "positions",
                {"change": row["change"]},
                do="add a position encoding to the embeddings, or turn queries and keys by their positions",
            )


def relative(tables: Tables) -> Iterator[Finding]:
    """Name the attention whose rotary embedding makes more than distances count."""
    for row in tables.table("positions").where(kind="rotary"):
        if float(row["change"] or 0) > ABSOLUTE:
            yield Finding(
                "rotary",
                "problem",
                f"{row['module'] or 'the model'} puts out something else when all positions of its rotary "
                f"embedding are moved by {SHIFT}, though only their distances are to count",
                "positions",
                {"change": row["change"]},
                module=str(row["module"]),
                do=ROTATE[str(row["pairs"])],
            )


def unturned(tables: Tables) -> Iterator[Finding]:
    """Say that the angles of a rotary embedding change nothing."""
    table = tables.table("positions")
    seen = any(float(row["change"] or 0) > CLEAR for row in table.where(kind="content"))
    zero = any(r["rms"] == 0 and r["role"] in ("query", "key") for r in tables.table("weights"))
    for row in table.where(kind="stretched"):
        if seen and not zero and float(row["change"] or 0) <= SEEN:
            yield Finding(
                "unturned",
                "problem",
                "the model puts out the same when the positions of half of its tokens are doubled: its "
                "rotary embedding has no effect, and attention does not see where tokens are",
                "positions",
                {"change": row["change"]},
                do="rotate queries and keys `[B, H, T, w]` by the position of their token, along T and not "
                "along the heads",
            )


POSITIONS: Final = Study(
    "positions",
    lambda c: [positions(c.small)],
    "preflight",
    rules=(order, relative, unturned),
    batch=SMALL_BATCH,
    order=-46,
)
