"""Learning-rate schedules and optimizers."""

from normlab.optim.optimizer import OPTIMIZERS, build_optimizer, keeps_tensors, set_rate
from normlab.optim.roles import ROLE_TABLES, RoleRule, clipped_together, underived
from normlab.optim.schedule import SCHEDULES, WARM_UP, ScheduleState, ValDecay, schedule_factor

__all__ = [
    "OPTIMIZERS",
    "ROLE_TABLES",
    "SCHEDULES",
    "WARM_UP",
    "RoleRule",
    "ScheduleState",
    "ValDecay",
    "build_optimizer",
    "clipped_together",
    "keeps_tensors",
    "schedule_factor",
    "set_rate",
    "underived",
]
