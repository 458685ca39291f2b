"""``apx.blocks``: outputs and gradients of the page's two blocks, against those of a wrapped module."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from cases import each
from normlab.nn import stack_of, wrap
from normlab.papers import find_artefact
from normlab.papers.studies.model_parts import PAGE

BLOCKS = find_artefact("apx.blocks")
SHAPE = (32, 10, 512)


class SelfAttention(nn.Module):
    """``nn.MultiheadAttention`` of a stream on itself."""

    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.attend = nn.MultiheadAttention(d_model, 8, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attend(x, x, x, need_weights=False)[0]


SUBLAYERS = {
    "linear": lambda d: nn.Linear(d, d),
    "mlp": lambda d: nn.Sequential(nn.Linear(d, 4 * d), nn.GELU(), nn.Linear(4 * d, d)),
    "attention": SelfAttention,
}


@each("placement", PAGE)
@each("kind", SUBLAYERS)
def test_outputs_and_gradients_are_the_page_s(placement, kind):
    torch.manual_seed(1)
    branch, norm = SUBLAYERS[kind](512), nn.LayerNorm(512)
    nn.init.normal_(norm.weight)
    nn.init.normal_(norm.bias)
    sublayer = wrap(copy.deepcopy(branch), placement, next(stack_of(("anything",), 1, 512)))
    sublayer.place.norm.load_state_dict(norm.state_dict())
    x, cotangent = torch.randn(SHAPE, requires_grad=True), torch.randn(SHAPE)
    theirs, ours = PAGE[placement](x, branch, norm), sublayer(x)
    assert torch.equal(ours, theirs)
    expected = torch.autograd.grad(theirs, [x, *norm.parameters(), *branch.parameters()], cotangent)
    parameters = [*sublayer.place.parameters(), *sublayer.f.parameters()]
    torch.testing.assert_close(torch.autograd.grad(ours, [x, *parameters], cotangent), expected)


def test_the_artefact_is_about_these_blocks():
    assert BLOCKS.published.keys() == {*PAGE, "shape"}
    assert BLOCKS.published["shape"] == str(list(SHAPE))
    assert BLOCKS.settings["shape"] == SHAPE
