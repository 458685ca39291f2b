"""The fourth list of public reports: what it holds."""

from __future__ import annotations

from collections import Counter

import pytest

from corpus.public2 import page, run
from corpus.public2.collected import CASES as SECOND
from corpus.public3.collected import CASES as THIRD
from corpus.public4.collected import CASES
from normlab.checks.check import properties

THREADS = [case.thread for case in CASES.values() if case.faulty]


def test_every_fault_has_a_twin():
    roles = Counter(case.role for case in CASES.values())
    assert roles == {"fault": 40, "twin": 40, "sound": 30}
    assert len(set(THREADS)) == 40
    assert len({case.kind for case in CASES.values() if case.faulty}) >= 15


def test_no_thread_is_in_an_earlier_list_and_at_most_two_are_of_a_repository():
    earlier = [case.thread for case in (*SECOND.values(), *THIRD.values()) if case.faulty]
    assert set(earlier).isdisjoint(THREADS)
    repositories = Counter(thread.partition("#")[0] for thread in [*earlier, *THREADS])
    assert max(repositories.values()) <= 2


def test_no_name_is_in_an_earlier_list():
    assert (SECOND.keys() | THIRD.keys()).isdisjoint(CASES)


def test_each_case_says_what_it_is_by_known_properties():
    known = {each_property.name for each_property in properties()}
    for case in CASES.values():
        assert case.what, case.name
        assert {*case.named_by, *case.since} <= known, case.name


@pytest.mark.long
def test_each_case_trains_and_a_fault_differs_from_its_twin():
    assert run.try_all(list(CASES.values()))


def test_all_cases_were_judged_at_first_sight():
    rows = page.kept(page.FOURTH / page.FIRST_SIGHT.name)["rows"]
    assert {(row["name"], row["role"]) for row in rows} == {(case.name, case.role) for case in CASES.values()}


def test_what_was_mended_names_cases_and_properties():
    told = page.told_as_mended(page.FOURTH)
    known = {each_property.name for each_property in properties()}
    assert {entry["property"] for entry in told["statement"]} <= known
    assert {name for entry in told["statement"] for name in entry["cases"]} <= CASES.keys()
