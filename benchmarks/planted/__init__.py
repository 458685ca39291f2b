"""Models with a planted fault each, and sound ones, for a preflight to tell apart."""

from .fault import BATCH, LOSS, OPTIMISER, Fault
from .fifth import FIFTH
from .fourth import FOURTH
from .healthy import HEALTHY, Healthy
from .known import KNOWN
from .models import ARCHITECTURES, Case, build
from .second import SECOND
from .seventh import SEVENTH
from .sixth import SIXTH
from .third import THIRD
from .unseen import UNSEEN

FAULTS = [
    *KNOWN.every,
    *UNSEEN.every,
    *SECOND.every,
    *THIRD.every,
    *FOURTH.every,
    *FIFTH.every,
    *SIXTH.every,
    *SEVENTH.every,
]

__all__ = [
    "ARCHITECTURES",
    "BATCH",
    "FAULTS",
    "FIFTH",
    "FOURTH",
    "HEALTHY",
    "KNOWN",
    "LOSS",
    "OPTIMISER",
    "SECOND",
    "SEVENTH",
    "SIXTH",
    "THIRD",
    "UNSEEN",
    "Case",
    "Fault",
    "Healthy",
    "build",
]
