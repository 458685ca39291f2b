"""The update of a traced step is the one that training makes; model and optimizer stay as they were."""

from __future__ import annotations

from copy import deepcopy
from functools import partial

import pytest
import torch
import transformers as tf
from torch import Tensor, nn, optim

from contracts.variants import build, inputs, loss_of, uniform
from normlab.trace.autograd import trainable
from normlab.trace.trace import Trace

KINDS = {
    "SGD": partial(optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
    "Adam": partial(optim.Adam, lr=1e-3),
    "AdamW": partial(optim.AdamW, lr=1e-3, amsgrad=True),
    "RAdam": partial(optim.RAdam, lr=1e-3),
    "NAdam": partial(optim.NAdam, lr=1e-3),
    "Adamax": partial(optim.Adamax, lr=1e-3),
    "Adagrad": partial(optim.Adagrad, lr=1e-3),
    "Adadelta": partial(optim.Adadelta, lr=1e-3),
    "Adafactor": partial(optim.Adafactor, lr=1e-3),
    "RMSprop": partial(optim.RMSprop, lr=1e-3),
    "Rprop": partial(optim.Rprop, lr=1e-3),
    "ASGD": partial(optim.ASGD, lr=1e-3),
    "LBFGS": partial(optim.LBFGS, lr=0.1, max_iter=3),
}


def trace_of(model: nn.Module) -> Trace:
    return Trace(model, inputs(model), lambda m, batch: loss_of(m, *batch))


def really(model: nn.Module, optimizer: optim.Optimizer) -> dict[str, Tensor]:
    """The weights after a step of training without dropout."""
    model.eval()

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, *inputs(model))
        loss.backward()
        return loss

    optimizer.step(closure)
    return {path: p.detach() for path, p in model.named_parameters()}


def trained(model: nn.Module, make) -> dict[str, Tensor]:
    copy = deepcopy(model)
    return really(copy, make(copy.parameters()))


def same(updated: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert updated.keys() == expected.keys()
    different = [path for path, x in expected.items() if not torch.equal(updated[path], x)]
    assert different == []


@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
def test_a_first_update_is_the_one_that_training_does(make):
    model = build(uniform("post", dropout=0.1)).train()
    before = deepcopy(model.state_dict())
    updated = trace_of(model).update(make)
    same(dict(model.named_parameters()), before)
    same(updated, trained(model, make))


@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
def test_an_optimizer_amid_training_goes_on_from_a_copy(make):
    model = build(uniform("post"))
    trace, optimizer = trace_of(model), make(model.parameters())
    schedule = optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
    for _ in range(3):
        really(model, optimizer)
        schedule.step()
    weights, state = deepcopy(model.state_dict()), deepcopy(optimizer.state_dict())
    calls = []
    optimizer.register_step_post_hook(lambda *_: calls.append(1))

    updated = trace.update(optimizer)
    assert calls == []
    same(dict(model.named_parameters()), weights)
    torch.testing.assert_close(optimizer.state_dict(), state, rtol=0, atol=0)
    same(updated, really(model, optimizer))
    assert calls == [1]


def test_groups_have_their_own_rates_and_what_they_do_not_hold_stays():
    model = build(uniform("post"))
    before = {path: p.detach().clone() for path, p in model.named_parameters()}
    groups = [
        {"params": list(model.encoder.parameters()), "lr": 0.0},
        {"params": list(model.decoder.parameters()), "lr": 0.1},
    ]
    updated = trace_of(model).update(optim.SGD(groups))
    moved = {path.split(".")[0] for path, x in updated.items() if not torch.equal(x, before[path])}
    assert moved == {"decoder"}


def test_a_rate_that_is_left_to_the_optimizer_stays_its_own():
    model = build(uniform("post"))
    trace, optimizer = trace_of(model), tf.Adafactor(model.parameters())
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))], "lr": 0.5})
    before = trace.update(tf.Adafactor)
    same(trace.update(optimizer, factor=0.25), before)
    assert [group["lr"] for group in optimizer.param_groups] == [None, 0.5]
    same(trace.update(tf.Adafactor, factor=0.25), before)


def test_parameters_without_an_entry_are_left_out():
    model = build(uniform("post"))
    before = trace_of(model).update(KINDS["Adam"])
    model.extra = nn.Parameter(torch.empty(0, 4))
    assert "extra" not in trainable(model)
    same(trace_of(model).update(KINDS["Adam"]), before)
    same(trace_of(model).update(KINDS["Adam"](model.parameters())), before)
    with pytest.raises(ValueError, match="unfreeze"):
        trainable(nn.ParameterList([torch.empty(0, 4)]))


def test_an_optimizer_without_a_closure_steps_on_its_gradients():
    class Plain(optim.Optimizer):
        def __init__(self, parameters) -> None:
            super().__init__(parameters, {})
            self.rate = 0.5

        @torch.no_grad()
        def step(self) -> None:
            for group in self.param_groups:
                for p in group["params"]:
                    p -= self.rate * p.grad

    model = build(uniform("post"))
    updated = trace_of(model).update(Plain(model.parameters()))
    same(updated, trained(model, partial(optim.SGD, lr=0.5)))


def test_what_cannot_be_stepped_says_so():
    model = build(uniform("post"))
    trace = trace_of(model)
    with pytest.raises(ValueError, match="optimizer"):
        trace.update(optim.SGD(build(uniform("post")).parameters(), lr=1.0))
    with torch.no_grad():
        model.embedding.weight[5] = float("nan")
    with pytest.raises(ValueError, match=r"\bnan\b"):
        trace.update(KINDS["Adam"])
    with pytest.raises(ValueError, match="unfreeze"):
        trace_of(build(uniform("post")).requires_grad_(requires_grad=False)).update(KINDS["Adam"])
