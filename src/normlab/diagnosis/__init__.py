"""``diagnose``: read the residual stream of any ``nn.Module``, probe its signals, run studies, draw
conclusions.

It imports ``setups`` and ``trace``, and no model of normlab's own; ``checks``, ``scaling``, ``watching`` and
the laboratory import it.
"""

from normlab.base.chart import Bars, ByDepth, Cells, Growth, HeatMap, Lines, Strips
from normlab.diagnosis import studies as studies
from normlab.diagnosis.diagnose import diagnose
from normlab.diagnosis.presets import PRESETS
from normlab.diagnosis.probes import STATISTICS, Observer, Probe, Record, Statistic, measure, observe
from normlab.diagnosis.reading import read_structure
from normlab.diagnosis.result import Diagnosis
from normlab.diagnosis.structure import StackView, Structure, SublayerView
from normlab.diagnosis.study import Finding, Study, find, register, registered, rule
from normlab.diagnosis.subject import Subject
from normlab.diagnosis.tables import Table, Tables
from normlab.trace.tensors import Tap

__all__ = [
    "PRESETS", "STATISTICS", "Bars", "ByDepth", "Cells", "Diagnosis", "Finding", "Growth", "HeatMap", "Lines",
    "Observer", "Probe", "Record", "StackView", "Statistic", "Strips", "Structure", "Study", "Subject",
    "SublayerView", "Table", "Tables", "Tap", "diagnose", "find", "measure", "observe", "read_structure",
    "register", "registered", "rule",
]  # fmt: skip
