"""Faults in how a model starts, in its optimizer, in the loop and in round trips."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from corpus.case import Arguments, Case
from corpus.later_parts import (
    Experts,
    Llama,
    MixtureLm,
    Rms,
    Rotary,
    Rotations,
    next_token_and_balance,
    pairs,
    seeded,
)
from corpus.unseen_parts import Gpt, adamw, draw, next_token, text

CASES: dict[str, Case] = {}
planted = pairs(CASES)


def from_meta(start: Callable[[nn.Module], None]) -> nn.Module:
    """Build on the meta device, allot memory and start each module there."""
    with torch.device("meta"):
        model = Llama()
    model.to_empty(device="cpu")
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.zero_()  # new memory holds zeros as a rule; here always, so that the case repeats
    model.apply(start)
    return model


def start_weights(module: nn.Module) -> None:
    """Start what has weights."""
    draw(module)
    if isinstance(module, Rms):
        nn.init.ones_(module.weight)


def start_all(module: nn.Module) -> None:
    """Start what has weights or a table."""
    start_weights(module)
    if isinstance(module, Rotary):
        module.inv_freq.copy_(module.rates())


@planted("buffers", "order", "meta", place="rotary*|blocks.0*|")
def rotary_table_lost_on_meta(*, faulty: bool) -> Arguments:
    """The start after the meta device leaves out the rotary table, which stays empty."""
    return {
        "model": seeded(lambda: from_meta(start_weights if faulty else start_all), 21),
        "batch": text(4, 32, 220, seed=21),
        "loss": next_token,
        "optimizer": adamw(1e-3),
        "make": Llama,
    }


@planted("seeds", "start", place="blocks.?|blocks.?.moe|blocks.?.moe.experts*")
def experts_are_clones(*, faulty: bool) -> Arguments:
    """The experts of a layer are copies of one drawn expert."""

    def make() -> nn.Module:
        model = MixtureLm(Experts)
        if faulty:
            for block in model.blocks:
                for expert in block.moe.experts[1:]:
                    expert.load_state_dict(block.moe.experts[0].state_dict())
        return model

    return {
        "model": seeded(make, 22),
        "batch": text(4, 32, 220, seed=22),
        "loss": next_token_and_balance,
        "optimizer": adamw(6e-4),
        "make": make,
    }


def each_step(model: nn.Module, batch: Tensor, optimizer: Any, scheduler: Any) -> Tensor:
    """Take one step with each of several optimizers."""
    loss = next_token(model, batch)
    loss.backward()
    for one in optimizer:
        one.step()
        one.zero_grad(set_to_none=True)
    return loss


@planted("optimizer_coverage", place="norm|norm.weight|optimizer")
def final_norm_in_no_group(*, faulty: bool) -> Arguments:
    """Muon and AdamW share out the blocks, the embedding and the head, and forget the final norm."""
    model = seeded(lambda: Llama(depth=4), 23)
    matrices = [p for p in model.blocks.parameters() if p.dim() == 2]
    vectors = [p for p in (model.blocks if faulty else model).parameters() if p.dim() < 2]
    tables = [model.embed.weight, model.head.weight]
    others = [{"params": tables, "lr": 3e-3}, {"params": vectors, "lr": 1e-3}]
    return {
        "model": model,
        "batch": text(4, 32, 220, seed=23),
        "loss": next_token,
        "optimizer": [
            torch.optim.Muon(matrices, lr=0.02, weight_decay=0.0),
            torch.optim.AdamW(others, betas=(0.8, 0.95), eps=1e-10, weight_decay=0.0),
        ],
        "step": each_step,
    }


def by_names(model: nn.Module, spared: tuple[str, ...]) -> torch.optim.Optimizer:
    """Decay all but the parameters with one of these parts in their names."""
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    decayed = [p for name, p in named if not any(part in name for part in spared)]
    others = [p for name, p in named if any(part in name for part in spared)]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=5e-4)


@planted("groups", place="*ln_*|optimizer")
def names_of_another_model_are_spared(*, faulty: bool) -> Arguments:
    """The list of what is not decayed holds BERT's names; the norms of this model are called otherwise."""
    norm = "LayerNorm.weight" if faulty else "ln_"
    return {
        "model": seeded(Gpt, 24),
        "batch": text(4, 24, 200, seed=24),
        "loss": next_token,
        "optimizer": lambda model: by_names(model, ("bias", norm)),
        "make": Gpt,
    }


def clipped_step(holder: Callable[[Iterable[nn.Parameter]], Iterable[nn.Parameter]]) -> Callable[..., Tensor]:
    """Return a step that measures the gradient of what the holder yields, and clips it."""

    def step(model: nn.Module, batch: Tensor, optimizer: Any, scheduler: Any) -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss = next_token(model, batch)
        loss.backward()
        trained = holder(filter(lambda p: p.requires_grad, model.parameters()))
        size = torch.stack([p.grad.norm() for p in trained]).norm()
        if torch.isfinite(size):
            nn.utils.clip_grad_norm_(trained, 0.1)
            optimizer.step()
        return loss

    return step


@planted("step", place="step|")
def clipping_an_empty_iterator(*, faulty: bool) -> Arguments:
    """The parameters are an iterator, which the logged norm has used up: nothing is left to clip."""
    return {
        "model": seeded(Gpt, 25),
        "batch": text(4, 24, 200, seed=25),
        "loss": next_token,
        "optimizer": lambda model: torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True),
        "step": clipped_step(iter if faulty else list),
        "make": Gpt,
    }


def wsd(optimizer: torch.optim.Optimizer, *, whole: bool) -> torch.optim.lr_scheduler.LambdaLR:
    """Warm up for 10 steps, hold the rate, and let it fall over the last 20 of 100 steps."""

    def share(step: int) -> float:
        if step < 10:
            return (step + 1) / 10
        if step < 80:
            return 1.0
        left = max(100 - step, 0)
        return left // 20 if whole else left / 20

    return torch.optim.lr_scheduler.LambdaLR(optimizer, share)


@planted("schedule", place="scheduler|")
def decay_by_whole_numbers(*, faulty: bool) -> Arguments:
    """A whole-number division turns the decay of the rate into zero for the last 19 of 100 steps."""
    return {
        "model": seeded(Llama, 26),
        "batch": text(4, 32, 220, seed=26),
        "loss": next_token,
        "optimizer": adamw(2e-3),
        "scheduler": lambda optimizer: wsd(optimizer, whole=faulty),
        "declare": {"peak_lr": 2e-3, "steps": 100},
        "make": Llama,
    }


class FromTheRowsStart(LlamaRotaryEmbedding):
    """Count positions from the first one that is handed over."""

    def forward(self, x: Tensor, position_ids: Tensor) -> Rotations:
        return super().forward(x, position_ids - position_ids[:, :1])


@planted("cache", place="model*|")
def cached_positions_start_anew(*, faulty: bool) -> Arguments:
    """Positions count from the first one of a call, so that each cached step stands at position zero."""
    config = LlamaConfig(
        vocab_size=210,
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        pad_token_id=0,
    )

    def make() -> nn.Module:
        model = LlamaForCausalLM(config)
        if faulty:
            model.model.rotary_emb = FromTheRowsStart(config)
        return model

    ids = text(4, 24, 210, seed=27)
    return {
        "model": seeded(make, 27),
        "batch": {"input_ids": ids, "labels": ids.clone()},
        "optimizer": adamw(1e-3),
        "make": make,
    }


class FourierPositions(nn.Module):
    """Positions as waves of random frequencies."""

    def __init__(self, d: int, *, saved: bool) -> None:
        super().__init__()
        self.register_buffer("rates", torch.randn(24), persistent=saved)
        self.project = nn.Linear(48, d)

    def forward(self, length: int) -> Tensor:
        angles = torch.arange(length, device=self.rates.device).to(self.rates.dtype)[:, None] * self.rates
        return self.project(torch.cat((angles.sin(), angles.cos()), dim=-1))


class FourierGpt(Gpt):
    def __init__(self, *, saved: bool) -> None:
        super().__init__()
        self.wpe = FourierPositions(64, saved=saved)
        self.wpe.apply(draw)

    def embed(self, ids: Tensor) -> Tensor:
        return self.drop(self.wte(ids) + self.wpe(ids.shape[1]))


@planted("state_dict", "buffers", place="wpe*|")
def drawn_frequencies_not_saved(*, faulty: bool) -> Arguments:
    """Random frequencies are no part of the checkpoint: a loaded model has others."""

    def make() -> nn.Module:
        return FourierGpt(saved=not faulty)

    return {
        "model": seeded(make, 28),
        "batch": text(4, 32, 200, seed=28),
        "loss": next_token,
        "optimizer": adamw(1e-3),
        "make": make,
    }


class MatrixRotary(Rotary):
    """The angles as a matrix product, which autocast computes in bfloat16."""

    def forward(self, length: int) -> Rotations:
        positions = torch.arange(length, device=self.inv_freq.device).to(self.inv_freq.dtype)
        angles = positions[:, None] @ self.inv_freq[None]
        return angles.cos(), angles.sin()


class ExactRotary(MatrixRotary):
    def forward(self, length: int) -> Rotations:
        with torch.autocast("cpu", enabled=False):
            return super().forward(length)


class AutocastLlama(Llama):
    def __init__(self, rotary: type[Rotary]) -> None:
        super().__init__()
        self.rotary = rotary(16)


def under_autocast(model: nn.Module, ids: Tensor) -> Tensor:
    """Return the cross entropy of the next token in mixed precision."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(ids)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


@planted("precision", place="rotary*|")
def angles_under_autocast(*, faulty: bool) -> Arguments:
    """Autocast rounds the rotary angles to bfloat16, by hundredths of a radian at the end of the row."""

    def make() -> nn.Module:
        return AutocastLlama(MatrixRotary if faulty else ExactRotary)

    return {
        "model": seeded(make, 29),
        "batch": text(4, 48, 220, seed=29),
        "loss": under_autocast,
        "optimizer": adamw(1e-3),
        "make": make,
    }
