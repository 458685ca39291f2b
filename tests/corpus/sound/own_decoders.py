"""Decoders of one file: usual ones, and ones whose layers or attention are unusual."""

from __future__ import annotations

import random
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, AdamW
from torch.utils.checkpoint import checkpoint

from corpus.batches import LENGTH, PAD, VOCAB, shifted_tokens, text, tokens
from corpus.case import OWN_1, OWN_3, PUBLIC, UNSEEN, Arguments, sound
from corpus.models import llama
from corpus.models.experts import StackedExperts
from corpus.models.gpt import Attention, Block, Gpt, PostBlock, gpt_of
from corpus.models.library import PADDED
from corpus.models.llama import Llama, Rotations, llama_of
from corpus.models.parts import LoRA
from corpus.models.translators import causal_mask
from corpus.training import WideAdamW, adamw, adamw_of_trained, changed, full_setup, groups, loss_setup

# --------------------------------------------------------------------------------------------------- usual


@sound(origin=OWN_1)
def nanogpt() -> Arguments:
    """A decoder of the GPT-2 kind with all that its user has."""
    return full_setup(partial(Gpt, 128, 6), declare={"tied": True})


@sound(origin=OWN_1)
def postln() -> Arguments:
    """A Post-LN decoder."""
    return full_setup(gpt_of(PostBlock))


@sound(origin=OWN_1)
def nanogpt_pad() -> Arguments:
    """Rows that are padded on the right, with labels up to their last word."""
    ids, labels = (x.clone() for x in shifted_tokens())
    for row, length in enumerate((LENGTH, LENGTH - 5, LENGTH - 9, LENGTH - 3)):
        ids[row, length:] = PAD
        labels[row, length - 1 :] = -100
    return full_setup(batch=(ids, labels), step=None, declare=PADDED)


@sound(origin=OWN_1)
def tokens_loss() -> Arguments:
    """A batch of one tensor, and an optimizer that is a function of the model."""
    arguments = loss_setup(Gpt, tokens(), remade=False)
    return arguments | {"optimizer": lambda model: SGD(model.parameters(), lr=0.1)}


@sound(origin=OWN_1)
def lora() -> Arguments:
    """A frozen decoder with adapters in its attention."""

    def adapt(model: Gpt) -> None:
        model.requires_grad_(False)
        for block in model.blocks:
            block.attn.qkv, block.attn.out = LoRA(block.attn.qkv), LoRA(block.attn.out)

    return full_setup(changed(adapt), optimizer=adamw_of_trained)


@sound(origin=OWN_1)
def moe_own() -> Arguments:
    """Layers with a mixture of experts."""
    return full_setup(llama_of(mlp=StackedExperts))


class Checkpointed(Llama):
    def run(self, x: Tensor, rotations: Rotations, seen: Tensor | None) -> Tensor:
        for block in self.blocks:
            if self.training:
                x = checkpoint(block, x, rotations, use_reentrant=False)
            else:
                x = block(x, rotations)
        return x


@sound(origin=OWN_1)
def rotary_ckpt() -> Arguments:
    """Layers under checkpoints that are not re-entrant."""
    return full_setup(Checkpointed)


@sound(origin=OWN_1)
def own_bf16() -> Arguments:
    """A rotary decoder in bfloat16, whose optimizer keeps wide copies."""

    def wide(model: nn.Module, lr: float) -> WideAdamW:
        return WideAdamW(groups(model), lr=lr)

    return full_setup(changed(lambda model: model.to(torch.bfloat16), Llama), optimizer=wide, step=None)


@sound(origin=PUBLIC)
def repeated_block_sound() -> Arguments:
    """A rotary decoder with four blocks."""
    return loss_setup(Llama, text(8), remade=False)


# -------------------------------------------------------------------------------------- torch, x-transformers


class TorchDecoder(nn.Module):
    """A decoder of nn.TransformerEncoder with a causal mask."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, 64)
        self.positions = nn.Parameter(torch.randn(64, 64) * 0.02)
        layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 4)
        self.head = nn.Linear(64, VOCAB)

    def forward(self, ids: Tensor) -> Tensor:
        length = ids.shape[1]
        x = self.tokens(ids) * 0.1 + self.positions[:length]
        return self.head(self.layers(x, mask=causal_mask(length), is_causal=True))


@sound(origin=OWN_1)
def nn_encoder() -> Arguments:
    """A decoder of nn.TransformerEncoder."""
    return loss_setup(TorchDecoder, tokens(), optimizer=adamw, remade=False)


def x_decoder(**options: bool) -> nn.Module:
    """Draw a decoder of x-transformers."""
    from x_transformers import Decoder, TransformerWrapper

    layers = Decoder(dim=64, depth=4, heads=4, attn_dim_head=16, **options)
    return TransformerWrapper(num_tokens=VOCAB, max_seq_len=64, attn_layers=layers)


@sound(origin=OWN_1)
def xtrans() -> Arguments:
    """A decoder of x-transformers in the wrapper that returns the loss."""
    from x_transformers import AutoregressiveWrapper

    def make() -> nn.Module:
        return AutoregressiveWrapper(x_decoder(rotary_pos_emb=True))

    return loss_setup(make, tokens(), None, adamw, remade=False)


@sound(origin=OWN_1)
def xtrans2() -> Arguments:
    """A decoder of x-transformers with RMSNorm, gated feed-forwards and fused attention."""
    make = partial(x_decoder, use_rmsnorm=True, ff_glu=True, attn_flash=True, alibi_pos_bias=False)
    return loss_setup(make, tokens(), optimizer=adamw, remade=False)


# ------------------------------------------------------------------------------------------- unusual layers


class DeepNorm(Block):
    def forward(self, x: Tensor) -> Tensor:
        x = self.norm_1(1.8 * x + self.attn(x))
        return self.norm_2(1.8 * x + self.mlp(x))


@sound(origin=OWN_3)
def deepnorm() -> Arguments:
    """Post-LN layers whose streams are scaled up."""
    return full_setup(gpt_of(DeepNorm))


class ReZero(Block):
    def __init__(self, dim: int, dropout: float):
        super().__init__(dim, dropout)
        self.norm_1, self.norm_2 = nn.Identity(), nn.Identity()
        self.share = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.share * self.attn(x)
        return x + self.share * self.mlp(x)


@sound(origin=OWN_3)
def rezero() -> Arguments:
    """Layers without norms, whose branches have a scale of zero at the start."""
    return full_setup(gpt_of(ReZero))


class LayerScale(Block):
    def __init__(self, dim: int, dropout: float):
        super().__init__(dim, dropout)
        self.gain_1, self.gain_2 = (nn.Parameter(torch.full((dim,), 1e-4)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.gain_1 * self.attn(self.norm_1(x))
        return x + self.gain_2 * self.mlp(self.norm_2(x))


@sound(origin=OWN_3)
def layerscale() -> Arguments:
    """Branches with learned gains of 1e-4."""
    return full_setup(gpt_of(LayerScale))


class Parallel(Block):
    def __init__(self, dim: int, dropout: float):
        super().__init__(dim, dropout)
        del self.norm_2

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm_1(x)
        return x + self.attn(normed) + self.mlp(normed)


@sound(origin=OWN_3)
def parallel() -> Arguments:
    """Layers whose attention and feed-forward read the same norm."""
    return full_setup(gpt_of(Parallel))


class StochasticDepth(Block):
    def forward(self, x: Tensor) -> Tensor:
        return x if self.training and random.random() > 0.8 else super().forward(x)


@sound(origin=OWN_3)
def stochdepth() -> Arguments:
    """Layers that are skipped in a fifth of the training steps, as Python's random numbers have it."""
    return full_setup(gpt_of(StochasticDepth), step=None)


# ----------------------------------------------------------------------------------------- unusual attention


class Alibi(llama.Attention):
    def place(self, q: Tensor, k: Tensor, rotations: Rotations) -> tuple[Tensor, Tensor]:
        return q, k

    def attend(self, q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None) -> Tensor:
        k, v = (y.repeat_interleave(2, 1) for y in (k, v))
        i = torch.arange(q.shape[-2])
        slopes = 2.0 ** -torch.arange(1, 5)[:, None, None].float()
        bias = -(i[:, None] - i[None]).clamp_min(0) * slopes
        scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5 + bias
        return scores.masked_fill(i[None] > i[:, None], -torch.inf).softmax(-1) @ v


@sound(origin=OWN_3)
def alibi_own() -> Arguments:
    """A penalty for distance, and no other positions."""
    return full_setup(llama_of(Alibi))


class Windowed(llama.Attention):
    def attend(self, q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None) -> Tensor:
        i = torch.arange(q.shape[-2])
        distance = i[:, None] - i[None]
        return super().attend(q, k, v, (distance >= 0) & (distance < 4))


@sound(origin=OWN_3)
def sliding_own() -> Arguments:
    """Attention to the last four tokens."""
    return full_setup(llama_of(Windowed))


class NormedHeads(llama.Attention):
    def place(self, q: Tensor, k: Tensor, rotations: Rotations) -> tuple[Tensor, Tensor]:
        q, k = (F.rms_norm(y, (y.shape[-1],)) for y in (q, k))
        return super().place(q, k, rotations)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.12, enable_gqa=True)


@sound(origin=OWN_3)
def qknorm_own() -> Arguments:
    """Normed queries and keys, with a scale of their own."""
    return full_setup(llama_of(NormedHeads))


class Prefix(Attention):
    def sees(self, length: int, device: torch.device) -> Tensor:
        seen = super().sees(length, device)
        seen[:8, :8] = True
        return seen


@sound(origin=OWN_3)
def prefix_lm() -> Arguments:
    """A prefix of eight tokens is read in both directions, and nothing in it is predicted."""
    ids, labels = shifted_tokens()
    labels = labels.clone()
    labels[:, :7] = -100
    return full_setup(gpt_of(Prefix), batch=(ids, labels), step=None)


class WidthScaled(Attention):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=1 / q.shape[-1])


def mup_groups(model: nn.Module, lr: float) -> AdamW:
    """Return AdamW with a quarter of the rate for hidden matrices."""
    hidden = [p for p in model.blocks.parameters() if p.dim() > 1]
    inside = {id(p) for p in hidden}
    others = [p for p in model.parameters() if id(p) not in inside]
    return AdamW([{"params": others, "lr": lr}, {"params": hidden, "lr": lr / 4}], weight_decay=0.0)


@sound(origin=OWN_3)
def mup() -> Arguments:
    """Scores are divided by the head's width, and hidden matrices learn more slowly, as in muP."""
    return full_setup(gpt_of(WidthScaled), optimizer=mup_groups)


class MupHeads(llama.Attention):
    def attend(self, q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None) -> Tensor:
        scale = 1 / q.shape[-1]
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)


class MupDecoder(Llama):
    """A rotary decoder in the maximal update parametrisation, three times as wide as its base."""

    def __init__(self):
        super().__init__(96, 3, block=partial(llama.Block, attention=MupHeads))
        nn.init.normal_(self.tokens.weight, std=0.1)
        for module in self.blocks.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=module.in_features**-0.5)

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) / 3


@sound(origin=UNSEEN)
def mup_decoder() -> Arguments:
    """A muP decoder: scores over the head width, a divided readout, rates by width."""

    def by_width(model: MupDecoder) -> AdamW:
        hidden = [p for p in model.blocks.parameters() if p.dim() == 2]
        inside = {id(p) for p in hidden}
        others = [p for p in model.parameters() if id(p) not in inside]
        groups = [
            {"params": hidden, "lr": 4e-3 / 3, "weight_decay": 0.3},
            {"params": others, "lr": 4e-3, "weight_decay": 0.0},
        ]
        return AdamW(groups, betas=(0.9, 0.95))

    return loss_setup(MupDecoder, text(seed=33), optimizer=by_width)
