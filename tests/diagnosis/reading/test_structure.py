from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cases import each
from contracts.variants import CONFIG, build, inputs, label, perturbed, uniform
from diagnosis.following import READABLE, alike, follow, shape_of
from normlab.diagnosis import read_structure
from normlab.lab.config import ModelConfig
from normlab.lab.tasks.task import build_model
from normlab.nn import Decoder, DeepNorm, DyT, Encoder, ScaleNorm, sites

X = torch.randn(3, 7, 16, generator=torch.Generator().manual_seed(2))
PLACEMENTS = {
    "post": {"post"},
    "pre": {"pre"},
    "subln": {"pre"},
    "mixln": {"post", "pre"},
    "sandwich": {"sandwich"},
    "periln": {"sandwich"},
    "normformer": {"sandwich", "pre"},
    "lnscale": {"other", "pre"},
    "b2t": {"post", "other"},
    "b2t_code": {"post", "other"},
    "admin_rescaled": {"post"},
    "hybridnorm": {"post", "other"},
}
"""How the sublayers of a placement are read; those of all other placements of ours are read as "other"."""


def unchanged(model: nn.Module, read) -> None:
    """Assert that a reading leaves weights, modes and hooks as they were."""
    before = {name: (x.clone(), x._version) for name, x in model.state_dict().items()}
    modes = [module.training for module in model.modules()]
    read()
    after = {name: (x, x._version) for name, x in model.state_dict().items()}
    assert all(torch.equal(after[n][0], x) and after[n][1] == version for n, (x, version) in before.items())
    assert modes == [module.training for module in model.modules()]
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


@pytest.mark.slow
@each("config", READABLE, ids=label)
def test_every_placement_of_ours_is_read_from_its_numbers(config):
    model = perturbed(config, dtype=torch.float32)
    structure = read_structure(model, inputs(model))
    follow(model, inputs(model), structure)
    assert [stack.name for stack in structure.stacks] == ["encoder.sublayers", "decoder.sublayers"]
    for stack, ours in zip(structure.stacks, (model.encoder, model.decoder), strict=True):
        owned = [sublayer.site for sublayer in ours.sublayers]
        roles = [site.role.replace("causal", "self") for site in owned]
        assert [(v.index, v.layer, v.role) for v in stack.sublayers] == [
            (site.index, site.layer, role) for site, role in zip(owned, roles, strict=True)
        ]
        paths = [f"{stack.name}.{i}" for i in range(len(owned))]
        assert [view.before.module for view in stack.sublayers] == paths
        assert {view.placement for view in stack.sublayers} == PLACEMENTS.get(
            config.encoder_placement, {"other"}
        )


@pytest.mark.slow
@each("config", READABLE, ids=label)
def test_every_start_of_ours_is_read_as_well(config):
    model = build(config)
    structure = None

    def read() -> None:
        nonlocal structure
        structure = read_structure(model, inputs(model))

    unchanged(model, read)
    assert [len(stack.sublayers) for stack in structure.stacks] == [4, 6]
    follow(model, inputs(model), structure)


@pytest.mark.slow
def test_factors_are_those_of_the_models_own_weights():
    config = uniform("deepnorm")
    structure = read_structure(model := build(config), inputs(model))
    for stack, ours in zip(structure.stacks, (model.encoder, model.decoder), strict=True):
        alpha, _ = DeepNorm.constants(next(sites(ours.sublayers[0].site)))
        assert [view.shortcut for view in stack.sublayers] == pytest.approx([alpha] * len(stack.sublayers))
        assert stack.sublayers[0].relation == f"after = norm({alpha:.3g} before + branch)"

    for shut in ("rezero", "prores"):
        structure = read_structure(model := build(uniform(shut)), inputs(model))
        assert {view.scale for stack in structure.stacks for view in stack.sublayers} == {0.0}

    structure = read_structure(model := perturbed(uniform("admin"), dtype=torch.float32), inputs(model))
    for view, ours in zip(structure.stacks[1].sublayers, model.decoder.sublayers, strict=True):
        assert view.shortcut == pytest.approx(tuple(ours.place.omega.tolist()), rel=1e-4)
        assert view.relation.startswith("after = norm((one a channel, mean ")

    structure = read_structure(model := build(uniform("layerscale", encoder_layers=25)), inputs(model))
    assert len(structure.stacks[0].sublayers) == 50
    for view in structure.stacks[0].sublayers:
        assert view.scale == pytest.approx([1e-6] * 16, rel=0.2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_small_factors_of_a_channel_are_read(dtype):
    """Where the stream is nearly 0, a branch is as far off as its fitted factor, and not as the stream."""
    model = build(uniform("layerscale", dim=64, encoder_layers=12)).to(dtype)
    generator = torch.Generator().manual_seed(4)
    for sublayer in (*model.encoder.sublayers, *model.decoder.sublayers):
        small = 0.002 * (0.5 + torch.rand(64, generator=generator, dtype=dtype))
        sublayer.place.lam.data = small
    structure = read_structure(model, inputs(model))
    assert structure.unread == ()
    for view, ours in zip(structure.stacks[0].sublayers, model.encoder.sublayers, strict=True):
        assert view.scale == pytest.approx(ours.place.lam.tolist(), rel=1e-3)


@pytest.mark.parametrize(
    ("placement", "norms"),
    [("keel", ("norm_in", None, "norm_out")), ("periln", ("norm_in", "norm_out", None))],
)
def test_norms_are_found_where_they_are(placement, norms):
    model = perturbed(uniform(placement), dtype=torch.float32)
    (stack, _) = read_structure(model, inputs(model)).stacks
    (view, *_) = stack.sublayers
    place = "encoder.sublayers.0.place"
    expected = tuple(norm and f"{place}.{norm}" for norm in norms)
    assert (view.norm_read, view.norm_branch, view.norm_write) == expected
    assert placement == "keel" or stack.final_norm == "encoder.end"


def test_a_branch_is_shown_by_what_does_something():
    model = build(uniform("normformer"))
    attention, ffn, *_ = read_structure(model, inputs(model)).stacks[0].sublayers
    assert attention.branch.module == "encoder.sublayers.0.place.norm_out"
    assert ffn.branch.module == "encoder.sublayers.1.f", "and not the Identity in the place of its norm"


@pytest.mark.parametrize("norm", ["rmsnorm", "scalenorm", "dyt", "derf"])
@pytest.mark.parametrize("placement", ["post", "pre"])
def test_every_kind_of_norm_counts_as_one(placement, norm):
    config = uniform(placement, norm=norm)
    structure = read_structure(model := perturbed(config, dtype=torch.float32), inputs(model))
    assert {v.placement for stack in structure.stacks for v in stack.sublayers} == {placement}


@pytest.mark.parametrize("kind", [Encoder, Decoder])
def test_a_single_stack_is_read(kind):
    layers = {"decoder_layers": 0} if kind is Encoder else {"encoder_layers": 0}
    model = build_model(kind, replace(CONFIG, **layers), 13, 1)
    (stack,) = read_structure(model, inputs(model)).stacks
    assert stack.name == f"{kind.__name__.lower()}.sublayers"
    assert [view.layer for view in stack.sublayers] == [0, 0, 1, 1]


def test_narrow_types_are_read_where_sums_are_plain():
    model = build(ModelConfig(**{**vars(CONFIG), "encoder_placement": "pre"})).to(torch.bfloat16)
    placements = [
        v.placement for stack in read_structure(model, inputs(model)).stacks for v in stack.sublayers
    ]
    assert placements == ["pre"] * 4 + ["post"] * 6

    large = (200 * X).to(torch.bfloat16)  # branches are lost in the rounding but for the last bits
    (stack,) = read_structure(Pairs().to(torch.bfloat16), large).stacks
    assert [view.placement for view in stack.sublayers] == ["pre"] * 6


@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize(("norm_first", "placement"), [(False, "post"), (True, "pre")])
def test_torch_transformer(norm_first, placement, batch_first):
    model = nn.Transformer(16, 2, 2, 3, 32, batch_first=batch_first, norm_first=norm_first)
    target = X.mul(2) if batch_first else torch.randn(5, 7, 16)
    structure = read_structure(model, (X, target))
    assert shape_of(structure) == {
        "encoder.layers": alike(2, "self_attention ffn", placement),
        "decoder.layers": alike(3, "self_attention cross_attention ffn", placement),
    }
    assert [stack.final_norm for stack in structure.stacks] == ["encoder.norm", "decoder.norm"]
    follow(model, (X, target), structure)


class Mixer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.q, self.out = nn.LayerNorm(16), nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(self.norm(x))
        return self.out((q @ q.transpose(1, 2)).softmax(-1) @ q)


class FeedForward(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.LayerNorm(16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))


class Pairs(nn.Module):
    """Blocks that are lists: nobody calls them, and no module puts out the sums."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleList([Mixer(), FeedForward()]) for _ in range(3))
        self.norm = nn.LayerNorm(16)

    def forward(self, x: Tensor) -> Tensor:
        for mix, ffn in self.layers:
            x = mix(x) + x
            x = ffn(x) + x
        return self.norm(x)


class Silent(nn.Module):
    """A Post-LN whose norms are functions, so that no module sees a sum."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.ffn = Mixer(), FeedForward()

    def forward(self, x: Tensor) -> Tensor:
        x = F.layer_norm(x + self.mix(x), (16,))
        return F.layer_norm(x + self.ffn(x), (16,))


class Attributes(nn.Module):
    """Blocks under names of their own, and under numbered ones."""

    def __init__(self, *names: str, block: Callable[[], nn.Module] = Pairs) -> None:
        super().__init__()
        self.names = names
        for name in names:
            self.add_module(name, block())

    def forward(self, x: Tensor) -> Tensor:
        for name in self.names:
            x = self.get_submodule(name)(x)
        return x


def test_blocks_that_are_lists():
    structure = read_structure(model := Pairs(), X)
    both = [(layer, role, "pre") for layer in range(3) for role in ("branch", "ffn")]
    assert shape_of(structure) == {"layers": both}
    assert structure.stacks[0].final_norm == "norm"
    follow(model, X, structure)


@pytest.mark.parametrize("end", [nn.Tanh(), nn.Sigmoid(), nn.Hardtanh()])
def test_an_activation_that_squashes_is_no_norm(end):
    class Squashed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.mlp, self.end = nn.LayerNorm(16), nn.Linear(16, 16), end

        def forward(self, x: Tensor) -> Tensor:
            return x + self.end(self.mlp(self.norm(x)))

    (stack,) = read_structure(Attributes("block1", "block2", block=Squashed), X).stacks
    assert {(view.placement, view.norm_branch) for view in stack.sublayers} == {("pre", None)}


@pytest.mark.parametrize("end", [nn.RMSNorm(16, elementwise_affine=False), ScaleNorm(16), DyT(16)])
def test_a_norm_without_gains_and_one_that_squashes_with_gains_are_norms(end):
    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.mlp, self.end = nn.LayerNorm(16), nn.Linear(16, 16), end

        def forward(self, x: Tensor) -> Tensor:
            return x + self.end(self.mlp(self.norm(x)))

    (stack,) = read_structure(Attributes("block1", "block2", block=Normed), X).stacks
    assert {(view.placement, view.norm_branch is None) for view in stack.sublayers} == {("sandwich", False)}


def test_a_gain_is_no_norm():
    class Gain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gain = nn.Parameter(torch.rand(16) + 1)

        def forward(self, x: Tensor) -> Tensor:
            return x * self.gain

    class Gained(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gain, self.mlp = Gain(), nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.mlp(self.gain(x))

    (stack,) = read_structure(Attributes("block1", "block2", block=Gained), X).stacks
    assert {(v.role, v.norm_read, v.relation) for v in stack.sublayers} == {
        ("ffn", None, "after = before + branch")
    }


def test_a_stack_that_runs_twice_is_read_once():
    class Twin(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
            self.tower = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return self.tower(x) @ self.tower(y).transpose(1, 2)

    structure = read_structure(Twin(), (X, X * 2))
    assert shape_of(structure) == {"tower.layers": alike(2, "self_attention ffn", "post")}


def test_numbered_attributes_are_blocks_and_others_are_named():
    layer = partial(nn.TransformerEncoderLayer, 16, 2, 32, batch_first=True)

    def model(*names: str) -> Attributes:
        return Attributes(*names, block=layer)

    layers = alike(2, "self_attention ffn", "post")
    numbered = read_structure(model("block1", "block2"), X)
    assert shape_of(numbered) == {"": layers}  # the model itself holds them
    named = read_structure(model("lower", "upper"), X, blocks="*er")
    assert shape_of(named) == {"*er": layers}
    with pytest.raises(ValueError, match=r"blocks=\"encoder\.layer\""):
        read_structure(model("lower", "upper"), X)
    with pytest.raises(ValueError, match=r"'encodr'.* lower"):
        read_structure(model("lower", "upper"), X, blocks="encodr")


def test_named_branches_stand_in_for_sums_that_are_not_seen():
    model = Attributes("block1", "block2", block=Silent)
    with pytest.raises(ValueError, match=r"Silent.*\bblock1\b.*branches="):
        read_structure(model, X)
    structure = read_structure(model, X, branches=("mix", "ffn"))
    (stack,) = structure.stacks
    assert [str(tap) for v in stack.sublayers for tap in (v.before, v.branch, v.after)] == [
        "block1.input[0]", "block1.mix.output", "block1.ffn.input[0]",
        "block1.ffn.input[0]", "block1.ffn.output", "block1.output",
        "block2.input[0]", "block2.mix.output", "block2.ffn.input[0]",
        "block2.ffn.input[0]", "block2.ffn.output", "block2.output",
    ]  # fmt: skip
    assert {(v.placement, v.relation) for v in stack.sublayers} == {
        ("other", "as named by the caller, not verified")
    }
    with pytest.raises(ValueError, match="attn"):
        read_structure(model, X, branches=("attn",))


def test_a_container_that_is_not_read_is_reported_beside_one_that_is():
    model = Attributes("pairs", block=Pairs)
    model.odd = nn.ModuleList([Silent(), Silent()])
    structure = read_structure(model, X, call=lambda m, x: m.odd[1](m.odd[0](m(x))))
    assert [stack.name for stack in structure.stacks] == ["pairs.layers"]
    assert [sentence.split(" was")[0] for sentence in structure.unread] == ["odd (2 x Silent)"]
    assert str(structure).splitlines()[:2] == [
        "pairs.layers: 3 layers, 6 sublayers",
        "  3 x branch: pre, after = before + branch, branch reads norm(before)",
    ]
    assert str(structure).splitlines()[-1] == structure.unread[0]


@torch.no_grad()
def test_compiled_models_and_parts_are_read_eagerly():
    model = Pairs().eval()
    for parameter in model.parameters():
        parameter += 0.1
    for layer in model.layers:
        layer[0].compile(backend="eager")
    model(X)
    expected = shape_of(read_structure(Pairs(), X))
    assert shape_of(read_structure(model, X)) == expected
    assert shape_of(read_structure(torch.compile(model, backend="eager"), X)) == expected


def test_a_frozen_model_is_read():
    model = Pairs().requires_grad_(requires_grad=False)
    assert len(read_structure(model, X).stacks[0].sublayers) == 6


def test_a_model_that_cannot_run_says_what_to_change():
    with pytest.raises(ValueError, match=r"Pairs .*TypeError.*\bz\b.*call=lambda"):
        read_structure(Pairs(), {"z": X})
    with pytest.raises(ValueError, match=r"meta.*layers\.0"):
        read_structure(Pairs().to("meta"), X)
    broken = Pairs()
    with torch.no_grad():
        broken.layers[1][1][1].weight[3, 3] = float("nan")
    with pytest.raises(ValueError, match=r"number: layers\.1\.1\.1 "):
        read_structure(broken, X)


def test_a_reading_that_fails_leaves_no_trace():
    model = Attributes("block1", "block2", block=Silent)

    def read() -> None:
        with pytest.raises(ValueError, match="stream"):
            read_structure(model, X)

    unchanged(model, read)


def test_layers_without_a_residual_are_not_read_as_one():
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(FeedForward() for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x)
            return x

    with pytest.raises(ValueError, match=r"FeedForward.*layers\.0"):
        read_structure(Plain(), X)
