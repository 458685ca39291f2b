from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.functional import jvp

from cases import each
from contracts.variants import build, inputs, label, loss_of, perturbed, uniform
from diagnosis.following import READABLE
from diagnosis.small import subject_read
from normlab.diagnosis.studies.dependency import FrozenNorm, dependency, residual_dependency
from normlab.diagnosis.subject import Subject
from normlab.nn import LayerNorm, Norm

STACKS = ("encoder", "decoder")
D, T = 16, 60
EARLY_AND_LATE = slice(0, 4), slice(-4, None)


def subject_of(model: nn.Module) -> Subject:
    return subject_read(model, inputs(model), lambda m, batch: loss_of(m, *batch))


def masks(model: nn.Module) -> dict[str, Tensor]:
    return {f"{name}.sublayers": ids != 0 for name, ids in zip(STACKS, inputs(model), strict=True)}


def matrix(table, stack: str) -> dict[tuple[int, int], float]:
    return {(row["of"], row["on"]): row["beta_sq"] for row in table.where(stack=stack)}


# --------------------------------------------------------------------------- one part at a time, slowly


class Seen:
    """What enters every sublayer and norm of a stack, and what its branches put out."""

    def __init__(self, model: nn.Module, stack: nn.Module) -> None:
        self.streams, self.ys, self.norms, handles = [], [], {}, []
        for sublayer in stack.sublayers:
            handles.append(sublayer.register_forward_hook(lambda m, a, out: self.streams.append((a[0], out))))
            handles.append(sublayer.f.register_forward_hook(lambda m, a, out: self.ys.append(out)))
            for norm in sublayer.place.modules():
                if isinstance(norm, LayerNorm):
                    handles.append(norm.register_forward_hook(self._norm))
        with torch.no_grad():
            model(*inputs(model))
        for handle in handles:
            handle.remove()

    def _norm(self, norm: nn.Module, args: tuple, _: Tensor) -> None:
        self.norms[norm] = args[0]

    def freeze(self) -> None:
        """From now on each norm is linear: divided by what it saw, and without its bias."""
        for norm, x in self.norms.items():
            sigma = (x.var(-1, correction=0, keepdim=True) + norm.eps).sqrt()

            def linear(part: Tensor, norm: nn.Module = norm, sigma: Tensor = sigma) -> Tensor:
                return norm.weight * (part - part.mean(-1, keepdim=True)) / sigma

            norm.forward = linear


def mapped(stream, fn):
    return tuple(map(fn, stream)) if isinstance(stream, tuple) else fn(stream)


def first(stream) -> Tensor:
    return stream[0] if isinstance(stream, tuple) else stream


def slow(model: nn.Module, stack: nn.Module, real: Tensor) -> dict[tuple[int, int], float]:
    """Each part alone through the placements' own ``write``."""
    seen = Seen(model, stack)
    seen.freeze()
    begun = seen.streams[0][0]
    found = {}
    for on in range(-1, len(seen.ys)):
        part = begun if on < 0 else mapped(begun, torch.zeros_like)
        for i, sublayer in enumerate(stack.sublayers):
            y = seen.ys[i] if i == on else torch.zeros_like(seen.ys[i])
            with torch.no_grad():
                part = sublayer.place.write(part, y)
            whole = first(seen.streams[i][1])
            share = first(part).var(-1, correction=0) / whole.var(-1, correction=0)
            if i >= on:
                found[i, on] = float(share[real].mean())
    return found


def without_norm_biases(config) -> nn.Module:
    """A model whose norms have no bias: where a branch is normed, a bias is part of the branch, not of r."""
    model = perturbed(config)
    for module in model.modules():
        if isinstance(module, LayerNorm):
            nn.init.zeros_(module.bias)
    return model


@pytest.mark.slow
@each("config", READABLE, ids=label)
def test_every_placement_is_that_of_its_own_write_part_by_part(config):
    model = without_norm_biases(config)
    table = dependency(replace(subject_of(model), padding_masks=masks(model)), tokens=256)
    for name, (path, real) in zip(STACKS, masks(model).items(), strict=True):
        expected = slow(model, getattr(model, name), real)
        found = matrix(table, path)
        assert found.keys() == expected.keys()
        assert found == pytest.approx(expected, rel=1e-5, abs=1e-9)


@pytest.mark.parametrize("name", ["post", "pre", "deepnorm", "admin"])
def test_a_norms_own_bias_is_nobodys(name):
    config = uniform(name)
    model = perturbed(config)
    table = dependency(replace(subject_of(model), padding_masks=masks(model)), tokens=256)
    real = masks(model)["encoder.sublayers"]
    assert matrix(table, "encoder.sublayers") == pytest.approx(slow(model, model.encoder, real), rel=1e-5)


# --------------------------------------------------------------------------------------- known laws


class Noise(nn.Module):
    """A branch that does not look at its input."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        noise = torch.randn(T, 512, generator=torch.Generator().manual_seed(seed))
        self.noise = nn.Parameter(noise)

    def forward(self, x: Tensor) -> Tensor:
        return self.noise.expand_as(x) + 0 * x


class Block(nn.Module):
    def __init__(self, seed: int, *, post: bool) -> None:
        super().__init__()
        self.mlp = Noise(seed)
        self.norm = nn.LayerNorm(512) if post else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + self.mlp(x))


class Noises(nn.Module):
    def __init__(self, *, post: bool, layers: int = 8) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(seed, post=post) for seed in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def noises(*, post: bool) -> Subject:
    x = torch.randn(1, T, 512, generator=torch.Generator().manual_seed(100))
    return subject_read(Noises(post=post), x, lambda model, batch: model(batch).square().sum())


def test_a_plain_sum_of_equal_branches_leans_on_all_alike():
    subject = noises(post=False)
    table = dependency(subject)
    assert len(table) == sum(range(2, 10))
    for row in table:
        assert row["beta_sq"] == pytest.approx(1 / (row["of"] + 2), rel=0.05)
    for row in residual_dependency(subject, table):
        assert row["beta_sq"] == pytest.approx(1 / (row["index"] + 2), rel=0.05)
        assert row["total"] == pytest.approx(1, abs=0.03)


def test_norms_on_the_way_halve_what_came_before():
    subject = noises(post=True)
    table = dependency(subject)
    for row in table:
        ago = row["of"] - max(row["on"], 0)
        assert row["beta_sq"] == pytest.approx(0.5 ** (ago + 1), rel=0.05)
    assert all(row["beta_sq"] == pytest.approx(0.5, abs=0.02) for row in residual_dependency(subject, table))
    assert all(row["total"] == pytest.approx(1, abs=0.03) for row in residual_dependency(subject, table))


def test_what_is_missing_from_one_is_the_cross_terms():
    model = build(uniform("pre")).double().eval()
    subject, real = subject_of(model), masks(model)["encoder.sublayers"]
    seen = Seen(model, model.encoder)
    parts = torch.stack([seen.streams[0][0], *seen.ys])[:, real]
    parts = parts - parts.mean(-1, keepdim=True)
    whole = parts.sum(0).square().mean(-1)
    pairs = torch.einsum("itd,jtd->ijt", parts, parts) / parts.shape[-1]
    cross = ((pairs.sum((0, 1)) - pairs.diagonal().sum(-1)) / whole).mean()
    own = residual_dependency(subject, dependency(replace(subject, padding_masks=masks(model)), tokens=256))
    last = own.where(stack="encoder.sublayers").rows[-1]
    assert abs(cross) > 1e-3
    assert last["total"] == pytest.approx(1 - float(cross), rel=1e-6)


@pytest.mark.slow
def test_post_leans_on_its_own_and_pre_on_all():
    own = {}
    for name in ("post", "pre"):
        model = build(uniform(name, dim=128, ffn_dim=256, encoder_layers=8))
        subject = subject_of(model)
        table = residual_dependency(subject, dependency(subject)).where(stack="encoder.sublayers")
        assert all(0.8 < total < 1.25 for total in table.column("total"))
        own[name] = table.column("beta_sq")
    early, late = ({name: sum(table[part]) for name, table in own.items()} for part in EARLY_AND_LATE)
    assert late["post"] > 0.8 * early["post"], "constant"
    assert late["pre"] < 0.4 * early["pre"], "falls as 1 / i"


# --------------------------------------------------------------------------------------------- norms


@pytest.mark.parametrize("kind", [*Norm.registry.values(), nn.LayerNorm, nn.RMSNorm])
def test_a_frozen_norm_is_linear_and_whole(kind):
    torch.manual_seed(0)
    norm = kind(D).double()
    for parameter in norm.parameters():
        nn.init.normal_(parameter, 1.0, 0.3)
    x, v = torch.randn(T, D, dtype=torch.float64) + 0.5, torch.randn(T, D, dtype=torch.float64)
    x[3, 4] = 0.0
    with torch.no_grad():
        frozen = FrozenNorm(norm, x)
        torch.testing.assert_close(frozen(x) + frozen.offset, norm(x), rtol=1e-6, atol=2e-5)
        torch.testing.assert_close(frozen(2 * x - 3 * v), 2 * frozen(x) - 3 * frozen(v))
        torch.testing.assert_close(frozen.offset, norm(torch.zeros_like(x)))


@pytest.mark.parametrize("kind", [nn.LayerNorm, nn.RMSNorm])
def test_a_frozen_norm_is_the_jacobian_but_along_the_stream(kind):
    norm = kind(D, eps=1e-12).double()
    x, v = (torch.randn(T, D, dtype=torch.float64) for _ in range(2))
    if kind is nn.LayerNorm:
        x = x - x.mean(-1, keepdim=True)
    v = v - (v * x).sum(-1, keepdim=True) / x.square().sum(-1, keepdim=True) * x
    with torch.no_grad():
        frozen = FrozenNorm(norm, x)
    torch.testing.assert_close(frozen(v), jvp(norm, x, v)[1], rtol=1e-5, atol=1e-6)
    assert jvp(norm, x, x)[1].abs().max() < 1e-6, "a norm does not follow the length of its input"
    torch.testing.assert_close(frozen(x), norm(x), rtol=1e-5, atol=1e-6)


def test_a_row_of_zeros_stays_one():
    x = torch.zeros(4, D)
    with torch.no_grad():
        frozen = FrozenNorm(nn.LayerNorm(D), x)
    assert frozen(x).isfinite().all()
    assert frozen(x).abs().max() == 0


# ------------------------------------------------------------------------------------- foreign models


class Parallel(nn.Module):
    def __init__(self, dim: int = D) -> None:
        super().__init__()
        self.norm, self.attention, self.mlp = nn.LayerNorm(dim), nn.Linear(dim, dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return self.attention(y) + self.mlp(y) + x


class Parallels(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Parallel() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def test_branches_side_by_side_enter_together():
    torch.manual_seed(0)
    model, x = Parallels(), torch.randn(2, 30, D)
    table = dependency(subject_read(model, x, lambda m, b: m(b).square().sum()), tokens=60)
    with torch.no_grad():
        y = model.layers[0].norm(x)
        whole = model.layers[0](x).var(-1, correction=0)
        parts = [x, model.layers[0].attention(y), model.layers[0].mlp(y)]
    expected = [float((part.var(-1, correction=0) / whole).mean()) for part in parts]
    for of in (0, 1):
        assert table.where(of=of).column("on") == [-1, 0, 1]
        assert table.where(of=of).column("beta_sq") == pytest.approx(expected, rel=1e-4)
    assert table.where(of=5).column("on") == [-1, 0, 1, 2, 3, 4, 5]


class Again(nn.Module):
    """Adds its input twice, and no norm follows."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.mlp = nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        y = x + self.attention(x)
        return y + self.mlp(y) + x


class Agains(Parallels):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Again() for _ in range(2))


def test_an_older_state_of_the_stream_brings_its_parts_once_more():
    torch.manual_seed(0)
    model, x = Agains(), torch.randn(2, 30, D)
    table = dependency(subject_read(model, x, lambda m, b: m(b).square().sum()), tokens=60)
    with torch.no_grad():
        first, second = model.layers
        a = first.attention(x)
        m = first.mlp(x + a)
        y = 2 * x + a + m
        b = second.attention(y)
        n = second.mlp(y + b)
        parts, whole = [4 * x, 2 * a, 2 * m, b, n], second(y).var(-1, correction=0)
    expected = [float((part.var(-1, correction=0) / whole).mean()) for part in parts]
    assert table.where(of=3).column("beta_sq") == pytest.approx(expected, rel=1e-4)


class Silent(nn.Module):
    """A norm that is a function: no module shows the sum."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.layer_norm(x + self.mlp(x), (D,))


class SilentOnes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Silent() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def test_sums_that_are_not_seen_are_not_made_up():
    x = torch.randn(2, 30, D)
    subject = subject_read(SilentOnes(), x, lambda model, b: model(b)[..., 0].sum(), branches=("mlp",))
    with pytest.raises(ValueError, match=r"layers: sublayer 0 .*\bsum\b"):
        dependency(subject)


# ---------------------------------------------------------------------------------------- good manners


def test_nothing_is_left_behind():
    model = build(uniform("post", dropout=0.1)).train()
    subject = subject_of(model)
    loss_of(model).backward()
    state = {name: (x.clone(), x._version) for name, x in model.state_dict().items()}
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    rng = torch.get_rng_state()
    once, again = dependency(subject), dependency(subject)
    assert once == again
    assert torch.equal(torch.get_rng_state(), rng)
    for name, x in model.state_dict().items():
        assert torch.equal(x, state[name][0])
        assert x._version == state[name][1]
    assert all(torch.equal(p.grad, grads[n]) for n, p in model.named_parameters() if p.grad is not None)
    assert all(module.training for module in model.modules())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_narrow_types_are_followed_in_float32():
    model = build(uniform("post", dim=64, ffn_dim=64, encoder_layers=6)).eval()
    subject = subject_of(model)
    wide = residual_dependency(subject, dependency(replace(subject, padding_masks=masks(model))))
    model.to(torch.bfloat16)
    narrow = residual_dependency(subject, dependency(replace(subject, padding_masks=masks(model))))
    assert narrow.column("beta_sq") == pytest.approx(wide.column("beta_sq"), rel=0.1)


@pytest.mark.parametrize("tokens", [0, 257])
def test_tokens_are_few(tokens):
    with pytest.raises(ValueError, match=rf"{tokens} tokens.*\b256"):
        dependency(noises(post=True), tokens=tokens)
