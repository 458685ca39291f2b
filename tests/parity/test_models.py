"""Streams, logits, losses and gradients of the authors' own models, with their weights in ours."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from normlab.lab.config import ModelConfig
from normlab.lab.tasks.task import label_smoothed
from normlab.nn import ENCODER_LAYER, Context, Placement, RMSNorm, Seq2Seq, Stack, stack_of
from normlab.nn.init import profile_
from oracles.comparing import TOLERANCE
from parity.arrays import Case, case, equal, load_, same_gradients

PAIRS = {
    "admin_code": "admin_code",
    "residual": "residual",
    "b2t": "b2t",
    "rezero": "rezero",
    "tfixup": "tfixup",
    "subln": "subln",
    "deepnorm": "deepnorm",
}
"""An encoder-decoder on two streams: file to placement."""
SINGLES = {
    "mixln": "mixln",
    "lnscale": "lnscale",
    "lnscale_olmo": "lnscale",
    "periln": "periln",
    "olmo2": "olmo2",
}
"""A single stack with branches of the file: file to placement."""
TEARS = {
    "tears_post_ln": ("post", {}),
    "tears_pre_ln": ("pre", {}),
    "tears_pre_fixnorm_ln": ("pre", {"embedding": "fixnorm"}),
    "tears_pre_fixnorm_scalenorm": ("pre", {"embedding": "fixnorm", "norm": "scalenorm"}),
}
"""A whole Transformer: file to placement and other parts."""
IN_FLOAT32 = 1e-6
"""Our table of sinusoids is rounded to float32."""


def config_of(arrays: Case, placement: str, **choices: Any) -> ModelConfig:
    names = ("dim", "ffn_dim", "heads", "encoder_layers", "decoder_layers")
    sizes: dict[str, Any] = {name: int(arrays[f"hyper.{name}"]) for name in names}
    return ModelConfig(
        **sizes, encoder_placement=placement, decoder_placement=placement, dropout=0.0, **choices
    )


def model_of(arrays: Case, placement: str, **choices: Any) -> Any:
    """The model in float64 and evaluation mode with the file's weights."""
    vocabulary = len(arrays["embed.weight"]) if "embed.weight" in arrays else 1
    model = Seq2Seq(config_of(arrays, placement, **choices), vocabulary).double().eval()
    load_(model, arrays)
    return model


def streams(model: Any, arrays: Case) -> tuple[Tensor, Tensor]:
    """The outputs of encoder and decoder."""
    source, target = ~arrays["pad.enc"], ~arrays["pad.dec"]
    memory = model.encoder(arrays["in.enc"], Context(padding_mask=source))
    context = Context(padding_mask=target, memory=memory, memory_mask=source)
    return memory, model.decoder(arrays["in.dec"], context)


def check_pair(model: Any, arrays: Case) -> None:
    memory, output = streams(model, arrays)
    real = ~arrays["pad.dec"]
    equal(memory[~arrays["pad.enc"]], arrays["out.enc"][~arrays["pad.enc"]], what="encoder")
    equal(output[real], arrays["out.dec"][real], what="decoder")
    probe = output[real].sin().sum()
    equal(probe, arrays["out.probe"])
    same_gradients(model, probe, arrays)


# ----------------------------------------------------------------------------------- encoder and decoder


@pytest.mark.parametrize("name", sorted(PAIRS.keys() - {"admin_code", "residual"}))
def test_encoder_and_decoder(name):
    arrays = case(name)
    check_pair(model_of(arrays, PAIRS[name]), arrays)


def test_residual_with_the_final_epsilon_of_its_authors():
    arrays = case("residual")
    model = model_of(arrays, "residual")
    for stack in (model.encoder, model.decoder):
        stack.end.norm.eps = float(arrays["hyper.end_eps"])
    check_pair(model, arrays)


def test_admin_as_its_authors_profile_it():
    arrays = case("admin_code")
    ones = {n.replace("norm.bias", "omega"): torch.ones(16) for n in arrays if n.endswith("norm.bias")}
    model = model_of({**arrays, **ones}, "admin_code")
    profile_(model, lambda: streams(model, arrays))
    for name, stack in (("enc", model.encoder), ("dec", model.decoder)):
        equal(
            torch.stack([s.place.omega for s in stack]), arrays[f"out.{name}.omega"][:, None].expand(-1, 16)
        )
    check_pair(model, arrays)


# -------------------------------------------------------------------------------------- single stacks


class Branch(nn.Module):
    """The stand-in for attention and feed-forward, sum_s m[t, s] b tanh(a x[s])."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.m = (nn.Parameter(torch.empty(n)) for n in ((24, 16), (16, 24), (7, 7)))

    def forward(self, x: Tensor) -> Tensor:
        return self.m @ ((x @ self.a.T).tanh() @ self.b.T)


@pytest.mark.parametrize("name", SINGLES)
def test_a_single_stack(name):
    arrays = case(name)
    layers, dim = int(arrays["hyper.layers"]), int(arrays["hyper.dim"])
    first = next(stack_of(ENCODER_LAYER, layers, dim, norm=partial(RMSNorm, eps=float(arrays["hyper.eps"]))))
    branches = [Branch() for _ in range(first.sublayers)]
    stack = Stack.of(branches, Placement.registry[SINGLES[name]], first).double()
    load_(stack, arrays)
    output = stack(arrays["in.x"])
    equal(output, arrays["out.x"])
    probe = output.sin().sum()
    equal(probe, arrays["out.probe"])
    same_gradients(stack, probe, arrays)


# -------------------------------------------------------------------------------- whole models and losses


def outputs(model: Any, arrays: Case) -> dict[str, Tensor]:
    """Whatever the model computes, under the file's names."""
    memory, mask = model.encode(arrays["in.src"])
    hidden = model.decode(arrays["in.tgt"], memory, mask)
    logits = model.embedding.logits(hidden)
    smoothing = float(arrays["hyper.label_smoothing"])
    sums = label_smoothed(logits, arrays["in.target_out"], smoothing, arrays["in.allowed"], 0)
    return {"enc": memory, "dec": hidden, "logits": logits, "loss": sums.loss, "nll": sums.nll}


def check_outputs(found: dict[str, Tensor], arrays: Case, *, tolerance: float = TOLERANCE) -> None:
    for name, array in found.items():
        real = ~arrays[f"pad.{'src' if name == 'enc' else 'tgt'}"] if array.dim() else ...
        equal(array[real], arrays[f"out.{name}"][real], tolerance=tolerance, what=name)


@pytest.mark.parametrize("name", TEARS)
def test_a_whole_transformer_with_the_authors_table_of_positions(name):
    arrays = case(name)
    placement, parts = TEARS[name]
    table = {"position_encoding": "learned", "max_positions": len(arrays["in.positions"])}
    model = model_of(arrays, placement, **parts, **table)
    with torch.no_grad():
        model.position_encoding.weight.copy_(arrays["in.positions"])
    found = outputs(model, arrays)
    check_outputs(found, arrays)
    assert (arrays["in.target_out"] != 0).sum() == arrays["out.words"]
    same_gradients(model, found["loss"], arrays)


@pytest.mark.parametrize("name", TEARS)
def test_a_whole_transformer(name):
    arrays = case(name)
    placement, parts = TEARS[name]
    check_outputs(outputs(model_of(arrays, placement, **parts), arrays), arrays, tolerance=IN_FLOAT32)
