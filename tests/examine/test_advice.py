"""What advice says, for plans whose forecasts are known."""

from __future__ import annotations

from dataclasses import replace

from normlab.examine.advice import PLAN, Advice, Alternative
from normlab.forecast.answer import Answer, Tried

LR = 4e-3


def answer(at_plan: float | None, lower: float | None = 0.5) -> Answer:
    tried = (Tried(LR, 0, at_plan), Tried(LR / 4, 0, lower))
    return Answer("cannot say", at_plan, LR, 0, "", tried, (), (), "10 runs of 2 models")


def advice(plan: Answer | None, **changes: Answer | None) -> Advice:
    others = [Alternative(name, f"--recipe {name}", one) for name, one in changes.items()]
    return Advice("post, 6 layers", LR, (Alternative(PLAN, "", plan, "" if plan else "no stream"), *others))


def test_changes_that_train_are_named_the_most_probable_first():
    found = advice(answer(0.2), pre=answer(0.7), admin=answer(0.9), deepnorm=answer(0.6), keel=answer(None))
    assert found.sentence == (
        "change the plan: at a learning rate of 4e-3 its first 200 steps succeed with a probability of 0.20; "
        "expected to train: admin (0.90), pre (0.70)"
    )
    assert [one.name for one in found.best] == ["admin", "pre"]


def test_a_plan_that_trains_stays():
    assert advice(answer(0.8)).sentence.startswith("train as planned: at a learning rate of 4e-3")
    assert advice(answer(0.8)).sentence.endswith("no change that was tried is expected to train")


def test_without_a_change_that_trains_the_highest_lower_rate_is_named():
    found = advice(answer(0.2, 0.7), pre=answer(0.5, 0.9))
    assert found.sentence.endswith("; likelier, but not sure: pre (0.50)")
    found = advice(answer(0.2, 0.7), pre=answer(0.1, 0.9))
    assert found.sentence.endswith("no change is expected to train at this rate, but at 1e-3 pre is (0.90)")


def test_the_forecaster_may_abstain():
    found = advice(answer(None), pre=answer(0.7))
    assert found.sentence == (
        "cannot say whether the plan trains at a learning rate of 4e-3; expected to train: pre (0.70)"
    )
    assert "the plan: 0.50 at 1e-3, cannot say at 4e-3" in str(found)


def test_there_may_be_no_forecast():
    found = advice(None)
    assert found.sentence.startswith(
        "there is no forecast for the plan at a learning rate of 4e-3: no stream"
    )
    assert "the plan: no forecast: no stream" in str(found)


def test_what_stops_a_training_is_said_and_no_such_change_is_named():
    dead = replace(answer(0.9, 0.9), reason="h.3.mlp is zero", stopped=True)
    found = advice(dead, pre=dead, admin=answer(0.8))
    assert found.sentence == "do not train as planned: h.3.mlp is zero; expected to train: admin (0.80)"
    assert advice(dead, pre=dead).sentence.endswith("no change that was tried is expected to train")
    assert "  pre: does not train: h.3.mlp is zero" in str(found)


def test_all_of_it_is_plain():
    plain = advice(answer(0.2), pre=answer(0.7)).to_plain()
    assert [one["name"] for one in plain["alternatives"]] == [PLAN, "pre"]
    assert plain["alternatives"][1]["answer"]["tried"][1] == {
        "lr": LR / 4,
        "warmup_steps": 0,
        "probability": 0.5,
    }
    assert f"{plain['verdict']}; {plain['changes']}" == advice(answer(0.2), pre=answer(0.7)).sentence
