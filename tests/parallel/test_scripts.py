"""Scripts that are parallel in four ways: sound ones are clean, and what is planted is named."""

from __future__ import annotations

import time

import pytest

from normlab.parallel.check import check_ranks
from parallel.planted import KINDS, SCRIPTS, Mistake, mistakes

BUDGET_S = 240.0
"""Far more than a check takes, for machines that do other things as well."""
QUICK = ("ddp-clipped-by-rank", "tensor-tie-lost")
"""Mistakes that are tried more often than the others."""


def check_is_clean(kind):
    report = check_ranks(str(SCRIPTS / f"{kind}.py"), ranks=2, budget_s=BUDGET_S)
    assert report.failures == ()
    assert report.unjudged == ()
    assert len(report.holds) == 7
    assert report.facts["precision"] == "float64"


def check_is_named(mistake, folder):
    report = check_ranks(str(mistake.plant(folder)), ranks=2, budget_s=BUDGET_S)
    named = {(failure.property, failure.module): failure.evidence for failure in report.failures}
    assert (mistake.property, mistake.at) in named
    assert mistake.factor in named[mistake.property, mistake.at]
    assert report.verdict == "fails"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp"])
def test_a_sound_script_is_clean(kind):
    check_is_clean(kind)


@pytest.mark.long
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "ddp"])
def test_every_sound_script_is_clean(kind):
    check_is_clean(kind)


@pytest.mark.wide
@pytest.mark.parametrize("mistake", [m for m in mistakes() if m.name in QUICK], ids=lambda m: m.name)
def test_a_mistake_is_named(mistake, tmp_path):
    check_is_named(mistake, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("mistake", [m for m in mistakes() if m.name not in QUICK], ids=lambda m: m.name)
def test_every_mistake_is_named(mistake, tmp_path):
    began = time.process_time()
    check_is_named(mistake, tmp_path)
    assert time.process_time() - began < 90


@pytest.mark.long
def test_three_ranks_are_no_different():
    report = check_ranks(str(SCRIPTS / "sharded.py"), ranks=3, budget_s=BUDGET_S)
    assert report.failures == ()
    assert report.facts["compared with"] == "3 batches that 3 ranks read"


@pytest.mark.long
def test_a_step_that_no_other_batch_can_be_put_into_is_not_judged(tmp_path):
    of_numpy = ("ids[:, 1:]) / ACCUMULATE", "ids[:, 1:]) * float(ids.numpy().sum() % 7 + 1) / ACCUMULATE")
    script = Mistake("of-numpy", "ddp.py", [of_numpy], "", "").plant(tmp_path)
    report = check_ranks(str(script), ranks=2, budget_s=BUDGET_S)
    assert report.failures == ()
    assert set(report.unjudged) == {"ranks_gradients", "ranks_clipping", "ranks_update"}
    assert set(report.holds) == {"ranks_data", "ranks_ties", "ranks_weights", "ranks_agree"}


def test_five_mistakes_are_planted_into_each_script():
    planted = mistakes()
    assert len({m.name for m in planted}) == len(planted) == 20
    for kind in KINDS:
        assert sum(m.script == f"{kind}.py" for m in planted) == 5
