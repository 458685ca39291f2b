"""What a check says of a step."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from normlab.checks.property import Note, Violation


@dataclass(frozen=True)
class Report:
    """A training step, tested: what fails, first the cause; what holds; what could not be tested, and why."""

    model: str
    failures: tuple[Violation, ...]
    notes: tuple[Note, ...]
    holds: tuple[str, ...]
    untestable: Mapping[str, str]
    seconds: Mapping[str, float] = field(repr=False, default_factory=dict)
    facts: Mapping[str, str] = field(repr=False, default_factory=dict)

    @property
    def ok(self) -> bool:
        """Whether no property fails."""
        return not self.failures

    def __str__(self) -> str:
        lines: list[str] = []
        for violation in self.failures:
            lines.append(f"✗ {violation.property:<16} {violation.module or 'model'}: {violation.evidence}")
            if violation.advice:
                lines.append(f"  {'':<16} → {violation.advice}")
            lines += [
                f"  {'':<16}   so {v.property} fails at {v.module or 'model'}" for v in violation.follows
            ]
        count = len(self.holds)
        lines.append(
            f"✓ {count} {'property holds' if count == 1 else 'properties hold'}: {', '.join(self.holds)}"
        )
        lines += [f"– {name}: {why}" for name, why in self.untestable.items()]
        lines += [f"  note: {n.property} at {n.module or 'model'}: {n.evidence}" for n in self.notes]
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """The same facts as plain values."""
        return asdict(self)

    def write_json(self, path: Path) -> None:
        """Write ``to_dict`` as JSON."""
        path.write_text(json.dumps(self.to_dict(), indent=1), encoding="utf-8")
