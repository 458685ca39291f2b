"""Texts and models of the studies."""

from __future__ import annotations

import pytest

from normlab.papers.lab import Lab, size


@pytest.fixture
def texts(tmp_path, monkeypatch):
    """A folder with forty short sentence pairs under the name of a text."""
    home = tmp_path / "iwslt14.de-en"
    home.mkdir()
    for split, pairs in (("train.partial", 40), ("valid", 5), ("test", 5)):
        for language, word in (("de", "wort"), ("en", "word")):
            lines = [f"{word} {i} " + f"{word}{i % 7} " * (i % 5) + "\n" for i in range(pairs)]
            (home / f"{split}.{language}").write_text("".join(lines), encoding="utf-8")
    monkeypatch.setenv("NORMLAB_DATA", str(tmp_path))
    return tmp_path


def test_a_model_has_the_width_of_its_size_and_the_depth_asked_for():
    model = size("small", "admin", 14)
    assert (model.decoder_placement, model.encoder_layers, model.decoder_layers) == ("admin", 14, 14)
    assert (model.dim, model.ffn_dim, model.heads) == (512, 1024, 4)


def test_without_the_text_it_is_the_built_in_corpus_and_says_so(tmp_path, monkeypatch):
    monkeypatch.delenv("NORMLAB_DATA", raising=False)
    assert "built-in corpus" in Lab(tmp_path).text("iwslt14.de-en")
    monkeypatch.setenv("NORMLAB_DATA", str(tmp_path))
    assert "built-in corpus" in Lab(tmp_path).text("iwslt14.de-en")


def test_a_folder_with_the_text_is_used(texts):
    lab = Lab(texts / "runs")
    assert lab.text("iwslt14.de-en").startswith("iwslt14.de-en, train.partial")
    first, second = lab.batches("iwslt14.de-en", 128, 2)
    assert first["source"].shape[0] == first.batch.target_out.shape[0]
    assert not (
        first["source"].shape == second["source"].shape and bool((first["source"] == second["source"]).all())
    )


def test_random_batches_mix_lengths_fit_and_share_no_sentence(texts):
    lab = Lab(texts / "runs")
    found = lab.random_batches("iwslt14.de-en", 128, 3)
    sentences = [tuple(row.tolist()) for one in found for row in one["source"]]
    stripped = [tuple(i for i in row if i) for row in sentences]
    assert len(set(stripped)) == len(stripped)
    for one in found:
        assert one["source"].numel() + one["target_in"].numel() <= 128
        assert len(set((one["source"] != 0).sum(1).tolist())) > 1
    with pytest.raises(ValueError, match="sentences"):
        lab.random_batches("iwslt14.de-en", 128, 40)
