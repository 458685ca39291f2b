"""A trial is the user's own training, on copies, at other rates."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, MultiplicativeLR, OneCycleLR

import normlab
from normlab.errors import UserError
from normlab.trace.restore import same_globals
from normlab.trials.course import read_course
from normlab.trials.training import Training, train
from trials.tiny import Pairs, Text, loss_of, setup, stepped, warmed

RATES: list[list[float]] = []


@pytest.fixture(autouse=True)
def _rates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Write down the rates with which SGD is called: in torch, as what a setup reaches is put back."""
    own = SGD.step

    def step(self: SGD, closure: Any = None) -> Any:
        RATES.append([float(group["lr"]) for group in self.param_groups])
        return own(self, closure)

    RATES.clear()
    monkeypatch.setattr(SGD, "step", step)


def run(given: normlab.Setup, rate_of: Any = None, steps: int = 10, **groups: Any) -> Training:
    batches = [b for b, _ in zip(given.stream(), range(steps), strict=False)]
    return train(given, batches, rate_of, seed=0, groups=groups, enough=lambda _: "")


def course(given: normlab.Setup) -> Any:
    seen = run(given, steps=4)
    RATES.clear()
    with same_globals():
        return read_course(given, seen)


def groups(model: nn.Module) -> list[dict[str, Any]]:
    own = list(model.parameters())
    return [{"params": own[:2], "lr": 0.1}, {"params": own[2:], "lr": 0.02}]


def test_rates_are_given_after_the_scheduler_set_them_and_groups_keep_their_proportion():
    given = setup(optimizer=lambda m: SGD(groups(m)), scheduler=warmed, step=stepped)
    found = course(given)
    assert found.rate == pytest.approx(0.1, rel=0.05)
    run(given, found.at(0.5, 10))
    ramp = [min(1.0, t / 2) for t in range(1, 11)]
    assert [row[0] for row in RATES] == pytest.approx([0.5 * x for x in ramp])  # 0.5 at the peak
    assert [row[1] / row[0] for row in RATES] == pytest.approx([0.2] * 10)


def test_a_schedule_that_multiplies_the_last_rate_stays_right():
    given = setup(
        optimizer=lambda m: SGD(m.parameters(), lr=0.1),
        scheduler=lambda o: MultiplicativeLR(o, lambda _: 0.5),
        step=stepped,
    )
    seen = run(given, lambda *_: [3.0], steps=4)
    assert list(seen.rates.values()) == [[0.1], [0.05], [0.025], [0.0125]]
    assert RATES == [[3.0]] * 4


def by_hand(model: nn.Module, batch: Any, optimizer: Any, scheduler: Any) -> Any:
    """Raises the rate over 50 steps, without a scheduler."""
    t = optimizer.state.setdefault("t", 0)
    optimizer.state["t"] = t + 1
    for group in optimizer.param_groups:
        group["lr"] = 0.1 * min(1.0, (t + 1) / 50)
    return stepped(model, batch, optimizer, scheduler)


def test_rates_that_a_step_sets_by_hand_are_replaced():
    given = setup(optimizer=lambda m: SGD(m.parameters(), lr=0.0), step=by_hand, lr=0.1)
    found = course(given)
    assert (found.rate, found.warmup) == (0.1, 0.2)
    seen = run(given, found.at(0.4, 10), steps=10)
    assert [row[0] for row in seen.rates.values()] == pytest.approx([0.002 * t for t in range(1, 11)])
    assert [row[0] for row in RATES] == pytest.approx([0.2] + [0.4] * 9)


def test_a_rate_that_rises_by_hand_needs_to_be_known():
    with pytest.raises(UserError, match="lr="):
        course(setup(optimizer=lambda m: SGD(m.parameters(), lr=0.0), step=by_hand))


@pytest.mark.parametrize(
    ("scheduler", "warmup"),
    [
        (None, 0.0),
        (warmed, 0.2),
        (lambda o: OneCycleLR(o, 0.01, total_steps=100), 0.2),
        (lambda o: CosineAnnealingLR(o, 100), 0.0),
        (lambda o: MultiplicativeLR(o, lambda _: 0.9), 0.0),
        (lambda o: LambdaLR(o, lambda t: (1 - t / 50) ** 2), 0.0),  # rises above its start after 100 steps
    ],
)
def test_a_warm_up_is_mirrored_where_there_is_one(scheduler: Any, warmup: float):
    given = setup(optimizer=lambda m: AdamW(m.parameters(), lr=0.01), scheduler=scheduler)
    found = course(given)
    assert found.warmup == warmup
    assert found.rate == pytest.approx(0.01, rel=0.05)


def two(model: nn.Module) -> list[torch.optim.Optimizer]:
    own = list(model.parameters())
    matrices = [p for p in own if p.ndim == 2]
    kind = getattr(torch.optim, "Muon", SGD)
    rest = [p for p in own if p.ndim < 2]
    return [kind(matrices, lr=0.02), AdamW(rest, lr=0.005)]


def test_every_optimizer_of_a_list_is_scaled():
    given = setup(optimizer=two)
    found = course(given)
    assert found.peaks == [0.02, 0.005]
    at_its_own, at_ten_times = run(given, found.at(0.02, 10)), run(given, found.at(0.2, 10))
    assert at_its_own.losses == run(given).losses  # as without other rates
    assert at_its_own.losses[0] == at_ten_times.losses[0]
    assert at_its_own.losses[1:] != at_ten_times.losses[1:]


def test_optimizers_of_a_list_keep_their_proportion():
    def two_of_a_kind(model: nn.Module) -> list[torch.optim.Optimizer]:
        return [SGD([group["params"][0]], lr=group["lr"]) for group in groups(model)]

    given = setup(optimizer=two_of_a_kind)
    found = course(given)
    run(given, found.at(0.5, 10))
    assert [rate for (rate,) in RATES] == pytest.approx([0.5, 0.1] * 10)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_a_trial_is_what_a_plain_loop_does(dropout: float):
    given = setup(dropout=dropout, step=stepped)
    seen = run(given, lambda *_: [0.05])
    torch.manual_seed(0)
    model = copy.deepcopy(given.model)
    optimizer = AdamW(model.parameters(), lr=0.05)
    plain = [float(stepped(model, b, optimizer, None)) for b in list(Text())[:10]]
    assert seen.losses == plain


def test_an_optimizer_amid_its_training_goes_on_from_its_state():
    given = setup(step=stepped)
    for batch in list(given.batches)[:3]:
        stepped(given.model, batch, given.optimizer, None)
    seen = run(given, lambda *_: [0.01], steps=3)
    plain = [float(stepped(given.model, b, given.optimizer, None)) for b in list(Text())[:3]]
    assert seen.losses == plain


def test_options_of_groups_are_replaced_on_copies_alone():
    given = setup()
    changed = run(given, betas=(0.5, 0.6))
    assert changed.losses != run(given).losses
    assert run(given, betas=lambda own: (own[0] - 0.4, 0.6)).losses == changed.losses
    assert given.optimizer.param_groups[0]["betas"] == (0.9, 0.999)


def test_rates_that_are_tensors_are_put_back_as_they_were():
    given = setup(optimizer=lambda m: AdamW(m.parameters(), lr=torch.tensor(0.01)))
    seen = run(given, lambda *_: [0.02], steps=3)
    assert [row[0] for row in seen.rates.values()] == pytest.approx([0.01] * 3)


def test_a_step_that_raises_later_ends_its_trial():
    def refuses(model: nn.Module, batch: Any, optimizer: Any, scheduler: Any) -> Any:
        loss = stepped(model, batch, optimizer, scheduler)
        if optimizer.param_groups[0]["params"][0].abs().max() > 50:
            raise ValueError("too large")
        return loss

    seen = run(setup(step=refuses), lambda *_: [30.0])
    assert "ValueError" in seen.stopped
    assert len(seen.losses) < 10


def steps_of(returns: Any) -> Any:
    def step(model: nn.Module, batch: Any, optimizer: Any, scheduler: Any) -> Any:
        stepped(model, batch, optimizer, scheduler)
        return returns

    return step


@pytest.mark.parametrize("returns", [None, "0.3", torch.zeros(2)])
def test_a_step_must_return_its_loss(returns: Any):
    with pytest.raises(UserError, match=r"\breturn"):
        run(setup(step=steps_of(returns)))


def bits(given: normlab.Setup) -> Sequence[Any]:
    state = given.optimizer.state_dict()
    moments = [x for s in state["state"].values() for x in s.values()]
    return [*given.model.state_dict().values(), *(p.grad for p in given.model.parameters()), *moments]


def test_nothing_of_the_setup_changes():
    given = setup(dropout=0.2, step=stepped)
    stepped(given.model, next(iter(given.batches)), given.optimizer, None)
    before, options = copy.deepcopy(bits(given)), copy.deepcopy(given.optimizer.param_groups[0])
    random = torch.get_rng_state()
    normlab.trial(given, steps=16, rates=[0.01, 0.1], change=["betas=0.5,0.6"])
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(a, b) for a, b in zip(before, bits(given), strict=True))
    left = {k: v for k, v in options.items() if k != "params"}
    assert left == {k: given.optimizer.param_groups[0][k] for k in left}
    assert given.model.training


def closed_over(model: nn.Module) -> None:
    earlier = model.forward
    model.forward = lambda ids: earlier(ids)


def compiled(model: nn.Module) -> None:
    model.up.forward = torch.compile(model.up.forward, backend="eager")


def hooked(model: nn.Module) -> None:
    model.head.register_forward_hook(lambda _, __, logits: logits + 0 * model.embed.weight.sum())


@pytest.mark.parametrize("wrap", [closed_over, compiled, hooked])
def test_a_model_that_holds_functions_is_trained_as_any_other(wrap: Any):
    def losses(change: Any) -> list[float]:
        given = setup(optimizer=lambda m: AdamW(m.parameters(), lr=0.01))
        change(given.model)
        before = copy.deepcopy(given.model.state_dict())
        seen = run(given)
        assert all(torch.equal(x, before[n]) for n, x in given.model.state_dict().items())
        assert all(p.grad is None for p in given.model.parameters())
        return seen.losses

    assert losses(wrap) == pytest.approx(losses(lambda _: None), rel=1e-5)


class Owner:
    def __init__(self, model: nn.Module):
        self.earlier, self.head = model.forward, model.head


def owned(model: nn.Module, ids: torch.Tensor, owner: Owner) -> torch.Tensor:
    return loss_of(model, ids) + 0.1 * owner.head.weight.norm()


@pytest.mark.parametrize("through", ["forward", "loss", "step"])
def test_a_copy_that_uses_the_original_is_not_trained(through: str):
    given = setup()
    owner = Owner(given.model)
    if through == "forward":
        given.model.forward = lambda ids: owner.earlier(ids)
    elif through == "loss":
        given = dataclasses.replace(given, loss=lambda m, ids: owned(m, ids, owner))
    else:

        def step(model: nn.Module, ids: torch.Tensor, optimizer: Any, _: Any) -> torch.Tensor:
            optimizer.zero_grad()
            loss = owned(model, ids, owner)
            loss.backward()
            optimizer.step()
            return loss

        given = dataclasses.replace(given, step=step)
    before = copy.deepcopy(bits(given))
    with pytest.raises(UserError, match="no copy"):
        normlab.trial(given, steps=16, rates=[0.01])
    assert all(a is b or torch.equal(a, b) for a, b in zip(before, bits(given), strict=True))


def test_a_step_may_look_at_the_model_that_was_copied():
    def step(model: nn.Module, batch: Any, optimizer: Any, scheduler: Any) -> torch.Tensor:
        norms.append(float(given.model.head.weight.detach().norm()))
        return stepped(model, batch, optimizer, scheduler)

    norms = list[float]()
    given = setup(step=step)
    assert run(given).losses == run(setup(step=stepped)).losses


def test_another_model_than_the_one_that_is_given_is_refused():
    given = setup()
    other = Pairs()
    with pytest.raises(UserError, match="model"):
        normlab.trial(
            normlab.Setup(
                given.model,
                Text(),
                loss=lambda _, b: loss_of(other, b),
                optimizer=lambda m: SGD(m.parameters(), lr=0.1),
            )
        )


def test_an_optimizer_that_is_never_called_is_refused():
    with pytest.raises(UserError, match="not called"):
        normlab.trial(setup(step=lambda model, batch, optimizer, scheduler: loss_of(model, batch)))
