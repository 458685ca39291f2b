"""Every planted error is caught by the tests, which pass without one in `make test`."""

from __future__ import annotations

from typing import Final

import pytest

import mutations
from mutation import Mutation
from mutations import FAILED_TESTS, MUTATIONS
from mutations_of_instruments import INSTRUMENTS

ROOMS: Final = ("checks", "trace", "trials", "judging")


@pytest.mark.long
@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: m.name)
def test_an_error_is_caught(mutation: Mutation):
    result = mutations.outcome_of(mutation)
    assert result.code == FAILED_TESTS, result.end_of_output
    assert result.first_failure.startswith("FAILED"), f"not a test failed: {result.end_of_output}"


def test_each_error_has_a_name_of_its_own_and_can_be_planted(tmp_path):
    assert len({m.name for m in MUTATIONS}) == len(MUTATIONS)
    for i, mutation in enumerate(MUTATIONS):
        package, source = tmp_path / str(i), mutations.ROOT / "src/normlab" / mutation.path
        (package / mutation.path).parent.mkdir(parents=True)
        before = source.read_text()
        (package / mutation.path).write_text(before)
        mutation.plant(package)
        assert (package / mutation.path).read_text() != before
        compile((package / mutation.path).read_text(), mutation.path, "exec")


@pytest.mark.parametrize("room", ROOMS)
def test_there_are_eight_errors_in_each_room_of_instruments(room: str):
    assert len(mutations.chosen_by([], room)) >= 8


def test_every_test_that_must_catch_an_error_exists():
    for mutation in INSTRUMENTS:
        assert mutation.own
        for test in mutation.own:
            file, _, name = test.partition("::")
            assert f"def {name}" in (mutations.ROOT / file).read_text(encoding="utf-8"), mutation.name


def test_errors_are_chosen_by_a_word_and_by_their_room():
    assert mutations.chosen_by([], None) == list(MUTATIONS)
    assert [m.name for m in mutations.chosen_by(["gamma"], None)] == ["gamma left out"]
    assert mutations.chosen_by(["gamma"], "checks") == []
    assert {m.room for m in mutations.chosen_by([], "trace")} == {"trace"}


def test_a_stale_error_says_so(tmp_path):
    stale = Mutation("gone", "nn/norm.py", {"absent": "anything"})
    with pytest.raises(ValueError, match=r"'gone': 0 .*nn/norm\.py, .*'absent'"):
        stale.plant(mutations.copy_of_package(tmp_path))
