"""Schedules as functions (step, course) -> factor, and optimisers."""

from .optimiser import OPTIMISERS, build_optimiser
from .schedule import SCHEDULES, Course, ValDecay, schedule_factor, warmup

__all__ = ["OPTIMISERS", "SCHEDULES", "Course", "ValDecay", "build_optimiser", "schedule_factor", "warmup"]
