"""Files that are broken at random: each is read, or refused with a sentence, and never with a traceback.

The mutations are drawn from fixed seeds. A part runs with all other tests; the whole takes most of an hour:

    python -m pytest -m "slow or long" tests/bad_input/test_mutated_files.py
"""

from __future__ import annotations

from pathlib import Path

import pytest

from bad_input.readers import READERS, Reader, broken, copied, working_in
from cases import few

QUICK = {
    "a baseline of check": 12,
    "a declaration": 12,
    "a project's file": 6,
    "a paper": 8,
    "a paper's regime.toml": 6,
    "a paper's runs.jsonl": 8,
    "a result of a paper": 4,
    "a table of pairs": 8,
    "the shard gpt2.bin": 6,
    "the shard tokens.npy": 6,
    "the index of a shard": 8,
    "a tokenizer of others": 6,
    "prepared data: manifest.json": 6,
    "a trial's journal": 4,
}
"""How many mutations each test run tries of the files that are made and read in a moment."""
WHOLE = 12
"""How many the whole tries for each file and reader."""

pytestmark = pytest.mark.filterwarnings("ignore")  # a warning is no traceback


def tracebacks(reader: Reader, seeds: range, folder: Path) -> list[str]:
    answers = [broken(reader, seed, folder / str(seed)) for seed in seeds]
    return [answer for answer in answers if answer]


@pytest.mark.parametrize("reader", few(READERS, 5), ids=lambda reader: reader.name)
@pytest.mark.slow
def test_a_good_file_is_read(reader: Reader, tmp_path: Path):
    file = copied(reader, tmp_path / "good")
    with working_in(tmp_path / "good"):
        reader.read(file)


@pytest.mark.parametrize("reader", [r for r in READERS if r.name in QUICK], ids=lambda reader: reader.name)
def test_a_broken_file_that_is_quickly_read_is_answered_with_a_sentence(reader: Reader, tmp_path: Path):
    assert tracebacks(reader, range(QUICK[reader.name]), tmp_path) == []


@pytest.mark.parametrize("reader", READERS, ids=lambda reader: reader.name)
@pytest.mark.long
def test_a_broken_file_is_answered_with_a_sentence(reader: Reader, tmp_path: Path):
    assert tracebacks(reader, range(WHOLE), tmp_path) == []


def test_there_are_as_many_mutations_as_promised():
    assert QUICK.keys() <= {reader.name for reader in READERS}
    assert WHOLE * len(READERS) >= 500
