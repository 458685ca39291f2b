"""One answer from the trials: carries, shifts or cannot say, with what limits it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from normlab.base.units import short_rate
from normlab.scaling.optimum import Losses
from normlab.scaling.result import Transfer
from normlab.scaling.sweep import Decay, Sweep
from normlab.scaling.wording import apart
from normlab.trials.scale import Scale
from normlab.trials.verdict import Trial
from scaling.curves import draw, skewed

SIZES = (64, 128, 256, 512)


def swept(curves: Mapping[int, Losses], decay: Decay | None = None, level: float = 3.0) -> Sweep:
    """Trials with these losses, above a level."""
    trials = {
        size: {(x, seed): Trial(2.0**x, 16, (level + y,) * 8) for (x, seed), y in losses.items()}
        for size, losses in curves.items()
    }
    return Sweep(decay or Decay(), trials, {size: Scale(start=5.0, unigram=4.5) for size in SIZES})


def answer(*sweeps: Sweep, **parts: Any) -> Transfer:
    given = {
        "title": "train.py:setup",
        "axis": "width",
        "sizes": SIZES,
        "target": 1024,
        "steps": 16,
        "seeds": 2,
        "rates": dict.fromkeys(SIZES, 1e-3),
        "step_s": dict.fromkeys(SIZES, 0.1),
        "parameters": {size: size**2 for size in SIZES},
        "sweeps": sweeps,
        **parts,
    }
    return Transfer(**given)


def of(optima: Sequence[float], noise: float = 0.002, **parts: Any) -> Transfer:
    rng = np.random.default_rng(1)
    return answer(swept(draw(optima, skewed(0.5), noise, rng=rng)), **parts)


def test_a_rate_that_stays_carries():
    transfer = of([0.1, 0.12, 0.1, 0.11])
    assert transfer.verdict == "carries"
    assert transfer.first.known == list(SIZES)
    assert transfer.first.shift is not None
    assert 1 / 1.4 < transfer.first.shift.low < 1 < transfer.first.shift.high < 1.4


def test_a_rate_that_moves_shifts_and_names_the_rate_to_take():
    transfer = of([0.0, -1.0, -2.0, -3.0])
    assert transfer.verdict == "shifts"
    assert transfer.first.slope is not None
    assert transfer.first.slope.value == pytest.approx(0.5, abs=0.005)
    best = transfer.to_dict()["decays"][0]["at_target"]
    assert best["low"] < 1e-3 / 16 < best["high"]
    assert short_rate(best["value"]) in transfer.sentence


def test_a_small_shift_that_is_certain_carries():
    """*Carries* is asked first: the shift of 1.2x over all widths is real, and does not matter."""
    found = of([0.0, -0.09, -0.18, -0.27], noise=0.0003)
    assert found.first.shift is not None
    assert found.first.shift.high < 1
    assert found.verdict == "carries"


def edge(curves: Mapping[int, Losses], size: int = 512) -> dict[int, Losses]:
    """The same, with losses at a size that rise from the lowest rate on."""
    rising = {(float(x), seed): 0.2 * x + 0.001 * seed * (x % 2) for x in range(-2, 3) for seed in range(2)}
    return {**curves, size: rising}


def test_a_rate_carries_only_where_the_ends_of_what_was_asked_for_are_known():
    curves = draw([0.1, 0.12, 0.1, 0.11], skewed(0.5), 0.002, rng=np.random.default_rng(1))
    found = answer(swept(edge(curves)))
    assert found.verdict == "cannot say"
    assert found.first.steady
    assert found.first.known == [64, 128, 256]
    unknown = found.first.optimum(512)
    assert (unknown.lack, unknown.rates) == ("rates", (-4.0, -3.0))
    assert found.to_dict()["decays"][0]["at_target"] is None
    assert found.remedy is not None
    assert (found.remedy.what, found.remedy.value) == ("rates", [2.0**-4, 2.0**-3])
    between = answer(swept(edge(curves, size=128)))
    assert between.first.contradicted == [128]
    assert between.verdict == "cannot say"


def test_a_shift_must_be_compatible_with_what_is_known_at_one_end():
    """The line falls to 2^-3 at the largest width, where the loss still falls at rates above 2^3."""
    curves = draw([0.0, -1.0, -2.0, -3.0], skewed(0.5), 0.002, rng=np.random.default_rng(1))
    falling = {(float(x), seed): -0.2 * x + 0.001 * seed * (x % 2) for x in range(-1, 4) for seed in range(2)}
    found = answer(swept({**curves, 512: falling}))
    assert found.verdict == "cannot say"
    assert found.first.contradicted == [512]
    unknown = found.first.optimum(512)
    assert unknown.low is not None
    assert unknown.high is None
    below = answer(swept({**curves, 512: {(x - 2, seed): -y for (x, seed), y in falling.items()}}))
    assert below.verdict == "shifts"
    assert (below.first.known, below.first.contradicted) == ([64, 128, 256], [])


def test_noise_cannot_say_and_names_the_seeds_and_their_cost():
    found = of([0.1, 0.0, 0.1, 0.2], noise=0.02)
    assert found.verdict == "cannot say"
    assert found.remedy is not None
    what, seeds, seconds, sentence = found.remedy
    assert what == "seeds"
    assert seeds > 2
    assert seconds == pytest.approx((seeds - 2) * 4 * 5 * 16 * 0.1)
    assert str(seeds) in sentence
    assert f"{sentence}." in str(found).splitlines()


@pytest.mark.parametrize("noise", [0.002, 0.005])
def test_where_best_rates_scatter_sizes_are_advised_and_no_seeds(noise: float):
    found = of([0.3, -0.3, 0.3, -0.3], noise=noise)
    assert found.verdict == "cannot say"
    assert found.remedy is not None
    assert (found.remedy.what, found.remedy.value) == ("sizes", 8)
    assert found.remedy.seconds == pytest.approx(2 * 4 * 5 * 16 * 0.1)


def test_where_nothing_is_learnt_or_known_there_is_no_answer_but_what_would_tell_more():
    curves = draw([0.0] * 4, skewed(0.5), 0.002, rng=np.random.default_rng(1))
    too_short = answer(swept(curves, level=4.7))
    assert too_short.verdict == "cannot say"
    assert too_short.first.known == []
    assert {too_short.first.optimum(size).lack for size in SIZES} == {"steps"}
    assert too_short.remedy is not None
    assert too_short.remedy[:3] == ("steps", 64, pytest.approx(4 * 4 * 5 * 2 * 16 * 0.1))
    some = {size: losses for size, losses in curves.items() if size == 64}
    some[512] = {(x, seed): -0.1 * x + 0.001 * (x % 2) * seed for x in range(5) for seed in range(2)}
    found = answer(swept(some), seconds=10.0)
    assert found.verdict == "cannot say"
    assert found.first.known == [64]
    assert [found.first.optimum(size).lack for size in SIZES] == ["", "trials", "trials", "rates"]
    assert found.remedy is not None
    assert found.remedy[:3] == ("budget", pytest.approx(10 + 2 * 16.0), pytest.approx(2 * 16.0))
    flat = answer(swept({size: {key: 0.001 * key[1] for key in own} for size, own in curves.items()}))
    assert flat.remedy is not None
    assert flat.remedy[:3] == ("seeds", 4, pytest.approx(2 * 4 * 5 * 16 * 0.1))


def test_two_sizes_are_enough_where_no_more_were_asked_for():
    rng = np.random.default_rng(1)
    curves = draw([0.0, -1.0], skewed(0.5), 0.002, rng=rng)
    found = answer(swept(curves))
    assert (found.verdict, found.first.known) == ("cannot say", [64, 128])
    two = replace(found.first, scales={size: Scale(start=5.0, unigram=4.5) for size in (64, 128)})
    both = answer(two, sizes=(64, 128), rates=dict.fromkeys((64, 128), 1e-3))
    assert both.verdict == "shifts"
    assert "two widths" in str(both)


def fault(quantity: str = "update", slope: float = 0.5, role: str = "head") -> dict[str, Any]:
    return {"quantity": quantity, "role": role, "slope": slope, "expected": 0.0, "right": False}


@pytest.mark.parametrize(
    ("optima", "wrong", "explained"),
    [
        ([0.0, -1.0, -2.0, -3.0], fault(), True),
        ([0.0, 1.0, 2.0, 3.0], fault(), False),
        ([0.0, 1.0, 2.0, 3.0], fault(slope=-0.5), True),
        ([0.0, 1.0, 2.0, 3.0], fault("eps"), True),
        ([0.0, -1.0, -2.0, -3.0], fault("decay"), False),
        ([0.1, 0.12, 0.1, 0.11], fault(), False),
    ],
)
def test_the_coordinate_check_says_why_only_where_its_fault_moves_the_rate_that_way(
    optima: list[float], wrong: dict[str, Any], *, explained: bool
):
    check = {"sentence": "the update of head is off", "fault": wrong, "rows": [wrong]}
    transfer = of(optima, coordinates=check)
    assert transfer.explained is explained
    assert transfer.reason == check["sentence"]
    (line,) = (line for line in transfer.lines() if check["sentence"] in line)
    assert ("why" in line) is explained


def test_other_facts_that_are_wrong_are_counted_and_measurements_are_not():
    wrong = fault("rate", -1.0)
    rows = [wrong, fault("rate", role="hidden"), fault("eps"), fault("eps"), fault("update"), fault("logits")]
    check = {"sentence": "the rate of head falls", "fault": wrong, "rows": rows}
    assert apart(check) == 2
    assert f"{check['sentence']}, and 2" in str(of([0.0, 1.0, 2.0, 3.0], coordinates=check))
    assert "coordinate" not in str(of([0.0, 1.0, 2.0, 3.0], coordinates={**check, "fault": None}))


def test_weight_decays_are_answered_apart_and_their_optima_compared():
    rng = np.random.default_rng(1)
    still = swept(draw([0.0] * 4, skewed(0.5), 0.002, rng=rng))
    moved = swept(draw([0.0, -0.5, -1.0, -1.5], skewed(0.5), 0.002, rng=rng), Decay(4.0, independent=True))
    found = answer(still, moved)
    assert (found.verdict, moved.verdict) == ("carries", "shifts")
    (line,) = [text for text in found.lines() if text.startswith("With 4x")]
    assert "independent" in line
    assert "x at 512" in line
    assert "x at 64" not in line
    assert [one["verdict"] for one in found.to_dict()["decays"]] == ["carries", "shifts"]


def test_a_setup_that_scales_its_own_rate_is_told_a_factor_and_gets_the_rates_of_its_trials():
    rates = {size: 1e-3 * 64 / size for size in SIZES}
    found = of([0.0, -1.0, -2.0, -3.0], rates=rates)
    assert found.scales_itself
    (sweep,) = found.to_dict()["decays"]
    for i, (size, own, line) in enumerate(zip(SIZES, sweep["sizes"], sweep["line"], strict=False)):
        assert own["multiple"]["value"] == pytest.approx(2.0**-i, rel=0.05)
        for one in (own["optimum"], line):
            assert one["value"] == pytest.approx(rates[size] * 2.0**-i, rel=0.05)
        assert own["rates"][0]["rate"] == rates[size] * own["rates"][0]["multiple"]
    assert sweep["at_target"]["multiple"]["value"] == pytest.approx(2.0**-4, rel=0.1)
    assert sweep["at_target"]["value"] is None
    known = of([0.0, -1.0, -2.0, -3.0], rates=rates, target=512).to_dict()["decays"][0]["at_target"]
    assert known["value"] == pytest.approx(rates[512] / 8, rel=0.05)


def test_a_result_is_short_plain_and_shown_in_a_notebook():
    found = of([0.1, 0.12, 0.1, 0.11])
    assert repr(found) == f"Transfer(train.py:setup: {found.sentence})"
    assert found.sentence in found._repr_html_()
    plain = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    (sweep,) = plain["decays"]
    assert [len(one["rates"]) for one in sweep["sizes"]] == [5] * 4
    assert [one["size"] for one in sweep["line"]] == [*SIZES, 1024]
    assert all(one["low"] < one["value"] < one["high"] for one in sweep["line"])


@pytest.mark.parametrize(
    ("word", "octave", "factor"),
    [("1", 3, 1.0), (4.0, -2, 4.0), ("0", 1, 0.0), ("independent", 2, 0.25), ("independent:4", 1, 2.0)],
)
def test_decays_are_factors_that_go_with_the_rate_or_not(word: str, octave: float, factor: float):
    assert Decay.of(word).at(octave) == factor
