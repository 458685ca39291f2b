"""Optimizers and learning-rate schedules by name, and which parameter gets which rate and decay.

It imports ``nn``, whose classes say the role of each parameter; only ``lab`` imports it.
"""

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
