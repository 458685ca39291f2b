"""The loop of sixty proposals: the tables of docs/judge-loop.md are those of the kept results."""

from __future__ import annotations

import json

import pytest

from scripts import script

loop = script("judge/loop")
KEPT = json.loads(loop.RESULTS.read_text(encoding="utf-8"))


def test_the_tables_are_those_of_the_kept_results():
    document = loop.DOCUMENT.read_text(encoding="utf-8")
    assert loop.written(document, KEPT) == document, "type: python benchmarks/judge/loop.py --write"
    for measured in KEPT.values():
        assert len(measured["real"]) == 20
        assert {len(several) for several in measured["loops"].values()} == {loop.ORDERS}


def sums(name):
    """What a way to keep has kept in all loops: all, without effect, harmful."""
    loops = [kept for measured in KEPT.values() for kept in measured["loops"][name]]
    return [sum(kept[key] for kept in loops) for key in ("kept", "without_effect", "harmful")]


def test_the_page_counts_what_was_kept():
    page = " ".join(loop.DOCUMENT.read_text(encoding="utf-8").split())
    kept, without_effect, harmful = sums("judge")
    assert f"Of the {kept} changes that the judge kept, all are real and none is harmful." in page
    assert (without_effect, harmful) == (0, 0)
    kept, without_effect, harmful = sums("one run, as many runs as the judge")
    assert (
        f"Of the {kept} that one run kept with as many runs, {without_effect} change nothing and "
        f"{harmful} are harmful alone."
    ) in page
    assert f"(a standard deviation of {KEPT['tuned']['noise']:.3f} over seeds)" in page
    assert f"several times the noise ({KEPT['untuned']['noise']:.3f})" in page


def test_what_the_page_says_of_all_loops_and_all_changes_holds():
    page = " ".join(loop.DOCUMENT.read_text(encoding="utf-8").split())
    assert "Every real change matters by less than the noise" in page
    assert max(abs(row["gain"]) for row in KEPT["tuned"]["real"]) < KEPT["tuned"]["noise"]
    assert "the final script of one-run keeping is better at equal budget, in all four loops" in page
    assert sum(len(measured["loops"]["judge"]) for measured in KEPT.values()) == 4
    for measured in KEPT.values():
        by_judge = measured["loops"]["judge"]
        by_one_run = measured["loops"]["one run, as many runs as the judge"]
        for judge, one_run in zip(by_judge, by_one_run, strict=True):
            assert one_run["runs"] == judge["runs"]
            assert one_run["gain"] > judge["gain"] > judge["margin"]


@pytest.mark.parametrize("setting", ["tuned", "untuned"])
def test_sixty_proposals_are_made_in_each_order(setting):
    start, real = loop.SETTINGS[setting]
    for order in range(loop.ORDERS):
        every = loop.proposals(real, order)
        assert len(every) == 60
        assert sum("salt" in proposal for proposal in every) == loop.NULLS
        assert all(loop.changed(start, proposal) != start for proposal in every)


def test_a_run_is_the_same_again_and_differs_by_its_salt():
    options = loop.changed(loop.Options(), {"steps": 3})
    assert loop.train(options) == loop.train(options)
    assert loop.train(options) != loop.train(loop.changed(options, {"salt": 1}))
