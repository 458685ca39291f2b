"""The presets mean one thing, whether a structure was read or is known."""

import pytest
import torch
from torch import nn

from diagnosis.small import BATCH, labelled, translating
from normlab.diagnosis import PRESETS, Probe, observe, read_structure
from normlab.diagnosis.presets import MEASURED, SublayerSite, preset_probes, stream_sites
from normlab.diagnosis.probes import StreamSignal
from normlab.lab.training.probing import activation_probes

X = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(1))
UNSEEN = {"inside"}
"""Signals whose rows carry the name of another."""


def encoder():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 8, batch_first=True, norm_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def rows(model, probes, loss=lambda model: model(X).square().sum()):
    found = []
    with observe(model, probes, found.append) as observer:
        loss(model).backward()
        observer.flush(0)
    keys = {(r.stack, r.index, r.module, r.signal, r.statistic): r.value for r in found}
    assert len(keys) == len(found)
    return keys


def kinds(found):
    return {(signal, statistic) for _, _, _, signal, statistic in found}


def test_the_stream_is_measured_after_each_sublayer():
    model = encoder().eval()
    structure = read_structure(model, X)
    found = rows(model, preset_probes(stream_sites(structure), "cheap"))
    after = {index: value for (stack, index, _, signal, _), value in found.items() if signal == "after"}
    x, expected = X, []
    for layer in model.layers:
        half = x + layer._sa_block(layer.norm1(x), None, None)
        x = half + layer._ff_block(layer.norm2(half))
        expected += [half, x]
    sizes = [y.square().mean().sqrt().item() for y in expected]
    assert [after[i] for i in range(4)] == pytest.approx(sizes, rel=1e-5)
    assert {stack for stack, *_ in found} == {"layers"}


def test_gradients_are_those_of_all_parameters_of_a_sublayer():
    model = encoder()
    found = rows(model, preset_probes(stream_sites(read_structure(model, X)), "standard"))
    layer = model.layers[1]
    own = [layer.norm2, layer.linear1, layer.linear2]
    expected = nn.utils.get_total_norm([p.grad for m in own for p in m.parameters()]).item()
    (value,) = [v for (_, i, _, signal, _), v in found.items() if (i, signal) == (3, "grad")]
    assert value == pytest.approx(expected, rel=1e-5)
    attention = nn.utils.get_total_norm([*layer.norm1.parameters(), *layer.self_attn.parameters()]).item()
    (value,) = [v for (_, i, _, signal, _), v in found.items() if (i, signal) == (2, "weight")]
    assert value == pytest.approx(attention, rel=1e-5)


def test_presets_grow_and_measure_what_the_table_says():
    model = encoder()
    structure = read_structure(model, X)
    sizes = []
    for preset in PRESETS:
        found = rows(model, preset_probes(stream_sites(structure), preset))
        wanted = {pair for pair in MEASURED[preset] if pair[0] not in UNSEEN}
        assert wanted <= kinds(found)
        for index in range(4):
            assert wanted <= kinds(key for key in found if key[1] == index), "at every sublayer"
        sizes.append(len(found))
    assert sizes == sorted(set(sizes))


@pytest.mark.parametrize("preset", PRESETS)
def test_our_trainer_measures_the_same_numbers(preset):
    subject = translating("pre")
    model, batch = subject.model, BATCH[:2]

    def loss(model):
        return labelled(model, batch)

    read = rows(model, preset_probes(stream_sites(read_structure(model, batch)), preset), loss)
    known = rows(model, activation_probes(model, preset), loss)
    activations = [
        {(s, i, signal, how): v for (s, i, _, signal, how), v in found.items()
         if signal.removeprefix("grad_") in ("before", "branch", "after")}
        for found in (read, known)
    ]  # fmt: skip
    assert activations[0] == activations[1]
    assert {s for s, *_ in activations[0]} == {"encoder.sublayers", "decoder.sublayers"}


def test_a_prefix_is_the_way_to_what_was_read():
    model = encoder()
    structure = read_structure(model, X)
    outer = nn.Sequential(model)
    model.eval()
    told = rows(outer, preset_probes(stream_sites(structure, "0."), "full"))
    model.zero_grad()
    inside = rows(model, preset_probes(stream_sites(structure), "full"))
    assert told == {(f"0.{s}", i, f"0.{m}", *what): v for (s, i, m, *what), v in inside.items()}


def test_weights_of_blocks():
    site = SublayerSite("h", None, ("h.0", "h.0.mlp"))
    for signal in ("weight", "grad"):
        stream = StreamSignal("h", None, signal)
        assert list(site.probes(signal, "l2")) == [
            Probe("h.0", signal, "l2", together=("h.0", "h.0.mlp"), stream=stream)
        ]


def test_a_preset_that_there_is_not():
    with pytest.raises(ValueError, match=r"'quick'.*cheap, .*full"):
        preset_probes(stream_sites(read_structure(encoder(), X)), "quick")
