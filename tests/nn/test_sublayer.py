"""Branches against plain loops, and anybody's module under a placement."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from cases import each
from contracts.variants import BY_PLACEMENT, CONFIG, label
from normlab.nn import Attention, Context, FeedForward, LayerNorm, Placement, PreNorm, Stack, stack_of, wrap

CLOSE = {"rtol": 1e-11, "atol": 1e-11}


def drawn(module: nn.Module, seed: int = 1) -> nn.Module:
    """The module in float64 and evaluation mode, with random parameters."""
    generator = torch.Generator().manual_seed(seed)
    module = module.double().eval()
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(torch.randn(p.shape, generator=generator, dtype=p.dtype))
    return module


def stream(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


def plain_heads(attention: Attention, x: Tensor) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Queries, keys and values `[T, w]` of each head of one sentence, without biases."""
    w = attention.matrices()
    split = [(x[0] @ w[name].T).split(attention.width, 1) for name in ("query", "key", "value")]
    return tuple(list(heads) for heads in split)


@pytest.mark.parametrize("position_encoding", ["sinusoidal", "rope"])
@pytest.mark.parametrize("source", ["self", "memory"])
def test_shared_keys_equal_full_attention_with_the_keys_repeated(source, position_encoding):
    config = replace(CONFIG, heads=4, position_encoding=position_encoding)
    few, full = (Attention(replace(config, kv_heads=n), source=source) for n in (2, 0))
    drawn(few), drawn(full)
    assert few.matrices()["key"].shape == few.matrices()["value"].shape == (8, 16)
    with torch.no_grad():
        full.out.load_state_dict(few.out.state_dict())
        for which in ("weight", "bias"):
            if source == "self":
                q, k, v = getattr(few.qkv, which).split([16, 8, 8])
            else:
                (q, (k, v)) = getattr(few.q, which), getattr(few.kv, which).split(8)
            repeated = [t.unflatten(0, (2, 4)).repeat_interleave(2, 0).flatten(0, 1) for t in (k, v)]
            if source == "self":
                getattr(full.qkv, which).copy_(torch.cat([q, *repeated]))
            else:
                getattr(full.q, which).copy_(q)
                getattr(full.kv, which).copy_(torch.cat(repeated))
    context = Context(memory=stream(2, 7, 16))
    torch.testing.assert_close(few(stream(2, 5, 16), context), full(stream(2, 5, 16), context), **CLOSE)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "sentence"),
    [
        (5, 0, r"^5 heads do not divide the width 16; heads that do: \[1, 2, 4, 8, 16\]$"),
        (4, 3, r"^3 kv_heads do not divide the 4 heads; those that do: \[1, 2, 4\]$"),
        (2, 4, r"^4 kv_heads do not divide the 2 heads; those that do: \[1, 2\]$"),
    ],
)
def test_heads_must_divide_what_they_share(heads, kv_heads, sentence):
    with pytest.raises(ValueError, match=sentence):
        Attention(replace(CONFIG, heads=heads, kv_heads=kv_heads), source="self")


@torch.no_grad()
@pytest.mark.parametrize("qk_norm", ["scaled", "qknorm", "normed"])
def test_attention_equals_a_plain_loop(qk_norm):
    """The loop runs over each query and key of each head, for each norm of queries and keys."""
    config = replace(CONFIG, norm="rmsnorm", qk_norm=qk_norm, bias="nobias")
    attention, x = drawn(Attention(config, source="self", causal=True)), stream(1, 4, 16)
    q, k, v = plain_heads(attention, x)
    if qk_norm == "normed":
        norms = attention.qk_norm.query, attention.qk_norm.key
        q, k = (n(torch.cat(t, 1)).split(8, 1) for n, t in zip(norms, (q, k), strict=True))
    rows = []
    for t in range(4):
        heads = []
        for h in range(2):
            scores = []
            for s in range(t + 1):
                product = float(q[h][t] @ k[h][s])
                if qk_norm == "qknorm":
                    cosine = product / float(q[h][t].norm() * k[h][s].norm())
                    scores.append(attention.qk_norm.g.item() * cosine)
                else:
                    scores.append(product / math.sqrt(8))
            weights = [math.exp(score - max(scores)) for score in scores]
            heads.append(sum(w / sum(weights) * v[h][s] for s, w in enumerate(weights)))
        rows.append(attention.out.weight @ torch.cat(heads))
    torch.testing.assert_close(attention(x, Context())[0], torch.stack(rows), **CLOSE)


def test_qk_norm_starts_from_the_length_of_sentences():
    attention = Attention(replace(CONFIG, qk_norm_len=20, qk_norm="qknorm"), source="self")
    assert attention.qk_norm.g.tolist() == pytest.approx([math.log2(20 * 20 - 20)])


def test_scalar_biases_stand_before_and_after_each_matrix():
    attention, x = drawn(Attention(replace(CONFIG, bias="scalarbias"), source="self")), stream(1, 3, 16)
    before, after = attention.qkv.before, attention.qkv.after
    parts = [attention.matrices()[name] for name in ("query", "key", "value")]
    expected = [(x + before[i]) @ w.T + after[i] for i, w in enumerate(parts)]
    torch.testing.assert_close(attention.qkv(x), torch.cat(expected, -1), **CLOSE)
    assert before.shape == after.shape == (3,)
    fresh = Attention(replace(CONFIG, bias="scalarbias"), source="self").qkv
    assert not fresh.before.any()
    assert not fresh.after.any()


def test_head_gains_and_inner_norms_stand_before_the_last_matrix():
    """A gain of 0 takes a head out, as zero columns of the output matrix would; the norm sees all heads."""
    x = stream(1, 3, 16)
    attention = drawn(Attention(replace(CONFIG, head_gain="headgain"), source="self"))
    with torch.no_grad():
        attention.head_gain.gain.copy_(torch.tensor([0.0, 1.0]))
        y = attention(x, Context())
        attention.head_gain.gain.fill_(1.0)
        attention.out.weight[:, :8] = 0
        torch.testing.assert_close(attention(x, Context()), y, **CLOSE)
    inner = drawn(FeedForward(replace(CONFIG, inner_norm="ffn_innernorm")))
    hidden = inner.inner_norm(torch.relu(inner.inner(x)))
    torch.testing.assert_close(inner(x, Context()), inner.outer(hidden), **CLOSE)
    placed = {
        name: [
            isinstance(branch.inner_norm, LayerNorm)
            for branch in (
                Attention(replace(CONFIG, inner_norm=name), source="self"),
                FeedForward(replace(CONFIG, inner_norm=name)),
            )
        ]
        for name in ("noinnernorm", "innernorm", "ffn_innernorm")
    }
    assert placed == {
        "noinnernorm": [False, False],
        "innernorm": [True, True],
        "ffn_innernorm": [False, True],
    }


def test_swiglu_gates_with_a_third_matrix():
    branch, x = drawn(FeedForward(replace(CONFIG, activation="swiglu"))), stream(1, 3, 16)
    w = branch.matrices()
    assert {name: tuple(m.shape) for name, m in w.items()} == {
        "ffn_in": (24, 16),
        "ffn_gate": (24, 16),
        "ffn_out": (16, 24),
    }
    with torch.no_grad():
        branch.inner.bias.zero_()
    gate = x @ w["ffn_gate"].T
    hidden = gate * torch.sigmoid(gate) * (x @ w["ffn_in"].T)
    torch.testing.assert_close(branch(x, Context()), hidden @ w["ffn_out"].T + branch.outer.bias, **CLOSE)


class Scaled(nn.Module):
    """A branch that takes an argument and a keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(16, 16)

    def forward(self, x: Tensor, factor: float, *, shift: float) -> Tensor:
        return self.net(x) * factor + shift


def test_anything_is_a_branch_and_gets_its_arguments():
    f, x = Scaled(), torch.randn(2, 3, 16)
    (site,) = stack_of(("mix",), 1, 16)
    sublayer = wrap(f, "pre", site)
    expected = x + f(nn.functional.layer_norm(x, (16,)), 2.0, shift=0.5)
    torch.testing.assert_close(sublayer(x, 2.0, shift=0.5), expected)
    assert sublayer.f is f
    with pytest.raises(ValueError, match=r"placement 'pri', .*'pre'\? .*\bpost, pre,"):
        wrap(f, "pri", site)


@each("name", Placement.registry)
def test_a_stack_of_anybodys_branches(name):
    """Begin, sublayers and end by hand give what the stack gives, and every parameter gets a gradient."""
    places = list(stack_of(("conv", "ffn"), 4, 16))
    branches = [nn.Linear(16, 16) for _ in places]
    stack = Stack.of(branches, Placement.registry[name], places[0])
    assert [s.f for s in stack] == branches
    x = torch.randn(2, 5, 16)
    flowing = stack.begin(x)
    for sublayer in stack:
        flowing = sublayer(flowing)
    y = stack(x)
    assert torch.equal(y, stack.end(flowing))
    assert y.shape == x.shape
    (y * torch.randn_like(y)).sum().backward()
    assert all(p.grad is not None for p in stack.parameters())


def test_a_stack_wants_a_branch_for_each_site():
    first = next(stack_of(("conv", "ffn"), 4, 16))
    with pytest.raises(ValueError, match=r"^3 branches .* give 8$"):
        Stack.of([nn.Identity()] * 3, PreNorm, first)


@each("config", BY_PLACEMENT, ids=label)
def test_a_models_own_choice_goes_before_the_placements(config):
    """Each option of the branch is what the model says or, where it is left open, what the placement says."""
    place = Placement.registry[config.encoder_placement]
    left_open = {"qk_norm": "", "bias": "", "inner_norm": "", "head_gain": ""}
    own = {axis: getattr(place, axis) for axis in left_open}
    assert place.complete(replace(config, **left_open)) == replace(config, **own)
    chosen = {"qk_norm": "qknorm", "bias": "nobias", "inner_norm": "innernorm", "head_gain": "headgain"}
    assert place.complete(replace(config, **chosen)) == replace(config, **chosen)
