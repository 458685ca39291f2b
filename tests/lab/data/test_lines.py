"""Texts are worked through in parts, and what is said of them is what all of it at once would say."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from normlab.errors import UserError
from normlab.lab.data import text as module
from normlab.lab.data.sources import open_lines
from normlab.lab.data.text import LONGEST_WORD, paired_parts, parts, require_parallel, survey

TEXTS = st.lists(st.text("aé \u2028", max_size=6), max_size=30)


@settings(max_examples=100)
@given(TEXTS, TEXTS, st.integers(1, 8), st.integers(1, 20))
def test_parts_are_small_and_hold_everything(source, target, most_lines, most_characters):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "LINES_AT_A_TIME", most_lines)
        patch.setattr(module, "CHARACTERS_AT_A_TIME", most_characters)
        single, double, found = list(parts(source)), list(paired_parts(source, target)), survey(source, "it")
    assert [line for part in single for line in part] == source
    both = [pair for part in double for pair in zip(*part, strict=True)]
    assert both == list(zip(source, target, strict=False))
    for part in (*single, *([s + t for s, t in zip(*part, strict=True)] for part in double)):
        assert 1 <= len(part) <= most_lines
        assert sum(map(len, part[:-1])) < most_characters, "only the last line may be too much"
    assert found.lines == len(source)
    assert found.blank == (not any(line.strip() for line in source))
    assert found.digest == hashlib.sha256("".join(f"{line}\n" for line in source).encode()).digest()


def test_nothing_is_read_before_it_is_asked_for(tmp_path):
    text = open_lines(tmp_path / "later")
    with pytest.raises(FileNotFoundError, match="later"):
        next(iter(text))
    (tmp_path / "later").write_text("now\n")
    assert list(text) == ["now"]


def test_parallel_text_must_be_parallel():
    require_parallel(("a.de", "a.en"), (2, 2))
    with pytest.raises(UserError, match=r"a\.de .*\b2\b.* a\.en .*\b1\b"):
        require_parallel(("a.de", "a.en"), (2, 1))
    with pytest.raises(UserError, match=r"a\.fr"):
        require_parallel(("a.de", "a.fr"), (2, 0))


def test_a_word_that_tokenizers_take_minutes_for_is_refused_by_line():
    longest = "x" * LONGEST_WORD
    assert survey([f"{longest} {longest}"], "a.de").lines == 1
    lines = ["a"] * module.LINES_AT_A_TIME + ["b", f"c {longest}x"]
    with pytest.raises(UserError, match=rf"a\.de, line {len(lines):,} .*{LONGEST_WORD + 1:,}"):
        survey(lines, "a.de")
