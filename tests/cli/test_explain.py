"""``normlab explain``: every property has every part, and docs/check.md says the same."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest

import properties
from normlab.checks.explanations import explanations
from normlab.checks.property import OF_RANKS, ORDER, PROPERTIES
from normlab.cli.main import main

KNOWN = explanations()


def test_every_property_is_explained_and_nothing_else():
    assert set(KNOWN) == set(ORDER) == set(PROPERTIES)


@pytest.mark.parametrize("name", ORDER)
def test_every_part_is_there_and_the_source_is_either_a_bug_or_a_paper(name):
    parts = asdict(KNOWN[name])
    empty = {part for part, text in parts.items() if not text.strip()}
    assert empty in ({"bug"}, {"paper"})
    assert KNOWN[name].source.startswith("https://")
    assert all(text == text.strip() for text in parts.values())


def test_the_page_is_what_the_texts_say():
    page = properties.PAGE.read_text(encoding="utf-8")
    assert page == properties.rewritten(page), f"docs/check.md is stale; type: {properties.COMMAND}"


def test_a_property_without_a_section_on_the_page_gets_one_in_its_place():
    page = properties.PAGE.read_text(encoding="utf-8")
    section = next(found for found in properties.SECTION.finditer(page) if found[1] == "causality")
    headings = properties.SECTION.findall(page)
    without = page.replace(section[0], "")
    assert "causality" not in properties.SECTION.findall(without)
    assert sorted(properties.SECTION.findall(properties.rewritten(without))) == sorted(headings)


def test_without_a_property_all_are_listed_a_line_each(capsys):
    assert main(["explain"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == [*ORDER, *OF_RANKS]


def test_a_property_is_explained_in_all_its_parts(capsys):
    assert main(["explain", "causality"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    one = KNOWN["causality"]
    for part in (one.statement, one.formulation, one.source, one.cannot_see, one.advice):
        assert " ".join(part.split()) in said


def test_several_are_explained_and_programs_read_json(capsys):
    assert main(["explain", "causality", "rows", "--json"]) == 0
    first, second = json.loads(capsys.readouterr().out)
    assert (first["name"], second["name"]) == ("causality", "rows")
    assert first == asdict(KNOWN["causality"]) | {"source": KNOWN["causality"].source}


def test_a_near_miss_names_the_right_one(capsys):
    assert main(["explain", "causalty"]) == 2
    assert "mean 'causality'" in capsys.readouterr().err
