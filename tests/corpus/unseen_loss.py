"""Planted faults, and their sound twins, in targets, in what counts, and in gradients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

from corpus.case import Arguments, Case, collect
from corpus.unseen_parts import (
    BOS,
    EOS,
    FIRST,
    PAD,
    CausalAttention,
    Gpt,
    MaskedLayer,
    Mlp,
    adamw,
    draw,
    groups,
    heads_of,
    next_token,
    padded,
    text,
)

CASES: dict[str, Case] = {}
case = collect(CASES)


class Translator(nn.Module):
    """An encoder-decoder in which both sides and the head share one embedding."""

    def __init__(self, vocabulary: int = 300, d: int = 64, *, shifted: bool = True) -> None:
        super().__init__()
        self.shifted = shifted
        self.shared = nn.Embedding(vocabulary, d)
        self.positions = nn.Embedding(48, d)
        self.encoder = nn.ModuleList(MaskedLayer(d) for _ in range(2))
        self.encoder_norm = nn.LayerNorm(d)
        self.decoder = nn.ModuleList(MaskedLayer(d, crossing=True) for _ in range(2))
        self.decoder_norm = nn.LayerNorm(d)
        self.apply(draw)

    def embed(self, ids: Tensor) -> Tensor:
        """Return the sum of the embeddings of tokens and positions."""
        return self.shared(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        real = (source != PAD)[:, None, None, :]
        memory = self.embed(source)
        for layer in self.encoder:
            memory = layer(memory, real)
        memory = self.encoder_norm(memory)
        entered = F.pad(target[:, :-1], (1, 0), value=BOS) if self.shifted else target
        x = self.embed(entered)
        causal = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril()
        for layer in self.decoder:
            x = layer(x, causal, memory, real)
        return F.linear(self.decoder_norm(x), self.shared.weight)


def _translation_loss(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    logits = model(batch["source"], batch["target"])
    return F.cross_entropy(logits.transpose(1, 2), batch["target"], ignore_index=PAD)


def _translation(*, shifted: bool) -> Arguments:
    torch.manual_seed(105)
    source, _ = padded([20, 14, 17, 9], 20, 300, seed=5)
    target, _ = padded([12, 24, 19, 15], 24, 300, seed=6)
    model = Translator(shifted=shifted)
    return {
        "model": model,
        "batch": {"source": source, "target": target},
        "loss": _translation_loss,
        "optimizer": torch.optim.AdamW(groups(model, 0.01), lr=5e-4, betas=(0.9, 0.98)),
        "make": lambda: Translator(shifted=shifted),
        "declare": {"pad_id": PAD, "eos_id": EOS},
    }


@case("targets", "causality")
def decoder_input_not_shifted() -> Arguments:
    """The decoder reads the target itself, not the target shifted by a start token."""
    return _translation(shifted=False)


@case()
def decoder_input_not_shifted_sound() -> Arguments:
    return _translation(shifted=True)


def _neox() -> GPTNeoXForCausalLM:
    return GPTNeoXForCausalLM(
        GPTNeoXConfig(
            vocab_size=250,
            hidden_size=64,
            num_hidden_layers=3,
            num_attention_heads=4,
            intermediate_size=128,
            max_position_embeddings=64,
            rotary_pct=0.25,
            use_parallel_residual=True,
            bos_token_id=BOS,
            eos_token_id=EOS,
            pad_token_id=EOS,
        )
    )


def _collated(*, by_id: bool) -> Arguments:
    torch.manual_seed(106)
    ids, mask = padded([28, 13, 21, 17], 28, 250, seed=7)
    ids = ids.masked_fill(mask == 0, EOS)
    ignored = ids == EOS if by_id else mask == 0
    return {
        "model": _neox(),
        "batch": {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(ignored, -100)},
        "optimizer": adamw(5e-4),
        "make": _neox,
        "declare": {"pad_id": EOS, "eos_id": EOS},
    }


@case("counted", place="labels|loss")
def end_masked_with_padding() -> Arguments:
    """The pad token is the EOS token, and labels are ignored by id: the model never learns to end a text."""
    return _collated(by_id=True)


@case()
def end_masked_with_padding_sound() -> Arguments:
    return _collated(by_id=False)


class SwitchMlp(nn.Module):
    """A mixture of experts that sends each token to the best one."""

    def __init__(self, d: int, experts: int = 4, *, renormalise: bool) -> None:
        super().__init__()
        self.renormalise = renormalise
        self.router = nn.Linear(d, experts, bias=False)
        self.experts = nn.ModuleList(Mlp(d) for _ in range(experts))

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x).softmax(dim=-1).topk(1, dim=-1)
        if self.renormalise:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        y = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            share = (weights * (chosen == number)).sum(dim=-1, keepdim=True)
            y = y + share * expert(x)
        return y


class SwitchBlock(nn.Module):
    """A Pre-LN block with a mixture of experts."""

    def __init__(self, d: int, *, renormalise: bool) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(d)
        self.attn = CausalAttention(d, 4)
        self.ln_2 = nn.LayerNorm(d)
        self.moe = SwitchMlp(d, renormalise=renormalise)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.moe(self.ln_2(x))


class SwitchDecoder(nn.Module):
    """A small Switch Transformer decoder."""

    def __init__(self, vocabulary: int = 200, d: int = 48, *, renormalise: bool = False) -> None:
        super().__init__()
        self.tok = nn.Embedding(vocabulary, d)
        self.pos = nn.Embedding(48, d)
        self.blocks = nn.ModuleList(SwitchBlock(d, renormalise=renormalise) for _ in range(2))
        self.norm = nn.LayerNorm(d)
        self.head = nn.Linear(d, vocabulary, bias=False)
        self.apply(draw)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tok(ids) + self.pos(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def _switch(*, renormalise: bool) -> Arguments:
    torch.manual_seed(107)
    return {
        "model": SwitchDecoder(renormalise=renormalise),
        "batch": text(4, 40, 200, seed=8),
        "loss": next_token,
        "optimizer": adamw(1e-3),
        "make": lambda: SwitchDecoder(renormalise=renormalise),
    }


@case("gradients", place="*router*|blocks.*.moe")
def single_expert_weight_renormalised() -> Arguments:
    """The weight of the one expert is divided by itself, so that the router gets no gradient."""
    return _switch(renormalise=True)


@case()
def single_expert_weight_renormalised_sound() -> Arguments:
    return _switch(renormalise=False)


class FusedRms(torch.autograd.Function):
    """Divide by the root mean square, with a backward written by hand."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, short: bool) -> Tensor:  # noqa: FBT001
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
        y = x * scale
        ctx.save_for_backward(y, scale)
        ctx.short = short
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        y, scale = ctx.saved_tensors
        if ctx.short:
            return grad * scale, None
        return (grad - y * (grad * y).mean(-1, keepdim=True)) * scale, None


class FusedRmsNorm(nn.Module):
    """RMSNorm on the function above."""

    def __init__(self, d: int, *, short: bool) -> None:
        super().__init__()
        self.short = short
        self.weight = nn.Parameter(torch.ones(d))

    def forward(self, x: Tensor) -> Tensor:
        return FusedRms.apply(x, self.short) * self.weight


class AlibiLayer(nn.Module):
    """A Pre-LN encoder layer whose scores fall with the distance of two tokens."""

    def __init__(self, d: int, *, short: bool) -> None:
        super().__init__()
        self.norm_attn = FusedRmsNorm(d, short=short)
        self.qkv = nn.Linear(d, 3 * d)
        self.out = nn.Linear(d, d)
        self.norm_mlp = FusedRmsNorm(d, short=short)
        self.mlp = Mlp(d)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        q, k, v = (heads_of(part, bias.shape[1]) for part in self.qkv(self.norm_attn(x)).chunk(3, dim=-1))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm_mlp(x))


class AlibiEncoder(nn.Module):
    """An encoder for masked tokens with linear biases of distance."""

    def __init__(self, vocabulary: int = 200, d: int = 64, *, short: bool = False) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, d)
        self.layers = nn.ModuleList(AlibiLayer(d, short=short) for _ in range(3))
        self.norm = FusedRmsNorm(d, short=short)
        self.head = nn.Linear(d, vocabulary)
        self.apply(draw)
        self.register_buffer("slopes", 2.0 ** -torch.arange(2.0, 9.0, 2.0))

    def forward(self, ids: Tensor, mask: Tensor, labels: Tensor) -> dict[str, Tensor]:
        at = torch.arange(ids.shape[1], device=ids.device)
        distance = (at[:, None] - at[None, :]).abs()
        bias = -self.slopes[:, None, None] * distance
        bias = bias[None].masked_fill(~mask.bool()[:, None, None, :], float("-inf"))
        x = self.tokens(ids)
        for layer in self.layers:
            x = layer(x, bias)
        logits = self.head(self.norm(x))
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
        return {"loss": loss, "logits": logits}


def _alibi(*, short: bool) -> Arguments:
    torch.manual_seed(108)
    whole, mask = padded([32, 19, 27, 23], 32, 200, seed=9)
    chosen = (torch.rand(whole.shape) < 0.2) & (whole >= FIRST)
    return {
        "model": AlibiEncoder(short=short),
        "batch": {
            "ids": whole.masked_fill(chosen, BOS),
            "mask": mask,
            "labels": whole.masked_fill(~chosen, -100),
        },
        "optimizer": adamw(1e-3, decay=0.01),
        "make": lambda: AlibiEncoder(short=short),
        "declare": {"pad_id": PAD, "causal": False},
    }


@case("derivative", place="*norm*|layers.*")
def short_backward_of_fused_norm() -> Arguments:
    """The backward of a fused RMSNorm takes its scale for a constant."""
    return _alibi(short=True)


@case()
def short_backward_of_fused_norm_sound() -> Arguments:
    return _alibi(short=False)


class CheckpointedGpt(Gpt):
    """A GPT-2 whose blocks are computed again in the backward pass."""

    reentrant = False

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant) if self.training else block(x)
        return self.lm_head(self.ln_f(x))


class ReentrantGpt(CheckpointedGpt):
    """The same with the older, reentrant checkpoint."""

    reentrant = True


def _tuned(kind: type[CheckpointedGpt]) -> Arguments:
    torch.manual_seed(109)

    def make() -> Gpt:
        model = kind(depth=3)
        model.lm_head.weight = nn.Parameter(model.wte.weight.detach().clone())
        model.wte.requires_grad_(False)
        model.wpe.requires_grad_(False)
        return model

    model = make()
    return {
        "model": model,
        "batch": text(4, 32, 200, seed=10),
        "loss": next_token,
        "optimizer": torch.optim.AdamW(groups(model), lr=3e-4),
        "make": make,
        "declare": {"frozen": ["wte.*", "wpe.*"], "tied": False},
    }


@case("gradients", place="blocks*")
def reentrant_checkpoint_after_frozen_embedding() -> Arguments:
    """Blocks in reentrant checkpoints get an input without a gradient, and so none themselves."""
    return _tuned(ReentrantGpt)


@case()
def reentrant_checkpoint_after_frozen_embedding_sound() -> Arguments:
    return _tuned(CheckpointedGpt)
