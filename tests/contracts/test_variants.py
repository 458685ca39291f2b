"""The promises of every registered variant: initial weights, gradients and checkpoints."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from cases import each
from contracts.outsiders import NAMES, enrolled
from contracts.variants import (
    BY_PLACEMENT,
    CONFIG,
    FOREIGN,
    OUTSIDE,
    PARTS,
    SINGLE,
    VARIANTS,
    backward,
    build,
    grads,
    inputs,
    label,
    logits_of,
    started,
    uniform,
)
from normlab.lab.training.checkpoint import load_checkpoint, save_checkpoint
from normlab.lab.training.parallel import SingleProcess
from normlab.nn import Branch, Placement, ProfiledPlacement, Sublayer
from normlab.nn.init import SCHEMES, profile_

every_variant = each("config", VARIANTS, ids=label)
SCHEME_NAMES = [*SCHEMES, NAMES["scheme"]]
every_part = pytest.mark.parametrize("config", PARTS, ids=label)


@every_part
def test_forward_and_backward_are_finite_and_repeatable(config):
    """The same seeds give the same bits: start, dropout, loss and gradients."""
    models = [started(config), started(config)]
    for bf16 in (False, True):
        seen = []
        for model in models:
            torch.manual_seed(8)
            with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
                loss = backward(model)
            seen.append((loss, grads(model)))
        (loss, first), (again, second) = seen
        assert loss.isfinite()
        assert torch.equal(loss, again)
        assert all(g.isfinite().all() and g.dtype == torch.float32 for g in first.values())
        assert all(torch.equal(g, second[name]) for name, g in first.items())


@pytest.mark.slow
@each("config", dict.fromkeys(SINGLE + OUTSIDE + FOREIGN), ids=label)
def test_bf16_is_near_fp32(config):
    """Over fp32 weights and with bf16 ones; without ReLU, whose units rounding turns on or off."""
    smooth = "gelu" if config.activation == "relu" else config.activation
    model = started(replace(config, activation=smooth)).eval()
    plain, expected = backward(model), grads(model)
    for autocast in (True, False):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            mixed = backward(model if autocast else model.bfloat16())
        assert mixed.item() == pytest.approx(plain.item(), rel=0.01)
        assert distance(grads(model), expected) < 0.05


@pytest.mark.slow
@each("config", PARTS, ids=label)
def test_bf16_in_and_out(config):
    """A model of bf16 weights keeps every stream, logit and gradient in bf16."""
    model = started(config).bfloat16()
    types = []
    for module in model.modules():
        if isinstance(module, Sublayer):
            module.register_forward_hook(
                lambda m, args, stream: types.extend(t.dtype for t in tensors(stream))
            )
    assert logits_of(model, *inputs(model)).dtype == torch.bfloat16
    assert len(types) >= config.encoder_layers + config.decoder_layers
    backward(model)
    types += [g.dtype for g in grads(model).values()]
    assert set(types) == {torch.bfloat16}


def distance(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Between two sets of gradients, as a share of the second one's length."""
    apart = sum(float((g.float() - expected[name]).square().sum()) for name, g in found.items())
    return (apart / sum(float(g.square().sum()) for g in expected.values())) ** 0.5


def tensors(stream: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The tensors of a stream."""
    return stream if isinstance(stream, tuple) else (stream,)


@pytest.mark.slow
@each("config", PARTS, ids=label)
def test_a_checkpoint_gives_back_weights_and_optimizer(config, tmp_path):
    """Saved, loaded into another start and stepped: the same bits as without the pause."""
    first, second = started(config), started(config, seed=4)
    optimizers = [
        torch.optim.Adam(m.parameters(), lr=torch.tensor(1e-3), fused=True) for m in (first, second)
    ]
    backward(first)
    optimizers[0].step()
    state = SingleProcess(first).state_dict(optimizers[0])
    save_checkpoint(tmp_path / "last", state | {"progress": {"step": 1, "seconds": 0.5}})
    assert {p.suffix for p in (tmp_path / "last").iterdir()} == {".safetensors", ".json"}
    checkpoint = load_checkpoint(tmp_path / "last", second, optimizers[1])
    assert (checkpoint.progress().step, checkpoint.progress().seconds) == (1, 0.5)
    for model, optimizer in zip((first, second), optimizers, strict=True):
        torch.manual_seed(2)
        backward(model)
        optimizer.step()
    for (name, a), (_, b) in zip(first.named_parameters(), second.named_parameters(), strict=True):
        assert torch.equal(a, b), name


@pytest.mark.slow
def test_scalars_have_a_shape():
    """Sharding refuses parameters without dimensions."""
    assert [f"{label(c)}: {n}" for c in PARTS for n, p in build(c).named_parameters() if not p.dim()] == []


@pytest.mark.slow
@every_variant
def test_a_start_without_data_is_left_alone_by_the_profile(config):
    model = build(config)
    before = {n: p.clone() for n, p in model.named_parameters()}
    called = []
    given = profile_(model, lambda: (called.append(1), model(*inputs(model))))
    places = {n: m.place for n, m in model.named_modules() if isinstance(m, Sublayer)}
    asking = {n for n, place in places.items() if isinstance(place, ProfiledPlacement)}
    assert given.keys() == asking
    assert len(called) == bool(asking)
    changed = {n for n, p in model.named_parameters() if not torch.equal(p, before[n])}
    assert {n.split(".place.")[0] for n in changed} <= asking


@pytest.mark.slow
@each(
    "config",
    [*BY_PLACEMENT, OUTSIDE[0]] + [uniform("fixup", scheme=name) for name in SCHEME_NAMES],
    ids=label,
)
def test_starts_of_one_seed_differ_by_the_gain_alone(config):
    """Two placements compared on one seed begin with the same weights, up to the gain; biases 0."""
    model = build(config, 6)
    base = build(uniform("post", scheme=config.scheme), 6)
    for stack in ("encoder", "decoder"):
        for ours, theirs in zip(getattr(model, stack), getattr(base, stack), strict=True):
            for name, weight in ours.f.matrices().items():
                expected = ours.place.gain(ours.site, name) * theirs.f.matrices()[name]
                torch.testing.assert_close(weight, expected)
            added = {"bias", "before", "after"}
            assert not any(p.any() for n, p in ours.f.named_parameters() if n.split(".")[-1] in added)


@each("scheme", SCHEME_NAMES)
def test_no_two_matrices_share_their_draw(scheme):
    model, other = (build(replace(CONFIG, scheme=scheme, norm="rmsnorm"), seed) for seed in (6, 7))
    branches = [m for m in model.modules() if isinstance(m, Branch)]
    drawn = [w.flatten()[:9] for f in branches for w in f.matrices().values() if w.any()]
    assert len({tuple(w.tolist()) for w in drawn}) == len(drawn)
    assert not torch.equal(other.embedding.weight, model.embedding.weight)


def test_outsiders_are_registered_only_while_they_are_asked_for():
    name = NAMES["placement"]
    assert name not in Placement.registry
    with enrolled():
        assert Placement.registry[name].name == name
    assert name not in Placement.registry
