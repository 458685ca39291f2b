"""Watches any ``nn.Module``: probes and records, the residual stream read from numbers, and what follows."""

from normlab.diagnosis.diagnose import Diagnosis, diagnose
from normlab.diagnosis.probing.observe import Observer, Probe, Record, observe
from normlab.diagnosis.probing.stats import STATISTICS, Statistic, measure
from normlab.diagnosis.programme import PRESETS, STUDIES
from normlab.diagnosis.reading.structure import StackView, Structure, SublayerView, read_structure
from normlab.diagnosis.reading.subject import Subject
from normlab.diagnosis.reading.taps import Tap, capture
from normlab.diagnosis.rules.finding import Finding
from normlab.diagnosis.rules.findings import find
from normlab.diagnosis.table import Table

__all__ = [
    "PRESETS",
    "STATISTICS",
    "STUDIES",
    "Diagnosis",
    "Finding",
    "Observer",
    "Probe",
    "Record",
    "StackView",
    "Statistic",
    "Structure",
    "Subject",
    "SublayerView",
    "Table",
    "Tap",
    "capture",
    "diagnose",
    "find",
    "measure",
    "observe",
    "read_structure",
]
