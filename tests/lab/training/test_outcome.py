import math
import random
import re
import statistics

import pytest

from cases import each
from normlab.lab.training.outcome import outcome

ENTROPY = 6.0
START = 8.8


def curve(nll, *, total=2000, every=10, noise=0.05, seed=0, upto=None):
    """Training rows of a run whose NLL at progress x in [0, 1] is about ``nll(x)``."""
    draw = random.Random(seed)
    steps = [1, *range(every, (upto or total) + 1, every)]
    return [
        {
            "kind": "train",
            "step": step,
            "loss": (value := nll(step / total) + draw.gauss(0, noise)) + 0.8,
            "nll": value,
            "grad_norm_l2": 1.0,
        }
        for step in steps
    ]


def decay(to, pace=30.0):
    return lambda x: to + (START - to) * math.exp(-pace * x)


def takes_off_at(x0, slope=0.05):
    """At the unigram entropy until ``x0``, creeping down by ``slope`` a tenth of the run, then learning."""
    early = decay(ENTROPY)
    return lambda x: (
        min(early(x) - slope * 10 * x, 6.0 - 12 * (x - x0)) if x > x0 else early(x) - slope * 10 * x
    )


def dev(step, nll, **more):
    return {"kind": "dev", "step": step, "nll": nll, "bleu": 0.0, **more}


def verdict(rows, *, total=2000, final=True, best=None, has_source=False):
    return outcome(
        rows,
        unigram_entropy_nats=ENTROPY,
        total_steps=total,
        best_step=best,
        has_source=has_source,
        final=final,
    )


def ended(rows, *, total=2000, **more):
    """The verdict on a run that is validated once, at its end, and is as good on dev as in training."""
    nll = statistics.median(row["nll"] for row in rows[-len(rows) // 10 :])
    return verdict([*rows, dev(total, nll, **more)], total=total, best=total, has_source=bool(more))


def judged(rows, *, total=2000):
    """The first verdict while the run goes on, or else the one at its end, with the step of the judgement."""
    for end in range(1, len(rows) + 1):
        if reached := verdict(rows[:end], total=total, final=False):
            return reached, rows[end - 1]["step"]
    return ended(rows, total=total), total


SEEDS = range(2)


# ---------------------------------------------------------------------------------------------- trained


@each("seed", SEEDS)
@each("noise", [0.02, 0.3])
@each("to", [1.0, 3.0, 5.0])
def test_a_run_that_learns_is_trained_at_its_end(to, noise, seed):
    reached, step = judged(curve(decay(to), noise=noise, seed=seed))
    assert (reached.state, reached.step, step) == ("trained", 2000, 2000)
    assert re.search(r"from [89]\.\d\d at the start", reached.evidence)


@each("seed", SEEDS)
@each(("total", "every"), [(300, 10), (2000, 10), (2000, 100)])
@each("x0", [0.4, 0.5, 0.6, 0.7])
def test_a_slow_starter_that_creeps_down_is_not_stopped(x0, total, every, seed):
    rows = curve(takes_off_at(x0), total=total, every=every, noise=0.01, seed=seed)
    reached, step = judged(rows, total=total)
    assert (reached.state, step) == ("trained", total)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_slow_starter_among_noisy_batches_is_not_stopped(seed):
    reached, _ = judged(curve(takes_off_at(0.55, slope=0.1), noise=0.1, seed=seed))
    assert reached.state == "trained"


def test_a_flat_start_is_given_half_the_steps():
    flat_until = 0.45
    rows = curve(lambda x: decay(ENTROPY)(x) if x < flat_until else 6.0 - 14 * (x - flat_until))
    assert judged(rows)[0].state == "trained"


def test_a_spike_is_no_divergence():
    rows = curve(decay(2.0))
    for row in rows[120:130]:
        row["nll"] = row["loss"] = 40.0
    assert judged(rows)[0].state == "trained"


def test_a_spike_in_the_last_window_does_not_hide_what_was_learned():
    rows = curve(decay(2.0))
    rows[-1]["nll"] = 40.0
    assert judged(rows)[0].state == "trained"


def test_a_rise_at_the_start_that_falls_again_is_let_be():
    rows = curve(lambda x: 2.0 + 18 * math.exp(-6 * x) * min(1.0, 20 * x) + 6.8 * math.exp(-60 * x))
    assert max(r["nll"] for r in rows) > START + 4
    assert judged(rows)[0].state == "trained"


# ------------------------------------------------------------------------------------------------ stuck


@each("seed", SEEDS)
@each(("total", "every", "noise"), [(300, 10, 0.03), (2000, 10, 0.03), (2000, 10, 0.15)])
@each("level", [0.96, 1.0, 1.05])
def test_a_flat_run_is_stuck_and_stopped_early(level, total, every, noise, seed):
    rows = curve(decay(level * ENTROPY), total=total, every=every, noise=noise, seed=seed)
    reached, step = judged(rows, total=total)
    assert reached.state == "stuck"
    assert total / 2 <= step <= 0.9 * total
    assert reached.step == step
    assert "6.00" in reached.evidence


def test_nothing_is_stuck_before_half_of_the_steps():
    rows = curve(decay(ENTROPY), upto=990)
    assert judged(rows)[1] == 2000, "no verdict while it went on"


def test_a_run_that_ends_while_it_falls_is_trained_and_says_so():
    reached, step = judged(curve(lambda x: START - 1.5 * x, total=400), total=400)
    assert (reached.state, step) == ("trained", 400)
    assert reached.evidence.endswith("; its training loss still fell")


def test_a_run_that_falls_only_because_its_rate_does_is_stuck_at_its_end():
    """It would have been stopped half way."""
    rows = curve(lambda x: ENTROPY + 0.5 - max(0.0, x - 0.7))
    assert judged(rows)[0].state == "stuck"
    assert ended(rows).state == "stuck"
    assert ended(rows).evidence.endswith("; its training loss still fell")


def test_a_run_that_falls_back_to_the_entropy_is_judged_by_the_weights_that_it_keeps():
    rows = curve(lambda x: decay(3.0)(x) if x < 0.5 else 6.0)
    assert ended(rows).state == "stuck"
    reached = verdict([*rows, dev(800, 3.1), dev(2000, 6.0)], best=800)
    assert reached.state == "trained"
    assert re.search(r"dev NLL 3\.10 .* (5\.9|6\.0)\d at the end of training$", reached.evidence)


def test_no_run_that_is_good_on_dev_is_stopped():
    """Heavy dropout keeps the loss of training at the entropy."""
    rows = curve(decay(ENTROPY))
    assert judged([*rows[:30], dev(290, 3.0), *rows[30:]])[1] == 2000


# ----------------------------------------------------------------------------------- ignores its source


@each(
    ("more", "state", "words"),
    [
        ({"nll_exchanged": 4.3, "repeated_share": 0.1}, "trained", "+1.30 with sources exchanged"),
        ({"nll_exchanged": 3.06, "repeated_share": 0.1}, "trained", "+0.06 with sources exchanged"),
        (
            {"nll_exchanged": 3.04, "repeated_share": 0.1},
            "ignores its source",
            "+0.04 with sources exchanged",
        ),
        ({"nll_exchanged": 2.9, "repeated_share": 0.1}, "ignores its source", "-0.10 with sources exchanged"),
        ({"nll_exchanged": 3.2, "repeated_share": 0.969}, "ignores its source", "96% of the outputs"),
        ({"nll_exchanged": 3.2, "repeated_share": 0.5}, "trained", "+0.20 with"),
        ({"repeated_share": 0.0}, "trained", "; source not exchanged"),
        ({"repeated_share": 0.6}, "ignores its source", "; source not exchanged; 60% of the outputs"),
    ],
)
def test_a_model_whose_outputs_do_not_depend_on_its_source(more, state, words):
    rows = curve(decay(3.0))
    reached = verdict([*rows, dev(2000, 3.0, **more)], best=2000, has_source=True)
    assert reached.state == state
    assert words in reached.evidence


def test_only_a_task_with_a_source_speaks_of_it():
    assert "source" not in ended(curve(decay(3.0))).evidence


def test_a_stuck_run_is_called_stuck_although_it_ignores_its_source_too():
    assert ended(curve(decay(ENTROPY)), nll_exchanged=ENTROPY).state == "stuck"


def test_a_run_that_ends_in_its_warmup_says_so():
    warming = [{**row, "lr": 1e-6 * row["step"]} for row in curve(decay(ENTROPY))]
    steady = [{**row, "lr": 1e-3} for row in curve(decay(ENTROPY))]
    assert ended(warming).evidence.endswith("; its learning rate still rose")
    assert "still rose" not in ended(steady).evidence


def test_a_falling_loss_does_not_excuse_that_the_source_is_ignored():
    reached = ended(curve(lambda x: 5.0 - x), nll_exchanged=4.05)
    assert reached.state == "ignores its source"
    assert reached.evidence.endswith("; its training loss still fell")


def test_no_run_ignores_its_source_before_its_end():
    rows = [*curve(decay(3.0)), dev(2000, 3.0, nll_exchanged=3.0, repeated_share=1.0)]
    assert verdict(rows, final=False, best=2000, has_source=True) is None


def test_the_best_weights_decide_whether_the_source_is_read():
    rows = curve(decay(3.0))
    validations = [dev(1000, 3.0, nll_exchanged=4.0), dev(2000, 3.1, nll_exchanged=3.1)]
    assert verdict([*rows, *validations], best=1000, has_source=True).state == "trained"
    assert verdict([*rows, *validations], best=2000, has_source=True).state == "ignores its source"


# --------------------------------------------------------------------------------------------- diverged


@each("value", [math.nan, math.inf])
@each("name", ["loss", "nll", "grad_norm_l2"])
def test_what_is_not_finite_diverged_at_once(name, value):
    rows = curve(decay(2.0))
    rows[5][name] = value
    reached, step = judged(rows)
    assert (reached.state, reached.step, step) == ("diverged", 50, 50)
    assert re.search(rf"\b{value} .*\b50\b", reached.evidence)


def test_a_dev_loss_that_is_not_finite_counts_too():
    reached = verdict([*curve(decay(2.0)), dev(100, math.nan)], best=100)
    assert (reached.state, reached.evidence) == ("diverged", "dev NLL is nan at step 100")


def test_a_run_that_ends_above_its_start_diverged_whatever_its_best_weights_are():
    rows = curve(lambda x: decay(4.0)(x) if x < 0.3 else 11.0)
    assert verdict([*rows, dev(400, 4.0), dev(2000, 11.0)], best=400).state == "diverged"


def test_a_dev_loss_above_the_start_is_diverged():
    assert verdict([*curve(decay(2.0)), dev(2000, START + 1)], best=2000).state == "diverged"


@each("seed", SEEDS)
@each("noise", [0.02, 0.3])
def test_a_run_that_stays_above_its_start_diverged_and_is_stopped(noise, seed):
    rows = curve(lambda x: decay(4.0)(x) if x < 0.3 else 11.0, noise=noise, seed=seed)
    reached, step = judged(rows)
    assert reached.state == "diverged"
    assert 780 <= step <= 1200, "after a whole window, and not much later"
    assert re.search(r"above the [89]\.\d\d it began with", reached.evidence)


# ------------------------------------------------------------------------------------------ little to see


def test_no_row_no_verdict():
    for rows in ([], [dev(5, 1.0)], curve(decay(2.0))):
        assert verdict(rows, best=5) is None


@each(("nll", "state"), [(1.0, "trained"), (5.9, "stuck")])
@each("count", [1, 2, 3])
def test_a_few_rows_are_enough_at_the_end(nll, state, count):
    rows = [
        {"kind": "train", "step": i + 1, "loss": nll, "nll": nll, "grad_norm_l2": 1.0} for i in range(count)
    ]
    rows.append(dev(count, nll))
    assert verdict(rows, total=count, best=count).state == state
    assert verdict(rows, total=count, best=count, final=False) is None


def test_the_same_curve_in_more_steps_has_the_same_outcome():
    states = {
        judged(curve(decay(ENTROPY), total=n, every=n // 200), total=n)[0].state for n in (200, 2000, 20000)
    }
    assert states == {"stuck"}
