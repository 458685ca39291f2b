import importlib
import math
from collections import Counter

import pytest

from cases import each
from normlab.lab.config import Config, DataConfig
from normlab.lab.tasks.scores import bleu_of_sums, bleu_tokens, corpus_bleu, score, sentence_statistics
from normlab.lab.tasks.translation import Translation

HYP = ["the cat sat on the mat .", "a man in a red hat is here .", "there is nothing (at all) ."]
REF = ["the cat sat on a mat .", "a man with a red hat is here .", "there is nothing , at all ."]


def multi_bleu(hypotheses, references):
    """``multi-bleu.perl`` written out: clipped matches, geometric mean, brevity penalty, no smoothing."""

    def grams(words, n):
        return Counter(tuple(words[i : i + n]) for i in range(len(words) - n + 1))

    pairs = [(h.split(), r.split()) for h, r in zip(hypotheses, references, strict=True)]
    logs = 0.0
    for n in range(1, 5):
        matched = sum(sum((grams(h, n) & grams(r, n)).values()) for h, r in pairs)
        total = sum(max(0, len(h) - n + 1) for h, _ in pairs)
        if not matched:
            return 0.0
        logs += math.log(matched / total) / 4
    made, wanted = sum(len(h) for h, _ in pairs), sum(len(r) for _, r in pairs)
    return 100 * math.exp(logs + min(0.0, 1 - wanted / made))


@pytest.mark.parametrize("cut", [7, 4])
def test_tokenised_bleu_is_that_of_the_perl_script(cut):
    hypotheses = [" ".join(h.split()[:cut]) for h in HYP]
    scores = score(hypotheses, REF, tokenised=True)
    assert scores.bleu_tokenised == pytest.approx(multi_bleu(hypotheses, REF), abs=1e-9)
    assert "tok:none" in scores.signature_tokenised


def test_raw_text_is_split_at_punctuation_before():
    raw = [line.replace(" .", ".").replace(" ,", ",") for line in HYP]
    references = [line.replace(" .", ".").replace(" ,", ",") for line in REF]
    split = [line.replace("(", "( ").replace(")", " )") for line in HYP]
    scores = score(raw, references)
    assert scores.bleu_tokenised == pytest.approx(multi_bleu(split, REF), abs=1e-9)
    assert "tok:intl" in scores.signature_tokenised
    assert "smooth:none" in scores.signature_tokenised


def test_a_copy_scores_full_marks_and_silence_none():
    best = score(REF, REF)
    assert (best.bleu, best.chrf, best.bleu_tokenised) == pytest.approx((100, 100, 100))
    none = score(["", "", ""], REF)
    assert (none.bleu, none.chrf, none.bleu_tokenised) == (0, 0, 0)


def test_case_counts():
    assert score(["The Cat Sat On The Mat"], ["the cat sat on the mat"]).bleu_tokenised == 0


def test_signatures_say_what_was_measured():
    scores = score(HYP, REF)
    for part in ("nrefs:1", "case:mixed", "tok:13a", "smooth:exp", "version:"):
        assert part in scores.signature
    assert "nc:6" in scores.signature_chrf


LANGUAGES = {
    "zh": (["我们今天去北京,好吗?"] * 2, ["我们明天去北京,好吗?"] * 2),
    "ja": (["私は毎日本を読みます。"] * 2, ["私は今日本を読みました。"] * 2),
    "ko": (["나는 매일 책을 읽는다."] * 2, ["나는 오늘 책을 읽었다."] * 2),
}


@pytest.mark.parametrize(("language", "tokens"), [("zh", "zh"), ("ja", "ja-mecab"), ("ko", "ko-mecab")])
def test_languages_with_tokens_of_their_own(language, tokens):
    pytest.importorskip({"zh": "sacrebleu", "ja": "MeCab", "ko": "mecab_ko"}[language])
    hypotheses, references = LANGUAGES[language]
    scores, plain = (score(hypotheses, references, target_lang=name) for name in (language, ""))
    assert scores.signature.split("|tok:")[1].startswith(tokens)
    assert scores.signature_tokenised.split("|tok:")[1].startswith(tokens)
    assert 0 < scores.bleu != plain.bleu, "13a takes a Chinese sentence for one word"
    assert (scores.chrf, scores.signature_chrf) == (plain.chrf, plain.signature_chrf)
    assert corpus_bleu(hypotheses, references, target_lang=language) == scores.bleu
    sums = sentence_statistics(hypotheses, references, target_lang=language).sum(axis=0)
    assert bleu_of_sums(sums) == pytest.approx(scores.bleu)


def test_chinese_is_scored_character_by_character():
    assert corpus_bleu(["一二三四"], ["一二三四五"], target_lang="zh") == pytest.approx(
        100 * math.exp(1 - 5 / 4)
    )


@each(
    ("language", "tokens"),
    [
        ("", "13a"),
        ("en", "13a"),
        ("deu", "13a"),
        ("zho_Hans", "zh"),
        ("jpn", "ja-mecab"),
        ("zh-TW", "zh"),
        ("ZH_cn", "zh"),
        ("ja-JP", "ja-mecab"),
    ],
)
def test_the_language_decides_on_the_tokens(language, tokens):
    assert bleu_tokens(language) == tokens


@pytest.mark.parametrize(
    ("language", "module"), [("ja", "tokenizer_ja_mecab"), ("ko-KR", "tokenizer_ko_mecab")]
)
def test_a_missing_package_is_named_before_anything_is_trained(monkeypatch, language, module):
    tokenizers = importlib.import_module(f"sacrebleu.tokenizers.{module}")
    monkeypatch.setattr(tokenizers, "MeCab", None)
    said = (
        f"^BLEU of the target language '{language}' needs MeCab to find words; type: pip install "
        rf"'normlab\[{language[:2]}\]'$"
    )
    with pytest.raises(ValueError, match=said):
        score(HYP, REF, target_lang=language)
    with pytest.raises(ValueError, match=said):
        Translation.check(Config(data=DataConfig(target_lang=language)))


def test_corpus_bleu_is_the_same_number():
    assert corpus_bleu(HYP, REF) == score(HYP, REF).bleu


def test_order_matters_but_only_in_pairs():
    assert corpus_bleu(HYP[::-1], REF[::-1]) == pytest.approx(corpus_bleu(HYP, REF))
    assert corpus_bleu(HYP[::-1], REF) < corpus_bleu(HYP, REF)


def test_a_hundred_tokenised_lines_score_without_a_word(capfd, caplog):
    corpus_bleu(["a b c d ."] * 100, ["a b c d ."] * 100)
    score(["a b c d ."] * 100, ["a b c d ."] * 100, tokenised=True)
    assert (capfd.readouterr().err, caplog.text) == ("", "")


@pytest.mark.parametrize("function", [score, corpus_bleu])
def test_lengths_are_compared(function):
    with pytest.raises(ValueError, match=r"\b2 .*\b3\b"):
        function(HYP[:2], REF)
    with pytest.raises(ValueError, match="nothing"):
        function([], [])
