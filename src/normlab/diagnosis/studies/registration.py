"""Find layers that are in a model and not among its modules, and layers that are there several times."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Final

import torch
from torch import nn

from normlab.diagnosis.reading.naming import POSITIONS
from normlab.diagnosis.reading.subject import Subject
from normlab.diagnosis.reading.taps import watching
from normlab.diagnosis.reading.unregistered import pointed_out, unregistered
from normlab.diagnosis.rules.finding import Finding, Tables
from normlab.diagnosis.study import Study
from normlab.diagnosis.table import Row, Table


def registration(subject: Subject) -> tuple[Table, Table, Table]:
    """Tabulate as ``unregistered`` the plain lists, tuples and dicts of modules that run and could learn, as
    ``repeated`` the containers that hold one module with parameters several times, and as ``copies`` the
    matrices that hold the same numbers as another one.
    """
    hidden, ran = unregistered(subject.model), set[str]()
    watched = {f"{path}.{i}": m for path, modules in hidden.items() for i, m in enumerate(modules)}
    if watched:
        with watching(watched, lambda path, side, values: ran.add(path.rpartition(".")[0])), torch.no_grad():
            subject.forward()
    lost = (
        {"module": path, "modules": len(modules), "said": pointed_out(path, modules)}
        for path, modules in hidden.items()
        if path in ran and any(p.requires_grad for module in modules for p in module.parameters())
    )
    return (
        Table("unregistered", tuple(lost)),
        Table("repeated", tuple(_repeated(subject.model))),
        Table("copies", tuple(_copies(subject.model))),
    )


def _repeated(model: nn.Module) -> Iterator[Row]:
    for path, module in model.named_modules():
        if isinstance(module, (nn.ModuleList, nn.Sequential)):
            child, most = next(iter(Counter(module._modules.values()).most_common(1)), (None, 0))
            if most > 1 and child is not None and next(child.parameters(), None) is not None:
                yield {"module": path, "modules": most}


def _copies(model: nn.Module) -> Iterator[Row]:
    """Yield each matrix that begins as a copy of an earlier one, unless all of its entries are the same or
    it is a table of positions.
    """
    seen: dict[tuple[object, ...], str] = {}
    weights = {path: p for path, p in model.named_parameters() if not POSITIONS.search(path)}
    for path, p in weights.items():
        if p.ndim < 2 or p.is_meta or not (x := p.detach()).numel() or bool((x == x.flatten()[0]).all()):
            continue
        x = x.to_dense().float()
        first = seen.setdefault((p.shape, x.sum().item(), x.abs().sum().item()), path)
        if first != path and torch.equal(weights[first], p):
            yield {"parameter": path, "of": first}


def not_registered(tables: Tables) -> Iterator[Finding]:
    """Name layers that no optimiser trains, because torch does not see them."""
    for row in tables.table("unregistered"):
        yield Finding(
            "unregistered",
            "problem",
            str(row["said"]),
            "unregistered",
            {"modules": row["modules"]},
            module=str(row["module"]),
            explains=("unread", "no_gradient", "cut_gradient"),
        )


def repeated_layer(tables: Tables) -> Iterator[Finding]:
    """Name layers that share all of their weights."""
    for row in tables.table("repeated"):
        path = str(row["module"])
        yield Finding(
            "repeated_layer",
            "warning",
            f"{path} holds the same module {row['modules']} times, so that its layers share all weights",
            "repeated",
            {"modules": row["modules"]},
            module=path,
            do="build a module for each layer, if this is not meant",
        )


def copied(tables: Tables) -> Iterator[Finding]:
    """Name matrices that were copied where they were to be drawn."""
    if rows := tables.table("copies").rows:
        path, of = str(rows[0]["parameter"]), rows[0]["of"]
        also = f", the first of {len(rows)} such copies" * (len(rows) > 1)
        yield Finding(
            "copied_weights",
            "warning",
            f"{path} begins with the numbers of {of}{also}: it was not drawn by itself",
            "copies",
            {"copies": len(rows)},
            module=path.rpartition(".")[0],
            do="initialise each matrix by itself, unless this model goes on from another one",
        )


REGISTRATION: Final = Study(
    "registration",
    lambda c: registration(c.subject),
    "preflight",
    rules=(not_registered, repeated_layer, copied),
    batch="the model alone",
    clean_if_empty=True,
    order=-61,
)
