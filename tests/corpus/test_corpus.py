"""Each fault is named first, at its place; sound steps have no failure; each property is needed by a case."""

from __future__ import annotations

import re
from collections import Counter

import pytest

pytest.importorskip("transformers", reason="the extra normlab[hf] is not installed")
pytest.importorskip("x_transformers", reason="the extra normlab[hf] is not installed")

from cases import each
from corpus import run
from corpus.case import OWN_1, PLANTED_1, PUBLIC, Case
from corpus.collected import CASES
from corpus.judge import Judge, Row, verdict
from normlab.checks.check import properties

NAMED_BY = {
    "finite": "nan_buffer",
    "optimizer_coverage": "opt_before_copy",
    "evaluation_repeats": "dropout_in_eval",
    "targets": "no_shift",
    "rows": "router_softmax_batch",
    "causality": "no_causal_mask",
    "reach": "encoder_built_as_a_decoder",
    "padding": "mask_all_ones",
    "documents": "packed_leak",
    "counted": "eos_masked",
    "order": "rope_q_only",
    "attention_scale": "no_scale",
    "ties": "untied_head",
    "residual": "half_stream_one",
    "norms": "no_final_norm",
    "dropout_repeats": "ckpt_rng",
    "training_equals_evaluation": "gelu_approximated_in_evaluation",
    "compiled_equals_plain": "compiled_to_low_precision",
    "inputs": "ignores_t",
    "gradients": "head_dropped",
    "derivative": "short_backward_of_fused_norm",
    "step": "step_each",
    "frozen": "frozen_emb",
    "siblings": "eps_one",
    "seeds": "copied_layers",
    "start": "hf_bias_nonzero",
    "buffers": "hf_inv_freq",
    "explained": "double_softmax",
    "reduction": "loss_sum",
    "padded_loss": "aux_pad",
    "initial_loss": "emb_std1",
    "nonlinear": "no_act",
    "precision": "angles_under_autocast",
    "groups": "groups_wrong",
    "update": "bf16_tiny_lr",
    "schedule": "sched_zero",
    "repeats": "labels_hold_the_mask",
    "state_dict": "drawn_frequencies_not_saved",
    "meta": "scale_set_where_weights_are_drawn",
    "cache": "cached_positions_start_anew",
    "overfit": "lr_huge",
    "reference": "reference_one_token_late",
    "adapters": "base_trains_beside_its_adapters",
}
"""For each property a case, a quick one, that no other property names in its place."""


@pytest.fixture(scope="session")
def judge():
    with Judge() as judge:
        yield judge


def _marked(case: Case):
    """`make test-slow` judges one case of each property, `make test-wide` those of public reports, and
    `make test-corpus` all.
    """
    mark = pytest.mark.long
    if case.name in NAMED_BY.values():
        mark = pytest.mark.slow
    elif case.origin is PUBLIC:
        mark = pytest.mark.wide
    return pytest.param(case, id=case.name, marks=mark)


@pytest.mark.parametrize("case", [_marked(case) for case in CASES.values()])
def test_a_fault_is_named_first_and_a_sound_step_has_no_failure(case, judge):
    row = judge(case.name)
    assert not row.error
    if case.not_right:
        assert row.verdict != case.right, "it is right now: delete its not_right"
        pytest.xfail(case.not_right)
    assert row.verdict == case.right, row


@pytest.mark.wide
@pytest.mark.parametrize("name", NAMED_BY)
def test_a_property_that_always_holds_is_noticed(name, judge):
    case = CASES[NAMED_BY[name]]
    row = judge(case.name)
    assert row.verdict == "FIRST"
    assert row.failures[0][0] == name
    assert judge(case.name, always_holds=name).verdict not in ("FIRST", "ERROR")


def test_each_property_has_a_case_that_needs_it():
    assert set(NAMED_BY) == {each_property.name for each_property in properties()}


def test_every_case_is_there():
    lists = Counter((case.origin.list, case.faulty) for case in CASES.values())
    assert lists == {
        ("cases", True): 21,
        ("cases", False): 26,
        ("faults", True): 49,
        ("faults", False): 1,
        ("faults2", True): 44,
        ("faults3", True): 14,
        ("planted", True): 97,
        ("planted", False): 16,
        ("unseen", True): 20,
        ("unseen", False): 30,
        ("later", True): 20,
        ("later", False): 30,
        ("covering", True): 5,
        ("covering", False): 5,
        ("sound", False): 51,
        ("sound2", False): 52,
        ("sound3", False): 26,
    }


def test_each_case_says_what_it_is():
    known = {each_property.name for each_property in properties()}
    for case in CASES.values():
        assert case.what, case.name
        assert set(case.properties) <= known, case.name
        assert not (case.thread and case.origin.kind != "public report"), case.name


def test_a_verdict_looks_at_the_first_failure():
    fault = Case("leak", dict, PLANTED_1, ("causality", "reach"), "blocks.0*|blocks")
    right = ("causality", "blocks.0.attn", "")
    elsewhere, other = ("causality", "blocks.1", ""), ("order", "blocks.0", "")
    assert verdict(fault, [right, other]) == "FIRST"
    assert verdict(fault, [other, right]) == "later"
    assert verdict(fault, [other, elsewhere]) == "flagged"
    assert verdict(fault, []) == "MISS"
    sound = Case("sound", dict, OWN_1)
    assert verdict(sound, []) == "ok"
    assert verdict(sound, [right]) == "BAD"


class JudgeOfOneFailure:
    """Stands for a process that judges: it says of each case that its documents are not read."""

    def __enter__(self) -> JudgeOfOneFailure:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def __call__(self, name: str) -> Row:
        failures = [("documents", "doc", "is not read")]
        case = CASES[name]
        return Row(name, case.faulty, verdict(case, failures), 1.0, failures, untestable={"cache": "none"})


def test_the_command_prints_a_verdict_for_each_case_and_sums(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(run, "Judge", JudgeOfOneFailure)
    file = tmp_path / "rows.json"
    names = ["packed", "packed_sound", "pad_eos", "end_masked_with_padding"]
    run.main(["documents", "counted", "sound", "--only", *names, "-v", "--json", str(file), "-j", "2"])
    printed = capsys.readouterr().out
    assert re.search(r"\bcounted @ loss\|labels", printed)
    assert "cache: none" in printed
    sums = [line.rpartition(": ") for line in printed.splitlines() if line.startswith("== ")]
    assert {numbers.rpartition(", ")[0] for _, _, numbers in sums} >= {
        "3 cases, 1 FIRST, 1 flagged, 1 BAD",
        "1 cases, 1 flagged",
        "4 cases, 1 FIRST, 2 flagged, 1 BAD",
    }
    rows = run.json.loads(file.read_text())
    assert {row["name"]: row["verdict"] for row in rows} == {
        "packed": "FIRST",
        "packed_sound": "BAD",
        "pad_eos": "flagged",
        "end_masked_with_padding": "flagged",
    }


@each("given", [["no_such_word"], ["--only", "no_such_case"]])
def test_what_the_corpus_does_not_have_is_refused(given, capsys):
    with pytest.raises(SystemExit, match="2"):
        run.main(given)
    assert given[-1] in capsys.readouterr().err
