"""Schedules against values worked out by hand, the papers' formulas and slow loops."""

from __future__ import annotations

import math

import pytest
import torch

from cases import each
from normlab.lab.config import OptimConfig
from normlab.optim import SCHEDULES, ScheduleState, ValDecay, schedule_factor


def factors(name, steps, total_steps=10, decays=0, **optim):
    state = ScheduleState(OptimConfig(schedule=name, **optim), total_steps, decays)
    return {n: schedule_factor(n, state) for n in steps}


CORNERS = [
    ("constant", 0, {}, {1: 1.0, 10: 1.0}),
    ("constant", 4, {}, {1: 0.25, 3: 0.75, 4: 1.0, 5: 1.0, 10: 1.0}),
    ("inverse_sqrt", 0, {}, {1: 1.0, 4: 0.5, 100: 0.1}),
    ("inverse_sqrt", 1, {}, {1: 1.0, 4: 0.5, 100: 0.1}),
    ("inverse_sqrt", 4, {}, {1: 0.25, 4: 1.0, 16: 0.5, 64: 0.25}),
    ("linear", 0, {}, {1: 0.9, 5: 0.5, 10: 0.0, 11: 0.0}),
    ("linear", 4, {}, {2: 0.5, 4: 1.0, 7: 0.5, 10: 0.0, 12: 0.0}),
    ("linear", 10, {}, {5: 0.5, 10: 1.0, 11: 0.0}),
    ("cosine", 0, {}, {5: 0.5, 10: 0.0, 11: 0.0}),
    ("cosine", 4, {}, {2: 0.5, 4: 1.0, 6: 0.75, 7: 0.5, 8: 0.25, 10: 0.0, 12: 0.0}),
    ("cosine", 10, {}, {5: 0.5, 10: 1.0, 11: 0.0}),
    ("linear", 0, {"final_lr_factor": 0.2}, {5: 0.6, 10: 0.2, 11: 0.2}),
    ("cosine", 4, {"final_lr_factor": 0.1}, {2: 0.5, 4: 1.0, 7: 0.55, 10: 0.1, 12: 0.1}),
    ("wsd", 0, {"decay_share": 0.45}, {1: 1.0, 6: 1.0, 7: 0.75, 9: 0.25, 10: 0.0, 11: 0.0}),
    ("wsd", 2, {"decay_share": 0.4, "final_lr_factor": 0.2}, {1: 0.5, 6: 1.0, 8: 0.6, 10: 0.2}),
    ("wsd", 8, {"decay_share": 0.5}, {4: 0.5, 8: 1.0, 9: 0.5, 10: 0.0}),
    ("wsd", 0, {"decay_share": 0.0}, {1: 1.0, 10: 1.0}),
    ("wsd_sqrt", 0, {"decay_share": 0.4}, {6: 1.0, 7: 0.5, 10: 0.0}),
    ("wsd_sqrt", 2, {"decay_share": 0.4, "final_lr_factor": 0.5}, {1: 0.5, 6: 1.0, 7: 0.75, 10: 0.5}),
    ("step_decay", 0, {"decay_step": 6}, {1: 1.0, 5: 1.0, 6: 0.1, 100: 0.1}),
    ("step_decay", 4, {"decay_step": 6, "decay_factor": 0.5}, {2: 0.5, 5: 1.0, 6: 0.5, 100: 0.5}),
    ("step_decay_inverse_sqrt", 0, {"decay_step": 4}, {1: 1.0, 3: 1.0, 4: 0.1, 16: 0.05, 64: 0.025}),
    (
        "step_decay_inverse_sqrt",
        2,
        {"decay_step": 4, "decay_factor": 1.0},
        {1: 0.5, 2: 1.0, 3: 1.0, 4: 1.0, 16: 0.5, 400: 0.1},
    ),
    ("val_decay", 0, {"decays": 0}, {1: 1.0, 100: 1.0}),
    ("val_decay", 0, {"decays": 3}, {1: 0.512, 100: 0.512}),
    ("val_decay", 4, {"decays": 2, "decay_factor": 0.5}, {2: 0.5, 4: 1.0, 5: 0.25}),
]


@each("name", [name for name in SCHEDULES if name != "val_decay"])
def test_validation_lowers_no_other_rate(name):
    steps = range(1, 11)
    assert factors(name, steps, decays=3, decay_step=6) == factors(name, steps, decay_step=6)


@each(("name", "warmup", "more", "expected"), CORNERS)
def test_corner_steps(name, warmup, more, expected):
    assert factors(name, expected, warmup_steps=warmup, **more) == pytest.approx(expected, abs=1e-15)


def test_every_schedule_has_corner_steps():
    assert {name for name, *_ in CORNERS} == set(SCHEDULES)


@each("name", SCHEDULES)
@each("warmup", [0, 1, 50])
def test_every_schedule_peaks_at_one_where_the_warmup_ends_and_never_rises_again(name, warmup):
    found = list(factors(name, range(1, 201), 200, warmup_steps=warmup, decay_step=120).values())
    assert 0.99 < max(found) <= 1.0
    assert found.index(max(found)) == max(0, warmup - 1)
    after = found[warmup:]
    assert after == sorted(after, reverse=True)
    assert min(found) >= 0.0


# --------------------------------------------------------------------------------------------- formulas


@pytest.mark.parametrize("multiplier", [1, 2, 3])
def test_inverse_sqrt_is_the_formula_of_nguyen_and_salazar(multiplier):
    """Their Equation 7: the docstring's ``lr`` makes it ours, and twice the rate is twice ``lr``."""
    width, k = 512, 8000
    lr = multiplier / math.sqrt(width * k)
    steps = [1, 2, 4000, 7999, 8000, 8001, 20000, 100000]
    theirs = {n: multiplier / math.sqrt(width) * min(1 / math.sqrt(n), n / k**1.5) for n in steps}
    ours = {n: lr * f for n, f in factors("inverse_sqrt", steps, warmup_steps=k).items()}
    assert ours == pytest.approx(theirs, rel=1e-12)
    assert lr == pytest.approx(multiplier * 4.94e-4, rel=1e-3)


def test_cosine_is_that_of_torch():
    p = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([p], lr=1.0)
    theirs = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=30)
    wanted = {}
    for n in range(1, 31):
        optimizer.step()
        theirs.step()
        wanted[n + 5] = theirs.get_last_lr()[0]
    found = factors("cosine", wanted, 35, warmup_steps=5)
    assert found == pytest.approx(wanted, abs=1e-12)


@each(("name", "fall"), [("wsd", lambda u: 1 - u), ("wsd_sqrt", lambda u: 1 - math.sqrt(u))])
@each(("share", "final"), [(0.1, 0.0), (0.65, 0.05)])
def test_warmup_stable_decay_is_the_formula_of_hagele_et_al(name, fall, share, final):
    """As in their code, which decays over the last ``int(share * total)`` steps."""
    total, warm = 237, 20
    last = int(share * total)
    theirs = {}
    for t in range(1, total + 1):
        if t <= warm:
            theirs[t] = t / warm
        elif t <= total - last:
            theirs[t] = 1.0
        else:
            theirs[t] = final + (1 - final) * fall((t - (total - last)) / last)
    found = factors(name, theirs, total, warmup_steps=warm, decay_share=share, final_lr_factor=final)
    assert found == pytest.approx(theirs, abs=1e-15)


@pytest.mark.parametrize(("decay_factor", "used"), [(0.0, 0.1), (0.3, 0.3)])
def test_a_step_decay_is_a_loop_that_multiplies_once(decay_factor, used):
    plain, rooted = {}, {}
    rate = 1.0
    for n in range(1, 101):
        if n == 40:
            rate *= used
        plain[n] = rate
        rooted[n] = rate if n < 40 else rate * math.sqrt(40) / math.sqrt(n)
    options = {"decay_step": 40, "decay_factor": decay_factor}
    assert factors("step_decay", plain, **options) == pytest.approx(plain, rel=1e-12)
    assert factors("step_decay_inverse_sqrt", rooted, **options) == pytest.approx(rooted, rel=1e-12)


# ------------------------------------------------------------------------------- decay by validation


def rates_of_ours(scores, optim):
    """The factor after each validation, with one validation a step."""
    best, state, rates = -math.inf, ValDecay(), []
    for step, score in enumerate(scores, start=1):
        state = state.after(step, optim, improved=score > best)
        best = max(best, score)
        rates.append(schedule_factor(step + 1, ScheduleState(optim, 1000, state.decays)))
    return rates


def test_three_validations_without_a_new_best_lower_the_rate():
    scores = [10, 12, 12, 11, 11, 12, 12, 12, 13, 12, 12, 14, 1, 1, 1]
    optim = OptimConfig(schedule="val_decay")
    expected = [1, 1, 1, 1, 0.8, 0.8, 0.8, 0.64, 0.64, 0.64, 0.64, 0.64, 0.64, 0.64, 0.512]
    assert rates_of_ours(scores, optim) == pytest.approx(expected)


@each("seed", range(5))
@each("patience", [1, 2, 3, 7])
def test_val_decay_is_that_of_torch(seed, patience):
    """Its patience is the last count that is still forgiven; its threshold is off."""
    random = torch.Generator().manual_seed(seed)
    scores = torch.randint(0, 30 + seed, (60,), generator=random).tolist()
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    theirs = torch.optim.lr_scheduler.ReduceLROnPlateau(
        optimizer, "max", factor=0.5, patience=patience - 1, threshold=0.0, eps=0.0
    )
    wanted = []
    for score in scores:
        theirs.step(score)
        wanted.append(optimizer.param_groups[0]["lr"])
    assert wanted[-1] < 0.1, "there is something to compare"
    optim = OptimConfig(schedule="val_decay", decay_factor=0.5, decay_patience=patience)
    assert rates_of_ours(scores, optim) == pytest.approx(wanted, rel=1e-12)


def test_validations_of_the_warm_up_do_not_count():
    optim = OptimConfig(schedule="val_decay", warmup_steps=6, decay_patience=2)
    found = rates_of_ours([5] * 11, optim)
    warming = [n / 6 for n in range(2, 7)]
    assert found == pytest.approx([*warming, 1, 1, 0.8, 0.8, 0.64, 0.64])


# ------------------------------------------------------------------------------------------- what is refused


@each("name", ["step_decay", "step_decay_inverse_sqrt"])
@each(("decay_step", "warmup", "peak"), [(0, 0, 1), (1, 0, 1), (400, 400, 400)])
def test_a_decay_before_the_peak_is_refused_with_the_way_out(name, decay_step, warmup, peak):
    with pytest.raises(
        ValueError,
        match=rf"'{name}' .*decay_step = {decay_step}, .* step {peak}"
        r".*--decay-step 8000, .*OptimConfig\(decay_step=8000\)$",
    ):
        factors(name, [warmup + 1], decay_step=decay_step, warmup_steps=warmup)


@each(
    ("field", "value", "said"),
    [
        ("decay_factor", 1.5, "decay_factor must be at most 1, got 1.5"),
        ("decay_factor", -0.1, "decay_factor must be at least 0, got -0.1"),
        ("decay_factor", "0.1", "decay_factor must be a number, got '0.1'"),
        ("decay_patience", 0, "decay_patience must be at least 1, got 0"),
        ("decay_patience", 1.5, "decay_patience must be a whole number, got 1.5"),
        ("decay_step", -1, "decay_step must be at least 0, got -1"),
        ("momentum", 1.0, "momentum must be below 1, got 1.0"),
    ],
)
def test_a_field_says_what_it_may_hold(field, value, said):
    with pytest.raises(ValueError, match=f"^{said}"):
        OptimConfig(**{field: value})
