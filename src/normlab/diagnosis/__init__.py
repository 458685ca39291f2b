"""Measure any ``nn.Module``: read its residual stream, probe its signals, run studies, conclude."""

from normlab.config.chart import ByDepth, Growth, HeatMap, Lines, Strips
from normlab.diagnosis import studies as studies
from normlab.diagnosis.diagnose import diagnose
from normlab.diagnosis.probing.observe import STATISTICS, Observer, Probe, Record, Statistic, measure, observe
from normlab.diagnosis.probing.presets import PRESETS
from normlab.diagnosis.reading.structure import StackView, Structure, SublayerView, read_structure
from normlab.diagnosis.reading.subject import Subject
from normlab.diagnosis.result import Diagnosis
from normlab.diagnosis.rules.finding import Finding, Tables
from normlab.diagnosis.study import Study, StudyContext, find, register, registered
from normlab.diagnosis.table import Table
from normlab.trace.tensors import Tap

__all__ = [
    "PRESETS", "STATISTICS", "ByDepth", "Diagnosis", "Finding", "Growth", "HeatMap", "Lines", "Observer",
    "Probe", "Record", "StackView", "Statistic", "Strips", "Structure", "Study", "StudyContext",
    "Subject", "SublayerView", "Table", "Tables", "Tap", "diagnose", "find", "measure", "observe",
    "read_structure", "register", "registered",
]  # fmt: skip
