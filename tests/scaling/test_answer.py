"""One answer from the trials: carries, shifts or cannot say, with what limits it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from normlab.scaling.answer import Sweep, Transfer
from normlab.scaling.decay import Decay
from normlab.scaling.optimum import Losses
from normlab.trials.scale import Scale
from normlab.trials.trials import Trial
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
    found = of([0.1, 0.12, 0.1, 0.11])
    assert found.verdict == "carries"
    assert "from width 64 to 512" in found.sentence
    assert "within 1.4x" in found.sentence


def test_a_rate_that_moves_shifts_and_names_the_rate_to_take():
    found = of([0.0, -1.0, -2.0, -3.0])
    assert found.verdict == "shifts"
    assert "falls 2.0" in found.sentence
    best = found.to_dict()["decays"][0]["at_target"]
    assert best["low"] < 1e-3 / 16 < best["high"]
    assert "at width 1024 take 6." in found.sentence


def test_a_small_shift_that_is_certain_carries():
    """*Carries* is asked first: the shift of 1.2x over all widths is real, and does not matter."""
    found = of([0.0, -0.09, -0.18, -0.27], noise=0.0003)
    assert found.first.shift is not None
    assert found.first.shift.high < 1
    assert found.verdict == "carries"


def test_noise_cannot_say_and_names_the_seeds_and_their_cost():
    found = of([0.3, -0.3, 0.3, -0.3], noise=0.01)
    assert found.verdict == "cannot say"
    assert "more widths may tell sooner" in str(found)
    seeds, seconds = found.more or (0, 0.0)
    assert seeds > 2
    assert seconds == pytest.approx((seeds - 2) * 4 * 5 * 16 * 0.1)
    assert f"About {seeds} seeds in place of 2 would tell" in str(found)


def test_where_nothing_is_learnt_or_known_there_is_no_answer():
    curves = draw([0.0] * 4, skewed(0.5), 0.002, rng=np.random.default_rng(1))
    too_short = answer(swept(curves, level=4.7))
    assert too_short.verdict == "cannot say"
    assert "nothing is learnt yet" in too_short.sentence
    some = {size: losses for size, losses in curves.items() if size == 64}
    some[512] = {(x, seed): -0.1 * x + 0.001 * (x % 2) * seed for x in range(5) for seed in range(2)}
    found = answer(swept(some))
    assert found.verdict == "cannot say"
    assert "above the highest rate" in found.sentence
    assert "at width 64 alone" in found.sentence
    assert "128, 256 it was not tried" in found.sentence


def test_two_sizes_are_enough_where_no_more_were_asked_for():
    rng = np.random.default_rng(1)
    curves = draw([0.0, -1.0], skewed(0.5), 0.002, rng=rng)
    found = answer(swept(curves))
    assert (found.verdict, found.first.known) == ("cannot say", [64, 128])
    two = replace(found.first, scales={size: Scale(start=5.0, unigram=4.5) for size in (64, 128)})
    both = answer(two, sizes=(64, 128), rates=dict.fromkeys((64, 128), 1e-3))
    assert both.verdict == "shifts"
    assert "two widths" in str(both)


def test_the_reason_is_that_of_the_coordinate_check_where_it_has_a_fault():
    check = {"sentence": "the update of head grows with width", "fault": True}
    assert "update of head grows" in str(of([0.0, -1.0, -2.0, -3.0], coordinates=check))
    assert "update of head" not in str(of([0.0, -1.0, -2.0, -3.0], coordinates={**check, "fault": False}))


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


def test_a_setup_that_scales_its_own_rate_is_told_a_factor():
    rates = {size: 1e-3 * 64 / size for size in SIZES}
    assert "the rate that your setup gives there" in of([0.0, -1.0, -2.0, -3.0], rates=rates).sentence


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
