"""Every planted error is caught by the tests, which pass without one in `make test`."""

from __future__ import annotations

import pytest

import mutations
from mutations import FAILED_TESTS, MUTATIONS, Mutation


@pytest.mark.slow
@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: m.name)
def test_an_error_is_caught(mutation):
    result = mutations.outcome_of(mutation)
    assert result.code == FAILED_TESTS
    assert result.first_failure.startswith("FAILED"), "a test failed, not an import"


def test_there_are_ten_errors_and_each_can_be_planted(tmp_path):
    assert len({m.name for m in MUTATIONS}) >= 10
    for i, mutation in enumerate(MUTATIONS):
        package, source = tmp_path / str(i), mutations.ROOT / "src/normlab" / mutation.path
        (package / mutation.path).parent.mkdir(parents=True)
        before = source.read_text()
        (package / mutation.path).write_text(before)
        mutation.plant(package)
        assert (package / mutation.path).read_text() != before
        compile((package / mutation.path).read_text(), mutation.path, "exec")


def test_a_stale_error_says_so(tmp_path):
    stale = Mutation("gone", "nn/norm.py", {"no such text": "anything"})
    with pytest.raises(
        ValueError, match=r"^mutation 'gone': 0 times in nn/norm.py, not once: 'no such text'"
    ):
        stale.plant(mutations.copy_of_package(tmp_path))
