"""What a diagnosis says: tables, findings, and the verdict in one line."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from normlab.base.extras import what_to_install
from normlab.base.io import to_plain
from normlab.base.units import count
from normlab.diagnosis.structure import Structure
from normlab.diagnosis.study import SEVERITIES, Finding, Study
from normlab.diagnosis.tables import Table, Tables
from normlab.errors import UserError

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
    """Seconds of each study by its name."""
    applied: tuple[str, ...]
    """Names of the studies that had something to measure and did not fail."""
    peak_memory_bytes: int
    """Peak memory: the process's so far on a CPU, torch's tensors' during the diagnosis on a GPU."""
    facts: Mapping[str, str]
    """Parameters, batch, loss, learning rate, optimizer and device, in words."""

    @property
    def cause(self) -> Finding | None:
        """The most severe finding that is more than a note, the first of these."""
        grave = self.at_least("warning")
        return max(grave, key=lambda finding: SEVERITIES.index(finding.severity), default=None)

    @property
    def verdict(self) -> str:
        """One line: the cause, or that nothing was found."""
        if self.cause is not None:
            return f"{self.cause.severity}: {self.cause.sentence}"
        idle = [study.name.replace("_", " ") for study in self.studies if study.name not in self.applied]
        left_out = f" (not applicable: {', '.join(idle)})" if idle else ""
        return f"nothing found in {len(self.applied)} studies{left_out}"

    def at_least(self, severity: str) -> list[Finding]:
        """Return the findings of this severity (``warning``, say) or above."""
        least = SEVERITIES.index(severity)
        return [finding for finding in self.findings if SEVERITIES.index(finding.severity) >= least]

    def to_plain(self) -> dict[str, Any]:
        return {
            "verdict": self.verdict,
            "cause": None if self.cause is None else self.cause.to_plain(),
            "model": self.model,
            "preset": self.preset,
            "facts": dict(self.facts),
            "structure": str(self.structure),
            "stacks": {stack.name: Tables(self.tables).label(stack.name) for stack in self.structure.stacks},
            "findings": [finding.to_plain() for finding in self.findings],
            "studies": [study.to_plain() for study in self.studies],
            "seconds": dict(self.seconds),
            "applied": list(self.applied),
            "peak_memory_bytes": self.peak_memory_bytes,
            "tables": {name: [dict(row) for row in table] for name, table in self.tables.items()},
        }

    def to_polars(self) -> dict[str, pl.DataFrame]:
        """Return the tables by name, and the findings as one more, as polars data frames.

        Raises UserError if polars is not installed.
        """
        try:
            import polars as pl
        except ModuleNotFoundError as error:
            raise UserError(what_to_install("Diagnosis.to_polars()", "charts")) from error

        tables = {name: [dict(row) for row in table] for name, table in self.tables.items()}
        tables["findings"] = [{**vars(f), "numbers": f.evidence} for f in self.findings]
        return {name: pl.DataFrame(rows, infer_schema_length=None) for name, rows in tables.items()}

    def page(self, path: str | Path) -> Path:
        """Draw the diagnosis as a page at this path, with its numbers as JSON beside it; return the path."""
        from normlab.report.diagnosis import write_diagnosis

        where = Path(path)
        name = where.name.removesuffix(".html")  # not its stem: v1.2 is a name
        return write_diagnosis(to_plain(self.to_plain()), where.parent, name)

    def __str__(self) -> str:
        return "\n".join([self.verdict, *(str(finding) for finding in self.findings)])

    def __repr__(self) -> str:
        counted = Counter(finding.severity for finding in self.findings)
        counts = ", ".join(count(counted[kind], kind) for kind in reversed(SEVERITIES) if counted[kind])
        return f"<Diagnosis of {self.model}: {self.verdict} ({counts or 'no finding'})>"

    def _repr_html_(self) -> str:
        """The verdict and the findings, for a notebook; notes fold away."""
        item = "<li><b>{}</b>: {}<br><small>{}</small></li>"
        grave, notes = list[str](), list[str]()
        for finding in self.findings:
            line = item.format(finding.severity, escape(finding.sentence), escape(finding.evidence))
            if finding.severity == "note":
                notes.append(line)
            else:
                grave.append(line)
        html = f"<p><b>{escape(self.model)}</b>: {escape(self.verdict)}</p><ul>{''.join(grave)}</ul>"
        if notes:
            summary = f"<summary>{count(len(notes), 'note')}</summary>"
            html += f"<details>{summary}<ul>{''.join(notes)}</ul></details>"
        return html
