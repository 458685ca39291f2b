"""A rehearsal takes the steps that a training loop would take, and leaves the model as it was."""

from __future__ import annotations

import copy
import math
from functools import partial

import pytest
import torch

from diagnosis.small import SOURCE, TARGET, labelled, translating, untouched
from normlab.diagnosis.studies.rehearsal import rehearsal

ADAM = partial(torch.optim.Adam, lr=1e-3)
BATCHES = [(SOURCE[:2], TARGET[:2]), (SOURCE[2:3], TARGET[2:3]), (SOURCE[3:], TARGET[3:])]


def looped(subject, steps):
    """The model after a plain loop over all mini-batches but the last, and the losses before its steps."""
    model = copy.deepcopy(subject.model).eval()
    optimiser, losses = ADAM(list(model.parameters())), []
    for i in range(steps):
        loss = labelled(model, BATCHES[i % 2])
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    return model, losses


def test_the_steps_are_those_of_a_training_loop():
    subject = translating("post", dropout=0.1)
    steps, both = rehearsal(subject, ADAM, batches=BATCHES, steps=5)
    model, losses = looped(subject, 5)
    assert [row["loss"] for row in steps] == pytest.approx(losses, rel=1e-5)
    before, after = both
    assert (before["step"], after["step"]) == (0, 5)
    assert before["loss"] == pytest.approx(labelled(subject.model.eval(), BATCHES[-1]).item(), rel=1e-5)
    assert after["loss"] == pytest.approx(labelled(model, BATCHES[-1]).item(), rel=1e-4)
    assert before["moved"] == 0
    moved = [
        ((new - old).norm() / old.norm()).item()
        for new, old in zip(model.parameters(), subject.model.parameters(), strict=True)
        if old.ndim > 1
    ]
    assert after["moved"] == pytest.approx(sorted(moved)[len(moved) // 2], rel=0.1)


def test_a_large_rate_saturates_attention_and_makes_tokens_alike():
    calm, wild = (
        rehearsal(translating("post"), partial(torch.optim.Adam, lr=lr), batches=BATCHES)[1].rows[-1]
        for lr in (1e-4, 0.3)
    )
    assert wild["max_logit"] > 10 * calm["max_logit"]
    assert wild["cosine"] > calm["cosine"]
    assert wild["moved"] > 10 * calm["moved"]


def test_it_ends_before_a_loss_that_is_not_finite():
    steps, both = rehearsal(translating("pre"), partial(torch.optim.SGD, lr=1e30), batches=BATCHES)
    assert 1 <= len(steps) < 10
    assert all(math.isfinite(row["loss"]) for row in steps)
    assert both.rows[-1]["loss"] is None


def test_a_batch_alone_is_split():
    steps, both = rehearsal(translating("pre"), ADAM, steps=2)
    assert len(steps) == 2
    assert len(both) == 2


def test_the_model_is_as_it_was():
    untouched("post", lambda subject: rehearsal(subject, ADAM, batches=BATCHES)[0])
