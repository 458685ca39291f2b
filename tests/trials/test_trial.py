"""The answer of trials, in each of its kinds; the budget; what is refused."""

from __future__ import annotations

import itertools
import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW

import normlab
from normlab.errors import UserError
from normlab.trials.search import LAST
from trials.tiny import VOCAB, Pairs, Text, loss_of, setup, stepped, warmed


def test_a_range_says_how_far_up_where_it_is_worse_and_where_the_own_rate_is():
    answer = normlab.trial(setup(0.02), steps=40)
    low, high = answer.usable
    assert low == min(t.rate for t in answer.rates)
    assert answer.edge.startswith("seen at")
    worse = min(t.rate for t in answer.rates if t.rate > high)
    assert worse == pytest.approx(2 * high)
    assert answer.best.loss < answer.unigram - 0.15
    assert answer.is_usable(next(t for t in answer.rates if t.rate == high))
    stopped = next(t.stopped for t in answer.rates if t.rate == worse)
    why = f"ended early ({stopped})" if stopped else "is worse"
    for part in ("within 5%", why, "your 2e-2 is", "lowest rate tried"):
        assert part in answer.sentence
    assert str(answer).startswith(answer.sentence)
    assert len(repr(answer)) < 400


def test_an_own_rate_above_the_range_is_said_to_be():
    answer = normlab.trial(setup(3.0), steps=40)
    assert answer.usable[1] < 3.0
    assert re.search(r"\byour 3 .*\babove\b", answer.sentence)


def both(model: nn.Module) -> list[torch.optim.Optimizer]:
    matrices = [p for p in model.parameters() if p.ndim == 2]
    rest = [p for p in model.parameters() if p.ndim < 2]
    return [torch.optim.Muon(matrices, lr=0.02), AdamW(rest, lr=0.005)]


@pytest.mark.parametrize(
    ("optimizer", "scheduler", "today"),
    [
        (lambda m: SGD(m.parameters(), lr=0.5, momentum=0.9), None, 0.5),
        (lambda m: SGD(m.parameters(), lr=0.5), warmed, 0.5),
        (both, None, 0.02),
    ],
)
def test_each_kind_of_optimizer_is_scanned_from_its_largest_rate(
    optimizer: Any, scheduler: Any, today: float
):
    answer = normlab.trial(setup(optimizer=optimizer, scheduler=scheduler), steps=32)
    assert answer.current_rate == pytest.approx(today, rel=0.05)
    assert answer.learns
    assert len(answer.rates) >= 4


def test_rates_may_be_given_and_an_edge_not_be_reached():
    answer = normlab.trial(setup(0.02), steps=40, rates=[0.02, 0.04])
    assert [t.rate for t in answer.rates] == [0.02, 0.04]
    assert answer.edge == "not reached by 4e-2"


def test_the_same_call_gives_the_same_answer():
    one, other = (normlab.trial(setup(0.02, dropout=0.2), steps=16) for _ in range(2))
    assert [t.losses for t in one.tried] == [t.losses for t in other.tried]


def test_where_nothing_is_learnt_trials_grow_at_the_rates_that_fall():
    answer = normlab.trial(setup(0.0005), steps=16, rates=[0.0005, 0.004])
    steps = {t.steps for t in answer.tried}
    assert steps >= {16, 32}
    assert answer.learns
    assert answer.steps == max(steps)


class Blind(nn.Module):
    """Tokens are drawn anew, so that nothing can be learnt but frequencies."""

    def __init__(self):
        super().__init__()
        self.inner = Pairs()

    def forward(self, ids):
        draw = torch.Generator().manual_seed(int(ids.sum()))
        return self.inner(torch.randint(0, VOCAB, ids.shape, generator=draw))


@pytest.mark.slow
def test_a_model_that_does_not_train_is_said_to_be_too_short_or_that():
    given = setup(model_class=Blind, optimizer=lambda m: AdamW(m.parameters(), lr=0.02))
    answer = normlab.trial(given, steps=32)
    assert answer.usable is None
    assert min(t.rate for t in answer.tried) < 0.02
    assert answer.steps == 16 * 32
    assert answer.sentence.startswith("Too short, or it does not train")
    assert not answer.best.falls
    assert answer.sentence.endswith("it no longer falls there: run normlab check, or try more steps")


class Zeroed(Pairs):
    def forward(self, ids):
        return super().forward(ids) * 0.0


def test_a_loss_that_stays_at_that_of_equal_logits_is_named():
    given = setup(model_class=Zeroed, optimizer=lambda m: AdamW(m.parameters(), lr=0.02))
    answer = normlab.trial(given, steps=16)
    assert "ln V" in answer.sentence
    assert "check" in answer.sentence
    assert max(t.rate for t in answer.tried) > 10  # not said of low rates alone


def test_a_loss_that_no_rate_moves_is_named():
    def detached(model: nn.Module, ids: Any) -> Any:
        return loss_of(model, ids) + 0.0 * model.up.weight.sum()

    given = setup(loss=detached, optimizer=lambda m: SGD([m.unused], lr=0.1), model_class=Unused)
    answer = normlab.trial(given, steps=16)
    assert answer.sentence.startswith("The loss is the same at every rate")


class Unused(Pairs):
    def __init__(self):
        super().__init__()
        self.unused = nn.Parameter(torch.ones(3))


def test_where_no_rate_trains_that_is_said_with_what_happened():
    def broken(model: nn.Module, ids: Any) -> Any:
        loss = loss_of(model, ids)
        return loss if model.steps.add_(1) < 4 else loss * torch.nan

    given = setup(loss=broken, model_class=Counting, optimizer=lambda m: SGD(m.parameters(), lr=0.1))
    answer = normlab.trial(given, steps=16)
    assert answer.best is None
    assert answer.sentence.startswith("No rate trains")
    assert "not finite" in answer.sentence


class Counting(Pairs):
    def __init__(self):
        super().__init__()
        self.register_buffer("steps", torch.zeros(()))


@pytest.mark.slow
def test_a_regression_is_compared_with_its_start_and_says_so():
    def squares(model: nn.Module, ids: Any) -> Any:
        return (model(ids[:, :-1]).mean(-1) - ids[:, 1:].float()).square().mean()

    answer = normlab.trial(setup(loss=squares), steps=40)
    assert answer.unigram is None
    assert answer.usable is not None
    assert "not known" in str(answer)


def test_a_loss_may_be_known_to_the_step_alone():
    answer = normlab.trial(setup(loss=None, step=stepped), steps=40)
    assert answer.unigram is None
    assert answer.usable is not None


@pytest.mark.parametrize(
    ("change", "differs"), [("betas=0.5,0.6", True), ("warmup=10", True), ("weight_decay=0.01", False)]
)
def test_a_change_is_tried_beside_on_the_same_batches(change: str, differs: Any):
    answer = normlab.trial(setup(), steps=16, rates=[0.01, 0.02], change=change)
    (beside,) = answer.variants
    assert beside.change == change
    assert beside.rates[0].losses[0] == answer.rates[0].losses[0]
    assert (beside.rates[0].losses != answer.rates[0].losses) is differs
    assert f"With {change}:" in str(answer)


def test_a_warm_up_that_is_changed_is_of_the_planned_steps():
    given = setup(
        declare={"steps": 1000}, optimizer=lambda m: AdamW(m.parameters(), lr=0.01), scheduler=warmed
    )
    answer = normlab.trial(given, steps=16, rates=[0.01], change=["warmup=500", "warmup=0"])
    assert [answer.warmup, *(one.warmup for one in answer.variants)] == [0.2, 0.5, 0.0]


def test_another_setup_may_be_tried_beside():
    torch.manual_seed(1)
    other = setup(model_class=Pairs, optimizer=lambda m: SGD(m.parameters(), lr=0.1))
    answer = normlab.trial(setup(), steps=16, rates=[0.1], change={"sgd": other})
    assert [one.change for one in answer.variants] == ["sgd"]


def slow(model: nn.Module, batch: Any, optimizer: Any, scheduler: Any) -> Any:
    time.sleep(0.01)
    return stepped(model, batch, optimizer, scheduler)


@pytest.mark.slow
def test_a_budget_is_kept_and_its_plan_announced():
    plans: list[str] = []
    start = time.monotonic()
    answer = normlab.trial(
        setup(step=slow, declare={"steps": 5000}), steps=32, budget_s=2.5, announce=plans.append
    )
    assert time.monotonic() - start < 2.5 * 1.1 + 0.5
    assert len(plans) == 1
    assert answer.plan == plans[0]
    assert re.search(r"allows \d+ trials of \d+ steps", plans[0])
    assert "the 5,000 steps" in plans[0]
    assert answer.ended_by or len(answer.rates) >= 5


def test_a_budget_that_holds_too_little_says_which_would_do():
    answer = normlab.trial(setup(step=slow), steps=500, budget_s=0.3)
    assert answer.tried == ()
    assert answer.sentence.startswith("Too short to tell")
    assert "budget" in answer.sentence


@pytest.mark.slow
def test_trials_are_shorter_where_three_do_not_fit():
    answer = normlab.trial(setup(step=slow), steps=500, budget_s=4)
    assert 16 <= answer.steps < 500
    assert len({t.steps for t in answer.tried}) == 1


def test_an_interrupt_gives_the_answer_so_far():
    def interrupts(line: str, done: int, of: int) -> None:
        if done == 2:
            raise KeyboardInterrupt

    answer = normlab.trial(setup(), steps=32, progress=interrupts)
    assert len(answer.tried) == 2
    assert answer.interrupted
    assert "interrupted" in str(answer)
    with pytest.raises(KeyboardInterrupt):
        normlab.trial(setup(), steps=32, progress=lambda *_: interrupts("", 2, 0))


def test_an_interrupt_before_the_first_trial_of_a_change_keeps_what_is_done():
    calls = itertools.count()

    def stops(*args: Any) -> Any:
        if next(calls) == 4 + 16:  # the own steps, and the one rate
            raise KeyboardInterrupt
        return stepped(*args)

    answer = normlab.trial(setup(step=stops), steps=16, rates=[0.01], change="betas=0.5,0.6")
    assert [t.rate for t in answer.tried] == [0.01]
    assert answer.interrupted
    assert answer.variants == ()


def test_the_facts_of_an_answer_are_plain_values():
    plain = normlab.trial(setup(), steps=16, rates=[0.01, 30.0], change="betas=0.5,0.6").to_dict()
    assert plain["sentence"]
    assert {t["rate"] for t in plain["trials"]} == {0.01, 30.0}
    assert len(plain["variants"]) == 1
    assert all(len(t["losses"]) >= LAST for t in plain["trials"])


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        ({"steps": 3}, "16"),
        ({"steps": True}, "whole number"),
        ({"budget_s": 0}, "above 0"),
        ({"rates": [0.1, -1]}, "above 0"),
        ({"change": "betas=0.9"}, "0.9, 0.999"),
        ({"change": "weight_decay=much"}, "kind"),
        ({"change": "beta=0.9,0.95"}, "betas"),
        ({"change": "lr=0.1"}, "rates"),
        ({"change": "post"}, "warmup=500"),
        ({"change": "warmup=many"}, "number of steps"),
        ({"change": "amsgrad=maybe"}, "kind"),
        ({"sed": 3}, "seed"),
        ({"lr": 0.1}, "dataclasses.replace"),
    ],
)
def test_what_is_wrong_is_refused_with_what_is_allowed(words: dict[str, Any], hint: str):
    with pytest.raises(UserError, match=re.escape(hint)):
        normlab.trial(setup(), **words)


@pytest.mark.parametrize(
    ("parts", "hint"),
    [
        ({"optimizer": None}, "optimizer="),
        ({"batches": iter(Text())}, "only once"),
        ({"batches": Text(0)}, "no batch"),
        ({"loss": lambda model, batch: model(batch["ids"])}, "on the batch"),
        ({"optimizer": lambda m: SGD(m.parameters(), lr=0.0)}, "is 0"),
    ],
)
def test_a_setup_that_cannot_be_trained_is_refused(parts: dict[str, Any], hint: str):
    with pytest.raises(UserError, match=hint):
        normlab.trial(setup(**parts))


class SparsePairs(Pairs):
    """Pairs whose table has sparse gradients."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, self.embed.embedding_dim, sparse=True)


@pytest.mark.parametrize(
    "returned",
    [lambda loss: None, lambda loss: (loss, 1), lambda loss: loss.item(), lambda loss: loss.expand(3)],
)
def test_a_loss_of_the_wrong_kind_is_refused_as_a_check_refuses_it(returned: Any):
    given = setup(loss=lambda model, batch: returned(loss_of(model, batch)))
    with pytest.raises(UserError) as refused:
        normlab.trial(given)
    with pytest.raises(UserError) as checked:
        normlab.check(given)
    assert str(refused.value) == str(checked.value)


def test_a_loss_without_a_graph_is_refused_for_that():
    with pytest.raises(UserError, match="no gradient"):
        normlab.trial(setup(loss=lambda model, batch: loss_of(model, batch).detach()))


@pytest.mark.parametrize("words", [{}, {"change": "eps=1e-6"}, {"folder": True}])
def test_what_cannot_be_copied_is_named(words: dict[str, Any], tmp_path: Path):
    given = setup()
    given.model.head.source = (i for i in range(3))
    if "folder" in words:
        words = {"folder": tmp_path}
    with pytest.raises(UserError, match=r"head\.source"):
        normlab.trial(given, **words)


def test_an_optimizer_that_raises_is_named_and_not_the_loss():
    with pytest.raises(UserError, match=r"^AdamW raised"):
        normlab.trial(setup(model_class=SparsePairs))


def test_a_loss_that_raises_in_a_closure_is_named_and_not_the_optimizer():
    def refusing(model: nn.Module, batch: Any) -> Any:
        raise KeyError("labels")

    def step(model: nn.Module, batch: Any, optimizer: Any, scheduler: Any) -> Any:
        return optimizer.step(lambda: refusing(model, batch))

    with pytest.raises(UserError, match=r"^loss .*KeyError"):
        normlab.trial(setup(loss=refusing, step=step))
