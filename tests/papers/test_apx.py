"""``apx.blocks``: the page's two blocks as it writes them, against a wrapped module."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from cases import each, pairwise
from normlab import nn as ours
from normlab.papers import find_artefact

BLOCKS = find_artefact("apx.blocks")
SHAPE = (32, 10, 512)


class PostLNBlock(nn.Module):
    """output = LayerNorm(x + Sublayer(x)), dropout on the sublayer's output."""

    def __init__(self, d_model: int, sublayer: nn.Module, dropout: float) -> None:
        super().__init__()
        self.norm, self.sublayer, self.dropout = nn.LayerNorm(d_model), sublayer, nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + self.dropout(self.sublayer(x)))


class PreLNBlock(nn.Module):
    """output = x + Sublayer(LayerNorm(x)), dropout on the sublayer's output."""

    def __init__(self, d_model: int, sublayer: nn.Module, dropout: float) -> None:
        super().__init__()
        self.norm, self.sublayer, self.dropout = nn.LayerNorm(d_model), sublayer, nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.sublayer(self.norm(x)))


class SelfAttention(nn.Module):
    """``nn.MultiheadAttention`` of a stream on itself."""

    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.attend = nn.MultiheadAttention(d_model, 8, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attend(x, x, x, need_weights=False)[0]


BLOCK = {"post": PostLNBlock, "pre": PreLNBlock}
SUBLAYERS = {
    "linear": lambda d: nn.Linear(d, d),
    "mlp": lambda d: nn.Sequential(nn.Linear(d, 4 * d), nn.GELU(), nn.Linear(4 * d, d)),
    "attention": SelfAttention,
}
OUR_NAMES = {"norm": "place.norm.", "sublayer": "f."}


def wrapped(block: nn.Module, placement: str) -> ours.Sublayer:
    """The block's own sublayer, copied, under our placement, with the block's norm."""
    site = next(ours.stack_of(("anything",), 1, 512))
    sublayer = ours.wrap(copy.deepcopy(block.sublayer), placement, site)
    sublayer.place.norm.load_state_dict(block.norm.state_dict())
    return sublayer


@each(("placement", "kind", "started", "mode"), pairwise(BLOCK, SUBLAYERS, (True, False), ("train", "eval")))
def test_outputs_and_gradients_are_the_page_s(placement, kind, started, mode):
    torch.manual_seed(1)
    block = BLOCK[placement](512, SUBLAYERS[kind](512), dropout=0.0 if mode == "train" else 0.1)
    if not started:
        nn.init.normal_(block.norm.weight)
        nn.init.normal_(block.norm.bias)
    sublayer = wrapped(block, placement)
    for module in (block, sublayer):
        module.train(mode == "train")
    x = torch.randn(SHAPE, requires_grad=True)
    theirs, found = block(x), sublayer(x)
    assert found.shape == SHAPE
    assert torch.equal(found, theirs)
    cotangent = torch.randn(SHAPE)
    ours_by_name = dict(sublayer.named_parameters())
    order = [OUR_NAMES[n.split(".")[0]] + n.partition(".")[2] for n, _ in block.named_parameters()]
    expected = torch.autograd.grad(theirs, [x, *block.parameters()], cotangent)
    gradients = torch.autograd.grad(found, [x, *(ours_by_name[n] for n in order)], cotangent)
    for a, b in zip(gradients, expected, strict=True):
        torch.testing.assert_close(a, b)


def test_the_two_placements_differ():
    torch.manual_seed(1)
    block = PostLNBlock(512, nn.Linear(512, 512), dropout=0.0)
    x = torch.randn(SHAPE)
    assert not torch.allclose(block(x), wrapped(block, "pre")(x), atol=0.1)


def test_the_artefact_is_about_these_blocks():
    assert set(BLOCKS.published) == {*BLOCK, "shape"}
    assert BLOCKS.published["shape"] == str(list(SHAPE))
    for placement, block in BLOCK.items():
        assert block.__doc__.startswith(f"output = {BLOCKS.published[placement]},")
