"""The lists of public reports: what the later ones hold, and that all are judged as they were."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from corpus.public2 import collected as second
from corpus.public2 import page, run
from corpus.public2.case import PublicCase
from corpus.public3 import collected as third
from corpus.public4 import collected as fourth
from normlab.checks.check import properties

LISTS = {"public2": second.CASES, "public3": third.CASES, "public4": fourth.CASES}
KNOWN = {each.name for each in properties()}

later = pytest.mark.parametrize("name", ["public3", "public4"])


def folder_of(name: str) -> Path:
    return Path(__file__).parent / name


def threads_of(cases: Mapping[str, PublicCase]) -> list[str]:
    return [case.thread for case in cases.values() if case.faulty]


def earlier_than(name: str) -> list[Mapping[str, PublicCase]]:
    return [cases for other, cases in LISTS.items() if other < name]


@later
def test_every_case_is_there(name: str) -> None:
    cases = LISTS[name]
    assert Counter(case.role for case in cases.values()) == {"fault": 40, "twin": 40, "sound": 30}
    assert len(set(threads_of(cases))) == 40
    assert len({case.kind for case in cases.values() if case.faulty}) >= 15


@later
def test_no_thread_is_in_an_earlier_list_and_at_most_two_are_of_a_repository(name: str) -> None:
    threads = threads_of(LISTS[name])
    earlier = [thread for cases in earlier_than(name) for thread in threads_of(cases)]
    assert set(earlier).isdisjoint(threads)
    repositories = Counter(thread.partition("#")[0] for thread in [*earlier, *threads])
    assert max(repositories.values()) <= 2


@later
def test_no_name_is_in_an_earlier_list(name: str) -> None:
    for cases in earlier_than(name):
        assert cases.keys().isdisjoint(LISTS[name])


@later
def test_each_case_says_what_it_is_by_known_properties(name: str) -> None:
    for case in LISTS[name].values():
        assert case.what, case.name
        assert {*case.named_by, *case.since} <= KNOWN, case.name


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:Detected call of .lr_scheduler.step:UserWarning")  # a case's own fault
@later
def test_each_case_trains_and_a_fault_differs_from_its_twin(name: str) -> None:
    assert run.try_all(list(LISTS[name].values()))


@later
def test_all_cases_were_judged_at_first_sight(name: str) -> None:
    rows = page.kept(folder_of(name) / page.FIRST_SIGHT.name)["rows"]
    cases = LISTS[name].values()
    assert {(row["name"], row["role"]) for row in rows} == {(case.name, case.role) for case in cases}


@later
def test_what_was_mended_names_cases_and_properties(name: str) -> None:
    told = page.told_as_mended(folder_of(name))
    assert {entry["property"] for entry in told["statement"]} <= KNOWN
    assert {case for entry in told["statement"] for case in entry["cases"]} <= LISTS[name].keys()


def kept_verdicts() -> list[tuple[str, str, str]]:
    """The list, name and verdict of every case."""
    verdicts: list[tuple[str, str, Any]] = []
    for name in LISTS:
        rows = page.kept(folder_of(name) / page.AFTER_MENDING.name)["rows"]
        verdicts += [(name, row["name"], row["verdict"]) for row in rows]
    return verdicts


@pytest.mark.long
@pytest.mark.parametrize(("name", "case", "verdict"), kept_verdicts())
def test_a_case_is_judged_as_before(name: str, case: str, verdict: str) -> None:
    row = run.judged(LISTS[name][case], budget_s=60.0)
    assert (row.verdict, row.error) == (verdict, "")
