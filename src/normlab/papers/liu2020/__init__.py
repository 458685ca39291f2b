"""Liu et al. 2020, Understanding the Difficulty of Training Transformers (arXiv 2004.08249).

``gradients`` holds its claims about vanishing gradients, ``dependency`` those about branches and the change
of the output, ``training`` its trainings.
"""

from __future__ import annotations

from typing import Final

from normlab.papers.liu2020 import dependency, gradients, training
from normlab.spec.artefact import Artefact

ARTEFACTS: Final[tuple[Artefact, ...]] = (
    training.TABLE1,
    training.FIG1_9,
    gradients.FIG3,
    gradients.ADMIN_VANISHES,
    dependency.FIG4,
    gradients.FIG5_11,
    dependency.FIG7_8,
    gradients.THEOREM1,
    gradients.REMARK1,
    gradients.APPENDIX_A3,
    dependency.THEOREM2,
    dependency.CONSTANT_C,
    training.TABLE2,
    training.WARMUP,
    training.FIG10,
    training.TABLE3,
    training.SECTION5_3,
    training.DROPOUT,
    dependency.PROFILING,
    training.RESCALE_INIT,
    training.TABLE4,
    training.APPENDIX_C,
    training.PARAMETERS,
)
