"""Means, slopes and their intervals, against NumPy and against how often they hold."""

from __future__ import annotations

import math

import numpy as np
import pytest

from normlab.reproduce.lab import Lab, describe, geometric, log_slope, mean, mean_ratio, size, slope


def test_a_mean_has_student_s_interval():
    values = [1.0, 2.0, 4.0, 9.0]
    found = mean(values)
    half = 3.182446 * np.std(values, ddof=1) / 2
    assert found.value == pytest.approx(4.0)
    assert (found.low, found.high) == pytest.approx((4.0 - half, 4.0 + half))


def test_one_value_is_exact():
    found = mean([3.0])
    assert (found.value, found.low, found.high) == (3.0, 3.0, 3.0)


def test_the_interval_of_a_mean_holds_as_often_as_it_says():
    random = np.random.default_rng(0)
    hits = [(m := mean(random.normal(5.0, 2.0, 4).tolist())).low <= 5.0 <= m.high for _ in range(600)]
    assert 0.93 <= np.mean(hits) <= 0.97


def test_a_slope_is_that_of_least_squares():
    x, random = [1.0, 2.0, 5.0, 7.0], np.random.default_rng(1)
    curves = random.normal(size=(3, 4)).tolist()
    expected = [np.polyfit(x, y, 1)[0] for y in curves]
    found = slope(x, curves)
    assert found.value == pytest.approx(np.mean(expected))
    assert found.high - found.low == pytest.approx(2 * 4.302653 * np.std(expected, ddof=1) / math.sqrt(3))


def test_an_exponent_is_found():
    depths = [6, 8, 10, 12, 14]
    found = log_slope(depths, [[b * n**-0.45 for n in depths] for b in (1.0, 3.0)])
    assert found.value == pytest.approx(-0.45)
    assert found.high - found.low == pytest.approx(0.0, abs=1e-9)


def test_a_geometric_mean():
    assert geometric([1.0, 4.0, 16.0]) == pytest.approx(4.0)


def test_models_are_named_by_their_depth():
    model = size("small", "admin", 14)
    assert describe(model) == "admin 14-14"
    assert (model.dim, model.ffn_dim, model.heads) == (512, 1024, 4)


def test_without_the_text_it_is_the_built_in_corpus_and_says_so(tmp_path, monkeypatch):
    monkeypatch.delenv("NORMLAB_DATA", raising=False)
    assert "built-in corpus" in Lab(tmp_path).text("iwslt14.de-en")
    assert "built-in corpus" in Lab(tmp_path, tmp_path).text("iwslt14.de-en")


def test_a_folder_with_the_text_is_used(tmp_path):
    home = tmp_path / "iwslt14.de-en"
    home.mkdir()
    for split, pairs in (("train.partial", 40), ("valid", 5), ("test", 5)):
        for language, word in (("de", "wort"), ("en", "word")):
            lines = [f"{word} {i} {word}{i % 7}\n" for i in range(pairs)]
            (home / f"{split}.{language}").write_text("".join(lines), encoding="utf-8")
    lab = Lab(tmp_path / "runs", tmp_path)
    assert lab.text("iwslt14.de-en").startswith("iwslt14.de-en, train.partial")
    first, second = lab.batches("iwslt14.de-en", 128, 2)
    assert first["source"].shape[0] == first.batch.target_out.shape[0]
    assert not (
        first["source"].shape == second["source"].shape and bool((first["source"] == second["source"]).all())
    )


def test_ratios_are_averaged_as_logarithms():
    found = mean_ratio([0.5, 2.0, 1.0])
    assert found.value == pytest.approx(1.0)
    assert found.low == pytest.approx(1 / found.high)
