"""The exact sentence for what is typed, and for the files that are named there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from bad_input.cases import COMPARED, CONFIGS, TEXTS, TYPED, UNPARSED
from bad_input.damage import DAMAGED
from bad_input.prompt import GOOD, refused, runs_made
from normlab.cli.main import main


@pytest.mark.parametrize(("flags", "sentence"), TYPED.values(), ids=list(TYPED))
def test_flags(place, capsys, flags, sentence):
    assert refused([*GOOD, *flags.split()], capsys) == sentence
    assert runs_made() == []


@pytest.mark.parametrize(("flags", "sentence"), COMPARED.values(), ids=list(COMPARED))
def test_comparisons(place, capsys, flags, sentence):
    words = ["compare", *GOOD[1 : GOOD.index("--recipe")], *flags.split()]
    assert refused(words, capsys) == sentence
    assert runs_made() == []


@pytest.mark.parametrize(("flags", "sentence"), UNPARSED.values(), ids=list(UNPARSED))
def test_what_the_parser_refuses(place, capsys, flags, sentence):
    with pytest.raises(SystemExit) as stopped:
        main([*GOOD, *flags.split()])
    assert stopped.value.code == 2
    told = capsys.readouterr()
    assert sentence in " ".join(re.sub(r"[│╭╮╰╯─]|-{5,}", " ", told.out + told.err).split())
    assert not Path("runs").exists()


@pytest.mark.parametrize(("files", "flags", "sentence"), TEXTS.values(), ids=list(TEXTS))
def test_texts(place, capsys, files, flags, sentence):
    for name, content in files.items():
        (place / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    assert refused([*GOOD, *flags.split()], capsys) == sentence
    assert runs_made() == []


def test_blocks_longer_than_the_learned_positions(place, capsys):
    words = ["--train-text", "train_tgt.txt", "--dev-text", "dev_tgt.txt", "--vocab-size", "100"]
    flags = ["--recipe", "pre+learned", "--warmup-steps", "0", "--block-len", "64", "--max-positions", "40"]
    assert refused(["train", *words, *flags], capsys) == (
        "a block has 64 positions, and the model has learned positions for 40; type --block-len 40, or "
        "--max-positions 64"
    )
    assert runs_made() == []


@pytest.mark.parametrize(("content", "sentence"), CONFIGS.values(), ids=list(CONFIGS))
def test_configurations(tmp_path, monkeypatch, capsys, content, sentence):
    monkeypatch.chdir(tmp_path)
    Path("c.json").write_bytes(content if isinstance(content, bytes) else content.encode())
    assert refused(["train", "--config", "c.json"], capsys) == sentence
    assert runs_made() == []


def test_there_are_as_many_cases_as_promised():
    tables = (TYPED, COMPARED, UNPARSED, TEXTS, CONFIGS, DAMAGED)
    sentences = [case[-1] for table in tables for case in table.values()]
    assert len(sentences) >= 90
    assert len(set(sentences)) >= 80, "and hardly one is there twice"
