"""Tabulate every buffer, and name those that hold no sensible numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Final

import torch
from torch import Tensor, nn

from normlab.diagnosis.rules.finding import Finding, Tables, number
from normlab.diagnosis.studies.weights import siblings
from normlab.diagnosis.study import Study
from normlab.diagnosis.table import Row, Table

LEAST: Final = 4
"""Entries of a buffer below which a constant is a setting, and not a table that was never filled."""
COLUMNS: Final = 8
COPIES: Final = 0.25
"""Least columns of a table of positions, and the share of different ones from which on frequencies are wrong:
a rotary table may hold each twice.
"""
ADDED: Final = "_bias"
"""End of the name of a buffer that is added to logits or scores, and starts with zeros."""
HUGE: Final = 1e8
TINY: Final = 1e-30
"""Magnitudes of finite numbers that are found in memory which nobody has written to."""


def buffers(model: nn.Module) -> Table:
    """Tabulate every buffer: ``finite`` and ``constant`` are 1 or 0, ``zeros`` is the share of its entries
    that are 0, ``smallest`` and ``largest`` are magnitudes of entries other than 0, and ``sum`` tells buffers
    apart; ``columns`` is the share of the columns of a table that are different. ``kind`` is the class of the
    module that holds it.
    """
    modules = dict(model.named_modules())
    rows: list[Row] = []
    for path, x in model.named_buffers():
        holder = path.rpartition(".")[0]
        kind = type(modules[holder]).__name__
        persistent = path.rpartition(".")[2] not in modules[holder]._non_persistent_buffers_set
        rows.append(
            {"module": holder, "buffer": path, "kind": kind, **_row(x), "persistent": int(persistent)}
        )
    return Table("buffers", tuple(rows))


def _row(x: Tensor) -> Row:
    wide = x.detach().to(torch.float64).flatten()
    finite = wide[wide.isfinite()]
    sizes = finite.abs()[finite != 0]
    floating = x.is_floating_point()
    return {
        "shape": "×".join(map(str, x.shape)),
        "dtype": str(x.dtype).removeprefix("torch."),
        "device": str(x.device),
        "floating": int(floating),
        "finite": int(bool((~wide.isnan()).all())),
        "constant": int(bool(x.numel() >= LEAST and (wide == wide[0]).all())),
        "zeros": (wide == 0).double().mean().item() if x.numel() else 0.0,
        "smallest": sizes.min().item() if len(sizes) else 0.0,
        "largest": sizes.max().item() if len(sizes) else 0.0,
        "sum": finite.sum().item(),
        "columns": _columns(x.detach()) if floating and x.ndim == 2 else None,
    }


def _columns(x: Tensor) -> float | None:
    """The share of the columns of a table that are not copies of others."""
    few = x.shape[0] < 2 or x.shape[1] < COLUMNS
    return None if few else len(x.double().unique(dim=1).T) / x.shape[1]


def strange_buffer(tables: Tables) -> Iterator[Finding]:
    """Name a buffer of numbers that nobody can have meant: not a number, one number throughout, or memory
    that was never written to.
    """
    for row in tables.table("buffers"):
        if row["floating"] and (why := _why(row)):
            yield _finding(row, why)
        elif row["constant"] and "position" in str(row["buffer"]):
            yield _finding(row, "holds one number throughout, so that all positions are the same")
        elif not row["constant"] and (share := number(row["columns"])) and share <= COPIES:
            yield _finding(row, f"has copies of columns: {share:.0%} of them are different ones")


def _why(row: Row) -> str:
    if not row["finite"]:
        return "holds what is not a number"
    if row["constant"] and "norm" not in str(row["kind"]).lower():
        if not row["zeros"]:
            return "holds one number throughout"
        return "" if str(row["buffer"]).endswith(ADDED) else "holds zeros alone"
    largest, smallest = number(row["largest"]) or 0.0, number(row["smallest"]) or 1.0
    if HUGE < largest < 1e30 or smallest < TINY:
        return f"holds numbers from {smallest:.2g} to {largest:.2g}, as memory does that was never written to"
    return ""


def unlike_buffers(tables: Tables) -> Iterator[Finding]:
    """Name the buffers that differ from those of the other layers, where most of these are the same."""
    for rows in siblings(tables.table("buffers"), "buffer"):
        usual, count = Counter(row["sum"] for row in rows).most_common(1)[0]
        if 2 * count > len(rows):
            for row in (row for row in rows if row["sum"] != usual and not _why(row)):
                yield _finding(row, f"differs from that of {count} other layers, which are the same")


def _finding(row: Row, why: str) -> Finding:
    return Finding(
        "strange_buffer",
        "problem",
        f"the buffer {row['buffer']} {why}",
        "buffers",
        {"buffer": row["buffer"], "smallest": row["smallest"], "largest": row["largest"]},
        module=str(row["module"]),
        do="compute it again after the model was built, or its weights were loaded",
        explains=("initial_loss", "attention", "jump"),
    )


BUFFERS: Final = Study(
    "buffers",
    lambda c: [buffers(c.subject.model)],
    "preflight",
    rules=(strange_buffer, unlike_buffers),
    batch="the model alone",
    order=-49,
)
