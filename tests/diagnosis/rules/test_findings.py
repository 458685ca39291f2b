"""Each rule on tables made by hand: what it says, how severe it finds it, and on which numbers it rests."""

import math
import re

import pytest

from normlab.diagnosis import Diagnosis, Structure, find
from normlab.diagnosis.study import SEVERITIES, Finding
from normlab.diagnosis.tables import Table, Tables
from normlab.diagnosis.wording import format_number


def table(name, *rows):
    return {name: Table(name, rows)}


def one(tables, name, lr=None):
    """The one finding of that name."""
    (found,) = [f for f in find(tables, lr) if f.name == name]
    return found


def sublayers(count, stack="decoder.layers", **columns):
    """Rows of a stack of sublayers by turns attention and ffn; columns are functions of the index."""
    return [
        {
            "stack": stack,
            "index": i,
            "layer": i // 2,
            "role": ("self_attention", "ffn")[i % 2],
            **{name: f(i) for name, f in columns.items()},
        }
        for i in range(count)
    ]


def structure(count=4, placement="post", **more):
    rows = sublayers(
        count,
        placement=lambda i: placement,
        relation=lambda i: f"after = {placement}",
        module=lambda i: f"decoder.layers.{i // 2}.{('attn', 'mlp')[i % 2]}",
        block=lambda i: f"decoder.layers.{i // 2}",
    )
    return table("structure", *({**row, "norm_write": None, "final_norm": None, **more} for row in rows))


# ------------------------------------------------------------------------------------------ what a finding is


def test_a_finding_says_its_evidence_and_reference():
    found = Finding("x", "warning", "much is so", "scales", {"factor": 0.12345, "n": 3}, "Author 2020")
    assert str(found) == "warning: much is so [scales: factor = 0.123, n = 3; Author 2020]"
    assert str(Finding("x", "note", "so it is", "", {})) == "note: so it is"


def test_a_severity_that_there_is_not_is_refused():
    with pytest.raises(ValueError, match="'bad'"):
        Finding("x", "bad", "s", "", {})


def test_at_least_takes_what_is_as_severe_or_more():
    some = [Finding(s, s, "", "", {}) for s in SEVERITIES]
    diagnosis = Diagnosis("", "cheap", Structure((), ()), {}, tuple(some), (), {}, (), 0, {})
    assert [f.name for f in diagnosis.at_least("warning")] == ["warning", "problem"]
    assert diagnosis.at_least("note") == some


@pytest.mark.parametrize(
    ("value", "words"), [(0.000123, "0.000123"), (7968.0, "7,968"), (1e9, "1e+09"), (3, "3"), (None, "None")]
)
def test_numbers_are_said_at_three_digits(value, words):
    assert format_number(value) == words


def test_nothing_measured_nothing_found():
    assert find({}) == ()
    assert find({name: Table(name, ()) for name in ("scales", "updates", "curvature", "attention")}) == ()


def test_the_most_severe_come_first():
    tables = structure() | table("curvature", {"quantity": "critical_lr", "value": 1e-5, "detail": ""})
    assert [f.severity for f in find(tables, lr=1e-3)] == ["problem", "note"]


def test_stacks_are_called_by_what_tells_them_apart():
    rows = [{"stack": name} for name in ("encoder.layers", "decoder.layers", "blocks", "")]
    records = Tables(table("structure", *rows))
    assert [records.label(row["stack"]) for row in rows] == ["encoder", "decoder", "blocks", "the model"]
    same = Tables(table("structure", {"stack": "body.a"}, {"stack": "body.b"}))
    assert (same.label("body.a"), same.label("body.b")) == ("body.a", "body.b")


# ---------------------------------------------------------------------------------------------- each rule


@pytest.mark.parametrize(
    ("placement", "words", "reference"),
    [("post", "is Post-LN", "2002.04745"), ("pre", "is Pre-LN", "2002.04745"), ("other", "neither", "")],
)
def test_the_placement_is_said_of_each_stack(placement, words, reference):
    found = one(structure(placement=placement), "placement")
    assert words in found.sentence
    assert f"after = {placement}" in found.sentence
    assert reference in found.reference
    assert found.numbers == {"layers": 2, "sublayers": 4, placement: 4}


def test_a_mixed_stack_is_counted():
    rows = [*structure(4, "pre")["structure"], {**structure(1, "other")["structure"].rows[0], "index": 4}]
    found = one(table("structure", *rows), "placement")
    assert found.numbers == {"layers": 2, "sublayers": 5, "pre": 4, "other": 1}


@pytest.mark.parametrize(("lr", "severity"), [(2e-2, "warning"), (0.2, "problem")])
def test_the_learning_rate_against_the_critical_one(lr, severity):
    tables = table("curvature", {"quantity": "critical_lr", "value": 1e-2, "detail": ""})
    found = one(tables, "learning_rate", lr)
    assert found.severity == severity
    assert found.numbers == {"lr": lr, "critical_lr": 1e-2, "ratio": pytest.approx(lr / 1e-2)}
    assert find(tables, None) == ()
    assert find(tables, 1e-3) == (), "a rate below it may fail all the same"


def test_no_critical_rate_no_sentence():
    assert find(table("curvature", {"quantity": "critical_lr", "value": None, "detail": "any"}), 1.0) == ()


@pytest.mark.parametrize(
    ("slope", "severity", "words"),
    [
        (0.5, "warning", "vanish .* decoder: that of decoder.layers.0.attn is"),
        (-0.5, "warning", "grow .* decoder: that of decoder.layers.5.mlp is"),
        (0.05, "note", "stay within"),
    ],
)
def test_gradients_that_vanish_or_grow(slope, severity, words):
    rows = sublayers(12, relative=lambda i: math.exp(slope * (i - 11) * 2))
    found = one(structure(12) | table("sublayer_gradients", *rows), "sublayer_gradients")
    assert found.severity == severity
    assert re.search(words, found.sentence)
    assert found.numbers["ratio"] == pytest.approx(math.exp(-abs(slope) * 22))


def test_sublayers_without_gradient_are_counted():
    rows = sublayers(4, relative=lambda i: 0.0 if i < 2 else 1.0)
    found = one(table("sublayer_gradients", *rows), "sublayer_gradients")
    assert found.numbers["without_gradient"] == 2
    assert find(table("sublayer_gradients", *sublayers(4, relative=lambda i: 0.0))) == ()


@pytest.mark.parametrize(("slope", "severity"), [(0.1, "note"), (0.6, "warning"), (-0.6, "warning")])
def test_gradients_of_first_and_last_layer(slope, severity):
    rows = sublayers(12, grad_l2=lambda i: math.exp(slope * (i // 2)))
    found = one(table("parameter_gradients", *rows), "parameter_gradients")
    assert found.severity == severity
    assert found.numbers["ratio"] == pytest.approx(math.exp(5 * slope))


@pytest.mark.parametrize(
    ("count", "share", "severity", "amplified"),
    [(36, lambda i: 0.4, "warning", True), (36, lambda i: 1 / (i + 1), "note", False),
     (12, lambda i: 0.6, "note", True)],
)  # fmt: skip
def test_leaning_on_the_own_branch(count, share, severity, amplified):
    rows = sublayers(count, beta_sq=share, total=lambda i: 1.0)
    found = one(table("residual_dependency", *rows), "residual_dependency")
    assert (found.severity, "like N" in found.sentence) == (severity, amplified)
    assert found.numbers["sum_beta_sq"] == pytest.approx(sum(share(i) for i in range(count)))
    assert found.numbers["sum_1_over_i"] == pytest.approx(sum(1 / i for i in range(1, count + 1)))


def law(name, aic, exponent=None, low=None, high=None):
    row = {"stack": "decoder.layers", "kind": "random", "law": name, "coefficient": 1.0}
    return {**row, "exponent": exponent, "low": low, "high": high, "r2": 0.9, "aic": aic}


@pytest.mark.parametrize(
    ("exponent", "low", "aic", "severity"),
    [(0.95, 0.85, (4.5, -12.3), "warning"), (0.95, 0.4, (4.5, -12.3), "note"),
     (0.9, 0.8, (-12.3, 4.5), "note"), (0.3, 0.2, (-12.3, 4.5), "note")],
)  # fmt: skip
def test_how_the_output_change_grows(exponent, low, aic, severity):
    fits = law("power", -1.0, exponent, low, exponent + 0.1), law("log", aic[0]), law("linear", aic[1])
    found = one(table("output_change_fit", *fits), "output_change")
    assert found.severity == severity
    assert ("than log N" in found.sentence) == (aic[1] < aic[0])
    interval = {"exponent": exponent, "low": low, "high": exponent + 0.1}
    assert found.numbers == {**interval, "aic_log": aic[0], "aic_linear": aic[1]}
    small = table("residual_dependency", *sublayers(36, beta_sq=lambda i: 0.001, total=lambda i: 1.0))
    assert one(table("output_change_fit", *fits) | small, "output_change").severity == "note"
    large = table("residual_dependency", *sublayers(36, beta_sq=lambda i: 0.4, total=lambda i: 1.0))
    assert one(table("output_change_fit", *fits) | large, "output_change").severity == severity


@pytest.mark.parametrize(("change", "severity"), [(0.01, "note"), (0.9, "note"), (1.5, "warning")])
def test_how_far_one_step_moves_the_output(change, severity):
    rows = [{"stack": "decoder.layers", "kind": "update", "depth": n, "change": n * change / 4, "seed": 0}
            for n in (1, 2, 4)]  # fmt: skip
    normed = structure(final_norm="norm") | table("output_change", *rows)
    assert one(normed, "update_change").severity == severity
    scales = sublayers(4, signal=lambda i: "after", mean_square=lambda i: 1000.0, theory=lambda i: None)
    bare = structure() | table("output_change", *rows) | table("scales", *scales)
    assert one(bare, "update_change").severity == "note"
    assert one(bare, "update_change").numbers["share"] == pytest.approx(change / 1000)


def scales(mean_square, theory=lambda i: None, count=36):
    rows = sublayers(count, signal=lambda i: "after", mean_square=mean_square, theory=theory)
    return table("scales", *({**row, "source": "Theory 1999"} for row in rows))


@pytest.mark.parametrize(
    ("mean_square", "severity", "words"),
    [(lambda i: 1.0, "note", "keeps its scale"), (lambda i: 1.0 + i, "note", "grows 36-fold"),
     (lambda i: 0.9**i, "note", "shrinks"), (lambda i: 1.3**i, "warning", "faster than branches")],
)  # fmt: skip
def test_the_hidden_scale(mean_square, severity, words):
    found = one(scales(mean_square), "hidden_scale")
    assert (found.severity, words in found.sentence) == (severity, True)
    assert found.numbers["factor"] == pytest.approx(mean_square(35) / mean_square(0))


def test_theory_stands_beside_what_was_measured():
    found = one(scales(lambda i: 1.0 + i, lambda i: 2.0 + 2 * i), "scale_theory")
    assert found.numbers == {"lowest": 0.5, "highest": 0.5, "places": 36}
    assert found.reference == "Theory 1999"
    assert [f.name for f in find(scales(lambda i: 1.0))] == ["hidden_scale"]


def update(parameter, grad, moved, kind="query"):
    return {"parameter": parameter, "kind": kind, "grad_l2": grad, "update_over_weight": moved}


def test_updates_that_differ_too_much():
    rows = [
        update("a.weight", 1.0, 1e-3),
        update("b.weight", 1e-6, 9e-4),
        update("n.weight", 1.0, 9.0, "norm"),
    ]
    even = one(table("updates", *rows, update("c.bias", 1e-12, 5.0)), "updates")
    assert even.severity == "note"
    assert even.numbers["gradient_ratio"] == pytest.approx(1e6)
    assert even.numbers["update_ratio"] == pytest.approx(1e-3 / 9e-4)
    uneven = one(table("updates", *rows, update("d.weight", 1.0, 1e-6)), "updates")
    assert uneven.severity == "warning"
    assert re.search(r"smallest: d\.weight, .*: a\.weight", uneven.sentence)


def test_a_step_that_moves_a_matrix_far():
    rows = update("a.weight", 1.0, 0.3), update("b.weight", 1.0, 0.2)
    found = one(table("updates", *rows), "large_update")
    assert "a.weight" in found.sentence
    assert found.numbers["update_over_weight"] == 0.3
    assert not [f for f in find(table("updates", *[update("a", 1.0, 0.05)] * 2)) if f.name == "large_update"]


def warming(steps):
    return table("plan", {"warmup_steps": steps})


@pytest.mark.parametrize(("steps", "severity"), [(2000, "note"), (2, "warning")])
def test_with_a_declared_warm_up_its_first_step_is_judged(steps, severity):
    rows = update("a.weight", 1.0, 0.3), update("b.weight", 1.0, 0.2)
    large = one(table("updates", *rows) | warming(steps), "large_update")
    kinds = {"update": 3.0, "first": 6.0 / steps}
    outputs = [{"stack": "decoder.layers", "kind": kind, "depth": 4, "change": change, "seed": 0}
               for kind, change in kinds.items()]  # fmt: skip
    moved = one(
        structure(final_norm="norm") | table("output_change", *outputs) | warming(steps), "update_change"
    )
    critical = table("curvature", {"quantity": "critical_lr", "value": 1e-3, "detail": ""})
    high = one(critical | warming(steps), "learning_rate", 5e-3)
    for found in (large, moved, high):
        assert found.severity == severity
        assert f"1/{steps} of" in found.sentence
        assert ("longer" in found.sentence) == (severity == "warning")
    assert large.numbers == {"update_over_weight": 0.3, "first_update": 0.3 / steps}
    assert moved.numbers["first_share"] == 6.0 / steps


def test_parameters_that_the_loss_does_not_reach():
    rows = [update(f"p{i}", 0.0, None) for i in range(5)] + [update("q", 1.0, 0.01)]
    found = one(table("updates", *rows), "no_gradient")
    assert found.severity == "warning"
    assert found.numbers == {"without_gradient": 5, "parameters": 6}
    assert re.search(r"\bp0, p1, p2 …", found.sentence)


def test_a_packed_matrix_without_gradient_is_one_parameter():
    kinds = ("query", "key", "value")
    rows = [update("packed.0", 0.0, None, kind) for kind in kinds]
    rows += [update("packed.1", float(kind == "value"), None, kind) for kind in kinds]
    found = one(table("updates", *rows, update("out", 1.0, None, "output")), "no_gradient")
    assert found.numbers == {"without_gradient": 2, "parameters": 3}
    assert re.search(r"\bpacked\.0, packed\.1 \(query, key\)", found.sentence)


def head(entropy, uniform=3.0, max_logit=2.0, index=0):
    row = {"stack": "encoder.layers", "index": index, "head": 0, "entropy": entropy}
    return {**row, "max_logit": max_logit, "uniform": uniform}


def test_attention_that_collapsed_or_is_uniform():
    found = one(table("attention", head(0.02), head(2.99), head(1.5)), "attention")
    assert found.severity == "warning"
    assert (found.numbers["collapsed"], found.numbers["uniform"]) == (1, 1)
    healthy = one(table("attention", head(1.0), head(2.0)), "attention")
    assert (healthy.severity, healthy.numbers["collapsed"], healthy.numbers["uniform"]) == ("note", 0, 0)


def test_attention_over_one_key_has_not_collapsed():
    found = one(table("attention", head(0.0, uniform=0.0), head(1.0)), "attention")
    assert (found.severity, found.numbers["collapsed"]) == ("note", 0)


def test_attention_logits_that_saturate():
    found = one(table("attention", head(1.0, max_logit=300.0)), "attention_logits")
    assert (found.severity, found.numbers["max_logit"]) == ("warning", 300.0)
    assert len(find(table("attention", head(1.0)))) == 1


def norm(module, spectral, exact=1.0):
    return {"module": module, "spectral": spectral, "exact": exact}


def test_gains_as_the_jacobian_has_them():
    tables = table("jacobian", norm("a", 0.001), norm("b", 1.0), norm("c", 500.0))
    dead, large = one(tables, "dead_gain"), one(tables, "large_gain")
    assert (dead.severity, dead.numbers["norms"], dead.sentence.endswith(" a")) == ("warning", 1, True)
    assert (large.severity, large.numbers["gain"], large.sentence.endswith(" c")) == ("warning", 500.0, True)
    found = one(table("jacobian", norm("a", 0.5, 0.5), norm("b", 2.0, 1.0)), "jacobian")
    assert (found.numbers["smallest"], found.numbers["largest"]) == (0.5, 2.0)
    assert found.numbers["measured_over_exact"] == 2.0


@pytest.mark.parametrize(("last", "severity"), [(0.9, "note"), (0.97, "warning")])
def test_tokens_that_grow_alike(last, severity):
    rows = [
        {"stack": "encoder.layers", "index": i, "cosine": c, "effective_rank": 3.0}
        for i, c in ((-1, 0.1), (0, 0.5), (1, last))
    ]
    found = one(table("similarity", *rows), "similarity")
    assert found.severity == severity
    assert found.numbers == {"first": 0.1, "last": last, "effective_rank": 3.0}
