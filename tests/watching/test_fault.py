"""What went wrong first, in made-up steps."""

import math
import re

import torch

from normlab.diagnosis import Record
from normlab.watching.fault import NO_PARAMETER, NOWHERE, fault
from normlab.watching.meter import StepRecord

NAN = math.nan
MODULES = ("embedding", "layer.inner", "layer", "")


def record(step, module, probe, value):
    signal, _, statistic = probe.partition(".")
    return Record(step, None, None, module, signal, statistic, value)


def step(number, *, loss=1.0, outputs=None, inputs=None, grads=None, weights=None, updates=None):
    """A step in which everything is 1 but what is given."""
    outputs, inputs, grads = outputs or {}, inputs or {}, grads or {}
    records = []
    for module in MODULES:
        if module != "embedding":
            records.append(record(number, module, "input.max_abs", inputs.get(module, 1.0)))
        records.append(record(number, module, "output.max_abs", outputs.get(module, 1.0)))
        records.append(record(number, module, "output.rms", outputs.get(module, 1.0)))
    for module in reversed(MODULES):
        for probe in ("grad_output.max_abs", "grad_output.rms"):
            records.append(record(number, module, probe, grads.get(module, 1.0)))
    records += [record(number, m, p, v) for (m, p), v in (weights or {}).items()]
    moved = {"layer.inner.weight": 1.0} | (updates or {})
    return recorded(number, seen=records, updates=moved, loss=loss)


def recorded(number, *, seen=(), gradients=None, updates, lr=0.1, loss=1.0):
    """A step with these norms of updates by parameter; those of gradients are 1 unless they are given."""
    gradients = gradients or dict.fromkeys(updates, 1.0)
    norms = (torch.tensor([norm[name] for name in updates]) for norm in (gradients, updates))
    return StepRecord(number, lr, torch.tensor(loss), tuple(updates), *norms, tuple(seen))


def test_the_innermost_module_with_a_finite_input_is_blamed():
    bad = step(
        3,
        outputs=dict.fromkeys(("layer.inner", "layer", ""), NAN),
        inputs={"": NAN},
        weights={("layer.inner", "weight[bias].max_abs"): NAN},
    )
    found = fault([step(1), step(2), bad])
    assert (found.rule, found.module, found.step) == ("forward", "layer.inner", 3)
    assert found.sentence.endswith("in step 3: its bias is not finite")


def test_a_module_that_only_passes_on_what_is_not_finite_is_not_blamed():
    bad = step(3, outputs=dict.fromkeys(("layer.inner", "layer", ""), NAN), inputs={"layer.inner": NAN})
    assert fault([bad]).module == "layer", "the one that was given something finite"


def test_without_a_bad_output_the_first_gradient_in_backward_order():
    bad = step(2, grads=dict.fromkeys(("layer.inner", "embedding"), math.inf))
    found = fault([step(1), bad])
    assert (found.rule, found.module) == ("backward", "layer.inner")
    assert re.search(r"\blayer, 1\b", found.evidence[1])


def test_an_update_that_is_not_finite_is_the_optimizers():
    found = fault([step(1), step(2, updates={"layer.inner.weight": NAN})])
    assert (found.rule, found.module) == ("update", "layer.inner")


def test_what_leaves_its_range_first_is_blamed_and_within_a_step_what_comes_first():
    left = step(3, outputs={"layer": 90.0, "layer.inner": 31.0})
    steps = [step(1), step(2), left, step(4, outputs={"": 99.0})]
    found = fault(steps)
    assert (found.rule, found.module, found.step) == ("range", "layer.inner", 3)
    assert "31 times" in found.sentence
    assert any("layer: 90 times" in line for line in found.evidence)


def test_gradients_that_all_grow_with_the_losss_own_are_the_losss():
    found = fault([step(1), step(2, grads=dict.fromkeys(MODULES, 51.0))])
    assert found.module == ""
    assert "gradient in" in found.sentence
    assert "model itself" in found.sentence


def test_an_update_is_measured_by_its_learning_rate():
    slow = [step(1), step(2)]
    fast = recorded(3, seen=slow[0].seen, updates={"layer.inner.weight": 100.0}, lr=10.0)
    assert fault([*slow, fast]).rule == "none"
    assert fault([*slow, step(3, updates={"layer.inner.weight": 100.0})]).module == "layer.inner.weight"


def test_nobody_is_blamed_for_what_stays_in_its_range_or_begins_at_zero():
    steps = [step(i, outputs={"layer": value}) for i, value in ((1, 0.0), (2, 5.0), (3, 9.0))]
    found = fault(steps)
    assert (found.sentence, found.rule, found.module) == (NOWHERE, "none", "")
    assert found.evidence[0].startswith("nearest to it: the rms of the output of layer, 1.8 times")
    assert fault([]).rule == "none"


def test_fewer_steps_before_allow_more():
    """A branch that begins at zero, as with ReZero, grows fast in its first steps and is sound."""
    before = [step(i) for i in range(1, 4)]
    grown = step(4, outputs={"layer": 20.0})
    assert fault([*before, grown]).rule == "none"
    longer = [step(i) for i in range(1, 20)]
    found = fault([*longer, step(20, outputs={"layer": 20.0})])
    assert (found.rule, found.module, found.step) == ("range", "layer", 20)


def test_where_no_module_was_seen_a_parameter_is_named():
    names = {"first.weight": 1.0, "second.weight": 1.0}
    steps = [recorded(i, updates=names) for i in range(20)]
    broken = recorded(20, updates=names, gradients=dict.fromkeys(names, NAN))
    one = fault([*steps, broken])
    assert (one.rule, one.module, one.step) == ("gradient", "second", 20), "the one nearest to the loss"
    grown = recorded(20, updates=names, gradients={"first.weight": 30.0, "second.weight": 40.0})
    one = fault([*steps, grown])
    assert (one.rule, one.module, one.step) == ("range", "second", 20), "the one that grew most"
    assert fault(steps).sentence == NO_PARAMETER
