"""The page of other people's models is the generated one, and agrees with theory."""

from __future__ import annotations

import re

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


def wordings(findings: list[dict[str, str]]) -> dict[tuple[str, str], str]:
    """The sentences by name and severity, with signs in place of the names of modules and of numbers."""
    sentences = {(f["name"], f["severity"]): f["sentence"] for f in findings}
    without_modules = {key: re.sub(r"\bbert\.[\w.]+", "M", said) for key, said in sentences.items()}
    return {key: re.sub(r"-?\d+(\.\d+)?", "N", said) for key, said in without_modules.items()}


@pytest.mark.slow
def test_the_findings_are_worded_as_they_are_today():
    """Numbers and layers differ, since the model of today's findings has two layers only."""
    today = wordings(foreign.deep(foreign.bert, 2, foreign.STARTS[0])["findings"])
    kept = wordings(KEPT["deep"][2]["findings"])
    of_both = today.keys() & kept.keys()  # the others have another severity, and so another advice
    assert {name for name, _ in of_both} >= {"placement", "hidden_scale", "residual_dependency", "updates"}
    for name_and_severity in of_both:
        assert today[name_and_severity] == kept[name_and_severity], (
            "type: python benchmarks/foreign.py --write"
        )
