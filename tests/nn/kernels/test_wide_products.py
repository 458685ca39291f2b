"""Products of bf16 matrices in fp32: the same numbers and gradients, in every way to multiply."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F

from contracts.variants import CONFIG, VOCAB, tokens
from normlab.lab.tasks.task import build_model
from normlab.nn import Seq2Seq
from normlab.nn.kernels.wide_products import WideProducts


def matrices(*shapes):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(shape, generator=generator).bfloat16() for shape in shapes]


A, B, C = matrices((48, 32), (32, 40), (48, 40))
STACKED_A, STACKED_B, STACKED_C = matrices((3, 48, 32), (3, 32, 40), (3, 48, 40))
(BIAS,) = matrices((40,))
PRODUCTS = {
    "mm": (lambda a, b, c: torch.mm(a, b), (A, B, C)),
    "addmm": (lambda a, b, c: torch.addmm(c, a, b, beta=-4.775, alpha=2.0315), (A, B, C)),
    "bmm": (lambda a, b, c: torch.bmm(a, b), (STACKED_A, STACKED_B, STACKED_C)),
    "baddbmm": (lambda a, b, c: torch.baddbmm(c, a, b, beta=0.5), (STACKED_A, STACKED_B, STACKED_C)),
    "linear": (lambda a, b, c: F.linear(a, b.mT), (STACKED_A, B, C)),
    "linear with a bias": (lambda a, b, c: F.linear(a, b.mT, c), (STACKED_A, B, BIAS)),
    "matmul": (lambda a, b, c: a @ b, (STACKED_A, B, C)),
}


@pytest.mark.parametrize("without_graph", [False, True], ids=["with a graph", "in inference"])
@pytest.mark.parametrize("name", PRODUCTS)
def test_a_product_is_rounded_once_from_fp32(name, without_graph):
    """The same as torch's in bf16 up to the order of sums, which moves some entries by one unit in the last
    place.
    """
    product, operands = PRODUCTS[name]
    a, b, c = operands if without_graph else [x.clone().requires_grad_() for x in operands]
    with WideProducts(), torch.inference_mode(without_graph):
        computed = product(a, b, c)
    assert computed.dtype == torch.bfloat16
    exact = product(*(x.double() for x in operands))
    torch.testing.assert_close(computed.double(), exact, rtol=2**-8, atol=2**-14)


def test_products_in_other_precisions_stay_as_they_are():
    a, b = A.float(), B.float()
    with WideProducts():
        assert torch.equal(a @ b, a.mm(b))
        assert (a @ b).dtype == torch.float32
        assert (A + A).dtype == torch.bfloat16


def gradients(context):
    """Return the loss of a small model under autocast, and its gradients by name."""
    model = build_model(Seq2Seq, CONFIG, VOCAB, 1)
    with context, torch.autocast("cpu", torch.bfloat16):
        logits = model(*tokens())
        loss = logits.float().logsumexp(-1).mean()
        loss.backward()
    return loss.detach(), {name: weight.grad for name, weight in model.named_parameters()}


def test_a_models_loss_and_gradients_are_those_of_products_in_bf16():
    loss, expected = gradients(nullcontext())
    wide_loss, computed = gradients(WideProducts())
    torch.testing.assert_close(wide_loss, loss, rtol=2**-10, atol=0)
    for name, gradient in expected.items():
        error = torch.linalg.vector_norm(computed[name] - gradient)
        assert error <= 0.02 * torch.linalg.vector_norm(gradient), name
