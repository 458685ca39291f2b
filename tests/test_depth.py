"""The depth page and the measurement behind it."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch

from cases import few
from normlab.nn import Placement
from scripts import script

depth = script("depth")
ROWS = depth.kept()
SHIPPED = [name for name, place in Placement.registry.items() if place.__module__.startswith("normlab.")]
AGAIN = "python benchmarks/depth.py"


def test_the_page_is_the_generated_one():
    assert depth.PAGE.read_text(encoding="utf-8") == depth.page(), (
        f"docs/depth.md is old; type: {AGAIN} --page"
    )


def test_every_claim_is_measured_and_plain_post_ln_stands_beside_it():
    wanted = {name for name in SHIPPED if Placement.registry[name].deep} | {"post", "pre"}
    for rate in depth.RATES:
        missing = sorted(wanted - {r.placement for r in ROWS if r.rate == rate})
        assert not missing, f"{missing} not measured at {rate:g}; type: {AGAIN} --write"
    assert {r.placement: r.claims for r in ROWS} == {
        r.placement: Placement.registry[r.placement].deep for r in ROWS
    }
    assert {r.sublayers for r in ROWS} == {1000}
    assert all(len(r.train_nats) == depth.STEPS for r in ROWS if r.end_nats is not None)


def test_every_placement_that_claims_depth_made_its_finite_steps():
    assert [(r.placement, r.rate) for r in ROWS if r.claims and r.finite_steps < depth.STEPS] == []


@pytest.fixture(scope="module")
def data():
    return depth.text()


def test_text(data):
    assert data.train.shape[1] == data.dev.shape[1] == depth.LENGTH + 1
    assert len(data.train) >= depth.STEPS * depth.BATCH
    assert 3 < data.unigram_entropy_nats < torch.tensor(float(data.vocab_size)).log()


def test_a_small_model_is_measured(data):
    row = depth.measure("rezero", 1e-2, data, layers=2, steps=3)
    assert (row.sublayers, row.finite_steps, row.claims, row.fell) == (4, 3, True, True)
    assert row.end_nats < row.start_nats
    assert len(row.train_nats) == 3


def test_steps_that_are_not_finite_are_counted_and_end_the_run(data):
    row = depth.measure("rezero", 1e30, data, layers=2, steps=5)
    assert row.finite_steps < 5
    assert row.end_nats is None
    assert not row.fell
    assert f"step {row.finite_steps}" in list(depth.table([row]))[-1]
    assert "did not: `rezero`" in depth.verdict([row], 4.0)


def test_the_verdict_names_what_contradicts_a_claim():
    row = depth.Row("keel", True, "plain", 1e-3, 1000, 6.0, 5.0, [6.0], 1.0, 50, 1.0)
    up, low = replace(row, end_nats=7.0), replace(row, placement="admin", end_nats=3.0)
    said = depth.verdict([up, low], 4.0)
    assert "2 of the 2" in said
    assert re.search(r"\bAgainst [^.]*`keel`\.", said)
    assert "frequencies: `admin`." in said
    assert "Against" not in depth.verdict([row, low], 4.0)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_finite_sees_one_element(bad: float):
    tensors = [torch.ones(3), torch.ones(2, 2)]
    assert depth.finite(tensors)
    tensors[1][0, 1] = bad
    assert not depth.finite(tensors)


def test_the_norm_of_large_gradients_is_not_infinite():
    assert depth.norm_l2([torch.full((4,), 1e30)]) == pytest.approx(2e30)
    assert depth.norm_l2([torch.tensor([3.0]), torch.tensor([4.0])]) == pytest.approx(5.0)


@pytest.mark.slow
@pytest.mark.parametrize("name", few(["deepnorm", "rezero"], 1))
def test_two_steps_of_a_thousand_sublayers_are_those_that_were_kept(name: str, data):
    row = depth.measure(name, 1e-3, data, layers=depth.SIZE.decoder_layers, steps=2)
    (old,) = (r for r in ROWS if (r.placement, r.rate) == (name, 1e-3))
    assert (row.sublayers, row.finite_steps) == (1000, 2)
    assert row.start_nats == pytest.approx(old.start_nats, rel=1e-3)
    assert row.train_nats == pytest.approx(old.train_nats[:2], rel=1e-2)
