"""Linear layers by oneDNN against ``F.linear``: values and gradients, and where it is not used."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from cases import each
from normlab.nn import reference
from normlab.nn.kernels import linear as module
from normlab.nn.kernels.linear import Linear, MkldnnLinear, kept_copies, linear


@pytest.fixture(autouse=True)
def every_size(monkeypatch):
    """Give the operator small products as well, whatever the processor."""
    monkeypatch.setattr(module, "_LEAST_PRODUCTS", 0)
    monkeypatch.setattr(module, "_LEAST_TRAINED", 0)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    module._multiplies.cache_clear()
    yield
    module._multiplies.cache_clear()


def require_operator(dtype: torch.dtype) -> None:
    """Skip a test that would compare ``F.linear`` with itself."""
    if not module._multiplies(dtype):
        pytest.skip(f"oneDNN's operator is missing in this torch, or does not multiply {dtype} here")


def sides(shape: tuple[int, ...], outs: int, *, biased: bool = True) -> list[torch.Tensor | None]:
    generator = torch.Generator().manual_seed(5)
    shapes = (shape, (outs, shape[-1]), (outs,))
    x, weight, bias = (torch.randn(s, generator=generator, requires_grad=True) for s in shapes)
    return [x, weight, bias if biased else None]


def passes(multiply, given: list[torch.Tensor | None], *, cast: bool) -> list[torch.Tensor]:
    """The product and every gradient."""
    with torch.autocast("cpu", torch.bfloat16, enabled=cast):
        y = multiply(*given)
    (y.float() * torch.arange(y.numel()).view_as(y).cos()).sum().backward()
    found = [y.detach(), *(p.grad for p in given if p is not None)]
    for p in given:
        if p is not None:
            p.grad = None
    return found


@pytest.mark.parametrize("cast", [False, True], ids=["fp32", "bf16"])
@each("shape", [(7,), (1, 1), (3, 17), (2, 5, 33), (4, 1, 3, 64)], ids=str)
@each(("outs", "biased"), [(1, True), (13, False), (96, True)])
def test_values_and_gradients_are_those_of_torch(shape, outs, biased, cast):
    require_operator(torch.bfloat16 if cast else torch.float32)
    given = sides(shape, outs, biased=biased)
    found, expected = passes(linear, given, cast=cast), passes(F.linear, given, cast=cast)
    assert [t.dtype for t in found] == [t.dtype for t in expected]
    tolerance = 2e-2 if cast else 1e-5
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def test_a_strided_input_and_a_transposed_gradient():
    require_operator(torch.float32)
    x, weight, bias = sides((6, 9, 5), 4)
    found = linear(x.transpose(0, 1)[::2], weight, bias).transpose(0, 2)
    expected = F.linear(x.transpose(0, 1)[::2], weight, bias).transpose(0, 2)
    torch.testing.assert_close(found, expected)
    grads = [torch.autograd.grad(y.square().sum(), (x, weight, bias)) for y in (found, expected)]
    torch.testing.assert_close(*grads, rtol=1e-5, atol=1e-5)


@each("wanted", range(3), ids=["x", "weight", "bias"].__getitem__)
def test_only_wanted_gradients_are_computed(wanted, monkeypatch):
    require_operator(torch.float32)
    computed = []
    backward = MkldnnLinear.backward

    def recording(ctx, grad):
        gradients = backward(ctx, grad)
        computed.append([number for number, gradient in enumerate(gradients) if gradient is not None])
        return gradients

    given = [side.requires_grad_(number == wanted) for number, side in enumerate(sides((3, 5), 4))]
    with monkeypatch.context() as patched:
        patched.setattr(MkldnnLinear, "backward", staticmethod(recording))
        (found,) = torch.autograd.grad(linear(*given).sum(), (given[wanted],))
    assert computed == [[wanted]]
    (expected,) = torch.autograd.grad(F.linear(*given).sum(), (given[wanted],))
    torch.testing.assert_close(found, expected)


def names_of(y: torch.Tensor) -> str:
    return type(y.grad_fn).__name__


def test_the_operator_is_used_in_training_and_not_where_it_cannot_be(monkeypatch):
    require_operator(torch.float32)
    layer = Linear(5, 4)
    x = torch.randn(3, 5)
    assert names_of(layer(x)) == "MkldnnLinearBackward"
    assert names_of(layer.double()(x.double())) == "AddmmBackward0"
    layer.float()
    with reference():
        assert names_of(layer(x)) == "AddmmBackward0"
    monkeypatch.setattr(module, "_LEAST_TRAINED", 61)  # one more than the layer's 3 x 5 x 4
    assert names_of(layer(x)) == "AddmmBackward0"
    monkeypatch.setattr(module, "_LEAST_TRAINED", 60)
    assert names_of(layer(x)) == "MkldnnLinearBackward"


@pytest.mark.parametrize("broken", ["missing", "refusing", "wrong"])
def test_an_operator_that_is_missing_or_wrong_is_left_alone(monkeypatch, broken):
    def product(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        if broken == "wrong":
            return a @ b.t()
        raise {"missing": AttributeError, "refusing": RuntimeError}[broken](broken)

    monkeypatch.setattr(module, "_product", product)
    assert not module._multiplies(torch.float32)
    assert names_of(Linear(5, 4)(torch.randn(3, 5))) == "AddmmBackward0"


def test_torch_multiplies_fp32_with_avx2_alone(monkeypatch):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    assert names_of(Linear(5, 4)(torch.randn(3, 5))) == "AddmmBackward0"


def test_types_that_do_not_fit_are_refused_as_torch_refuses_them():
    with pytest.raises(RuntimeError, match="dtype"):
        Linear(5, 4)(torch.randn(3, 5, dtype=torch.bfloat16))


@torch.no_grad()
def test_copies_are_kept_within_the_block_alone():
    layer = Linear(64, 32)
    x = torch.randn(9, 64)
    with torch.autocast("cpu", torch.bfloat16):
        before = layer(x)
        with kept_copies():
            first = layer(x)
            layer.weight.mul_(2)
            assert torch.equal(layer(x), first)
    with torch.autocast("cpu", torch.bfloat16):  # another one: autocast keeps copies of its own until its end
        after = layer(x)
    assert torch.equal(first, before)
    assert not torch.equal(after, before)


def test_a_compiled_layer_equals_the_eager_one():
    layer, x = Linear(6, 4), torch.randn(3, 6)
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), layer(x))
    torch._dynamo.reset()
