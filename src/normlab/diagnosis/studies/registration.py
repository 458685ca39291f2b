"""Find layers that are in a model and not among its modules, and layers that are there several times."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Final

import torch
from torch import nn

from normlab.diagnosis.reading.subject import Subject
from normlab.diagnosis.reading.taps import watching
from normlab.diagnosis.reading.unregistered import pointed_out, unregistered
from normlab.diagnosis.rules.finding import Finding, Tables
from normlab.diagnosis.study import Study
from normlab.diagnosis.table import Row, Table


def registration(subject: Subject) -> tuple[Table, Table]:
    """Tabulate as ``unregistered`` the plain lists, tuples and dicts of modules that run and could learn, and
    as ``repeated`` the containers that hold one module with parameters several times.
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
    return Table("unregistered", tuple(lost)), Table("repeated", tuple(_repeated(subject.model)))


def _repeated(model: nn.Module) -> Iterator[Row]:
    for path, module in model.named_modules():
        if isinstance(module, (nn.ModuleList, nn.Sequential)):
            child, most = next(iter(Counter(module._modules.values()).most_common(1)), (None, 0))
            if most > 1 and child is not None and next(child.parameters(), None) is not None:
                yield {"module": path, "modules": most}


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


REGISTRATION: Final = Study(
    "registration",
    lambda c: registration(c.subject),
    "preflight",
    rules=(not_registered, repeated_layer),
    batch="the model alone",
    order=-61,
)
