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
    assert sums("judge") == [17, 0, 0]
    assert sums("one run, as many runs as the judge") == [57, 18, 8]
    assert [f"{KEPT[setting]['noise']:.3f}" for setting in ("untuned", "tuned")] == ["0.030", "0.039"]
    assert max(abs(row["gain"]) for row in KEPT["tuned"]["real"]) < KEPT["tuned"]["noise"]
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
