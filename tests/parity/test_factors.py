"""The factors that the authors' constructors put on the initial weights, and their constants."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import Tensor, nn

from normlab.lab.config import ModelConfig
from normlab.nn import ENCODER_LAYER, Decoder, Encoder, Placement, Seq2Seq, stack_of
from normlab.nn.init import initialise_
from parity.arrays import below, case, equal, located

MATRICES = ("self.q", "self.k", "self.v", "self.out", "ffn.in", "ffn.out")
CROSS = ("cross.q", "cross.k", "cross.v", "cross.out")
KINDS = {(True, True): Seq2Seq, (True, False): Encoder, (False, True): Decoder}
SUBLN, DEEPNORM, TFIXUP = case("subln_gains"), case("deepnorm_gains"), case("tfixup_factors")


@cache
def initialised(placement: str, n: int, m: int) -> nn.Module:
    """A tiny model of these depths in float64, with its initial weights."""
    config = ModelConfig(
        dim=4,
        ffn_dim=8,
        heads=2,
        encoder_layers=n,
        decoder_layers=m,
        encoder_placement=placement,
        decoder_placement=placement,
    )
    model = KINDS[bool(n), bool(m)](config, 5).double()
    initialise_(model, "xavier", 1)
    return model


def factor(ours: Tensor, plain: Tensor) -> Tensor:
    """The number by which every entry of one tensor is multiplied to give the other."""
    ratios = ours / plain
    equal(ratios, torch.full_like(ratios, ratios.mean().item()))
    return ratios.mean()


def factors(placement: str, n: int, m: int) -> dict[str, Tensor]:
    """The factor on each kind of matrix, which is the same in every layer, and on the embeddings."""
    ours, plain = (initialised(name, n, m) for name in (placement, "post"))
    found = {"embed": factor(ours.embedding.weight, plain.embedding.weight)}
    for stack, layers in (("enc", n), ("dec", m)):
        for matrix in (*MATRICES, *(CROSS if stack == "dec" and n else ())):
            names = [f"{stack}.{layer}.{matrix}.weight" for layer in range(layers)]
            if names:
                found[f"{stack}.{matrix}"] = factor(together(ours, names), together(plain, names))
    return found


def together(model: nn.Module, names: list[str]) -> Tensor:
    """All weights of these names."""
    return torch.cat([parameter[rows] for parameter, rows in (located(model, name) for name in names)])


def check(placement: str, depths: Tensor, expected: dict[str, Tensor]) -> None:
    """Compare the factors in models of several depths (N, M) with arrays of as many numbers."""
    assert expected
    found = [factors(placement, n, m) for n, m in depths.tolist()]
    for name, numbers in expected.items():
        equal(torch.stack([f[name] for f in found]), numbers, what=name)


def alone(stack: str, singles: Tensor) -> Tensor:
    """The depths (N, M) of models that are a single stack."""
    layers = [singles, torch.zeros_like(singles)]
    return torch.stack(layers if stack == "enc" else layers[::-1], 1)


@pytest.mark.slow
def test_gains_of_subln():
    check("subln", SUBLN["hyper.pairs"], below(SUBLN, "gain.pair."))
    for stack in ("enc", "dec"):
        expected = {f"{stack}.{n}": a for n, a in below(SUBLN, f"gain.single.{stack}.").items()}
        check("subln", alone(stack, SUBLN["hyper.singles"]), expected)


def test_gains_of_deepnorm():
    """In the encoder of a pair the authors' code has 1.15 where the paper has 0.87, which is ours."""
    pairs = below(DEEPNORM, "gain.pair.")
    scaled = {name for name in pairs if name.startswith("enc.") and not name.endswith((".q", ".k"))}
    paper = DEEPNORM["paper.beta.pair.enc"]
    check("deepnorm", DEEPNORM["hyper.pairs"], pairs | dict.fromkeys(scaled, paper))
    for stack in ("enc", "dec"):
        expected = {f"{stack}.{n}": a for n, a in below(DEEPNORM, f"gain.single.{stack}.").items()}
        check("deepnorm", alone(stack, DEEPNORM["hyper.singles"]), expected)
        equal(DEEPNORM["paper.beta.single"], expected[f"{stack}.ffn.in"])
    equal(DEEPNORM["paper.beta.pair.dec"], pairs["dec.ffn.in"])


@pytest.mark.parametrize("stack", ["enc", "dec"])
def test_alpha_of_deepnorm(stack):
    for shape, depths in (
        ("pair", DEEPNORM["hyper.pairs"]),
        ("single", alone(stack, DEEPNORM["hyper.singles"])),
    ):
        models = [initialised("deepnorm", n, m) for n, m in depths.tolist()]
        stacks = [model.get_submodule({"enc": "encoder", "dec": "decoder"}[stack]) for model in models]
        alphas = torch.tensor([each.sublayers[-1].place.alpha for each in stacks], dtype=torch.float64)
        equal(alphas, DEEPNORM[f"alpha.{shape}.{stack}"])
        equal(alphas, DEEPNORM[f"paper.alpha.{shape}" + f".{stack}" * (shape == "pair")])


def test_factors_of_tfixup():
    """The authors' code has another factor for a target embedding of its own, which no model here has."""
    embeddings = {"embed": TFIXUP["factor.embed.shared"]}
    check("tfixup", TFIXUP["hyper.pairs"], below(TFIXUP, "on_xavier.") | embeddings)
    equal(TFIXUP["factor.embed.shared"], TFIXUP["factor.embed.source_own"])


def test_factor_of_b2t_as_coded():
    arrays = case("b2t")
    depths = torch.tensor([[int(arrays["hyper.encoder_layers"]), int(arrays["hyper.decoder_layers"])]])
    expected = {
        f"{stack}.{matrix}": arrays[f"start.{stack}.factor"][None]
        for stack in ("enc", "dec")
        for matrix in (*MATRICES, *(CROSS if stack == "dec" else ()))
    }
    check("b2t_code", depths, expected)


@pytest.fixture
def in_float64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.usefixtures("in_float64")
def test_admin_without_data():
    """The start for an output change of O(log n), one of three in the authors' package."""
    arrays = case("admin_torch")
    for i, sublayers in enumerate(arrays["hyper.residual_layers"].tolist()):
        site = next(stack_of(ENCODER_LAYER, sublayers // 2, 16, norm=lambda dim: nn.Identity()))
        place = Placement.registry["admin_free"](site)
        equal(place.omega, arrays["omega.logn"][i].expand(16))
        equal(place.write(arrays["in.x"], arrays["in.f"]), arrays["out.sum"][i])
