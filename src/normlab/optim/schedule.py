r"""Learning-rate schedules: functions (step, state) -> factor of ``optim.lr``, which is the peak rate.

Steps are counted from 1. Every schedule begins with the warm-up, if there is one, and all of them scale with
``lr``: twice the learning rate in a paper is twice ``lr``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from normlab.base.optim_config import OptimConfig
from normlab.base.registry import Registry
from normlab.errors import UserError


@dataclass(frozen=True)
class ScheduleState:
    """Everything except the step that a schedule depends on."""

    optim: OptimConfig
    total_steps: int
    decays: int = 0
    """How many times validation has lowered the rate so far (see ``ValDecay``)."""

    @property
    def peak_step(self) -> int:
        """The last step of the warm-up, or step 1 without one."""
        return max(1, self.optim.warmup_steps)


SCHEDULES: Registry[Callable[[int, ScheduleState], float]] = Registry("schedule")
"""Schedules by name, for the steps after the warm-up."""


@SCHEDULES.register("constant")
def constant(step: int, state: ScheduleState) -> float:
    """The peak rate until the end."""
    return 1.0


@SCHEDULES.register("inverse_sqrt")
def inverse_sqrt(step: int, state: ScheduleState) -> float:
    r""":math:`\sqrt{k/n}` with :math:`k = \max(1, \text{warm-up})`.

    Vaswani et al. 2017, Equation 3 (arXiv 1706.03762), written relative to its peak. In absolute terms
    :math:`\frac{\lambda}{\sqrt{d}} \min(n^{-1/2}, n\,k^{-3/2})` has its peak at step k, so ``lr`` is
    :math:`\lambda / \sqrt{d\,k}`: 4.94e-4 for a multiplier of 1 at width 512 and 8000 warm-up steps.
    """
    return (state.peak_step / step) ** 0.5


@SCHEDULES.register("linear", "final_lr_factor")
def linear(step: int, state: ScheduleState) -> float:
    r""":math:`r + (1 - r)(N - n)/(N - k)` from 1 at the peak to r at step N (``optim.final_lr_factor``, 0).

    Devlin et al. 2019, Section A.2 (arXiv 1810.04805).
    """
    return _down_to_final(_left(step, state), state)


@SCHEDULES.register("cosine", "final_lr_factor")
def cosine(step: int, state: ScheduleState) -> float:
    r""":math:`r + \frac{1 - r}{2}\left(1 + \cos \pi\frac{n - k}{N - k}\right)` from 1 at the peak to r
    at step N (``optim.final_lr_factor``, 0).

    Loshchilov and Hutter 2017, Equation 5 (arXiv 1608.03983), without restarts.
    """
    return _down_to_final(0.5 * (1.0 - math.cos(math.pi * _left(step, state))), state)


@SCHEDULES.register("wsd", "decay_share", "final_lr_factor")
def wsd(step: int, state: ScheduleState) -> float:
    r""":math:`1` until the last :math:`\lfloor f N \rfloor` steps, and then
    :math:`r + (1 - r)(1 - u)`, with u from 0 to 1.

    Warm-up, stable, decay: f is ``optim.decay_share`` and r ``optim.final_lr_factor``. Hägele et al. 2024,
    Section 3 (arXiv 2405.18392).
    """
    return _down_to_final(1.0 - _decayed(step, state), state)


@SCHEDULES.register("wsd_sqrt", "decay_share", "final_lr_factor")
def wsd_sqrt(step: int, state: ScheduleState) -> float:
    r""":math:`1` until the last :math:`\lfloor f N \rfloor` steps, and then
    :math:`r + (1 - r)(1 - \sqrt{u})`, with u from 0 to 1.

    The symbols are those of ``wsd``. Hägele et al. 2024, Section 3 (arXiv 2405.18392).
    """
    return _down_to_final(1.0 - _decayed(step, state) ** 0.5, state)


@SCHEDULES.register("step_decay", "decay_step", "decay_factor")
def step_decay(step: int, state: ScheduleState) -> float:
    r""":math:`1` before step s and :math:`\alpha` from then on (``optim.decay_factor``, 0.1).

    Step s is ``optim.decay_step``; with S steps per epoch, epoch e begins at step (e - 1) S + 1.

    Xiong et al. 2020, Section 4.1 (arXiv 2002.04745).
    """
    return (state.optim.decay_factor or 0.1) if step >= _decay_step(state) else 1.0


@SCHEDULES.register("step_decay_inverse_sqrt", "decay_step", "decay_factor")
def step_decay_inverse_sqrt(step: int, state: ScheduleState) -> float:
    r""":math:`1` before step s and :math:`\alpha \sqrt{s/n}` from then on (``optim.decay_factor``, 0.1).

    Step s is ``optim.decay_step``, as in ``step_decay``. The source leaves :math:`\alpha` open here;
    with ``decay_factor`` 1 the inverse square root begins at the peak.

    Xiong et al. 2020, Section 4.1 and Footnote 1 (arXiv 2002.04745).
    """
    return step_decay(step, state) * min(1.0, _decay_step(state) / step) ** 0.5


@SCHEDULES.register("val_decay", "decay_factor", "decay_patience")
def val_decay(step: int, state: ScheduleState) -> float:
    r""":math:`\alpha^m` once the dev score has failed m times to improve for P validations.

    :math:`\alpha` is ``optim.decay_factor`` (0.8) and P ``optim.decay_patience``; ``ValDecay`` counts m.

    Nguyen and Salazar 2019, Sections 2.4 and 3.3 (arXiv 1910.05895).
    """
    return (state.optim.decay_factor or 0.8) ** state.decays


def warmup(step: int, warmup_steps: int) -> float:
    r""":math:`n/k` of the peak at step n of a warm-up of k steps.

    Vaswani et al. 2017, Section 5.3 (arXiv 1706.03762).
    """
    return step / warmup_steps


WARM_UP: Registry[Callable[[int, int], float]] = Registry("warm-up")
"""The recipe part that switches on the warm-up of ``optim.warmup_steps``."""
WARM_UP.register("warmup", "warmup_steps")(warmup)


def schedule_factor(step: int, state: ScheduleState) -> float:
    """Return the factor on the peak learning rate at a step, counted from 1."""
    if step <= state.optim.warmup_steps:
        return warmup(step, state.optim.warmup_steps)
    return SCHEDULES[state.optim.schedule](step, state)


def check_schedule(optim: OptimConfig) -> None:
    """Raise UserError for a schedule that is unknown or not fully configured."""
    after = optim.warmup_steps + 1
    SCHEDULES[optim.schedule](after, ScheduleState(optim, total_steps=after))


@dataclass(frozen=True)
class ValDecay:
    r""":math:`m \leftarrow m + 1` at every P-th validation in a row without a new best dev score.

    Initially m is zero. A decay resets the count and keeps the best score. Validations during the warm-up do
    not count, since they are not at the peak rate. ``train.best_by`` names the score. This follows the
    wording of the paper: the authors' published code lowers the rate when a score is below each of the P
    before it, so the rate stays the same while scores neither rise nor fall.

    Nguyen and Salazar 2019, Sections 2.4 and 3.3 (arXiv 1910.05895).
    """

    decays: int = 0
    waited: int = 0
    """Validations since the last improvement or decay."""

    def after(self, step: int, optim: OptimConfig, *, improved: bool) -> ValDecay:
        """Return the state after the validation at ``step``."""
        if improved or step <= optim.warmup_steps:
            return replace(self, waited=0)
        if self.waited + 1 < optim.decay_patience:
            return replace(self, waited=self.waited + 1)
        return ValDecay(decays=self.decays + 1)


def _left(step: int, state: ScheduleState) -> float:
    """Return the share of the steps from the peak to the end that is still ahead, at least 0."""
    return max(0.0, (state.total_steps - step) / max(1, state.total_steps - state.optim.warmup_steps))


def _down_to_final(share: float, state: ScheduleState) -> float:
    """Return the factor at a share of the way from the end of the decay (0) to the peak (1)."""
    final = state.optim.final_lr_factor
    return final + (1.0 - final) * share


def _decayed(step: int, state: ScheduleState) -> float:
    """Return the share of the final decay already done, 0 to 1; it never starts before the warm-up ends."""
    steps = int(state.optim.decay_share * state.total_steps)
    begin = max(state.total_steps - steps, state.optim.warmup_steps)
    return min(1.0, max(0.0, (step - begin) / max(1, state.total_steps - begin)))


def _decay_step(state: ScheduleState) -> int:
    optim = state.optim
    if optim.decay_step <= state.peak_step:
        raise UserError(
            f"schedule {optim.schedule!r} decays at optim.decay_step = {optim.decay_step}, and its peak is "
            f"at step {state.peak_step}; choose a later step: --decay-step 8000, or in "
            "Python OptimConfig(decay_step=8000)"
        )
    return optim.decay_step
