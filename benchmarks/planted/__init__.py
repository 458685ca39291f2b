"""Models with a planted fault each, and sound ones, for a preflight to tell apart."""

from .fault import OPTIMISER, Fault
from .healthy import HEALTHY, Healthy
from .known import KNOWN
from .models import ARCHITECTURES, Case, build
from .unseen import UNSEEN

FAULTS = [*KNOWN.every, *UNSEEN.every]

__all__ = [
    "ARCHITECTURES",
    "FAULTS",
    "HEALTHY",
    "KNOWN",
    "OPTIMISER",
    "UNSEEN",
    "Case",
    "Fault",
    "Healthy",
    "build",
]
