"""Register the studies of this package, and apply the rules of all registered ones."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pkgutil import iter_modules

from normlab.diagnosis import studies
from normlab.diagnosis.rules.finding import SEVERITIES, Finding, Tables
from normlab.diagnosis.study import Study, register, registered
from normlab.diagnosis.table import Table
from normlab.spec.arguments import validate_arguments

for module in iter_modules(studies.__path__):
    for value in vars(import_module(f"{studies.__name__}.{module.name}")).values():
        if isinstance(value, Study):
            register(value)


@validate_arguments
def find(tables: Mapping[str, Table], lr: float | None = None) -> tuple[Finding, ...]:
    """Apply the rules of all studies to these tables; the most severe findings come first."""
    rules = [rule for study in registered() for rule in study.rules]
    known = Tables(tables, lr)
    found = [f for rule in rules for f in rule(known)]
    return tuple(sorted(found, key=lambda f: -SEVERITIES.index(f.severity)))
