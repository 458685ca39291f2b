"""``normlab.capture`` records a training in one's own process, and leaves all as it was."""

from __future__ import annotations

import os
import random
import sys
from collections import deque, namedtuple
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import normlab
from normlab.private_torch import stance
from normlab.setups.patches import PATCHES
from normlab.trace.kept import MOST_BESIDE
from setups.doors import imported


def parts(models):
    """A model with an optimizer and a schedule that have made three steps, and a loop over them."""
    torch.manual_seed(0)
    model = models.Decoder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)

    def train(steps):
        losses = []
        model.train()
        for _ in range(steps):
            ids = torch.randint(1, models.WORDS, (6, 13))
            loss = models.next_token_loss(model(ids[:, :-1]), ids)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            losses.append(loss.item())
        return losses

    train(3)
    return model, optimizer, schedule, train


@pytest.fixture
def models(monkeypatch):
    return imported("models", monkeypatch)


@pytest.mark.slow
def test_a_block_shows_its_setup_and_ends_early(models):
    model, optimizer, schedule, train = parts(models)
    with normlab.capture() as captured:
        train(10)
        pytest.fail("the block goes on after the second step")
    assert captured.setup.model is model
    assert captured.setup.optimizer is optimizer
    assert captured.setup.scheduler is schedule
    assert normlab.check(captured.setup).ok
    assert captured.facts["recorded"]


def test_nothing_stays_changed(models):
    model, optimizer, schedule, train = parts(models)
    model.eval()
    patched = [vars(owner)[name] for owner, name, _ in PATCHES]
    weights = [p.detach().clone() for p in model.parameters()]
    gradients = [p.grad.clone() for p in model.parameters()]
    state = {k: v.clone() for k, v in optimizer.state[next(model.parameters())].items()}
    draws = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # noqa: NPY002
    step, finders = optimizer.step, list(sys.meta_path)
    with normlab.capture() as captured:
        train(10)
    assert captured.setup is not None
    assert [vars(owner)[name] for owner, name, _ in PATCHES] == patched
    assert all(map(torch.equal, weights, model.parameters()))
    assert all(torch.equal(old, p.grad) for old, p in zip(gradients, model.parameters(), strict=True))
    assert all(torch.equal(v, state[k]) for k, v in optimizer.state[next(model.parameters())].items())
    assert torch.equal(torch.get_rng_state(), draws[0])
    assert (random.getstate(), np.random.get_state()[1].tolist()) == draws[1:]  # noqa: NPY002
    assert (optimizer.step, sys.meta_path) == (step, finders)
    assert (model.training, schedule.last_epoch) == (False, 3)


@pytest.mark.slow
def test_a_training_goes_on_as_it_would_have(models):
    losses = parts(models)[3](4)
    train = parts(models)[3]
    with normlab.capture():
        train(10)
    assert train(4) == losses


@pytest.mark.slow
def test_what_is_made_in_the_block_is_seen(models):
    with normlab.capture() as captured:
        *_, train = parts(models)
        train(1)
    assert type(captured.setup.model) is models.Decoder


@pytest.mark.slow
def test_several_batches_are_clones(models):
    _, _, _, train = parts(models)
    with normlab.capture(batches=4) as captured:
        train(10)
    batches = captured.setup.batches
    assert len(batches) == 4
    assert len({tuple(batch["ids"].flatten().tolist()) for batch in batches}) == 4


@pytest.mark.slow
def test_a_block_without_a_step_is_refused_when_it_is_asked_for():
    with normlab.capture() as captured, pytest.raises(normlab.UserError):
        _ = captured.setup
    with pytest.raises(normlab.UserError):
        _ = captured.setup


@pytest.mark.slow
def test_an_exception_of_the_block_is_raised():
    with pytest.raises(ZeroDivisionError), normlab.capture():
        _ = 1 / 0


Row = namedtuple("Row", "step loss")


class Slotted:
    __slots__ = ("loss",)


class Loop:
    """A trainer of the user's own: it holds a model, a count of steps, and what it logs."""

    def __init__(self, models):
        self.model = models.Decoder()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.models, self.steps, self.history = models, 7, ["begun"]

    def train(self):
        for _ in range(5):
            ids = torch.randint(1, self.models.WORDS, (6, 13))
            loss = self.models.next_token_loss(self.model(ids[:, :-1]), ids)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.steps += 1
            self.history.append(loss.item())
            self.last = loss


@pytest.mark.slow
def test_what_holds_a_model_is_as_before(models):
    loop = Loop(models)
    history = loop.history
    with normlab.capture() as captured:
        loop.train()
    assert captured.setup.model is loop.model
    assert (loop.steps, loop.history) == (7, ["begun"])
    assert loop.history is history
    assert not hasattr(loop, "last")


@pytest.mark.slow
def test_what_holds_a_model_is_as_before_beside_an_optimizer_that_holds_much(models):
    other = torch.optim.SGD(models.Decoder().parameters(), lr=0.1)
    # more than is searched beside what a training changes, which leaves no room for what holds that
    other.log = SimpleNamespace(entries=[[i] for i in range(2 * MOST_BESIDE)])
    loop = Loop(models)
    with normlab.capture():
        loop.train()
    assert (loop.steps, loop.history) == (7, ["begun"])


@pytest.mark.slow
def test_numbers_that_are_kept_are_plain_ones(models):
    logged, entries, kept = list[float](), {}, Slotted()
    recent, nested, sizes = deque(maxlen=3), [], set()

    def log(loss, ids):
        value = loss.item()
        logged.append(value)
        entries["loss"] = value * 2
        kept.loss = value
        recent.append(value)
        nested.append((("a", Row(1, value)), ids.shape))
        sizes.add(ids.shape[0])

    model = models.Decoder()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with normlab.capture():
        for _ in range(3):
            ids = torch.randint(1, models.WORDS, (6, 13))
            loss = models.next_token_loss(model(ids[:, :-1]), ids)
            loss.backward()
            log(loss, ids)
            optimizer.step()
    values = [logged[0], entries["loss"], kept.loss, recent[0], nested[0][0][1].loss]
    assert [type(value) for value in values] == [float] * 5
    assert values == [logged[0], 2 * logged[-1], logged[-1], logged[0], logged[0]]
    assert type(nested[0][1]) is torch.Size
    assert [type(size) for size in (*nested[0][1], *sizes)] == [int] * 3
    assert type(nested[0][0][1]) is Row


@pytest.mark.slow
def test_what_the_block_sets_for_the_process_stays_as_it_set_it(models, monkeypatch):
    _, _, _, train = parts(models)
    monkeypatch.setenv("OF_THE_BLOCK", "before")
    dtype = torch.get_default_dtype()
    with normlab.capture() as captured:
        os.environ["OF_THE_BLOCK"] = "after"
        torch.set_default_dtype(torch.float64)
        train(10)
    after = torch.get_default_dtype(), os.environ["OF_THE_BLOCK"], os.environ.get("WANDB_MODE")
    torch.set_default_dtype(dtype)
    assert after == (torch.float64, "after", None)
    assert captured.setup is not None


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")
def test_the_stance_of_the_compiler_is_put_back(models):
    _, _, _, train = parts(models)
    with torch.compiler.set_stance("eager_on_recompile"):
        before = stance()
        with normlab.capture():
            torch.compile(torch.nn.Linear(2, 2))
            train(10)
        assert stance() == before


@pytest.mark.slow
def test_the_optimizer_of_a_block_can_be_chosen(models):
    first, second = models.Decoder(), models.Decoder()
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (first, second)]
    with normlab.capture(optimizer=2) as captured:
        for _ in range(3):
            for model, optimizer in zip((first, second), optimizers, strict=True):
                ids = torch.randint(1, models.WORDS, (6, 13))
                models.next_token_loss(model(ids[:, :-1]), ids).backward()
                optimizer.step()
    assert captured.setup.model is second
    assert captured.setup.optimizer is optimizers[1]


@pytest.mark.slow
def test_a_wrapper_that_is_handed_the_model_is_looked_through():
    torch.manual_seed(0)
    wrapper = torch.nn.Sequential(torch.nn.Embedding(20, 8), torch.nn.Linear(8, 20))
    optimizer = torch.optim.SGD(wrapper.parameters(), lr=0.1)
    ids = torch.randint(0, 20, (4, 6))

    def loss_of(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        logits = x
        for layer in model:
            logits = layer(logits)
        return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), x[:, 1:].flatten())

    with normlab.capture() as captured:
        for _ in range(2):
            optimizer.zero_grad()
            forward = wrapper.forward
            wrapper.forward = loss_of  # a trainer runs a loss of its own through the wrapper of a model
            loss = wrapper(wrapper, ids)
            wrapper.forward = forward
            loss.backward()
            optimizer.step()
    assert not captured.setup.cannot
