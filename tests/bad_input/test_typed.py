"""Flags, texts and configurations that cannot be used: the facts of the answer, and no run is made."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from bad_input.cases import COMPARED, CONFIGS, TEXTS, TYPED, UNPARSED
from bad_input.damage import DAMAGED
from bad_input.prompt import GOOD, lacking, refused, runs_made
from cases import each
from normlab.cli.main import main


@pytest.mark.slow
@each(("flags", "facts"), TYPED.values(), ids=list(TYPED))
def test_flags(place, capsys, flags, facts):
    assert not lacking(refused([*GOOD, *flags.split()], capsys), facts)
    assert runs_made() == []


@pytest.mark.slow
@each(("flags", "facts"), COMPARED.values(), ids=list(COMPARED))
def test_comparisons(place, capsys, flags, facts):
    words = ["compare", *GOOD[1 : GOOD.index("--recipe")], *flags.split()]
    assert not lacking(refused(words, capsys), facts)
    assert runs_made() == []


@pytest.mark.parametrize(("flags", "facts"), UNPARSED.values(), ids=list(UNPARSED))
def test_what_the_parser_refuses(place, capsys, flags, facts):
    with pytest.raises(SystemExit) as stopped:
        main([*GOOD, *flags.split()])
    assert stopped.value.code == 2
    told = capsys.readouterr()
    said = " ".join(re.sub(r"[│╭╮╰╯─]|-{5,}", " ", told.out + told.err).split())
    assert not lacking(said, facts)
    assert not Path("runs").exists()


@pytest.mark.slow
@each(("files", "flags", "facts"), TEXTS.values(), ids=list(TEXTS))
def test_texts(place, capsys, files, flags, facts):
    for name, content in files.items():
        (place / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    assert not lacking(refused([*GOOD, *flags.split()], capsys), facts)
    assert runs_made() == []


def test_blocks_longer_than_the_learned_positions(place, capsys):
    words = ["--train-text", "train_tgt.txt", "--dev-text", "dev_tgt.txt", "--vocab-size", "300"]
    flags = ["--recipe", "pre+learned", "--warmup-steps", "0", "--block-len", "64", "--max-positions", "40"]
    said = refused(["train", *words, *flags], capsys)
    assert not lacking(said, "64 | 40 | --block-len 40 | --max-positions 64")
    assert runs_made() == []


@each(("content", "facts"), CONFIGS.values(), ids=list(CONFIGS))
def test_configurations(tmp_path, monkeypatch, capsys, content, facts):
    monkeypatch.chdir(tmp_path)
    Path("c.json").write_bytes(content if isinstance(content, bytes) else content.encode())
    assert not lacking(refused(["train", "--config", "c.json"], capsys), facts)
    assert runs_made() == []


def test_there_are_as_many_cases_as_promised():
    tables = (TYPED, COMPARED, UNPARSED, TEXTS, CONFIGS, DAMAGED)
    facts = [case[-1] for table in tables for case in table.values()]
    assert len(facts) >= 90
    assert len(set(facts)) >= 80, "and hardly one is there twice"
