"""Ten cases of the corpus, written as scripts, get the verdicts of the corpus."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="the extra normlab[hf] is not installed")
pytest.importorskip("x_transformers", reason="the extra normlab[hf] is not installed")

import normlab
from cases import few
from corpus.collected import CASES
from corpus.judge import verdict
from normlab.setups.script import setup_from_script

SCRIPTS = Path(__file__).with_name("corpus_scripts")
NAMES = [
    "no_causal_mask",
    "no_scale",
    "no_shift",
    "accumulated",
    "norm_decay",
    "fast_schedule",
    "loss_sum",
    "double_softmax",
    "short_backward_of_fused_norm",
    "tie_lost",
]


def failures_of(name: str, *arguments: str) -> list[tuple[str, str, str]]:
    """What a check says of one of the scripts."""
    with setup_from_script(str(SCRIPTS / f"{name}.py"), arguments) as named:
        report = normlab.check(named.setup)
    return [(failure.property, failure.module, failure.evidence) for failure in report.failures]


def test_each_has_another_property():
    assert len({CASES[name].properties[0] for name in NAMES}) == 10


@pytest.mark.slow
@pytest.mark.parametrize("name", few(NAMES, 5))
def test_a_fault_is_named_first(name):
    failures = failures_of(name, "--faulty")
    assert verdict(CASES[name], failures) == "FIRST", failures


@pytest.mark.slow
@pytest.mark.parametrize("name", few(NAMES, 5))
def test_its_sound_twin_has_no_failure(name):
    assert failures_of(name) == []
