"""What losses are compared with, read off the gradient at the logits."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from normlab.setups.setup import Setup
from normlab.trials.scale import BIAS_NATS, Scale, read_scale
from trials.tiny import LENGTH, ROWS, VOCAB, Text, entropy, loss_of, setup


def scale(loss: Any = loss_of, **parts: Any) -> Scale:
    given = setup(loss=loss, **parts)
    return read(given)


def read(given: Setup, batches: Any = None, first: float | None = None) -> Scale:
    batches = list(given.batches) if batches is None else batches
    own = given.loss(given.model, batches[0]).item() if first is None else first
    return read_scale(given, batches, 60.0, own)


@pytest.mark.parametrize("factor", [1.0, 64.0])
def test_the_entropy_is_that_of_the_targets_whatever_the_unit_of_the_loss(factor: float):
    text = Text()
    found = scale(lambda model, ids: factor * loss_of(model, ids))
    text.batches = text.batches[: found.targets // text.batches[0][:, 1:].numel()]
    assert found.unigram == pytest.approx(entropy(text))
    assert found.uniform == pytest.approx(math.log(VOCAB))
    assert found.weight == pytest.approx(factor)
    assert found.nats(factor * 1.5) == pytest.approx(1.5)


def test_a_further_term_of_the_loss_is_taken_off():
    found = scale(lambda model, ids: loss_of(model, ids) + 0.25)
    assert found.rest == pytest.approx(0.25, abs=1e-5)
    assert found.nats(1.75) == pytest.approx(1.5, abs=1e-5)


def test_label_smoothing_raises_the_entropy():
    smooth = scale(
        lambda m, ids: F.cross_entropy(m(ids[:, :-1]).transpose(1, 2), ids[:, 1:], label_smoothing=0.1)
    )
    assert scale().unigram < smooth.unigram < math.log(VOCAB)


def test_no_targets_are_known_where_the_loss_is_no_cross_entropy():
    found = scale(lambda m, ids: (m(ids[:, :-1]) - 0.1 * F.one_hot(ids[:, 1:], VOCAB)).square().mean())
    assert found.unigram is None
    assert found.unknown
    assert found.reference == found.start > 0


def test_weights_that_were_trained_before_are_compared_with_their_start():
    given = setup(rate=0.03)
    for _ in range(5):
        for batch in given.batches:
            given.optimizer.zero_grad()
            loss_of(given.model, batch).backward()
            given.optimizer.step()
    found = read(given)
    assert found.reference == found.start < found.unigram - 0.15
    assert not found.learns(found.start - 0.02, 0.01)
    assert found.learns(found.start - 0.05, 0.01)


def test_something_is_learnt_below_the_entropy_alone():
    found = Scale(start=3.0, unigram=2.0, uniform=3.0)
    assert not found.learns(1.9, 0.0)
    assert found.learns(1.8, 0.0)


def test_targets_are_read_until_their_entropy_is_known():
    found = scale()
    each_batch = found.targets / found.batches
    assert (VOCAB - 1) / (2 * found.targets) <= BIAS_NATS < (VOCAB - 1) / (2 * (found.targets - each_batch))


def test_a_target_counts_as_the_loss_weighs_it():
    weights = torch.linspace(0, 1, LENGTH - 1).expand(ROWS, -1)

    def weighed(model: Any, ids: torch.Tensor) -> torch.Tensor:
        losses = F.cross_entropy(model(ids[:, :-1]).transpose(1, 2), ids[:, 1:], reduction="none")
        return (losses * weights).mean()

    found = scale(weighed)
    targets = torch.stack(Text().batches[: found.batches])[..., 1:]
    counts = torch.zeros(VOCAB).index_add(0, targets.flatten(), weights.expand_as(targets).flatten())
    assert found.unigram == pytest.approx(float(torch.distributions.Categorical(counts).entropy()), rel=1e-4)


def test_a_batch_that_comes_again_is_read_once():
    ids = Text().batches[0]
    given = Setup(setup().model, ids, loss=loss_of)
    assert read(given, [ids] * 20).targets == ids[:, 1:].numel()


def test_two_scored_outputs_are_weighed_as_the_loss_weighs_them():
    class Two(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = torch.nn.Embedding(VOCAB, 8)
            self.first, self.second = torch.nn.Linear(8, VOCAB), torch.nn.Linear(8, 2)

        def forward(self, ids):
            x = self.embed(ids)
            return self.first(x), self.second(x[:, 0])

    def loss(model, ids):
        words, sentences = model(ids[:, :-1])
        return loss_of(lambda _: words, ids) + F.cross_entropy(sentences, ids[:, 0] % 2)

    text = Text()
    found = read(Setup(Two(), text, loss=loss), text.batches)
    assert found.weight == pytest.approx(2.0)
    assert found.uniform == pytest.approx((math.log(VOCAB) + math.log(2)) / 2)


@pytest.mark.parametrize(("returned", "known"), [(2.3, True), (2.9, True), (0.6, False), (9.6, False)])
def test_a_step_that_returns_its_loss_in_another_unit_is_compared_with_itself(returned: float, known: Any):
    found = read(setup(), first=returned)
    assert (found.unigram is not None) is known
    assert known or found.start == returned
