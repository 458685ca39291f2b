"""Probes of a stream that was read."""

import pytest
import torch
from torch import nn

from normlab.diagnosis import PRESETS, Probe, Tap, observe, read_structure
from normlab.diagnosis.probing.presets import _at, stream_probes, weight_probes

X = torch.randn(2, 3, 8)


def encoder():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 8, batch_first=True, norm_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def rows(model, probes):
    found = []
    with observe(model, probes, found.append) as observer:
        model(X).square().sum().backward()
        observer.flush(0)
    return {(r.module, r.probe): r.value for r in found}


def test_the_stream_is_measured_after_each_sublayer():
    model = encoder()
    structure = read_structure(model, X)
    seen = rows(model.eval(), stream_probes(structure, "cheap"))
    (stack,) = structure.stacks
    assert len(seen) == len(stack.sublayers) == 4
    x = X
    for layer in model.layers:
        x = layer(x)
    assert seen["layers.1", "output.rms"] == pytest.approx(x.square().mean().sqrt().item(), rel=1e-5)


def test_presets_grow_and_every_probe_finds_something():
    model = encoder()
    structure = read_structure(model, X)
    sizes = {}
    for preset in PRESETS:
        probes = stream_probes(structure, preset)
        assert len(set(probes)) == len(probes)
        seen = rows(model, probes)
        kinds = {name for _, name in seen}
        assert {f"{p.signal}.{p.statistic}" for p in probes} == kinds
        sizes[preset] = len(seen)
    assert sizes["cheap"] < sizes["standard"] < sizes["full"]


def test_a_prefix_is_the_way_to_what_was_read():
    model = encoder()
    structure = read_structure(model, X)
    outer = nn.Sequential(model)
    inside, outside = stream_probes(structure, "full"), stream_probes(structure, "full", prefix="0.")
    model.eval()
    told = rows(outer, outside)
    model.zero_grad()
    assert told == {(f"0.{module}", probe): value for (module, probe), value in rows(model, inside).items()}


def test_a_tensor_that_may_not_be_the_first_is_measured_with_the_others():
    assert _at(Tap("m", "output", (1,)), "a.", "rms") == Probe("a.m", "output", "rms", every_tensor=True)
    assert _at(Tap("m", "output", ()), "", "rms") == Probe("m", "output", "rms")


def test_weights_of_a_model_that_is_its_own_container():
    assert weight_probes(["", "h"]) == [
        Probe(name, signal, "l2") for name in ("*", "h.*") for signal in ("weight", "grad")
    ]


def test_a_preset_that_there_is_not():
    with pytest.raises(ValueError, match="no preset 'quick'; there are cheap, standard, full"):
        stream_probes(read_structure(encoder(), X), "quick")
