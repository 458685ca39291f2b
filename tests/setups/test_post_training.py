"""Post-training in code of one's own: sound scripts have no failure, and each mistake is named first."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest
import torch

import normlab
from cases import few
from normlab.checks.report import Report
from normlab.setups.script import setup_from_script

SCRIPTS = Path(__file__).with_name("post_training")
SOUND = ("sft", "dpo", "grpo", "reward", "distillation", "lora", "packed")
NAMED_FIRST = {
    ("sft", "prompt_counted"): "counted",
    ("sft", "padding_counted"): "counted",
    ("sft", "mask_unshifted"): "counted",
    ("dpo", "reference_of_all_tokens"): "reference",
    ("dpo", "reference_mean"): "reference",
    ("dpo", "rejected_reference_lost"): "reference",
    ("dpo", "reference_follows"): "reference",
    ("dpo", "reference_trained"): "reference",
    ("grpo", "old_of_other_tokens"): "reference",
    ("grpo", "old_is_colder"): "reference",
    ("grpo", "reference_without_mask"): "reference",
    ("reward", "last_column"): "padded_loss",
    ("reward", "mean"): "padded_loss",
    ("distillation", "no_logarithm"): "reference",
    ("distillation", "over_positions"): "reference",
    ("distillation", "teacher_rolled"): "reference",
    ("lora", "base_trains"): "adapters",
    ("lora", "base_scaled"): "adapters",
    ("lora", "start_random"): "adapters",
    ("packed", "one_document"): "documents",
    ("packed", "one_count"): "documents",
}


def report_of(name: str, *arguments: str) -> Report:
    """What a check says of one of the scripts."""
    sys.modules.pop("language_model", None)  # it reads the mistake when it is imported
    with setup_from_script(str(SCRIPTS / f"{name}.py"), arguments) as named:
        return normlab.check(named.setup)


@pytest.mark.slow
@pytest.mark.parametrize("name", SOUND)
def test_a_sound_script_has_no_failure(name):
    report = report_of(name)
    assert report.failures == ()
    judged = {"dpo": "reference", "grpo": "reference", "distillation": "reference", "lora": "adapters"}
    assert judged.get(name, "gradients") in report.holds


@pytest.mark.slow
@pytest.mark.parametrize(("name", "mistake"), few(NAMED_FIRST, 8))
def test_a_mistake_is_named_first(name, mistake):
    failures = report_of(name, mistake).failures
    assert failures[0].property == NAMED_FIRST[name, mistake], failures


@pytest.mark.slow
def test_a_target_in_the_next_document_is_a_note():
    report = report_of("packed", "border_counted")
    assert report.ok
    assert "documents" in {note.property for note in report.notes}


def test_a_preference_over_an_equal_reference_costs_the_logarithm_of_two():
    sys.modules.pop("language_model", None)
    with setup_from_script(str(SCRIPTS / "dpo.py"), ()) as named:
        loss = named.setup.loss(named.setup.model, named.setup.batch)
    torch.testing.assert_close(float(loss.detach()), math.log(2))
