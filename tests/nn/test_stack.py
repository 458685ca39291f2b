"""Post-LN and Pre-LN stacks against torch's own layers with the same weights."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from contracts.variants import CONFIG, perturbed
from normlab.nn import Attention, Context, Stack

TORCH_LAYERS = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}
OPTIONS = {"dim_feedforward": 24, "dropout": 0.0, "batch_first": True}


def copy_attention(ours: Attention, theirs: nn.MultiheadAttention) -> None:
    packed = [ours.q, ours.kv] if ours.from_memory else [ours.qkv]
    theirs.in_proj_weight.copy_(torch.cat([p.weight for p in packed]))
    theirs.in_proj_bias.copy_(torch.cat([p.bias for p in packed]))
    theirs.out_proj.load_state_dict(ours.out.state_dict())


@torch.no_grad()
def copy_stack(ours: Stack, theirs: nn.TransformerEncoder | nn.TransformerDecoder) -> None:
    """Copy the weights of our sublayers into torch's layers."""
    left = list(ours.sublayers)
    for layer in theirs.layers:
        attentions = [m for m in layer.children() if isinstance(m, nn.MultiheadAttention)]
        norms = [m for m in layer.children() if isinstance(m, nn.LayerNorm)]
        taken, left = left[: len(norms)], left[len(norms) :]
        for sublayer, norm in zip(taken, norms, strict=True):
            norm.load_state_dict(sublayer.place.norm.state_dict())
        for sublayer, attention in zip(taken[:-1], attentions, strict=True):
            copy_attention(sublayer.f, attention)
        layer.linear1.load_state_dict(taken[-1].f.inner.state_dict())
        layer.linear2.load_state_dict(taken[-1].f.outer.state_dict())
    assert not left
    if theirs.norm is not None:
        theirs.norm.load_state_dict(ours.end.state_dict())


def streams() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Random source and target streams, and which of their positions are real."""
    source, target = torch.randn(3, 6, 16), torch.randn(3, 5, 16)
    source_real, target_real = (
        torch.arange(t) < torch.tensor(n)[:, None] for t, n in ((6, (6, 4, 2)), (5, (5, 3, 4)))
    )
    return source, source_real, target, target_real


@pytest.mark.parametrize("grad", [True, False], ids=["trained", "searched"])
@pytest.mark.parametrize(("placement", "norm_first"), [("post", False), ("pre", True)])
def test_encoder_and_decoder_equal_torch(placement, norm_first, grad):
    torch.manual_seed(1)
    config = replace(CONFIG, encoder_placement=placement, decoder_placement=placement)
    model = perturbed(config, dtype=torch.float32)
    final = [nn.LayerNorm(16) if norm_first else None for _ in TORCH_LAYERS]
    layers = [kind(16, 2, norm_first=norm_first, **OPTIONS) for kind in TORCH_LAYERS]
    encoder = nn.TransformerEncoder(layers[0], 2, final[0], enable_nested_tensor=False)
    decoder = nn.TransformerDecoder(layers[1], 2, final[1])
    copy_stack(model.encoder, encoder)
    copy_stack(model.decoder, decoder)
    source, source_real, target, target_real = streams()
    with torch.set_grad_enabled(grad):
        memory = model.encoder(source, Context(padding_mask=source_real))
        theirs = encoder(source, src_key_padding_mask=~source_real)
        torch.testing.assert_close(memory[source_real], theirs[source_real], **TOLERANCE)
        context = Context(padding_mask=target_real, memory=theirs, memory_mask=source_real)
        expected = decoder(
            target,
            theirs,
            tgt_mask=torch.ones(5, 5, dtype=torch.bool).triu(1),
            tgt_key_padding_mask=~target_real,
            memory_key_padding_mask=~source_real,
        )
        torch.testing.assert_close(
            model.decoder(target, context)[target_real], expected[target_real], **TOLERANCE
        )


def test_the_paths_of_streams_and_branches_are_promised():
    names = {name for name, _ in perturbed(CONFIG).named_modules()}
    assert {"encoder.sublayers.3", "encoder.sublayers.3.f", "decoder.sublayers.5.f.inner"} <= names


def test_sublayers_of_a_layer_share_what_the_placement_shares_and_no_more():
    stack = perturbed(replace(CONFIG, encoder_placement="rezero")).encoder
    alphas = [s.place.alpha for s in stack.sublayers]
    assert alphas[0] is alphas[1]
    assert alphas[2] is alphas[3]
    assert alphas[0] is not alphas[2]
