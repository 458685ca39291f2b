"""The answer of a forecast, on a forecaster whose edge is known."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from normlab.diagnosis.rules import features
from normlab.forecast import answer as module
from normlab.forecast.answer import Answer, Trial, answer
from normlab.forecast.fit import fit
from normlab.forecast.forecaster import Forecaster
from normlab.forecast.table import SurveyedRun

EDGE = 0.0
"""The value of ``critical`` above which runs fail; those with a warm-up never do."""


def run(critical: float, warmup: float) -> SurveyedRun:
    trained = critical < EDGE or warmup > 1
    choices = {"placement": "post", "norm": "layernorm", "optimiser": "adam", "text": "dates"}
    return SurveyedRun(
        run=f"{critical}-{warmup}",
        model=f"s{warmup:g}",
        kind="drawn",
        choices={**choices, "layers": 2.0, "width": 32.0, "warmup": 8.0 * (warmup > 1)},
        lr=10**critical,
        seed=2,
        steps=200,
        outcome="trained" if trained else "stuck",
        nll=1.0,
        seconds=1.0,
        features={"0": features_of(critical, warmup)},
        version=1,
    )


def features_of(critical: float, warmup: float) -> dict[str, float]:
    """Three features are the same, so that all are outside together."""
    return {"critical": critical, "warmup": warmup, "way": critical, "update": critical}


RUNS = [run(float(c), w) for c in np.linspace(-2, 2, 300) for w in (0.0, 2.0)]


@pytest.fixture(scope="module")
def forecaster() -> Forecaster:
    rows = [one.features["0"] for one in RUNS]
    return fit(rows, [one.trained for one in RUNS], ["critical", "warmup", "way", "update"])


def trial(critical: float, warmup: int = 0) -> Trial:
    return Trial(10**critical, warmup, features_of(critical, 2.0 if warmup else 0.0))


def answered(forecaster: Forecaster, *trials: Trial, **more) -> Answer:
    return answer(forecaster, RUNS, trials, **more)


def test_what_is_expected_to_train_is_to_be_trained(forecaster):
    found = answered(forecaster, trial(-1.0))
    assert found.kind == "train"
    assert found.probability is not None
    assert found.probability > 0.9
    assert found.sentence.startswith("train: at a learning rate of 0.1 its first 200 steps succeed with a")
    assert found.rests_on == "600 runs of 2 models"
    assert {near.outcome for near in found.nearest} == {"trained"}
    assert found.nearest[0].nearness == max(near.nearness for near in found.nearest)
    assert found.nearest[0].model.startswith("post with layernorm, 2 layers of width 32, adam")


def test_a_warm_up_goes_before_a_lower_rate_and_a_high_rate_before_a_low_one(forecaster):
    plan, lower, lowest = trial(1.0), trial(-0.5), trial(-1.5)
    found = answered(forecaster, plan, lowest, lower, trial(1.0, 50))
    assert (found.kind, found.lr, found.warmup_steps) == ("warm up", 10.0, 50)
    assert "train with a warm-up of about 50 steps: with it" in found.sentence
    found = answered(forecaster, plan, lowest, lower)
    assert (found.kind, found.lr) == ("lower the rate", lower.lr)
    assert found.sentence.startswith("lower the learning rate to 0.32: there the first 200 steps succeed")
    assert "with a probability of 0.0" in found.sentence


def test_what_nothing_helps_is_not_to_be_trained_and_the_reason_is_the_strongest_feature(forecaster):
    found = answered(forecaster, trial(1.0), trial(1.5))
    assert found.kind == "do not train"
    assert found.reason == str(min(found.effects, key=lambda effect: effect.by))
    assert "at a learning rate of 10 its first 200 steps succeed with a probability of 0.0" in found.sentence


def test_a_cause_stops_a_training_that_is_expected_to_succeed(forecaster):
    found = answered(forecaster, trial(-1.0), cause="blocks.3: is wrong; mend it")
    assert found.sentence == "do not train: blocks.3: is wrong; mend it"
    assert found.stopped


def test_outside_of_what_was_seen_and_near_to_chance_there_is_no_answer(forecaster):
    found = answered(forecaster, trial(7.0))
    assert (found.kind, found.probability, found.effects) == ("cannot say", None, ())
    assert (
        "is 1e+07, outside of the 0.01 to 1e+02 of the runs that forecasts rest on, and 2 other"
        in found.sentence
    )
    found = answered(forecaster, trial(-1.0), trial(7.0))
    assert [one.probability is None for one in found.tried] == [False, True]
    even = replace(forecaster, trees=[tree._replace(p=[0.5] * len(tree.p)) for tree in forecaster.trees])
    assert answered(even, trial(-1.0)).reason == "a probability of 0.50 is too near to chance"


def test_an_answer_is_plain_for_programs(forecaster):
    plain = answered(forecaster, trial(1.0), trial(-1.0)).to_plain()
    assert plain["kind"] == "lower the rate"
    assert len(plain["because"]) == len(plain["effects"]) > 0
    assert plain["sentence"].startswith("lower the learning rate")


def test_every_feature_has_words():
    documented = set(module.WORDS)
    assert documented >= set(features.TABLES)
    assert set(module.LOGARITHMS) <= documented
