"""Where a loss began, rose and ended: sound noisy trainings are not reported, diverged ones are."""

from __future__ import annotations

import random

import pytest
import torch

from normlab.watching.losses import LossCurve, Losses
from normlab.watching.meter import StepRecord
from normlab.watching.recorder import Recorder
from watching.reported import Kept


def curve_of(losses):
    curve = LossCurve()
    for loss in losses:
        curve.add(loss)
    return curve


@pytest.mark.parametrize(
    ("first", "last", "deviation"), [(2.5, 2.45, 0.2), (1.2, 1.1, 0.15), (1.6, 1.2, 0.4), (6.0, 3.0, 0.2)]
)
@pytest.mark.parametrize("steps", [30, 200])
def test_at_most_three_in_a_hundred_noisy_sound_trainings_are_reported(first, last, deviation, steps):
    draw = random.Random(0)
    falls = [first + (last - first) * step / steps for step in range(steps)]
    reported = [curve_of([loss + draw.gauss(0.0, deviation) for loss in falls]).diverged for _ in range(300)]
    assert sum(reported) <= 9


@pytest.mark.parametrize(
    "losses",
    [
        [3.3, *[19.9 - 0.1 * i for i in range(166)], *[3.22] * 20],  # back near its start
        [
            1.81,
            4.6,
            41.8,
            2.7,
            3.3,
            2.7,
            5.0,
            3.4,
            4.3,
            1.6,
            2.8,
            2.8,
            2.8,
            3.9,
            2.1,
            4.2,
            3.6,
            3.2,
            1.4,
            3.0,
        ],
        [4.29, 4.85, 11.7, 6.4, 7.0, 5.6, 6.0, *[4.9, 4.2, 4.5, 4.0] * 4, *[4.3, 3.9, 4.7, 4.2] * 4],
        [3.3, 8.0, 19.9, *[6.0 + (i % 5) for i in range(40)]],
        [4.0] * 20 + [9.0] * 12,
        [0.1, 0.2, *[0.5] * 10],
    ],
)
def test_a_loss_that_ends_above_its_start_is_reported(losses):
    assert curve_of(losses).diverged


def reports_on(losses):
    kept = Kept()
    recorder = Recorder(kept)
    for step, loss in enumerate(losses):
        norms = torch.ones(1)
        recorder.add(StepRecord(step, 0.1, torch.tensor(loss), ("weight",), norms, norms))
        if recorder.pending == 16:
            recorder.check_steps(step)
    recorder.close()
    return [(r["trigger"]["kind"], r["trigger"]["words"]) for r in kept.reports]


def test_an_early_rise_that_is_over_is_a_note_with_its_height():
    rising = [3.3, 12.0, 19.9, 18.0, 16.0, 12.0]
    falling = [12.0 - 0.1 * i for i in range(80)]
    assert reports_on([*rising, *falling, *[2.5] * 20]) == [
        ("recovered", "the loss rose from 3.3 to 19.9 and ended at 2.5")
    ]
    assert reports_on([3.3 - 0.01 * i for i in range(100)]) == []


def test_a_loss_that_falls_fast_at_once_has_not_risen():
    fast = [8.3, 5.75, 5.5, 5.31, 5.02, *[4.8 - 0.01 * i for i in range(40)]]
    assert reports_on(fast) == []
    assert reports_on([8.3, 5.75, 5.5, 5.31, *[5.4, 5.3] * 20]) == []


def test_too_few_losses_are_not_judged():
    assert not curve_of([1.0, 9.0, 9.0]).diverged


def test_the_loss_of_a_step_is_what_the_loop_gives_else_what_the_model_puts_out():
    at = torch.ones(1, requires_grad=True)
    losses = Losses()
    assert losses.of_step() is None
    for output in ((torch.ones(2, 3), 2.0 * at.sum()), {"loss": 4.0 * at.sum()}, 6.0 * at.sum()):
        losses.see(output, {})
    for output in ((at.sum(), at.sum()), torch.ones(2, 3), (torch.ones(2), None), torch.tensor(9.0)):
        losses.see(output, {})  # two numbers, none, and one that nothing is trained by
    assert losses.of_step() == pytest.approx(4.0)
    losses.give(1.5)
    assert losses.of_step() == pytest.approx(1.5)
    losses.clear()
    for _ in range(2):
        losses.see({"loss": 2.0 * at.sum()}, {"num_items_in_batch": 8})
    assert losses.of_step() == pytest.approx(4.0)


def test_a_loss_falls_where_most_at_the_end_are_below_those_at_the_start():
    draw = random.Random(0)
    assert curve_of([3 - 0.01 * i + draw.gauss(0, 0.1) for i in range(60)]).fell
    assert not curve_of([3.0] * 60).fell
    assert not curve_of([3.0 + 0.001 * i for i in range(60)]).fell
    assert curve_of([3.0] * 9).fell, "too few to say"
