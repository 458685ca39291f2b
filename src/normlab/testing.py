"""Assertions about a training step, for test files: ``assert_step(model, batch, optimizer=optimizer)``."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

from torch import nn

from normlab.checks.check import check, properties
from normlab.checks.report import Report
from normlab.setups.setup import Setup, refuse_unknown


def assert_step(
    model: nn.Module | Setup, batch: Any = None, *, allow: Collection[str] = (), **arguments: Any
) -> Report:
    """Return the report on a training step; raise AssertionError with it if a property fails.

    Takes the arguments of ``normlab.check``. ``allow`` are names of properties that may fail. Raises
    UserError for a name that no property has.
    """
    for name in [allow] if isinstance(allow, str) else allow:
        refuse_unknown(name, [p.name for p in properties()], "allow")
    report = check(model, batch, **arguments)
    failures = tuple(v for v in report.failures if v.property not in allow)
    if failures:
        raise AssertionError(f"\n{replace(report, failures=failures)}")
    return report
