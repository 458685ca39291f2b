"""Learning-rate schedules and optimisers."""

from .optimiser import OPTIMISERS, build_optimiser, keeps_tensors, set_rate
from .roles import ROLE_TABLES, RoleRule, clipped_together, underived
from .schedule import SCHEDULES, WARM_UP, ScheduleState, ValDecay, schedule_factor

__all__ = [
    "OPTIMISERS",
    "ROLE_TABLES",
    "SCHEDULES",
    "WARM_UP",
    "RoleRule",
    "ScheduleState",
    "ValDecay",
    "build_optimiser",
    "clipped_together",
    "keeps_tensors",
    "schedule_factor",
    "set_rate",
    "underived",
]
