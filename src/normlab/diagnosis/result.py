"""The result of a diagnosis: tables, findings, and the one line that they come to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from normlab.config.io import to_plain
from normlab.config.units import count
from normlab.diagnosis.reading.structure import Structure
from normlab.diagnosis.rules.finding import SEVERITIES, Finding, Tables, at_least, told
from normlab.diagnosis.study import Study
from normlab.diagnosis.table import Table

if TYPE_CHECKING:
    import polars as pl


@dataclass(frozen=True, repr=False)
class Diagnosis:
    """The tables that were measured, and the findings that follow from them."""

    model: str
    """Name of the model's class."""
    preset: str
    structure: Structure
    tables: Mapping[str, Table]
    findings: tuple[Finding, ...]
    """The most severe ones first."""
    studies: tuple[Study, ...]
    """The studies that ran, in their order."""
    seconds: Mapping[str, float]
    """Time of each study by its name."""
    applied: tuple[str, ...]
    """Names of the studies that had something to measure and did not fail."""
    peak_memory_bytes: int
    """Peak of the process so far on a CPU, of torch's tensors during the diagnosis on a GPU."""
    facts: Mapping[str, str]
    """Parameters, batch, loss, learning rate, optimiser and device, in words."""

    @property
    def cause(self) -> Finding | None:
        """The first of the gravest findings above a note."""
        grave = self.at_least("warning")
        return max(grave, key=lambda f: SEVERITIES.index(f.severity), default=None)

    @property
    def verdict(self) -> str:
        """One line: the cause with its place and what to do, or that nothing was found."""
        if (found := self.cause) is None:
            unused = [study.name for study in self.studies if study.name not in self.applied]
            idle = f" (not applicable: {', '.join(unused).replace('_', ' ')})" if unused else ""
            return f"nothing found in {len(self.applied)} studies{idle}"
        return f"{found.severity}: {told(found)}"

    def at_least(self, severity: str) -> list[Finding]:
        """Return the findings of this severity (``warning``, say) or above."""
        return at_least(self.findings, severity)

    def to_plain(self) -> dict[str, Any]:
        """Return the diagnosis as dicts and lists; see ``normlab.config.io.to_plain`` for JSON."""
        cause = self.cause
        return {
            "verdict": self.verdict,
            "cause": None if cause is None else _plain(cause),
            "model": self.model,
            "preset": self.preset,
            "facts": dict(self.facts),
            "structure": str(self.structure),
            "stacks": {stack.name: Tables(self.tables).label(stack.name) for stack in self.structure.stacks},
            "findings": [_plain(finding) for finding in self.findings],
            "studies": [study.to_plain() for study in self.studies],
            "seconds": dict(self.seconds),
            "applied": list(self.applied),
            "peak_memory_bytes": self.peak_memory_bytes,
            "tables": {name: [dict(row) for row in table] for name, table in self.tables.items()},
        }

    def to_polars(self) -> dict[str, pl.DataFrame]:
        """Return the tables by name, and the findings as one more, as data frames of polars."""
        import polars as pl

        tables = {name: [dict(row) for row in table] for name, table in self.tables.items()}
        tables["findings"] = [{**vars(f), "numbers": f.evidence} for f in self.findings]
        return {name: pl.DataFrame(rows, infer_schema_length=None) for name, rows in tables.items()}

    def page(self, path: str | Path) -> Path:
        """Draw the diagnosis as a page at this path, with its numbers as JSON beside it; return the path."""
        import normlab

        where = Path(path)
        name = where.name.removesuffix(".html")  # not its stem: v1.2 is a name
        return normlab.write_diagnosis(to_plain(self.to_plain()), where.parent, name)

    def __str__(self) -> str:
        return "\n".join([self.verdict, *(str(finding) for finding in self.findings)])

    def __repr__(self) -> str:
        counted = Counter(finding.severity for finding in self.findings)
        said = ", ".join(count(counted[kind], kind) for kind in reversed(SEVERITIES) if counted[kind])
        return f"<Diagnosis of {self.model}: {self.verdict} ({said or 'no finding'})>"

    def _repr_html_(self) -> str:
        """The verdict and the findings, for a notebook; notes fold away."""
        item = "<li><b>{}</b>: {}<br><small>{}</small></li>"
        grave, notes = list[str](), list[str]()
        for f in self.findings:
            said = item.format(f.severity, escape(f.sentence), escape(f.evidence))
            (notes if f.severity == "note" else grave).append(said)
        head = f"<p><b>{escape(self.model)}</b>: {escape(self.verdict)}</p><ul>{''.join(grave)}</ul>"
        folded = f"<details><summary>{count(len(notes), 'note')}</summary><ul>{''.join(notes)}</ul></details>"
        return head + folded * bool(notes)


def _plain(finding: Finding) -> dict[str, Any]:
    return {**vars(finding), "numbers": dict(finding.numbers)}
