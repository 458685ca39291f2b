"""What a step draws on purpose, a code or the blocks that it uses; and words that are read as a set."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normlab.trace.comparison import SEEDS
from normlab.trace.dry_run import SEED

from .tiny import DIM, LENGTH, VOCAB, Block, Decoder, first, report_of

CODE = 6


class Autoencoder(nn.Module):
    """Reads a row of tokens into one code, and predicts all of them from it."""

    def __init__(self, *, draws: bool = False, skips_code: bool = False):
        super().__init__()
        self.draws, self.skips_code = draws, skips_code
        self.embed, self.places = nn.Embedding(VOCAB, DIM), nn.Parameter(torch.randn(LENGTH, DIM))
        self.mean, self.log_var = nn.Linear(DIM, CODE), nn.Linear(DIM, CODE)
        self.spread, self.head = nn.Linear(CODE, DIM), nn.Linear(DIM, VOCAB)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        read = F.gelu(self.embed(ids) + self.places)
        row = read.mean(1)
        code, log_var = self.mean(row), self.log_var(row)
        drawn = code + torch.randn_like(code) * (0.5 * log_var).exp() if self.draws else code
        of_code = self.spread(drawn)[:, None] + self.places
        return self.head(F.gelu(of_code + read if self.skips_code else of_code)), code, log_var


def asked_for_all(model: nn.Module, ids: Tensor) -> Tensor:
    return F.cross_entropy(model(ids)[0].transpose(1, 2), ids)


def bound(model: nn.Module, ids: Tensor) -> Tensor:
    logits, mean, log_var = model(ids)
    divergence = -0.5 * (1 + log_var - mean.square() - log_var.exp()).sum(1).mean()
    return F.cross_entropy(logits.transpose(1, 2), ids) + 0.1 * divergence


def test_what_sees_a_code_of_a_row_may_be_asked_for_the_row():
    assert report_of("targets", model=Autoencoder(), loss=asked_for_all).holds == ("targets",)
    report = report_of("targets", model=Autoencoder(skips_code=True), loss=asked_for_all)
    assert first(report) == ("targets", "loss")


def test_a_draw_in_evaluation_is_meant_if_the_loss_scores_its_distribution():
    report = report_of("evaluation_repeats", "targets", model=Autoencoder(draws=True), loss=bound)
    assert report.ok
    assert [note.property for note in report.notes] == ["evaluation_repeats"]
    report = report_of("evaluation_repeats", model=Autoencoder(draws=True), loss=asked_for_all)
    assert first(report)[0] == "evaluation_repeats"


class Nested(Decoder):
    """A decoder that trains only its first blocks, as many as it draws."""

    def __init__(self, most: int):
        super().__init__(0.0)
        self.most = most

    def forward(self, ids: Tensor) -> Tensor:
        used = int(torch.randint(1, self.most + 1, ())) if self.training else len(self.blocks)
        x = self.embed(ids)
        for block in self.blocks[:used]:
            x = block(x)
        return self.head(self.norm(x))


def is_rare() -> bool:
    """Draw what happens in one of five steps."""
    return bool(torch.rand((), dtype=torch.float64) > 0.8)


class LeavesOut(Decoder):
    """Leaves out its last block in most training steps."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        leaves_out = self.training and not is_rare()
        for block in self.blocks[: -1 if leaves_out else None]:
            x = block(x)
        return self.head(self.norm(x))


def test_a_choice_that_comes_out_the_same_twice_is_drawn_all_the_same():
    rare = []
    for seed in (SEED, *SEEDS):
        torch.manual_seed(seed)
        rare.append(is_rare())
    assert not any(rare[:2])
    assert any(rare)
    report = report_of("training_equals_evaluation", "gradients", model=LeavesOut(0.0))
    assert report.holds == ("gradients",)
    assert set(report.untestable) == {"training_equals_evaluation"}


@pytest.mark.slow
def test_a_block_that_no_draw_of_training_uses_is_named():
    report = report_of("gradients", model=Nested(3))
    assert first(report)[0] == "gradients"
    assert first(report)[1].startswith("blocks.3.")


class Words(nn.Module):
    """Blocks over tokens of their own that read words by cross-attention, or over the words themselves."""

    def __init__(self, *, over_words: bool):
        super().__init__()
        self.over_words = over_words
        self.embed, self.own = nn.Embedding(VOCAB, DIM), nn.Parameter(torch.randn(5, DIM))
        self.blocks = nn.ModuleList(Both() for _ in range(2))
        self.head = nn.Linear(DIM, 1)

    def forward(self, ids: Tensor) -> Tensor:
        words = self.embed(ids)
        x = words if self.over_words else self.own.expand(len(ids), -1, -1)
        for block in self.blocks:
            x = block(x, words)
        return self.head(x.mean(1))


class Both(Block):
    """A block that attends to its own stream and to words."""

    def forward(self, x: Tensor, words: Tensor) -> Tensor:
        y = self.norm(x)
        read = F.scaled_dot_product_attention(y, words, words) + F.scaled_dot_product_attention(y, y, y)
        x = x + read
        return x + self.down(F.gelu(self.up(x)))


@pytest.mark.parametrize("over_words", [False, True])
def test_words_that_no_block_runs_over_are_a_set(*, over_words: bool):
    report = report_of(
        "order", model=Words(over_words=over_words), loss=lambda m, ids: m(ids).square().mean()
    )
    assert report.ok is not over_words
    assert [note.property for note in report.notes] == ["order"] * (not over_words)
