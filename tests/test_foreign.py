"""The page of other people's models is the generated one, and agrees with theory."""

from __future__ import annotations

import pytest

from scripts import script

pytest.importorskip("transformers", reason="the extra normlab[hf] is not installed")
pytest.importorskip("x_transformers", reason="the extra normlab[hf] is not installed")

foreign = script("foreign")
KEPT = foreign.kept()


def test_the_page_is_the_generated_one():
    assert foreign.PAGE.read_text(encoding="utf-8") == foreign.page(), (
        "docs/foreign-models.md is old; type: python benchmarks/foreign.py --page"
    )


def test_every_class_is_read_whole():
    assert [row["name"] for row in KEPT["classes"]] == list(foreign.CLASSES)
    for row in KEPT["classes"]:
        assert row["unread"] == []
        assert {stack["layers"] for stack in row["stacks"]} == {row["layers"]} == {foreign.LAYERS}
        assert all(len(stack["placements"]) == 1 for stack in row["stacks"])
        assert (["other"] in [stack["placements"] for stack in row["stacks"]]) == (
            row["name"] == foreign.IN_DOUBT
        )


def test_the_deep_ones_are_both_placements_at_both_starts():
    kinds = [(row["name"], row["std"], row["layers"]) for row in KEPT["deep"]]
    names = ("BertForMaskedLM", "GPT2LMHeadModel")
    assert kinds == [(name, std, foreign.DEEP) for std in foreign.STARTS[::-1] for name in names]
    leaning = [
        next(f["severity"] for f in row["findings"] if f["name"] == "residual_dependency")
        for row in KEPT["deep"]
    ]
    assert leaning[:2] == ["warning", "note"]


@pytest.mark.slow
def test_the_findings_are_worded_as_they_are_today():
    today = {f["name"]: f["sentence"] for f in foreign.deep(foreign.bert, 2, foreign.STARTS[0])["findings"]}
    kept = {f["name"]: f["sentence"] for f in KEPT["deep"][2]["findings"]}
    assert today.keys() & kept.keys() >= {"placement", "hidden_scale", "residual_dependency", "updates"}
    for name in today.keys() & kept.keys():
        words = [sentence.split()[:3] for sentence in (today[name], kept[name])]
        assert words[0] == words[1], "type: python benchmarks/foreign.py --write"
