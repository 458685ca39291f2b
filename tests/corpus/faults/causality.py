"""Faults that ``causality`` names: a token that reads later ones."""

from __future__ import annotations

from functools import partial
from types import MethodType

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from corpus.batches import LENGTH, PAD, text, tokens
from corpus.case import DEEP, LATER, PLANTED_1, PLANTED_2, PLANTED_3, UNSEEN, Arguments, fault, twins
from corpus.models import gpt, llama
from corpus.models.deep import Training, deep_gpt2, deep_llama, deep_translation, planted, twelve_layers
from corpus.models.gpt import Attention, Gpt, gpt_of, steady, untied
from corpus.models.library import LaidOut
from corpus.models.llama import Llama, Rms, Rotations
from corpus.models.parts import becomes, draw
from corpus.models.translators import TorchTranslator, next_target_loss
from corpus.places import FIRST_ATTENTION, FIRST_CROSS, LLAMA_ATTENTION, SELF_ATTENTIONS, within
from corpus.training import changed, full_setup, loss_setup
from normlab.nn import Context, Seq2Seq

# ------------------------------------------------------------------------------------------------------ masks


class Unmasked(Attention):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v)


@fault("causality", place="blocks.0*", origin=PLANTED_1)
def no_causal_mask() -> Arguments:
    """No layer has a causal mask."""
    return full_setup(gpt_of(Unmasked))


@fault("causality", place=FIRST_ATTENTION, origin=DEEP)
@planted(deep_gpt2)
def deep_no_causal_mask(training: Training) -> None:
    """None of twelve layers has a causal mask."""
    for block in training.model.blocks:
        becomes(block.attn, Unmasked)


class SeesTheNext(Attention):
    def sees(self, length: int, device: torch.device) -> Tensor:
        return torch.ones(length, length, dtype=torch.bool, device=device).tril(1)


@fault("causality", place="blocks.2*", origin=PLANTED_1)
def mask_off_by_one_layer2() -> Arguments:
    """The mask of one layer shows the next token."""
    return full_setup(changed(lambda model: becomes(model.blocks[2].attn, SeesTheNext)))


class WeakMask(Attention):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        hidden = ~self.sees(q.shape[-2], q.device)
        return (self.scores(q, k) - 10 * hidden).softmax(-1) @ v


@fault("causality", place="blocks.0*", origin=PLANTED_3)
def mask_minus_ten() -> Arguments:
    """The mask takes 10 off the scores of later tokens, which leaves them some weight."""
    return full_setup(gpt_of(WeakMask))


class MaskAfterSoftmax(Attention):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.scores(q, k).softmax(-1).tril() @ v


@fault("causality", place="blocks.0*", origin=PLANTED_3)
def mask_after_softmax() -> Arguments:
    """The mask comes after the softmax, whose sum counts later tokens."""
    return full_setup(gpt_of(MaskAfterSoftmax))


@fault("causality", "attention_scale", place=FIRST_ATTENTION, origin=DEEP)
@planted(deep_gpt2)
def mask_behind_the_softmax(training: Training) -> None:
    """The causal mask stands behind the softmax, so that the weights of a query sum to less than 1."""
    for block in training.model.blocks:
        becomes(block.attn, MaskAfterSoftmax)


class BufferedMask(Attention):
    """Attention that keeps its mask as a buffer, which a checkpoint holds."""

    def __init__(self, dim: int, dropout: float):
        super().__init__(dim, dropout)
        self.register_buffer("mask", torch.ones(64, 64, dtype=torch.bool).tril())

    def sees(self, length: int, device: torch.device) -> Tensor:
        return self.mask[:length, :length]


@fault("causality", "buffers", place=within("blocks.3"), origin=DEEP)
@planted(deep_gpt2)
def mask_overwritten_by_load(training: Training) -> None:
    """A load from an encoder's checkpoint overwrote the causal mask of layer 3."""
    training.make = partial(twelve_layers, block=partial(gpt.Block, attention=BufferedMask))
    training.model = training.make()
    loaded = {"blocks.3.attn.mask": torch.ones(64, 64, dtype=torch.bool)}
    training.model.load_state_dict(loaded, strict=False)


@fault("causality", place=f"decoder|{within(SELF_ATTENTIONS[0])}", origin=DEEP)
@planted(deep_translation)
def target_mask_forgotten(training: Training) -> None:
    """The decoder got no causal mask, the forgotten tgt_mask of nn.Transformer: it reads what it predicts."""
    for path in SELF_ATTENTIONS:
        training.model.get_submodule(path).f.causal = False


class NoTargetMask(TorchTranslator):
    def translate(self, source: Tensor, target: Tensor) -> Tensor:
        return self.transformer(source, target)


@fault("causality", place="transformer|transformer.decoder|transformer.decoder.layers.0*", origin=PLANTED_2)
def seq2seq_no_tgt_mask() -> Arguments:
    """The decoder has no causal mask."""
    return loss_setup(NoTargetMask, (tokens(), tokens(length=14, seed=4)), next_target_loss, remade=False)


def decode_itself(model: Seq2Seq, target_in: Tensor, memory: Tensor, memory_mask: Tensor) -> Tensor:
    """Decode with the target's own embeddings in the place of the memory."""
    mask, x = target_in != PAD, model.embed(target_in)
    return model.decoder(x, Context(padding_mask=mask, memory=x, memory_mask=mask))


@fault("causality", "inputs", "gradients", place=f"{FIRST_CROSS}|{within('encoder')}", origin=DEEP)
@planted(deep_translation)
def cross_attention_to_the_target(training: Training) -> None:
    """Cross-attention reads the embedded target instead of the encoder's output."""
    training.model.decode = MethodType(decode_itself, training.model)


# ------------------------------------------------------------------------------------------------------ heads


class MergedByView(Attention):
    def merge(self, y: Tensor) -> Tensor:
        rows, _, length, _ = y.shape
        return self.out(y.reshape(rows, length, -1))


@fault("causality", place="blocks.0*", origin=PLANTED_3)
def no_transpose_back() -> Arguments:
    """Heads are merged without a transpose, which scatters a token over others."""
    return full_setup(gpt_of(MergedByView))


@fault("causality", place=FIRST_ATTENTION, origin=DEEP)
@planted(deep_gpt2)
def heads_merged_without_transpose(training: Training) -> None:
    """The heads are merged by a view alone, without the transpose, which scatters a token over others."""
    for block in training.model.blocks:
        becomes(block.attn, MergedByView)


class HeadsByView(LaidOut):
    """Attention that views `[B, T, H w]` as `[B, H, T, w]` without transposing time and heads."""

    def laid_out(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        rows, length, _ = x.shape
        maps = self.q_proj, self.k_proj, self.v_proj
        q, k, v = (f(x).reshape(rows, -1, length, self.head_dim) for f in maps)
        return *apply_rotary_pos_emb(q, k, cos, sin), v


@fault("causality", place=LLAMA_ATTENTION, origin=DEEP)
@planted(deep_llama)
def heads_split_by_view(training: Training) -> None:
    """The heads are split by a view alone, without the transpose: a head gets parts of many tokens."""
    for layer in training.model.model.layers:
        becomes(layer.self_attn, HeadsByView)


# ------------------------------------------------------------------------------------- convolutions and norms


class CentredConvolution(llama.Block):
    def __init__(self, dim: int):
        super().__init__(dim)
        self.conv = nn.Conv1d(dim, dim, 3, padding=1, groups=dim)

    def forward(self, x: Tensor, rotations: Rotations, seen: Tensor | None = None) -> Tensor:
        return super().forward(x + self.conv(x.transpose(1, 2)).transpose(1, 2), rotations, seen)


@fault("causality", place="blocks.0*", origin=PLANTED_2)
def conv_noncausal() -> Arguments:
    """A convolution before attention reads the next token."""
    return full_setup(partial(Llama, block=CentredConvolution))


class ShortConv(nn.Module):
    """A gated depthwise convolution over time, in the place of attention."""

    symmetric = False

    def __init__(self, dim: int, dropout: float):
        super().__init__()
        self.conv = nn.Conv1d(dim, dim, 3, groups=dim)
        self.gate, self.out = nn.Linear(dim, dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        around = (1, 1) if self.symmetric else (2, 0)
        mixed = self.conv(F.pad(x.transpose(1, 2), around)).transpose(1, 2)
        return self.out(mixed * F.silu(self.gate(x)))


class SymmetricConv(ShortConv):
    symmetric = True


@twins("causality", place="blocks.[02].attn*|blocks.[02]", origin=UNSEEN)
def symmetric_convolution(*, faulty: bool) -> Arguments:
    """The short convolution of a hybrid is padded on both sides and so sees one token ahead."""

    def mix_by_convolution(model: Gpt) -> None:
        for block in model.blocks[::2]:
            block.attn = (SymmetricConv if faulty else ShortConv)(64, 0.0).apply(draw)

    return loss_setup(changed(mix_by_convolution, untied), text(seed=1))


class ShiftedMlp(nn.Module):
    """A squared-ReLU feed-forward that mixes each token with the one before it, as RWKV does."""

    rolled = False

    def __init__(self, dim: int):
        super().__init__()
        self.share = nn.Parameter(torch.linspace(0.1, 0.9, dim))
        self.up, self.down = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(3 * dim, dim, bias=False)
        self.apply(draw)

    def forward(self, x: Tensor) -> Tensor:
        before = torch.roll(x, 1, dims=1) if self.rolled else F.pad(x, (0, 0, 1, -1))
        mixed = self.share * x + (1 - self.share) * before
        return self.down(F.relu(self.up(mixed)).square())


class RolledMlp(ShiftedMlp):
    rolled = True


@twins("causality", place="blocks.0|blocks.0.mlp*", origin=LATER)
def token_shift_rolls_round(*, faulty: bool) -> Arguments:
    """The token before the first one is the last one: the shift is a roll."""

    def shift(model: Gpt) -> None:
        for block in model.blocks:
            block.mlp = RolledMlp(64) if faulty else ShiftedMlp(64)

    return loss_setup(changed(shift, steady), text(length=24, seed=3))


class RmsOverTime(Rms):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(1, keepdim=True) + self.eps) * self.weight


@fault("causality", "norms", "siblings", place="blocks.1*", origin=PLANTED_1)
def norm_over_time() -> Arguments:
    """One norm takes its mean square over the tokens, not over the features."""
    return full_setup(changed(lambda model: becomes(model.blocks[1].norm_2, RmsOverTime), Llama))


class NormOfAllTokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm([LENGTH, 64])

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x)


@fault("causality", "norms", place="blocks.1*", origin=PLANTED_3)
def ln_over_time() -> Arguments:
    """One norm takes its mean and variance over all tokens of a row."""
    return full_setup(changed(lambda model: setattr(model.blocks[1], "norm_1", NormOfAllTokens())))


class NormOverTime(nn.LayerNorm):
    """A layer norm with its mean and variance over axis 1, which is time."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - the name of nn.LayerNorm's argument
        variance, mean = torch.var_mean(input, 1, keepdim=True, correction=0)
        return (input - mean) * torch.rsqrt(variance + self.eps) * self.weight + self.bias


@fault("causality", "norms", "siblings", place=within("blocks.4"), origin=DEEP)
@planted(deep_gpt2)
def deep_norm_over_time(training: Training) -> None:
    """A norm of layer 4, counted from 0, takes its mean and variance over time, not over features."""
    becomes(training.model.blocks[4].norm_1, NormOverTime)
