"""Probes that only look, and ``torch.compile``."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from cases import each, few
from contracts.variants import (
    ALONE,
    PARTS,
    VARIANTS,
    assert_close,
    backward,
    grads,
    kind_of,
    label,
    perturbed,
    started,
)
from normlab.lab.config import ModelConfig
from normlab.nn import Decoder, TokenModel

DECODERS = [c for c in ALONE if kind_of(c) is Decoder]
# The package that turns graphs into machine code imports torch's own deprecated parts.
inductor = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")


@pytest.mark.wide
@each("config", PARTS, ids=label)
def test_probes_on_every_module_change_no_bit(config):
    """Neither of the loss nor of a gradient; and once they are off no hook is left."""
    model = started(config)
    plain = seeded(model)
    seen: dict[str, list[Tensor]] = {}
    hooks = [module.register_forward_hook(probe(name, seen)) for name, module in model.named_modules()]
    probed = seeded(model)
    for hook in hooks:
        hook.remove()
    assert equal(probed, plain)
    assert equal(seeded(model), plain)
    paths = {f"{stack}.sublayers.1" for stack in ("encoder", "decoder") if hasattr(model, stack)}
    assert paths | {f"{path}.f" for path in paths} <= seen.keys()
    assert all(value.isfinite() for values in seen.values() for value in values)
    assert not any(m._forward_hooks or m._forward_pre_hooks or m._backward_hooks for m in model.modules())


def probe(name: str, seen: dict[str, list[Tensor]]) -> Any:
    """A hook that takes the scales of what a module gives, and of the gradients that come back."""

    def look(module: nn.Module, args: Any, output: Any) -> None:
        for tensor in output if isinstance(output, tuple) else (output,):
            note(tensor)
            if tensor.requires_grad:
                tensor.register_hook(note)

    def note(tensor: Tensor) -> None:
        values = tensor.detach().float()
        seen.setdefault(name, []).extend((values.square().mean(), values.abs().amax()))

    return look


def seeded(model: TokenModel) -> tuple[Tensor, dict[str, Tensor]]:
    torch.manual_seed(9)
    return backward(model), grads(model)


def equal(some: tuple[Tensor, dict[str, Tensor]], other: tuple[Tensor, dict[str, Tensor]]) -> bool:
    """Bit by bit."""
    (loss, first), (again, second) = some, other
    same = first.keys() == second.keys() and all(torch.equal(g, second[n]) for n, g in first.items())
    return torch.equal(loss, again) and same


def compiled_equals_eager(config: ModelConfig, backend: str) -> None:
    """One graph of one layer a stack; loss and gradients."""
    layers = {f"{s}_layers": min(1, getattr(config, f"{s}_layers")) for s in ("encoder", "decoder")}
    model = perturbed(replace(config, **layers))
    loss, expected = backward(model), grads(model)
    torch._dynamo.reset()
    counters.clear()
    model.compile(backend=backend, fullgraph=True)
    assert_close(backward(model), loss)
    assert_close(grads(model), expected)
    assert counters["stats"]["unique_graphs"] == 1
    torch._dynamo.reset()


@pytest.mark.parametrize("config", DECODERS, ids=label)
def test_a_layer_compiles_into_one_graph(config):
    compiled_equals_eager(config, "eager")


@pytest.mark.wide
@pytest.mark.parametrize("config", VARIANTS, ids=label)
def test_compiled_equals_eager(config):
    compiled_equals_eager(config, "aot_eager")


@pytest.mark.slow
@inductor
@pytest.mark.parametrize("config", few([DECODERS[0], DECODERS[-1]], 1), ids=label)
def test_compiled_to_machine_code_equals_eager(config):
    compiled_equals_eager(config, "inductor")


@pytest.mark.slow
@inductor
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_dropout_compiles_too(backend):
    model = started(replace(DECODERS[0], decoder_layers=1, attention_dropout=0.2, ffn_dropout=0.2))
    torch._dynamo.reset()
    model.compile(backend=backend, fullgraph=True)
    losses = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        losses.append(backward(model).item())
    assert losses[0] == losses[1] != losses[2]
    torch._dynamo.reset()
