"""Pretokenizers: text is split into words and joined again."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from cases import each
from normlab.cli.options import load as configuration
from normlab.errors import UserError
from normlab.lab.config import DataConfig
from normlab.lab.data.pretokenizer import Moses, PretokenizerChain, primary
from normlab.lab.data.sources import open_lines
from normlab.lab.data.tokenizer import BytePairs
from normlab.lab.data.vocabulary import vocabulary
from normlab.lab.tasks.language_model import LanguageModel


@each(
    ("language", "text", "words"),
    [
        ("en", "It's John's well-known cat, isn't it?", "It 's John 's well-known cat , isn 't it ?"),
        ("en", 'A "B" & [d] | (e).', 'A " B " & [ d ] | ( e ) .'),
        ("de", "Dr. Müller zahlt 3,50 €.", "Dr. Müller zahlt 3,50 € ."),
        ("fr", "L'homme qu'il a vu", "L' homme qu' il a vu"),
        ("gl", "Ola, mundo.", "Ola , mundo ."),
    ],
)
def test_text_is_split_and_joined_again(language, text, words):
    moses = Moses(language)
    assert moses.split(text) == words
    assert moses.join(words) == text


def test_nothing_is_escaped_and_nothing_unescaped():
    assert Moses("en").split("Q&A &apos; | ]") == "Q & A & apos ; | ]"
    assert Moses("en").join("&apos; &amp;") == "&apos; &amp;"


def test_white_space_becomes_one_space_and_an_empty_line_stays_empty():
    assert Moses("en").split(" a\t b\u00a0c \n") == "a b c"
    assert (Moses("en").split(""), Moses("en").join("")) == ("", "")


@pytest.mark.parametrize("language", ["zh-CN", "zh_TW", "ZH"])
def test_languages_may_have_regions(language):
    assert primary(language) == "zh"


def test_each_side_has_the_rules_of_its_language():
    inner = BytePairs.train(["L' homme isn 't , ."], 60)
    chain = PretokenizerChain(inner, "moses", ("fr", "en"))
    assert chain.encode(["L'homme."]) == inner.encode(["L' homme ."])
    assert chain.encode_target(["isn't."]) == inner.encode(["isn 't ."])
    assert chain.decode(inner.encode(["isn 't , ."])) == ["isn't,."]
    assert chain.vocab_size == inner.vocab_size
    config = DataConfig(pretokenizer="moses", source_lang="fr", target_lang="en", vocab_size=60)
    learned = vocabulary(config, ["L'homme."], ["isn't."])
    from_words = PretokenizerChain(BytePairs.train(["L' homme .", "isn 't ."], 60), "moses", ("fr", "en"))
    assert learned.to_json() == from_words.to_json(), "a vocabulary is learned from the same words"


def test_a_pretokenizer_needs_two_languages_and_a_known_name():
    with pytest.raises(UserError, match=r"'moses'.*--source-lang .*--target-lang en"):
        DataConfig(pretokenizer="moses", source_lang="de")
    with pytest.raises(UserError, match=r"moses.*'perl'"):
        DataConfig(pretokenizer="perl", source_lang="de", target_lang="en")
    with pytest.raises(UserError, match=r"'perl'.*moses"):
        PretokenizerChain(BytePairs.train(["a"], 9), "perl", ("de", "en"))


def test_a_language_model_reads_its_text_as_it_is():
    config = configuration("language_model")
    data = replace(config.data, pretokenizer="moses", source_lang="en", target_lang="en")
    with pytest.raises(ValueError, match=r"pretokenizer .*'moses'"):
        LanguageModel.check(replace(config, data=data))


RAW = {
    "multi30k/test2016.de": 0.995,
    "multi30k/test2016.en": 0.995,
    "multi30k/test2016.fr": 0.995,
    "ted.sk-en/test.en": 0.995,
    "wmt14.en-de/newstest2014.500.de": 0.96,
    "wmt14.en-de/newstest2014.500.en": 0.96,
}
"""Of so many lines the raw text comes back to the letter; the others differ in a blank at an apostrophe, a
slash or a quotation mark. French is left out where the text breaks its rule of a blank before : and %."""


@pytest.mark.skipif(
    not Path(os.environ.get("NORMLAB_DATA", "?")).joinpath("multi30k").is_dir(),
    reason="needs multi30k, ted.sk-en and wmt14.en-de in $NORMLAB_DATA",
)
@pytest.mark.parametrize(("name", "share"), RAW.items(), ids=list(RAW))
def test_real_sentences_come_back(name, share):
    lines = [" ".join(line.split()) for line in open_lines(f"$NORMLAB_DATA/{name}")]
    moses = Moses(name.rpartition(".")[2])
    back = [moses.join(moses.split(line)) for line in lines]
    same = sum(a == b for a, b in zip(lines, back, strict=True))
    assert share * len(lines) <= same
    assert [a.replace(" ", "") for a in back] == [a.replace(" ", "") for a in lines], (
        "blanks alone may differ"
    )
