"""Watches any ``nn.Module``: probes and records, the residual stream read from numbers, and what follows."""

from normlab.diagnosis.diagnose import Diagnosis, diagnose
from normlab.diagnosis.finding import Finding
from normlab.diagnosis.findings import find
from normlab.diagnosis.observe import Observer, Probe, Record, observe
from normlab.diagnosis.programme import PRESETS, STUDIES
from normlab.diagnosis.stats import STATISTICS, Statistic, measure
from normlab.diagnosis.structure import StackView, Structure, SublayerView, read_structure
from normlab.diagnosis.subject import Subject
from normlab.diagnosis.table import Table
from normlab.diagnosis.taps import Tap, capture

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
