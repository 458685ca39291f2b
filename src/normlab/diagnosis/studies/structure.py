"""The residual stream as it was read: one row per sublayer, and the placement of each stack."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Final

from normlab.diagnosis.reading.structure import Structure
from normlab.diagnosis.rules.finding import XIONG, Finding, Tables, number
from normlab.diagnosis.study import Study
from normlab.diagnosis.table import Table

PLACEMENTS: Final = {
    "post": ("Post-LN", XIONG.format("Table 1")),
    "pre": ("Pre-LN", XIONG.format("Table 1")),
    "sandwich": ("Sandwich-LN", "Ding et al. 2021, Section 2.4 (arXiv 2105.13290)"),
    "other": ("neither Post-LN nor Pre-LN nor Sandwich-LN", ""),
}
COLUMNS: Final = "index layer role placement relation norm_read norm_branch norm_write".split()


def structure(read: Structure) -> Table:
    """Tabulate each sublayer with its role, its placement, its norms and the module of its branch."""
    rows = (
        {"stack": stack.name}
        | {name: getattr(view, name) for name in COLUMNS}
        | {"module": view.branch.module, "final_norm": stack.final_norm}
        for stack in read.stacks
        for view in stack.sublayers
    )
    return Table("structure", tuple(rows))


def placement(tables: Tables) -> Iterator[Finding]:
    """Name the placement of each stack, and how many of its sublayers follow it."""
    for stack, table in tables.stacks("structure"):
        counted = Counter(str(row["placement"]) for row in table)
        kind, count = counted.most_common(1)[0]
        words, reference = PLACEMENTS.get(kind, PLACEMENTS["other"])
        relations = Counter(str(row["relation"]) for row in table.where(placement=kind))
        relation, same = relations.most_common(1)[0]
        layers = int(max(number(row["layer"]) or 0.0 for row in table)) + 1
        rest = "" if count == len(table) else f", {count} of {len(table)} sublayers,"
        like = "in each" if same == count else f"in {same} of them"
        yield Finding(
            "placement",
            "note",
            f"{stack} is {words}{rest} with {layers} layers: {like} {relation}",
            "structure",
            {"layers": layers, "sublayers": len(table), **counted},
            reference,
        )


STRUCTURE: Final = Study(
    "structure",
    lambda c: [structure(c.subject.structure)],
    "cheap",
    rules=(placement,),
    batch="the model alone",
    order=0,
)
