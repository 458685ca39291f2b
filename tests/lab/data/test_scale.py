"""A large text needs no more memory than a small one, and the page that says so is the generated one."""

from __future__ import annotations

import pytest

from scripts import script

data = script("data")


def test_the_page_is_the_generated_one():
    assert data.PAGE.read_text(encoding="utf-8") == data.page(data.kept()), (
        "docs/data-scale.md is old; type: python benchmarks/data.py --page"
    )


def test_memory_does_not_grow_with_the_text():
    rows = data.kept()
    assert rows[0].pairs <= 10_000
    assert rows[-1].pairs >= 10_000_000
    for peak in ("prepare_mib", "training_mib"):
        assert max(getattr(row, peak) for row in rows) - getattr(rows[0], peak) <= data.MOST_MIB


@pytest.mark.slow
def test_invented_text_is_the_same_each_time_and_parallel():
    first, again = (list(data.sides(300, seed=5)) for _ in range(2))
    assert first == again
    [(source, target)] = first
    assert source.count("\n") == target.count("\n") == 300
    assert len(set(data.words(1))) == data.WORDS


@pytest.mark.slow
def test_thirty_times_the_text_in_the_same_memory(tmp_path):
    small, large = (data.measured(pairs, tmp_path, times=4) for pairs in (10_000, 300_000))
    assert large.text_mib > 25 * small.text_mib
    assert large.prepare_mib - small.prepare_mib < 150, "the text alone, as lists of strings, is 150 MiB"
    assert large.training_mib - small.training_mib < 60, (
        "one and the same text: 635 to 769 in single trainings"
    )
