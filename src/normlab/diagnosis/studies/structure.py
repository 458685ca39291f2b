"""The residual stream as it was read: one row per sublayer, and the placement of each stack."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Final

import torch

from normlab.diagnosis.reading.structure import Structure
from normlab.diagnosis.reading.subject import Subject
from normlab.diagnosis.reading.taps import watching
from normlab.diagnosis.reading.unregistered import pointed_out, unregistered
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
    """Tabulate each sublayer with its role, its placement and its norms."""
    rows = (
        {"stack": stack.name}
        | {name: getattr(view, name) for name in COLUMNS}
        | {"branch": str(view.branch), "final_norm": stack.final_norm}
        for stack in read.stacks
        for view in stack.sublayers
    )
    return Table("structure", tuple(rows))


def unseen(subject: Subject) -> Table:
    """Tabulate the modules that run, and could learn, but that the model keeps in plain lists and dicts."""
    hidden, ran = unregistered(subject.model), set[str]()
    watched = {f"{path}.{i}": m for path, modules in hidden.items() for i, m in enumerate(modules)}
    if watched:
        with watching(watched, lambda path, side, values: ran.add(path.rpartition(".")[0])), torch.no_grad():
            subject.forward()
    rows = (
        {"attribute": path, "modules": len(modules), "said": pointed_out(path, modules)}
        for path, modules in hidden.items()
        if path in ran and any(p.requires_grad for module in modules for p in module.parameters())
    )
    return Table("unregistered", tuple(rows))


def not_registered(tables: Tables) -> Iterator[Finding]:
    """Report layers that no optimiser trains, because torch does not see them."""
    for row in tables.table("unregistered"):
        numbers = {name: row[name] for name in ("attribute", "modules")}
        yield Finding("unregistered", "problem", str(row["said"]), "unregistered", numbers)


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
    lambda c: [structure(c.subject.structure), unseen(c.subject)],
    "cheap",
    rules=(not_registered, placement),
    batch="the model alone",
    order=0,
)
