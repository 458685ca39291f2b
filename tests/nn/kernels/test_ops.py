"""Dropout, attention, and the switch to their plain paths."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from cases import each
from normlab.nn import Dropout, reference
from normlab.nn.kernels import ops


@each("p", [0.1, 0.3, 0.5, 0.9])
@each("shape", [(400_001,), (25, 160, 100)], ids=["odd", "cube"])
def test_dropout_rate_and_scale(p, shape):
    torch.manual_seed(3)
    y = ops.dropout(torch.full(shape, 2.0), p)
    assert y.unique().tolist() == pytest.approx([0.0, 2 / (1 - p)])
    # Five standard deviations of a binomial share.
    spread = 5 * (p * (1 - p) / y.numel()) ** 0.5
    assert (y == 0).double().mean().item() == pytest.approx(p, abs=spread)
    halves = [half.double().mean().item() for half in (y == 0).flatten().tensor_split(2)]
    assert halves == pytest.approx([p, p], abs=2 * spread)


def test_dropout_draws_are_independent_of_their_neighbours():
    """Four draws share one wide integer: no lag up to 8 shows a correlation."""
    torch.manual_seed(4)
    kept = (ops.dropout(torch.ones(400_000), 0.5) != 0).double() * 2 - 1
    for lag in range(1, 9):
        assert abs(float((kept[lag:] * kept[:-lag]).mean())) < 5 / 400_000**0.5


@pytest.mark.parametrize("plain", [False, True])
def test_dropout_is_repeatable_and_its_gradient_is_its_mask(plain):
    x = torch.ones(1001, requires_grad=True)

    def once() -> torch.Tensor:
        torch.manual_seed(9)
        return ops.dropout(x, 0.25)

    if plain:
        with reference():
            y = once()
            torch.manual_seed(9)
            assert torch.equal(y, F.dropout(x, 0.25))
    else:
        y = once()
        assert torch.equal(y, once())
    y.sum().backward()
    assert torch.equal(x.grad, y.detach())


@each("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@each("p", [0.1, 0.5, 0.9])
def test_dropout_is_the_product_with_its_mask_in_every_type(dtype, p):
    """Bit by bit, with a mask that is made from the same draws by comparison."""
    x = torch.randn(7, 33, generator=torch.Generator().manual_seed(1)).to(dtype)
    torch.manual_seed(9)
    y = ops.dropout(x, p)
    torch.manual_seed(9)
    draws = torch.empty(58, dtype=torch.int64).random_(-(2**63), None).view(torch.int16)[:231].view(7, 33)
    mask = (draws >= round(p * 2**16) - 2**15).to(dtype).mul_(1 / (1 - p))
    assert torch.equal(y, x * mask)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_search_step_equals_the_reference(dtype):
    """A few queries on slices of a cache, with some keys out of sight."""
    torch.manual_seed(5)
    q = torch.randn(3, 5, 2, 8, dtype=dtype).transpose(1, 2)
    k, v = (torch.randn(3, 2, 20, 8, dtype=dtype)[:, :, :15] for _ in range(2))
    mask = torch.rand(3, 1, 5, 15) < 0.5
    mask[..., 0] = True
    how = {"mask": mask, "causal": False, "p": 0.0}
    fast = ops.attention(q, k, v, **how)
    with reference():
        plain = ops.attention(q, k, v, **how)
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(fast, plain, rtol=tolerance, atol=tolerance)


def test_dropout_module_is_nothing_in_evaluation_and_refuses_bad_rates():
    x = torch.randn(5, 5)
    assert Dropout(0.5).eval()(x) is x
    assert Dropout(0.0)(x) is x
    assert repr(Dropout(0.5)) == "Dropout(p=0.5)"
    for p in (-0.1, 1.0):
        with pytest.raises(ValueError, match=rf"got {p}$"):
            Dropout(p)


@each("masked", ["none", "padding", "causal"])
@each("shape", [(3, 5), (600, 600)], ids=["few", "many"])
@each(("groups", "scale"), [(2, None), (1, 0.9)], ids=["each", "shared-scaled"])
def test_attention_paths_agree(masked, shape, groups, scale):
    """Trained, searched and reference attention: values, and gradients where there are any."""
    torch.manual_seed(2)
    queries, keys = shape if masked != "causal" else (shape[1], shape[1])
    heads = ((2, queries), (groups, keys), (groups, keys))
    sides = [torch.randn(2, h, n, 4, requires_grad=True) for h, n in heads]
    mask = torch.rand(2, 1, 1, keys) < 0.7
    mask[..., 0] = True
    how = {"mask": mask if masked == "padding" else None, "causal": masked == "causal", "p": 0.0}
    how["scale"] = scale

    def grads(y: torch.Tensor) -> list[torch.Tensor]:
        return [y, *torch.autograd.grad(y.square().sum(), sides)]

    fast = grads(ops.attention(*sides, **how))
    with reference():
        plain = grads(ops.attention(*sides, **how))
    with torch.no_grad():
        searched = ops.attention(*sides, **how)
    torch.testing.assert_close(fast, plain, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(searched, plain[0], rtol=1e-4, atol=1e-5)


def test_attention_drops_weights_at_its_rate():
    torch.manual_seed(6)
    q, k = (torch.zeros(1, 1, 200, 4, requires_grad=True) for _ in range(2))
    y = ops.attention(q, k, torch.eye(200)[None, None], mask=None, causal=False, p=0.2)
    assert (y == 0).double().mean().item() == pytest.approx(0.2, abs=5 * (0.16 / 40_000) ** 0.5)
    assert y.max().item() == pytest.approx(1 / 200 / 0.8)


def test_reference_is_left_again_even_by_an_error():
    with pytest.raises(KeyError), reference():
        raise KeyError
    x = torch.ones(64)
    torch.manual_seed(1)
    ours = ops.dropout(x, 0.5)
    torch.manual_seed(1)
    assert not torch.equal(ours, F.dropout(x, 0.5))


def test_a_compiled_function_follows_the_switch():
    """Compiled outside the block, it takes the plain path inside, and the fast one again after it."""
    q = torch.randn(1, 2, 3, 4)
    fused_in_each_call: list[bool] = []

    def backend(graph, inputs):
        """Run a graph as it is, and note at each call whether the fused kernel is in it."""
        fused = any("scaled_dot_product" in str(node.target) for node in graph.graph.nodes)

        def run(*args):
            fused_in_each_call.append(fused)
            return graph.forward(*args)

        return run

    compiled = torch.compile(lambda: ops.attention(q, q, q, mask=None, causal=True, p=0.0), backend=backend)
    with torch.no_grad():
        before = compiled()
        with reference():
            inside = compiled()
        after = compiled()
    torch._dynamo.reset()
    assert fused_in_each_call == [True, False, True]
    torch.testing.assert_close(inside, before)
    assert torch.equal(after, before)


def test_the_reference_is_twice_differentiable():
    q, k, v = (torch.randn(1, 1, 3, 2, dtype=torch.float64, requires_grad=True) for _ in range(3))
    with reference():
        assert torch.autograd.gradgradcheck(
            lambda *a: ops.attention(*a, mask=None, causal=True, p=0.0), (q, k, v)
        )


@each("length", [1, 7, 15, 16, 17])
def test_short_rows_are_filled_up_and_their_softmax_stays_the_same(length):
    scores = torch.randn(1000, 10, length, dtype=torch.float64)
    scores[..., length // 2 + 1 :] = float("-inf")
    assert scores.numel() >= ops._MANY_SCORES
    ours, plain = (scores.clone().requires_grad_() for _ in range(2))
    up = torch.randn_like(scores)
    (ops.softmax(ours) * up).sum().backward()
    (torch.softmax(plain, -1) * up).sum().backward()
    torch.testing.assert_close(ops.softmax(ours), torch.softmax(plain, -1), rtol=1e-14, atol=0)
    torch.testing.assert_close(ours.grad, plain.grad, rtol=1e-12, atol=1e-14)
