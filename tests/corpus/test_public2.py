"""The second list of public reports: what it holds, how it is judged, and its page."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from cases import each
from corpus.public2 import page, run
from corpus.public2.case import PublicCase
from corpus.public2.collected import CASES
from normlab.checks.check import properties

FAULT = PublicCase(
    "leak", dict, "masks", "", True, "owner/name#1", ("causality", "reach"), "blocks.0*|layers"
)


def test_every_case_is_there():
    assert Counter(case.role for case in CASES.values()) == {"fault": 40, "twin": 40, "sound": 30}
    assert len({case.thread for case in CASES.values() if case.faulty}) == 40
    repositories = Counter(case.thread.partition("#")[0] for case in CASES.values() if case.faulty)
    assert max(repositories.values()) <= 2
    assert len({case.kind for case in CASES.values() if case.faulty}) >= 15


def test_each_case_says_what_it_is_by_known_properties():
    known = {each_property.name for each_property in properties()}
    for case in CASES.values():
        assert case.what, case.name
        assert set(case.named_by) <= known, case.name


@pytest.mark.wide
def test_each_case_trains_and_a_fault_differs_from_its_twin():
    assert run.try_all(list(CASES.values()))


RIGHT, OTHER = ("causality", "blocks.0.attn", ""), ("order", "blocks.0", "")


@each(
    ("failures", "word"),
    [
        ([RIGHT, OTHER], "named first"),
        ([OTHER, RIGHT], "named"),
        ([OTHER, ("causality", "blocks.1", "")], "flagged"),
        ([], "missed"),
    ],
)
def test_a_fault_is_named_by_its_properties_at_its_place(failures, word):
    assert run.verdict(FAULT, failures) == word


def test_a_sound_step_has_no_failure():
    sound = replace(FAULT, faulty=False)
    assert run.verdict(sound, []) == "clean"
    assert run.verdict(sound, [RIGHT]) == "false alarm"


def test_a_fault_that_no_property_speaks_of_can_only_be_flagged():
    assert run.verdict(replace(FAULT, named_by=()), [RIGHT]) == "flagged"


def test_the_page_is_the_generated_one():
    assert page.PAGE.read_text(encoding="utf-8") == page.page(), (
        f"docs/faults.md is old; type: {page.COMMAND}"
    )


def test_what_was_mended_and_what_is_left_are_cases():
    told = page.tomllib.loads(page.MENDED.read_text(encoding="utf-8"))
    known = {each_property.name for each_property in properties()}
    assert {one["property"] for one in told["statement"]} <= known
    assert {name for one in told["statement"] for name in one["cases"]} <= CASES.keys()
    after = {row["name"]: row["verdict"] for row in page.kept(page.AFTER_MENDING)["rows"]}
    missed = {name for name, verdict in after.items() if verdict in ("missed", "flagged")}
    assert missed <= {one["case"] for one in told["left"]}


@each("file", [page.FIRST_SIGHT, page.IN_FULL])
def test_all_cases_were_judged(file):
    rows = page.kept(file)["rows"]
    assert {(row["name"], row["role"]) for row in rows} == {(case.name, case.role) for case in CASES.values()}
