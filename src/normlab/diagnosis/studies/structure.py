"""The residual stream as it was read: one row per sublayer, and the placement of each stack."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Final

from normlab.diagnosis.reading.structure import Structure, SublayerView
from normlab.diagnosis.rules.finding import XIONG, Finding, Tables, number
from normlab.diagnosis.study import Study
from normlab.diagnosis.table import Table
from normlab.spec.units import count

PLACEMENTS: Final = {
    "post": ("Post-LN", XIONG.format("Table 1")),
    "pre": ("Pre-LN", XIONG.format("Table 1")),
    "sandwich": ("Sandwich-LN", "Ding et al. 2021, Section 2.4 (arXiv 2105.13290)"),
    "other": ("neither Post-LN nor Pre-LN nor Sandwich-LN", ""),
}
FEW: Final = 3
"""Blocks that are named at most, and that can be unlike all others by mistake."""
COLUMNS: Final = "index layer role placement relation norm_read norm_branch norm_write".split()


def structure(read: Structure) -> tuple[Table, Table]:
    """Tabulate each sublayer with its role, its placement, its norms and the block that it is in; and the
    blocks in which no sum was seen (``silent``).
    """
    rows = (
        {"stack": stack.name}
        | {name: getattr(view, name) for name in COLUMNS}
        | {"module": view.branch.module, "final_norm": stack.final_norm, "block": _block(stack.name, view)}
        for stack in read.stacks
        for view in stack.sublayers
    )
    silent = ({"stack": s.name, "block": b, "of": len(s.sublayers)} for s in read.stacks for b in s.silent)
    return Table("structure", tuple(rows)), Table("silent", tuple(silent))


def _block(stack: str, view: SublayerView) -> str:
    """The path of the block that a branch is in."""
    path = view.branch.module
    inner = path.removeprefix(f"{stack}.").partition(".")[0]
    return f"{stack}.{inner}" if path.startswith(f"{stack}.") else path


def missing_sum(tables: Tables) -> Iterator[Finding]:
    """Name the blocks with fewer sums than the others of their container."""
    broken = [(str(row["block"]), 0) for row in tables.table("silent")]
    for _, table in tables.stacks("structure"):
        counted = Counter(str(row.get("block")) for row in table)
        usual, alike = Counter(counted.values()).most_common(1)[0]
        if 2 * alike > len(counted):
            broken += [(block, sums) for block, sums in counted.items() if sums < usual]
    for block, sums in broken[:FEW]:
        yield Finding(
            "no_residual",
            "problem",
            f"in {block} {count(sums, 'sum') if sums else 'no sum'} of the stream and a branch "
            f"{'was' if sums < 2 else 'were'} seen, and more in the other blocks: a residual is missing",
            "structure",
            {"sums": sums, "blocks": len(broken)},
            module=block,
            do=f"add the input of each branch to its output in {block}",
            explains=("unlike_placement",),
        )


def unlike_placement(tables: Tables) -> Iterator[Finding]:
    """Name the few sublayers whose equation is not that of the others of their role."""
    for _, table in tables.stacks("structure"):
        for role in dict.fromkeys(table.column("role")):
            rows = list(table.where(role=role))
            usual, alike = Counter(str(row["relation"]) for row in rows).most_common(1)[0]
            odd = [row for row in rows if row["relation"] != usual]
            if odd and len(odd) <= FEW and 4 * len(odd) <= alike:
                row, block = odd[0], str(odd[0].get("block"))
                yield Finding(
                    "unlike_placement",
                    "warning",
                    f"in {block} {row['relation']}, and in the other layers {usual}",
                    "structure",
                    {"sublayers": len(odd), "of": len(rows)},
                    module=block,
                    do="place norm and sum as in the other layers, or as the recipe says",
                )


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


def no_final_norm(tables: Tables) -> Iterator[Finding]:
    """Name the stacks whose branches read the stream through norms, and that end without one."""
    for stack, table in tables.stacks("structure"):
        rows = list(table)
        reading = sum(bool(row.get("norm_read")) and not row.get("norm_write") for row in rows)
        if 2 * reading > len(rows) and not rows[-1].get("final_norm"):
            yield Finding(
                "no_final_norm",
                "warning",
                f"the Pre-LN stack {stack} has no final norm: what reads it sees a stream that grows with "
                "the depth",
                "structure",
                {"sublayers": len(rows), "pre": reading},
                XIONG.format("Table 1"),
                module=str(rows[0]["stack"]),
                do="put a norm behind the last layer",
                explains=("initial_loss", "hidden_scale"),
            )


STRUCTURE: Final = Study(
    "structure",
    lambda c: structure(c.subject.structure),
    "preflight",
    rules=(missing_sum, no_final_norm, unlike_placement, placement),
    batch="the model alone",
    order=0,
)
