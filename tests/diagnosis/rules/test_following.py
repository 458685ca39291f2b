"""What follows from what: by name, and by place."""

from __future__ import annotations

from normlab.diagnosis.rules.finding import Finding, cause, consequences, follows, told


def found(name, module="", layer=None, *, table="scales", severity="warning", explains=(), do="") -> Finding:
    return Finding(
        name, severity, f"{name} is wrong", table, {}, module=module, layer=layer, explains=explains, do=do
    )


GAIN = found("gain", "blocks.6.norm", 6, table="weights", explains=("jump", "unlike"))


def test_what_lies_behind_a_fault_follows_from_it_and_what_lies_before_does_not():
    assert follows(found("jump", "blocks.7.attn", 7), GAIN)
    assert follows(found("jump", "blocks.6", 6), GAIN)
    assert not follows(found("jump", "blocks.2.attn", 2), GAIN)
    assert follows(found("jump", "decoder.0.attn", 0), GAIN), "another stack may read this one"
    assert follows(found("jump"), GAIN), "about the whole model"
    assert not follows(found("other", "blocks.7", 7), GAIN)
    assert not follows(GAIN, GAIN)


def test_what_is_said_of_weights_follows_from_their_own_module_alone():
    assert follows(found("unlike", "blocks.6.norm.weight", 6, table="weights"), GAIN)
    assert not follows(found("unlike", "blocks.7.mlp", 7, table="weights"), GAIN)


def test_two_faults_are_both_seen_and_the_first_one_on_the_way_is_the_cause():
    jump, later = found("jump", "blocks.2.attn", 2), found("jump", "blocks.8.attn", 8)
    findings = [GAIN, later, jump]
    assert cause(findings) is jump
    assert consequences(findings, jump) == []
    assert consequences(findings, GAIN) == [later]


def test_a_chain_is_folded_under_its_beginning():
    first = found("start", explains=("middle",))
    middle, last = found("middle", explains=("last",)), found("last")
    assert cause([last, middle, first]) is first
    assert consequences([last, middle, first], first) == [last, middle]


def test_a_problem_goes_before_a_warning_and_a_circle_has_a_cause():
    grave = found("grave", "blocks.9", 9, severity="problem")
    assert cause([GAIN, grave]) is grave
    a, b = found("a", explains=("b",)), found("b", explains=("a",))
    assert cause([a, b]) is a
    assert cause([]) is None


def test_a_finding_is_told_with_its_place_and_what_to_do():
    line = told(found("gain", "blocks.6", 6, do="set it to 1"))
    assert line == "blocks.6: gain is wrong (layer 6); set it to 1"
    assert told(found("blocks.6", "blocks.6", 6)) == "blocks.6 is wrong (layer 6)"
