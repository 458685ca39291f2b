"""Planted faults, and their sound twins, in the optimizer and the training loop."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Qwen2Config, Qwen2ForCausalLM

from corpus.case import Arguments, Case, collect
from corpus.unseen_parts import (
    EOS,
    PAD,
    Gpt,
    MaskedLayer,
    adamw,
    draw,
    groups,
    next_real_token,
    next_token,
    padded,
    text,
)

CASES: dict[str, Case] = {}
case = collect(CASES)


class SentenceClassifier(nn.Module):
    """An encoder whose masked mean enters a head."""

    def __init__(self, vocabulary: int = 220, d: int = 64, classes: int = 2) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, d)
        self.positions = nn.Embedding(48, d)
        self.layers = nn.ModuleList(MaskedLayer(d) for _ in range(2))
        self.norm = nn.LayerNorm(d)
        self.head = nn.Linear(d, classes)
        self.apply(draw)

    def forward(self, ids: Tensor, mask: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for layer in self.layers:
            x = layer(x, mask.bool()[:, None, None, :])
        real = mask.unsqueeze(-1).to(x.dtype)
        logits = self.head((self.norm(x) * real).sum(1) / real.sum(1))
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


def _with_head(model: SentenceClassifier, classes: int) -> SentenceClassifier:
    """Replace the head by a fresh one for other classes."""
    model.head = nn.Linear(model.head.in_features, classes)
    draw(model.head)
    return model


def _new_head(*, late: bool) -> Arguments:
    torch.manual_seed(114)
    ids, mask = padded([24, 18, 11, 22, 9, 15], 24, 220, seed=15)
    model = SentenceClassifier()
    if late:
        optimizer = torch.optim.AdamW(groups(model, 0.01), lr=2e-4)
        model = _with_head(model, 5)
    else:
        model = _with_head(model, 5)
        optimizer = torch.optim.AdamW(groups(model, 0.01), lr=2e-4)
    return {
        "model": model,
        "batch": {"ids": ids, "mask": mask, "labels": torch.tensor([4, 0, 2, 1, 3, 2])},
        "optimizer": optimizer,
        "make": lambda: _with_head(SentenceClassifier(), 5),
        "declare": {"pad_id": PAD, "causal": False},
    }


@case("optimizer_coverage", place="head*|optimizer")
def head_replaced_after_optimizer() -> Arguments:
    """The head is replaced when the optimizer holds the old one's parameters already."""
    return _new_head(late=True)


@case()
def head_replaced_after_optimizer_sound() -> Arguments:
    return _new_head(late=False)


def _qwen() -> Qwen2ForCausalLM:
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=280,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
            tie_word_embeddings=True,
            bos_token_id=1,
            eos_token_id=EOS,
            pad_token_id=PAD,
        )
    )


def _named_groups(exempt: tuple[str, ...]) -> Callable[[nn.Module], torch.optim.Optimizer]:
    """Return an AdamW that does not decay parameters whose names hold one of the parts."""

    def build(model: nn.Module) -> torch.optim.Optimizer:
        named = list(model.named_parameters())
        free = [p for name, p in named if any(part in name for part in exempt)]
        rest = [p for name, p in named if not any(part in name for part in exempt)]
        return torch.optim.AdamW(
            [{"params": rest, "weight_decay": 0.1}, {"params": free, "weight_decay": 0.0}], lr=5e-4
        )

    return build


def _exempting(*parts: str) -> Arguments:
    torch.manual_seed(115)
    ids = text(4, 32, 280, seed=16)
    return {
        "model": _qwen(),
        "batch": {"input_ids": ids, "labels": ids.clone()},
        "optimizer": _named_groups(parts),
        "make": _qwen,
        "declare": {"tied": True},
    }


@case("groups", place="*norm*|optimizer")
def norm_names_of_another_family() -> Arguments:
    """BERT's list of names free of decay is used for a Qwen2, whose norms are called otherwise."""
    return _exempting("bias", "LayerNorm.weight")


@case()
def norm_names_of_another_family_sound() -> Arguments:
    return _exempting("bias", "norm.weight")


Step = Callable[[nn.Module, Mapping[str, Tensor], torch.optim.Optimizer, Any], Tensor]


def _accumulated(*, by_tokens: bool) -> Step:
    """Return a step over two micro-batches of padded rows."""

    def step(
        model: nn.Module, batch: Mapping[str, Tensor], optimizer: torch.optim.Optimizer, scheduler: Any
    ) -> Tensor:
        model.train()
        optimizer.zero_grad(set_to_none=True)
        parts = batch["ids"].chunk(2)
        counts = [(part[:, 1:] != PAD).sum() for part in parts]
        total = torch.zeros(())
        for part, count in zip(parts, counts, strict=True):
            share = count / sum(counts) if by_tokens else 1 / len(parts)
            loss = next_real_token(model, {"ids": part}) * share
            loss.backward()
            total = total + loss.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return total

    return step


def _uneven(*, by_tokens: bool) -> Arguments:
    torch.manual_seed(116)
    ids, _ = padded([40, 36, 38, 6, 5, 7], 40, 200, seed=17)
    return {
        "model": Gpt(depth=2),
        "batch": {"ids": ids},
        "loss": next_real_token,
        "optimizer": adamw(1e-3),
        "step": _accumulated(by_tokens=by_tokens),
        "make": lambda: Gpt(depth=2),
        "declare": {"pad_id": PAD, "eos_id": EOS, "tied": True},
    }


@case("step", "reduction", place="step|loss")
def mean_of_uneven_means() -> Arguments:
    """Micro-batches with many and with few real tokens weigh the same in the accumulated gradient."""
    return _uneven(by_tokens=False)


@case()
def mean_of_uneven_means_sound() -> Arguments:
    return _uneven(by_tokens=True)


def _warm_cosine(warm: int, total: int) -> Callable[[torch.optim.Optimizer], Any]:
    """Return a linear warm-up and a cosine down to a tenth."""

    def share(step: int) -> float:
        if step < warm:
            return (step + 1) / warm
        done = min(1.0, (step - warm) / (total - warm))
        return 0.1 + 0.45 * (1 + math.cos(math.pi * done))

    return lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, share)


def _four_parts(*, each: bool) -> Callable[..., Tensor]:
    """Return a step over four micro-batches that moves the schedule after each of them, or once."""

    def step(model: nn.Module, batch: Tensor, optimizer: torch.optim.Optimizer, scheduler: Any) -> Tensor:
        model.train()
        losses = []
        for part in batch.chunk(4):
            loss = next_token(model, part) / 4
            loss.backward()
            losses.append(loss.detach())
            if each:
                scheduler.step()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if not each:
            scheduler.step()
        return torch.stack(losses).sum()

    return step


def _scheduled(*, each: bool) -> Arguments:
    torch.manual_seed(117)
    return {
        "model": Gpt(depth=2, dropout=0.1),
        "batch": text(8, 24, 200, seed=18),
        "loss": next_token,
        "optimizer": adamw(1e-3),
        "scheduler": _warm_cosine(20, 400),
        "step": _four_parts(each=each),
        "make": lambda: Gpt(depth=2, dropout=0.1),
        "declare": {"peak_lr": 1e-3, "steps": 400, "tied": True},
    }


@case("schedule", "step", place="scheduler|step")
def schedule_moved_by_micro_batches() -> Arguments:
    """The schedule takes a step after each micro-batch and is over in a quarter of the training."""
    return _scheduled(each=True)


@case()
def schedule_moved_by_micro_batches_sound() -> Arguments:
    return _scheduled(each=False)
