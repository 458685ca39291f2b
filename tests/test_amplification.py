"""The amplification page and the measurement behind it."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest
import torch

from normlab.nn import PAD, Encoder, Seq2Seq
from scripts import script

amplification = script("amplification")
KEPT = amplification.kept()
AGAIN = "python benchmarks/amplification.py"


# -------------------------------------------------------------------------------------- what is published


@pytest.mark.slow
def test_the_page_is_the_generated_one():
    assert amplification.PAGE.read_text(encoding="utf-8") == amplification.page(KEPT), (
        f"docs/amplification.md is old; type: {AGAIN} --page"
    )


def test_every_case_is_measured_once():
    done = [found.case for found in KEPT]
    wanted = set(amplification.cases())
    assert len(done) == len(set(done))
    assert wanted <= set(done), f"type: {AGAIN} --write"


@pytest.mark.slow
def test_at_least_ten_seeds_each_and_intervals_as_narrow_as_wanted():
    for name in amplification.FAMILIES:
        grown = amplification.growths(KEPT, name, "random", amplification.RATE)
        assert {g.placement for g in grown} == set(amplification.PLACEMENTS)
        assert all(g.seeds >= 10 for g in grown)
        for g in (g for g in grown if g.power is not None):
            assert (g.power.high - g.power.low) / 2 <= amplification.WANTED, g.placement


# ----------------------------------------------------------------------------------------------- the parts


@pytest.fixture
def small(monkeypatch):
    """One family of small models at three depths."""
    family = amplification.FAMILIES["encoder"]
    size = replace(family.size, dim=16, ffn_dim=16, heads=2)
    made = replace(family, size=size, layers=(1, 2, 3), more={"post": 3}, rates=(amplification.RATE,))
    monkeypatch.setattr(amplification, "FAMILIES", {"encoder": made})
    monkeypatch.setattr(amplification, "SEEDS", 2)


def made_up(exponent: float, placement: str = "post", scale: float = 1e-4) -> list:
    """Changes that follow a power of the depth, with two seeds."""
    rate, found = amplification.RATE, []
    for seed in range(2):
        for n in amplification.FAMILIES["encoder"].layers:
            change = scale * (1 + seed / 10) * (2 * n) ** exponent
            case = amplification.Case("encoder", placement, n, rate, seed)
            found.append(amplification.Measured(case, 2 * n, change, 0.0, 1.0))
    return found


def test_cases_are_all_depths_and_seeds(small):
    found = list(amplification.cases())
    assert [(c.placement, c.layers, c.seed) for c in found[:15]] == [
        *(("post", n, seed) for n in (1, 2, 3) for seed in range(3)),
        *(("pre", n, seed) for n in (1, 2, 3) for seed in range(2)),
    ]


def test_batches_are_whole_and_another_for_each_seed():
    (source,), wanted = amplification.batch_of(Encoder, 3)
    hidden = wanted != -100
    assert source.shape == wanted.shape == (amplification.BATCH, amplification.LENGTH)
    assert (source != PAD).all()
    assert 0.05 < hidden.float().mean() < 0.3
    assert (source[hidden] == amplification.UNK).all()
    (english, german), following = amplification.batch_of(Seq2Seq, 3)
    assert english[~hidden].equal(source[~hidden])
    assert german[:, 1:].equal(following[:, :-1])
    assert not amplification.batch_of(Seq2Seq, 2)[0][0].equal(english)


def test_a_case_is_measured_and_measured_again(small):
    cases = [case for case in amplification.cases() if case.placement == "pre"]
    first, structure = amplification.measure(cases[0])
    again, same = amplification.measure(cases[0], structure)
    other, _ = amplification.measure(cases[1], structure)
    assert same is structure
    assert first.sublayers == 2
    assert (again.random, again.update) == (first.random, first.update)
    assert other.random != first.random > 0 < first.update


def test_rezero_stands_still_until_its_scalars_move(small):
    found, _ = amplification.measure(amplification.Case("encoder", "rezero", 2, 5e-4, 0))
    assert found.random == 0.0
    assert found.update > 0.0


def test_lines_are_kept_and_one_that_was_cut_off_is_none(tmp_path, monkeypatch):
    monkeypatch.setattr(amplification, "RESULTS", tmp_path / "results/some.jsonl")
    assert amplification.kept() == []
    found = made_up(0.5)[:2]
    for one in found:
        amplification.keep(one)
    with amplification.RESULTS.open("a", encoding="utf-8") as file:
        file.write(json.dumps({"family": "encoder"})[:-1])
    assert len(amplification.kept()) == 2
    amplification.keep(made_up(0.5)[2])
    back = amplification.kept()
    found = made_up(0.5)[:3]
    assert [one.case for one in back] == [one.case for one in found]
    assert [one.random for one in back] == pytest.approx([one.random for one in found], rel=1e-5)


@pytest.mark.parametrize("exponent", [0.3, 1.0])
def test_the_exponent_is_that_of_the_changes(exponent: float):
    (grown,) = amplification.growths(made_up(exponent), "encoder", "random", amplification.RATE)
    assert grown.power.exponent == pytest.approx(exponent)
    assert grown.seeds == 2
    assert grown.means[6] == pytest.approx(1.05e-4 * 12**exponent)
    assert (grown.law, grown.fits["linear"].r2 > 0.999) == (
        {0.3: "log", 1.0: "linear"}[exponent],
        exponent == 1,
    )
    assert f"| {exponent:.2f} ± 0.00 |" in list(amplification.table([grown]))[-1]


def test_a_seed_that_lacks_a_depth_does_not_count():
    found = made_up(1.0)
    (grown,) = amplification.growths(found[:-1], "encoder", "random", amplification.RATE)
    assert grown.seeds == 1
    assert amplification.growths(found[:3], "encoder", "random", amplification.RATE) == []


def test_what_is_said():
    found = [*made_up(0.3), *made_up(0.3, "pre"), *made_up(-0.2, "deepnorm"), *made_up(1, "rezero", scale=0)]
    said = amplification.said(amplification.growths(found, "encoder", "random", amplification.RATE), "random")
    assert "`rezero`: nothing moved" in said
    assert re.search(r"Corollary 2 [^.]*does not [^.]*`post`", said)
    assert re.search(r"Corollary 1 [^.]*holds [^.]*`pre`", said)
    assert "`deepnorm` moves less" in said
    assert "0.1 or less" in said
    assert "saturated" not in said

    one = amplification.growths(found, *amplification.DRAWN, most=1)
    both = amplification.growths(found, *amplification.DRAWN)
    assert "`post` has p = 0.30 ± 0.00" in amplification.said(both, "random", one)
    assert "With 2 seeds" not in amplification.said(both, "random", both)

    large = amplification.growths(made_up(0.1, scale=1.0), "encoder", "random", amplification.RATE)
    assert re.search(r"`post` moved .*\b0\.5\b", amplification.said(large, "update"))
    spread = [
        replace(one, random=one.random * one.sublayers ** (0.2 * one.case.seed)) for one in made_up(1.0)
    ]
    wide = amplification.growths(spread, "encoder", "random", amplification.RATE)
    assert re.search(r"\babove 0\.1 .*`post`", amplification.said(wide, "random"))


@pytest.mark.slow
@pytest.mark.parametrize("placement", ["post", "deepnorm"])
def test_a_case_is_the_one_that_was_kept(placement: str):
    case = amplification.Case("encoder", placement, 6, amplification.RATE, 0)
    (old,) = (found for found in KEPT if found.case == case)
    torch.set_num_threads(1)
    found, _ = amplification.measure(case)
    assert found.random == pytest.approx(old.random, rel=1e-2)
    assert found.update == pytest.approx(old.update, rel=1e-2)


def test_the_picture_is_of_what_moved():
    found = [*made_up(1.0), *made_up(0.3, "pre"), *made_up(1, "rezero", scale=0)]
    drawn = amplification.draw(amplification.growths(found, *amplification.DRAWN))
    assert all(f">{name}</text>" in drawn for name in ("post", "pre"))
    assert "rezero" not in drawn
