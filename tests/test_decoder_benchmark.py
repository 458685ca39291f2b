"""The decoders that ``benchmarks/decoder.py`` times are what it says they are."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).resolve().parents[1] / "benchmarks"


@pytest.fixture
def decoder(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)  # it imports its neighbours
    already = set(sys.modules)
    import decoder

    yield decoder
    for name in set(sys.modules) - already:
        if Path(getattr(sys.modules[name], "__file__", None) or "/").parent == FOLDER:
            del sys.modules[name]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")  # x-transformers
@pytest.mark.parametrize("shape", ["GPT-2", "Llama"])
def test_peers_have_our_size_and_one_has_our_logits(decoder, shape):
    _, built = decoder.models(shape)
    ids = torch.randint(4, decoder.VOCAB, (2, 16), generator=torch.Generator().manual_seed(0))
    sizes = {name: sum(p.numel() for p in model.parameters()) for name, model in built.items()}
    assert max(sizes.values()) < 1.002 * min(sizes.values()), sizes
    with torch.no_grad():
        logits = {name: model.eval()(ids) for name, model in built.items()}
    assert {tuple(found.shape) for found in logits.values()} == {(2, 16, decoder.VOCAB)}
    for name, found in logits.items():
        if name.startswith("Hugging Face"):
            torch.testing.assert_close(found, logits[decoder.OURS], atol=1e-5, rtol=0)


def test_both_settings_of_threads_are_compiled_unless_told_otherwise(decoder, monkeypatch):
    asked = []
    monkeypatch.setattr(decoder, "steps", lambda *a, compiled: asked.append((a[2], compiled)) or [])
    monkeypatch.setattr(decoder, "generation", lambda *a: [])
    monkeypatch.setattr(decoder, "where_time_goes", lambda *a: [])
    monkeypatch.setattr(sys, "argv", ["decoder.py", "--threads", "1", "2", "--shapes", "Llama"])
    decoder.main()
    assert set(asked) == {(1, True), (2, True)}
