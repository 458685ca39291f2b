"""Sound models of one file, and of other libraries, first list."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD

from .case import Arguments, Case, collect
from .gpt import GPT, VOCAB, Block, LoRA, small
from .other_models import DiT, TorchDecoder, TorchSeq2Seq, flow_loss, next_target_loss
from .rotary import RotaryGPT, mixture
from .setups import LENGTH, ROWS, adamw, adamw_of_trained, own, shifted_tokens, tokens, with_loss

SOUND: dict[str, Case] = {}
case = collect(SOUND)


@case()
def nanogpt() -> Arguments:
    return own(declare={"tied": True})


@case()
def postln() -> Arguments:
    """A Post-LN decoder."""
    return own(lambda: GPT(64, 4, block=partial(Block, post=True)))


@case()
def nanogpt_pad() -> Arguments:
    """Rows that are padded on the right, with labels up to their last word."""
    ids, labels = (x.clone() for x in shifted_tokens())
    for row, length in enumerate((LENGTH, LENGTH - 5, LENGTH - 9, LENGTH - 3)):
        ids[row, length:] = 0
        labels[row, length - 1 :] = -100
    return own(batch=(ids, labels), step=None, declare={"pad_id": 0})


def shifted_loss(model: nn.Module, ids: Tensor) -> Tensor:
    """Return the mean loss of the next token of a model that returns logits first."""
    return F.cross_entropy(model(ids[:, :-1])[0].transpose(1, 2), ids[:, 1:])


def loss_of_logits(model: nn.Module, ids: Tensor) -> Tensor:
    """Return the mean loss of the next token of a model that returns logits of every token."""
    return F.cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


@case()
def tokens_loss() -> Arguments:
    """A batch of one tensor, and an optimizer that is a function of the model."""
    torch.manual_seed(0)
    return {
        "model": small(),
        "batch": tokens(length=LENGTH + 1),
        "loss": shifted_loss,
        "optimizer": lambda model: SGD(model.parameters(), lr=0.1),
    }


def adapted() -> GPT:
    """Return a frozen decoder with adapters in its attention."""
    model = small().requires_grad_(False)
    for block in model.h:
        block.qkv, block.o = LoRA(block.qkv), LoRA(block.o)
    return model


@case()
def lora() -> Arguments:
    return own(adapted, optimizer=adamw_of_trained)


@case()
def dit() -> Arguments:
    """A diffusion Transformer, whose loss draws noise and times."""
    images = torch.randn(ROWS, 4, 8, 8, generator=torch.Generator().manual_seed(0))
    return with_loss(DiT, (images, torch.tensor([1, 3, 5, 7])), flow_loss) | {"make": DiT}


@case()
def nn_encoder() -> Arguments:
    return with_loss(TorchDecoder, tokens(), loss_of_logits)


@case()
def nn_transformer() -> Arguments:
    return with_loss(TorchSeq2Seq, (tokens(), tokens(length=14, seed=4)), next_target_loss)


@case()
def xtrans() -> Arguments:
    """A decoder of x-transformers in the wrapper that returns the loss."""
    from x_transformers import AutoregressiveWrapper, Decoder, TransformerWrapper

    torch.manual_seed(0)
    layers = Decoder(dim=64, depth=4, heads=4, attn_dim_head=16, rotary_pos_emb=True)
    decoder = TransformerWrapper(num_tokens=VOCAB, max_seq_len=64, attn_layers=layers)
    model = AutoregressiveWrapper(decoder)
    return {"model": model, "batch": tokens(), "optimizer": adamw(model)}


@case()
def xtrans2() -> Arguments:
    """A decoder of x-transformers with RMSNorm, gated feed-forwards and fused attention."""
    from x_transformers import Decoder, TransformerWrapper

    def make() -> nn.Module:
        options = {"use_rmsnorm": True, "ff_glu": True, "attn_flash": True, "alibi_pos_bias": False}
        layers = Decoder(dim=64, depth=4, heads=4, attn_dim_head=16, **options)
        return TransformerWrapper(num_tokens=VOCAB, max_seq_len=64, attn_layers=layers)

    return with_loss(make, tokens(), loss_of_logits)


@case()
def moe_own() -> Arguments:
    """Layers with a mixture of experts."""
    return own(mixture)


@case()
def rotary_ckpt() -> Arguments:
    """Layers under checkpoints that are not re-entrant."""
    return own(lambda: RotaryGPT(checkpointed=True))


@case()
def own_bf16() -> Arguments:
    return own(lambda: RotaryGPT().to(torch.bfloat16), step=None)
