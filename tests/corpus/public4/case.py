"""How cases are added to the fourth list; what a case is, the second list says."""

from __future__ import annotations

from corpus.public2.case import CaseList

LIST = CaseList()
CASES = LIST.cases
"""Every case by its name, once ``public4.collected`` has been imported."""
report, sound = LIST.report, LIST.sound
