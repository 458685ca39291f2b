"""Lines that no search can take are refused with their number, and before a run begins."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from lab.training.tiny import tiny, write_text
from normlab.errors import UserError
from normlab.lab.config import DecodeConfig
from normlab.lab.data.parallel import prepare
from normlab.lab.data.ragged import Ragged
from normlab.lab.tasks import search as module
from normlab.lab.tasks.search import n_best_lines
from normlab.lab.tasks.translation import Translation


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    root = tmp_path_factory.mktemp("long")
    return prepare(write_text(root / "text"), root / "data")


def test_what_is_too_long_to_translate_is_refused_by_line(prepared, monkeypatch):
    config, corpus = prepared
    model = Translation(tiny(config), corpus, torch.device("cpu")).build()
    tokenizer, lines = corpus.tokenizer, corpus.dev_text.source
    monkeypatch.setattr(module, "LONGEST_SENTENCE", 40)
    decode = DecodeConfig(beam=1)
    with pytest.raises(UserError, match=r"^line 3 .*120 tokens, .*\b39\b"):
        n_best_lines(model, tokenizer, [*lines[:2], "one " * 40], decode, count=1)
    with pytest.raises(UserError, match=r"^line 2 .*120 .*\bprefix\b"):
        n_best_lines(model, tokenizer, lines[:2], decode, count=1, prefixes=["", "one " * 40])
    with pytest.raises(UserError, match=r"line 1 .*1,000,000"):
        n_best_lines(model, tokenizer, ["x" * 10**6], decode, count=1)


@pytest.mark.parametrize("name", ["dev_src", "dev_tgt", "test_src"])
def test_what_no_search_takes_is_refused_before_training(prepared, name):
    config, corpus = prepared
    split, side = name.split("_")
    pairs = getattr(corpus, f"{split}_text")
    which = {"src": "source", "tgt": "target"}[side]
    long = [*getattr(pairs, which)[:-1], "one " * 4096]
    ids = Ragged.of(corpus.tokenizer.encode(long))
    changes = {f"{split}_text": replace(pairs, **{which: long})}
    if split == "dev":
        changes["dev"] = replace(corpus.dev, **{which: ids})
    with pytest.raises(UserError, match=rf"line {len(long)} .*12289"):
        Translation.check_text(tiny(config), replace(corpus, **changes))
    Translation.check_text(tiny(config), corpus)
