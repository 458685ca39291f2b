"""Learning-rate schedules and optimisers."""

from .optimiser import OPTIMISERS, build_optimiser, keeps_tensors
from .schedule import SCHEDULES, ScheduleState, ValDecay, schedule_factor, warmup

__all__ = [
    "OPTIMISERS",
    "SCHEDULES",
    "ScheduleState",
    "ValDecay",
    "build_optimiser",
    "keeps_tensors",
    "schedule_factor",
    "warmup",
]
