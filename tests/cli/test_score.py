"""``normlab run score``: measures of translations that are there already."""

import re

import pytest

from normlab.cli.main import main
from normlab.lab.tasks.scores import corpus_bleu


def test_score_prints_every_measure(tmp_path, capsys):
    text = tmp_path / "text"
    text.write_text("the cat sat on the mat\na second line of words\n")
    assert main(["run", "score", str(text), str(text)]) == 0
    printed = capsys.readouterr().out
    assert "100.00" in printed
    assert "tok:13a" in printed


def test_score_takes_tokenised_text_as_it_is(tmp_path, capsys):
    text = tmp_path / "text"
    text.write_text("the cat &apos;s mat , and so on\na second line of words\n")
    assert main(["run", "score", str(text), str(text), "--tokenised"]) == 0
    assert "tok:none" in capsys.readouterr().out


def test_score_has_the_tokens_of_the_language(tmp_path, capsys):
    texts = {"ref": "我们今天去北京,好吗?", "near": "我们明天去北京,好吗?", "far": "他们今天来上海,对吗?"}
    for name, line in texts.items():
        (tmp_path / name).write_text(f"{line}\n" * 5, encoding="utf-8")
    ref, near, far = (str(tmp_path / name) for name in texts)
    assert main(["run", "score", near, ref, "--target-lang", "zh", "--against", far]) == 0
    out = capsys.readouterr().out
    five = {name: [line] * 5 for name, line in texts.items()}
    better, worse = (corpus_bleu(five[name], five["ref"], target_lang="zh") for name in ("near", "far"))
    assert f"bleu                 {better:.2f}\n" in out
    assert "tok:zh" in out
    assert f"{far}: {better - worse:+.2f} BLEU" in out


@pytest.mark.slow
def test_score_says_whether_a_difference_may_be_chance(tmp_path, capsys):
    references = [f"{'a b c d e f g h'[: 2 * (i % 7) + 3]} {i}" for i in range(40)]
    for name, lines in {"ref": references, "good": references, "bad": ["a b c x"] * 40}.items():
        (tmp_path / name).write_text("".join(f"{line}\n" for line in lines))
    ref, good, bad = (str(tmp_path / name) for name in ("ref", "good", "bad"))
    assert main(["run", "score", good, ref, "--against", bad]) == 0
    (said,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("minus"))
    p = r"p [<=] 0\.00\d"
    assert re.match(
        rf"minus {bad}: \+\d+\.\d\d BLEU; paired bootstrap {p}, approximate randomisation {p}$", said
    )
    assert main(["run", "score", good, ref, "--against", good]) == 0
    *_, said = capsys.readouterr().out.splitlines()
    assert said == f"minus {good}: nothing, the translations are the same"
    (tmp_path / "short").write_text("a b c d\n")
    assert main(["run", "score", good, ref, "--against", str(tmp_path / "short")]) == 2
    said = "normlab: 1 translation but 40 references; give one line for each\n"
    assert capsys.readouterr() == ("", said), "nothing is scored before everything is read"
    assert main(["run", "score", "-", ref, "--against", "-"]) == 2
    assert capsys.readouterr().err == (
        "normlab: - is standard input, which can be read only once; give the other texts as files\n"
    )
