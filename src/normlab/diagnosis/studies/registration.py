"""Find layers that are in a model and not among its modules, and layers that are there several times."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Final

from torch import nn

from normlab.diagnosis.reading.naming import layer_of
from normlab.diagnosis.rules.finding import Finding, Tables
from normlab.diagnosis.study import Study
from normlab.diagnosis.table import Row, Table


def registration(model: nn.Module) -> Table:
    """Tabulate containers: those that are plain lists, tuples or dicts of modules which no optimiser gets
    (``unregistered``), and those that hold one module several times (``repeated``), with the number of
    modules.
    """
    known, rows = set(model.modules()), list[Row]()
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if name != "_modules" and (lost := [m for m in _held(value) if m not in known]):
                rows.append(_row(f"{path}.{name}".lstrip("."), "unregistered", len(lost)))
        if isinstance(module, (nn.ModuleList, nn.Sequential)):
            most = max(Counter(id(child) for child in module._modules.values()).values(), default=0)
            whole = next(iter(module.parameters()), None) is not None
            if most > 1 and whole:
                rows.append(_row(path, "repeated", most))
    return Table("registration", tuple(rows))


def _held(value: object) -> list[nn.Module]:
    items = value.values() if isinstance(value, Mapping) else value
    return [m for m in items if isinstance(m, nn.Module)] if isinstance(items, (list, tuple)) else []


def _row(path: str, how: str, count: int) -> Row:
    return {"module": path, "how": how, "modules": count}


def odd_containers(tables: Tables) -> Iterator[Finding]:
    """Name layers that would not be trained, and layers that share all of their weights."""
    for row in tables.table("registration"):
        path, count = str(row["module"]), row["modules"]
        lost = row["how"] == "unregistered"
        yield Finding(
            "unregistered" if lost else "repeated_layer",
            "problem" if lost else "warning",
            f"{path} is a plain list of {count} modules: model.parameters() does not have theirs, and no "
            "optimiser trains them"
            if lost
            else f"{path} holds the same module {count} times, so that its layers share all weights",
            "registration",
            {"modules": count},
            module=path,
            layer=layer_of(path),
            do="make it an nn.ModuleList" if lost else "build a module for each layer, if this is not meant",
            explains=("unread", "no_gradient", "cut_gradient"),
        )


REGISTRATION: Final = Study(
    "registration",
    lambda c: [registration(c.subject.model)],
    "preflight",
    rules=(odd_containers,),
    batch="the model alone",
    order=-61,
)
