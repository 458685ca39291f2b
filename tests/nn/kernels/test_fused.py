"""Norms of rows: values and gradients of the fast path against the plain one, and when it is left."""

from __future__ import annotations

import pytest
import torch

from cases import each
from normlab.nn import reference
from normlab.nn.kernels import fused
from normlab.nn.kernels.fused import erf_scaled, root_mean_square_normed, scaled_to, tanh_scaled

SHAPES = [(1, 1), (7, 3), (2, 5, 33), (3, 1, 4, 64)]


def last_operation(y: torch.Tensor) -> str:
    """The name of the node that made y, in which the fast path and the plain one differ."""
    return type(y.grad_fn).__name__


def compared(norm, *given: torch.Tensor, tolerance: float) -> None:
    def passes() -> list[torch.Tensor]:
        y = norm(*given)
        weights = torch.arange(y.numel(), dtype=torch.float64).view_as(y).cos().to(y.dtype)
        return [y, *torch.autograd.grad((y * weights).sum(), given)]

    fast = passes()
    with reference():
        plain = passes()
    assert last_operation(fast[0]) != last_operation(plain[0]), "the plain path was compared with itself"
    assert [t.dtype for t in fast] == [t.dtype for t in plain]
    torch.testing.assert_close(fast, plain, rtol=tolerance, atol=tolerance)


def rows(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    torch.manual_seed(4)
    return (3 * torch.randn(shape, dtype=torch.float64)).to(dtype).requires_grad_()


WIDE_TYPES = [(torch.float64, 1e-12), (torch.float32, 2e-5)]
wide_types = each(("dtype", "tolerance"), WIDE_TYPES, ids=str)


@each(("dtype", "tolerance"), [*WIDE_TYPES, (torch.bfloat16, 4e-2)], ids=str)
@each("shape", SHAPES)
def test_rows_brought_to_a_length(shape, dtype, tolerance):
    x = rows(shape, dtype)
    compared(lambda x: scaled_to(x, 1.5), x, tolerance=tolerance)
    compared(scaled_to, x, torch.tensor([2.5], dtype=dtype, requires_grad=True), tolerance=6 * tolerance)


@wide_types
@each("shape", SHAPES)
@each("scale", [1.0, 1e-3])
def test_root_mean_squares(shape, dtype, tolerance, scale):
    """Rows may be as small as the root of epsilon."""
    x = (scale * rows(shape, dtype)).detach().requires_grad_()
    weight = torch.linspace(-1, 2, shape[-1], dtype=dtype).requires_grad_()
    compared(
        lambda x, w: root_mean_square_normed(x, w, 1e-6), x, weight, tolerance=tolerance * (1 + 0.3 / scale)
    )


@wide_types
@each("shape", SHAPES)
@each("alpha", [0.5, -2.0, 0.0])
def test_tanh_and_erf_with_gains(shape, dtype, tolerance, alpha):
    """Also with a factor of 0, by which nothing can be divided, and far out, where both are flat."""
    x = (5 * rows(shape, dtype)).detach().requires_grad_()
    scalars = [torch.tensor([value], dtype=dtype, requires_grad=True) for value in (alpha, 0.3)]
    weight = torch.linspace(-1, 2, shape[-1], dtype=dtype).requires_grad_()
    bias = torch.linspace(1, -3, shape[-1], dtype=dtype).requires_grad_()
    many = tolerance * x.numel() ** 0.5
    compared(tanh_scaled, x, scalars[0], weight, bias, tolerance=many)
    compared(erf_scaled, x, *scalars, weight, bias, tolerance=many)


def test_a_tanh_of_the_largest_numbers_is_one():
    x = torch.tensor([[-3e38, -90.0, 0.0, 90.0, 3e38]], requires_grad=True)
    y = tanh_scaled(x, torch.tensor([0.5]), torch.ones(5), torch.zeros(5))
    y.sum().backward()
    assert y.tolist() == [[-1, -1, 0, 1, 1]]
    assert x.grad.tolist() == [[0, 0, 0.5, 0, 0]]


def test_one_short_row_takes_all_rows_to_the_plain_path():
    x = rows((4, 6), torch.float32).detach()
    x[2] *= 1e-7
    x[3] = 0
    y = scaled_to(x.requires_grad_(), 2.0)
    with reference():
        plain = scaled_to(x, 2.0)
    assert last_operation(y) == last_operation(plain)
    assert last_operation(scaled_to(x[:2], 2.0)) != last_operation(plain), "two long rows are no reason"
    y.sum().backward()
    lengths = y.detach().norm(dim=-1)
    assert lengths[:2].tolist() == pytest.approx([2.0, 2.0])
    assert 0 < lengths[2] < 2
    assert lengths[3] == 0
    assert x.grad.isfinite().all()


def test_a_row_of_nan_is_not_hidden():
    x = torch.ones(3, 4)
    x[1] = float("nan")
    assert scaled_to(x, 2.0).isnan().any(1).tolist() == [False, True, False]


@pytest.mark.parametrize("x", [torch.ones(6, 4).t(), torch.ones(0, 4)], ids=["strided", "empty"])
def test_what_the_operator_does_not_take_is_scaled_all_the_same(x):
    torch.testing.assert_close(scaled_to(x, 3.0), x * 3 / x.shape[-1] ** 0.5)


def test_the_operator_is_used(monkeypatch):
    seen = []
    operator = torch._weight_norm_interface
    monkeypatch.setattr(torch, "_weight_norm_interface", lambda *a: seen.append(1) or operator(*a))
    scaled_to(torch.ones(2, 3), 1.0)
    with reference():
        scaled_to(torch.ones(2, 3), 1.0)
    assert len(seen) == 1


@pytest.mark.parametrize("broken", ["missing", "wrong"])
def test_an_operator_that_is_missing_or_wrong_is_left_alone(monkeypatch, broken):
    def interface(v: torch.Tensor, g: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
        if broken == "missing":
            raise AttributeError(broken)
        return v, g

    fused._normalises_rows.cache_clear()
    monkeypatch.setattr(torch, "_weight_norm_interface", interface)
    torch.testing.assert_close(scaled_to(torch.tensor([[3.0, 4.0]]), 10.0), torch.tensor([[6.0, 8.0]]))
    assert not fused._normalises_rows()
    fused._normalises_rows.cache_clear()


NORMS = {
    "length": lambda x: scaled_to(x, 1.5),
    "root-mean-square": lambda x: root_mean_square_normed(x, torch.ones(4, dtype=x.dtype), 1e-6),
    "tanh": lambda x: tanh_scaled(x, *(x.new_full((n,), 0.3) for n in (1, 4, 4))),
    "erf": lambda x: erf_scaled(x, *(x.new_full((n,), 0.3) for n in (1, 1, 4, 4))),
}


@pytest.mark.parametrize("name", sorted(NORMS.keys() - {"length"}))
def test_halves_take_the_plain_path(name):
    halves, singles = rows((3, 4), torch.bfloat16), rows((3, 4), torch.float32)
    with reference():
        plain = NORMS[name](halves)
    assert last_operation(NORMS[name](halves)) == last_operation(plain)
    assert last_operation(NORMS[name](singles)) != last_operation(plain)


@pytest.mark.parametrize("name", NORMS)
def test_the_plain_path_is_twice_differentiable_and_the_fast_one_says_that_it_is_not(name):
    x = rows((3, 4), torch.float64)
    with reference():
        assert torch.autograd.gradgradcheck(NORMS[name], (x,))
    (grad,) = torch.autograd.grad(NORMS[name](x).square().sum() + x.sum(), (x,), create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()
