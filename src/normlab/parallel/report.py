"""What a check of ranks says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from normlab.checks.report import Report
from normlab.parallel.properties import PROPERTIES


@dataclass(frozen=True)
class RanksReport(Report):
    """A report whose properties are those of ranks."""

    def to_dict(self) -> dict[str, Any]:
        """The same facts as plain values, with what each property states."""
        tested = [*self.judged, *self.untestable]
        return {**super().to_dict(), "statements": {name: PROPERTIES[name].statement for name in tested}}
