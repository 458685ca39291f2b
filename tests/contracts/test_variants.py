"""What every registered placement, norm, embedding and scheme promises."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import Tensor

from contracts.variants import SIZE, UNIFORM, VARIANTS, VOCAB, label, perturbed, tokens
from normlab.init import SCHEMES, profile_
from normlab.nn import Placement, Seq2Seq
from normlab.run.checkpoint import load_checkpoint, save_checkpoint
from normlab.spec.config import ModelConfig
from normlab.tasks.build import build_seq2seq
from normlab.tasks.loss import label_smoothed

every_variant = pytest.mark.parametrize("config", VARIANTS, ids=label)


def started(config: ModelConfig, seed: int = 3) -> Seq2Seq:
    """A float32 model as training begins, dropout included."""
    model = build_seq2seq(replace(config, dropout=0.1), VOCAB, seed)
    profile_(model, lambda: model(*tokens()))
    return model


def backward(model: Seq2Seq) -> Tensor:
    source, target = tokens()
    model.zero_grad()
    sums = label_smoothed(model(source, target), target, 0.1, None, 0)
    sums.loss.backward()
    return sums.loss.detach()


def grads(model: Seq2Seq) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@every_variant
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_forward_and_backward_are_finite_and_repeatable(config, precision):
    """The same seeds give the same bits: start, dropout, loss and gradients."""
    seen = []
    for _ in range(2):
        model = started(config)
        torch.manual_seed(8)
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            loss = backward(model)
        seen.append((loss, grads(model)))
    (loss, first), (again, second) = seen
    assert loss.isfinite()
    assert torch.equal(loss, again)
    assert all(g.isfinite().all() and g.dtype == torch.float32 for g in first.values())
    assert all(torch.equal(g, second[name]) for name, g in first.items())


@every_variant
def test_bf16_is_near_fp32(config):
    model = started(config).eval()
    plain = backward(model)
    expected = grads(model)
    with torch.autocast("cpu", torch.bfloat16):
        mixed = backward(model)
    assert mixed.item() == pytest.approx(plain.item(), rel=0.01)
    distance = sum(float((g - expected[name]).square().sum()) for name, g in grads(model).items())
    length = sum(float(g.square().sum()) for g in expected.values())
    assert distance < 0.1**2 * length


@every_variant
def test_every_parameter_gets_a_gradient(config):
    """At the start too, but for branches that ReZero has switched off: alpha = 0 hides their weights."""
    model = perturbed(config)
    backward(model)
    assert without_gradient(model) == set()
    model = started(config)
    backward(model)
    assert without_gradient(model) == {n for n, _ in model.named_parameters() if switched_off(config, n)}


def without_gradient(model: Seq2Seq) -> set[str]:
    return {n for n, p in model.named_parameters() if p.grad is None or not p.grad.any()}


def switched_off(config: ModelConfig, name: str) -> bool:
    """Whether a parameter sits behind an alpha of 0; behind a decoder of these sits the whole encoder."""
    if config.decoder_placement == "rezero" and name.startswith("encoder."):
        return True
    stack = name.split(".")[0]
    return ".f." in name and getattr(config, f"{stack}_placement") == "rezero"


@every_variant
def test_a_checkpoint_gives_back_weights_and_optimiser(config, tmp_path, monkeypatch):
    """Saved, loaded into another start and stepped: the same bits as without the pause."""
    monkeypatch.setattr("os.fsync", lambda descriptor: None)  # slow, and no power fails here
    first, second = started(config), started(config, seed=4)
    optimisers = [
        torch.optim.Adam(m.parameters(), lr=torch.tensor(1e-3), fused=True) for m in (first, second)
    ]
    backward(first)
    optimisers[0].step()
    save_checkpoint(tmp_path / "last", first, optimisers[0], {"step": 1, "seconds": 0.5})
    assert {p.suffix for p in (tmp_path / "last").iterdir()} == {".safetensors", ".json"}
    assert load_checkpoint(tmp_path / "last", second, optimisers[1]) == {"step": 1, "seconds": 0.5}
    for model, optimiser in zip((first, second), optimisers, strict=True):
        torch.manual_seed(2)
        backward(model)
        optimiser.step()
    for (name, a), (_, b) in zip(first.named_parameters(), second.named_parameters(), strict=True):
        assert torch.equal(a, b), name


@pytest.mark.parametrize(("placement", "scheme"), list(product(Placement.registry, SCHEMES)))
def test_standard_deviations_at_the_start(placement, scheme):
    """Scheme times the placement's gain for every matrix; biases 0."""
    config = replace(SIZE, dim=64, ffn_dim=192, encoder_placement=placement, decoder_placement=placement)
    model = build_seq2seq(replace(config, scheme=scheme), VOCAB, 1)
    attention = {"xavier": (2 / (64 + 64)) ** 0.5, "smallinit": (2 / (64 + 4 * 64)) ** 0.5}[scheme]
    ffn = (2 / (64 + 192)) ** 0.5
    for stack in (model.encoder, model.decoder):
        for sublayer in stack.sublayers:
            for name, weight in sublayer.f.matrices().items():
                expected = sublayer.place.gain(name) * (ffn if name.startswith("ffn") else attention)
                spread = 5 / (2 * weight.numel()) ** 0.5
                assert weight.std().item() == pytest.approx(expected, rel=spread), name
                assert abs(weight.mean().item()) < 5 * expected / weight.numel() ** 0.5
            assert not any(p.any() for n, p in sublayer.f.named_parameters() if n.endswith("bias"))


@pytest.mark.parametrize("config", UNIFORM, ids=label)
def test_a_start_without_data_is_left_alone_by_the_profile(config):
    model = build_seq2seq(config, VOCAB, 1)
    before = {n: p.clone() for n, p in model.named_parameters()}
    called = []
    given = profile_(model, lambda: (called.append(1), model(*tokens())))
    profiled = Placement.registry[config.encoder_placement].profiled
    assert (len(called), len(given)) == ((1, 10) if profiled else (0, 0))
    changed = {n for n, p in model.named_parameters() if not torch.equal(p, before[n])}
    assert {n.split(".place.")[0] for n in changed} == given.keys()


def test_starts_of_one_seed_differ_by_the_gain_alone():
    """Two placements compared on one seed begin with the same weights, up to the gain."""
    models = {
        name: build_seq2seq(replace(SIZE, encoder_placement=name, decoder_placement=name), VOCAB, 6)
        for name in Placement.registry
    }
    for model in models.values():
        for ours, base in zip(model.decoder.sublayers, models["post"].decoder.sublayers, strict=True):
            for name, weight in ours.f.matrices().items():
                expected = ours.place.gain(name) * base.f.matrices()[name]
                torch.testing.assert_close(weight, expected)
    other = build_seq2seq(SIZE, VOCAB, 7)
    drawn = [m.weight.flatten()[:9] for m in other.modules() if isinstance(m, torch.nn.Linear)]
    assert len({tuple(w.tolist()) for w in drawn}) == len(drawn), "no two matrices share their draw"
    assert not torch.equal(other.embedding.weight, models["post"].embedding.weight)
