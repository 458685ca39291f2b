"""The findings of normlab with their evidence, measured once for all tests of a process."""

from __future__ import annotations

from normlab.papers.finding import known_findings, reviewed
from normlab.papers.regimes import read_book

FINDINGS = known_findings()
BOOK = read_book()
REVIEWED = {id_: reviewed(finding, BOOK) for id_, finding in FINDINGS.items()}
