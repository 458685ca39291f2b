r"""Learning-rate schedules: functions (step, warm-up steps, total steps) -> factor of the peak rate.

Steps count from 1. Every schedule starts with the warm-up, if that has steps.
"""

from __future__ import annotations

from collections.abc import Callable

from normlab.nn.registry import Registry

Schedule = Callable[[int, int, int], float]

SCHEDULES: Registry[Schedule] = Registry("schedule")
"""The part of each schedule that follows the warm-up."""


@SCHEDULES.register("constant")
def constant(step: int, warmup_steps: int, total_steps: int) -> float:
    """The peak rate to the end."""
    return 1.0


@SCHEDULES.register("inverse_sqrt")
def inverse_sqrt(step: int, warmup_steps: int, total_steps: int) -> float:
    r""":math:`\sqrt{k/n}` with :math:`k = \max(1, \text{warm-up})`.

    Vaswani et al. 2017, Equation 3 (arXiv 1706.03762), written relative to its peak.
    """
    return (max(1, warmup_steps) / step) ** 0.5


@SCHEDULES.register("linear")
def linear(step: int, warmup_steps: int, total_steps: int) -> float:
    r""":math:`(N - n)/(N - k)` from the peak to 0 at step N.

    Devlin et al. 2019, Section A.2 (arXiv 1810.04805).
    """
    return max(0.0, (total_steps - step) / max(1, total_steps - warmup_steps))


def warmup(step: int, warmup_steps: int) -> float:
    r""":math:`n/k` of the peak at step n of a warm-up of k steps.

    Vaswani et al. 2017, Section 5.3 (arXiv 1706.03762).
    """
    return step / warmup_steps


def schedule_factor(name: str, step: int, *, warmup_steps: int, total_steps: int) -> float:
    """Factor of the peak learning rate at a step, counted from 1."""
    if step <= warmup_steps:
        return warmup(step, warmup_steps)
    return SCHEDULES[name](step, warmup_steps, total_steps)
