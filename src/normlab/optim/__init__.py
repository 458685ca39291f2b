"""Schedules as functions step -> factor, and optimisers."""

from .optimiser import OPTIMISERS, build_optimiser
from .schedule import SCHEDULES, schedule_factor, warmup

__all__ = ["OPTIMISERS", "SCHEDULES", "build_optimiser", "schedule_factor", "warmup"]
