"""Ids that go through a function, one by one, before they are looked up are still the batch's tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cases import each
from normlab.setups.setup import Setup
from normlab.trace.step_under_test import StepUnderTest

from .tiny import ROWS, VOCAB, Decoder, report_of, tokens

Read = Callable[[Tensor], Tensor]
NAMES = ("rows", "causality", "reach", "targets")


class Reads(Decoder):
    """Looks ids up through a function."""

    def __init__(self, read: Read, vocab: int = VOCAB):
        super().__init__(0.0)
        self.embed = nn.Embedding(vocab, self.embed.embedding_dim)
        self.read = read

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(self.read(ids))


def not_below_zero(ids: Tensor) -> Tensor:
    return ids.clamp(min=0)


def modulo(ids: Tensor) -> Tensor:
    return ids % 7


def hides_one(ids: Tensor) -> Tensor:
    return torch.where(ids == 3, 0, ids)


def renumbered(ids: Tensor) -> Tensor:
    return (torch.arange(VOCAB).flip(0))[ids]


def loss_of(model: nn.Module, ids: Tensor) -> Tensor:
    return F.cross_entropy(model(ids)[:, :-1].transpose(1, 2), ids[:, 1:], ignore_index=-1)


def with_a_hole() -> Tensor:
    ids = tokens()
    ids[0, -2:] = -1
    return ids


def step_of(read: Read, ids: Tensor) -> StepUnderTest:
    return StepUnderTest(Setup(Reads(read), ids, loss_of))


@pytest.mark.slow
@each(
    ("read", "ids"),
    [(not_below_zero, with_a_hole()), (modulo, tokens()), (hides_one, tokens()), (renumbered, tokens())],
)
def test_a_function_of_each_id_is_a_lookup(read: Read, ids: Tensor):
    facts = step_of(read, ids).facts
    assert facts.tokens.place == ()
    assert torch.equal(facts.tokens.ids, ids)
    report = report_of(*NAMES, model=Reads(read), batches=ids, loss=loss_of)
    assert report.holds == ("targets", "rows", "causality", "reach")


def sum_with_the_one_before(ids: Tensor) -> Tensor:
    return (ids + ids.roll(1, 1)) % VOCAB


def in_reverse(ids: Tensor) -> Tensor:
    return (VOCAB - 1 - ids).flip(1)


@each("read", [sum_with_the_one_before, in_reverse])
def test_what_mixes_or_moves_ids_is_none(read: Read):
    assert not step_of(read, tokens()).facts.sources


class LooksUpTwice(Decoder):
    """Looks ids up as they are, and what a function makes of them in a second, larger table."""

    def __init__(self, read: Read):
        super().__init__(0.0)
        self.second = nn.Embedding(64, self.embed.embedding_dim)
        self.read = read

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.second(self.read(ids))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def positions_counted_from_ids(ids: Tensor) -> Tensor:
    return (ids > 5).cumsum(1)


def twice(ids: Tensor) -> Tensor:
    return 2 * ids


@each("read", [positions_counted_from_ids, twice])
def test_an_entry_that_is_looked_up_as_it_stands_is_taken_once(read: Read):
    facts = StepUnderTest(Setup(LooksUpTwice(read), tokens(), loss_of)).facts
    assert [source.vocabulary for source in facts.sources] == [VOCAB]
    assert torch.equal(facts.tokens.ids, tokens())


def test_an_entry_among_others_is_found():
    batch = {"labels": tokens() + 1, "ids": with_a_hole(), "mask": torch.ones(ROWS, tokens().shape[1])}

    def loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
        return loss_of(model, batch["ids"])

    facts = StepUnderTest(Setup(Reads(not_below_zero), batch, loss)).facts
    assert facts.tokens.place == ("ids",)


class MaskedInputs(Decoder):
    """Gives ids below 0, which stand for no token, a vector of zeros."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids.clamp(min=0)) * (ids >= 0)[..., None]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


@pytest.mark.parametrize("own_copy", [False, True])
def test_tokens_that_are_neither_seen_nor_asked_for_are_lost(*, own_copy: bool):
    def loss(model: nn.Module, stored: Tensor) -> Tensor:
        ids = stored.long()
        labels = ids[:, 1:].clone() if own_copy else ids[:, 1:]
        labels[:, :3] = -100
        return F.cross_entropy(model(ids[:, :-1]).transpose(1, 2), labels)

    report = report_of("reach", model=MaskedInputs(0.0), batches=tokens().int(), loss=loss)
    assert report.ok is own_copy
    if not own_copy:
        assert report.failures[0].property == "reach"


class Repeats(nn.Module):
    """A decoder that also reads a source."""

    def __init__(self):
        super().__init__()
        self.decoder, self.source = Decoder(0.0), nn.Embedding(VOCAB, VOCAB)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        return self.decoder(target) + self.source(source).mean(1, keepdim=True)


def test_where_a_source_is_repeated_the_text_that_goes_on_is_judged():
    def loss(model: nn.Module, given: dict[str, Tensor]) -> Tensor:
        logits = model(given["source"], given["target"][:, :-1])
        return F.cross_entropy(logits.transpose(1, 2), given["target"][:, 1:])

    ids = tokens()
    given: dict[str, Any] = {"source": ids, "target": F.pad(ids, (1, 0), value=0)}
    report = report_of("targets", "causality", model=Repeats(), batches=given, loss=loss)
    assert report.holds == ("targets", "causality")
