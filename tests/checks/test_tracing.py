"""What led to a verdict: facts, copies, passes and comparisons, of a sound and of a faulty tiny step."""

from __future__ import annotations

import json
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from checks.tiny import Block, Decoder, groups, loss_of, report_of, tokens
from normlab.checks.tracing import PropertyTrace, trace_property
from normlab.errors import UserError
from normlab.trace.changes import setting_among
from normlab.trace.trace import Trace
from normlab.trace.trail import Change, PassMade, RunsCompared, StepMade, TensorsCompared, Trail, listening


class SeesTheNext(Block):
    """A block whose feed-forward reads the token after its own."""

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x)).roll(-1, 1)))


def traced(name: str, model: Decoder, **setup: object) -> PropertyTrace:
    return trace_property(name, model, tokens(), loss=loss_of, **setup)


def faulty() -> Decoder:
    torch.manual_seed(0)
    model = Decoder()
    model.blocks[2] = SeesTheNext()
    return model


def test_a_verdict_that_holds_rests_on_comparisons_within_the_limit():
    torch.manual_seed(0)
    trace = traced("causality", Decoder())
    compared = [entry for entry in trace.entries if isinstance(entry, RunsCompared)]
    assert (trace.verdict, trace.failures, trace.untestable) == ("holds", (), "")
    assert len(compared) == 4  # two cuts in two modes
    assert all(entry.size <= entry.limit and not entry.module for entry in compared)
    modes = [change.how for entry in compared for change in entry.second.changes if change.kind == "mode"]
    assert modes == ["training", "training"]
    assert all(any(c.kind == "batch" for c in entry.second.changes) for entry in compared)
    assert trace.copies.stand_in
    assert trace.copies.exact
    assert not trace.copies.part


def test_a_failure_is_the_last_comparison_and_names_the_same_module():
    trace = traced("causality", faulty())
    (failure,) = trace.failures
    last = trace.entries[-1]
    assert isinstance(last, RunsCompared)
    assert last.size > last.limit == trace.copies.rounding
    assert last.module == failure.module == "blocks.2"
    assert last.asked_by.startswith("checks.tokens.")
    losses = [entry.loss for entry in trace.entries if isinstance(entry, PassMade)]
    assert len({*losses}) == 2  # with and without the change


def test_facts_are_read_or_say_why_they_are_unknown():
    facts = {fact.name: fact for fact in traced("causality", faulty()).facts}
    assert facts["tokens"].value == "batch [4, 7]"
    assert facts["causal"].value.startswith("yes")
    assert (facts["padding"].value, "pad_id" in facts["padding"].why_unknown) == ("", True)


@pytest.mark.parametrize("name", ["reach", "padding", "update"])
def test_the_answer_is_that_of_a_check(name):
    torch.manual_seed(0)
    report = report_of(name, optimizer=groups)
    trace = traced(name, Decoder(), optimizer=groups)
    assert trace.untestable == report.untestable.get(name, "")
    assert (trace.verdict == "holds") == (name in report.holds)
    assert trace.failures == report.failures


def test_tensors_and_whole_steps_are_noted_too():
    torch.manual_seed(0)
    kinds = {name: {type(e) for e in traced(name, Decoder(), optimizer=groups).entries} for name in NOTED}
    assert kinds == NOTED


NOTED = {"reach": {PassMade, TensorsCompared}, "update": {StepMade}}


def test_nothing_else_is_tested_where_numbers_are_not_finite():
    model = Decoder()
    model.head.weight.data.fill_(float("nan"))
    trace = traced("causality", model)
    assert (trace.verdict, trace.entries, trace.applies) == ("fails", (), True)
    assert {failure.property for failure in trace.failures} == {"finite"}
    assert traced("finite", model).failures[0].module == "head.weight"


def test_plain_values_are_those_of_json():
    values = traced("causality", faulty()).to_plain()
    assert json.loads(json.dumps(values, allow_nan=False)) == values
    assert (values["verdict"], values["entries"][-1]["module"]) == ("fails", "blocks.2")


def test_a_name_that_is_no_property_of_one_process_is_refused():
    with pytest.raises(UserError, match="mean 'causality'"):
        traced("causalty", Decoder())
    with pytest.raises(UserError, match="ranks_data"):
        traced("ranks_data", Decoder())


# ------------------------------------------------------------------------------------------------- the trail


def test_a_pass_says_what_was_changed():
    step = Trace(Decoder(), tokens(), loss_of)
    batch = tokens()
    batch[1, 3] = 0
    weights = {"head.weight": torch.zeros_like(step.model.head.weight), "norm.bias": step.model.norm.bias}
    trail = Trail(partial(setting_among, {"the step": step}))
    with listening(trail):
        step.again(batch=batch, weights=weights, training=True, seed=3, dropout=False).once()
    step.again(seed=4).once()
    (made,) = trail.entries
    assert made.setting.model == "the step"
    assert made.loss == pytest.approx(torch.log(torch.tensor(23.0)).item())
    assert set(made.setting.changes) == {
        Change("batch", "batch", "1 of 32 numbers, from [1, 3] to [1, 3]"),
        Change("weights", "head.weight", "368 of 368 numbers"),
        Change("mode", "", "training"),
        Change("seed", "", "3"),
        Change("dropout", "", "off"),
    }


def test_a_pass_that_raises_is_noted_with_what_it_raises():
    trail = Trail(partial(setting_among, {}))
    with listening(trail), pytest.raises(IndexError):
        Trace(Decoder(), tokens() + 100, loss_of).once()
    (made,) = trail.entries
    assert (made.loss, made.raised.split(":")[0]) == (None, "IndexError")
