"""What stands in the place of a function is called there, and the function is back afterwards."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager

import pytest
import torch
from torch import nn

from normlab.trace.patching import replace, replace_clipping, replace_step, run_closure, same_modes


class Greeter:
    def greet(self):
        return "hello"

    @classmethod
    def kind(cls) -> str:
        return cls.__name__


class Guest(Greeter):
    pass


def test_an_attribute_of_its_own_is_put_back():
    greeter = Greeter()
    greeter.greet = earlier = lambda: "good morning"
    with ExitStack() as stack:
        replace(stack, greeter, "greet", lambda: "good night")
        assert greeter.greet() == "good night"
    assert greeter.greet is earlier


def test_an_object_that_shows_the_method_of_its_class_does_so_again():
    greeter = Greeter()
    with ExitStack() as stack:
        replace(stack, greeter, "greet", lambda: "good night")
    assert greeter.greet() == "hello"
    assert vars(greeter) == {}


def test_a_class_method_is_put_back_unbound():
    with ExitStack() as stack:
        replace(stack, Greeter, "kind", classmethod(lambda cls: "nobody"))
        assert Guest.kind() == "nobody"
    assert Guest.kind() == "Guest"


def test_it_is_put_back_whatever_is_raised():
    greeter = Greeter()
    with ExitStack() as stack:
        replace(stack, greeter, "greet", lambda: 1 / 0)
        stack.enter_context(pytest.raises(ZeroDivisionError))
        greeter.greet()
    assert greeter.greet() == "hello"


def model_with_gradient():
    model = nn.Linear(3, 1, bias=False)
    model.weight.grad = torch.full((1, 3), 2.0)
    return model


def test_a_schedule_steps_an_optimizer_whose_step_is_replaced():
    model, seen = model_with_gradient(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    before = model.weight.detach().clone()
    with ExitStack() as stack:
        replace_step(stack, optimizer, lambda optimizer, closure=None: seen.append((optimizer, closure)))
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        optimizer.step()
        scheduler.step()  # torch warns, which is an error here, unless it saw a step before
        assert torch.equal(model.weight, before)
    assert seen == [(optimizer, None)]
    optimizer.step()
    assert not torch.equal(model.weight, before)


def test_a_closure_is_run_with_gradients():
    modes = []
    with torch.no_grad():
        assert run_closure(lambda: modes.append(torch.is_grad_enabled()) or 3.0) == 3.0
        assert run_closure(None) is None
    assert modes == [True]


@pytest.mark.parametrize("form", ["a tensor", "a list", "a generator"])
def test_a_clip_runs_inside_of_what_is_made_around_it(form):
    model, seen = model_with_gradient(), []
    p = model.weight

    @contextmanager
    def around(call):
        seen.append((call.largest_norm, float(call.norm), float(p.grad.norm())))
        yield
        seen.append(float(p.grad.norm()))
        assert call.parameters == [p]

    with ExitStack() as stack:
        replace_clipping(stack, around)
        nn.utils.clip_grad_norm_({"a tensor": p, "a list": [p], "a generator": model.parameters()}[form], 1.0)
    norm = 12**0.5
    assert seen == [(1.0, pytest.approx(norm), pytest.approx(norm)), pytest.approx(1.0, rel=1e-4)]
    nn.utils.clip_grad_norm_(p, 0.5)
    assert len(seen) == 2


def test_two_that_watch_clipping_see_each_call_once():
    p, seen = model_with_gradient().weight, []

    def noted_by(name):
        @contextmanager
        def around(_):
            seen.append(name)
            yield

        return around

    with ExitStack() as stack:
        for name in ("first", "second"):
            replace_clipping(stack, noted_by(name))
        nn.utils.clip_grad_norm_(p, 1.0)
    assert sorted(seen) == ["first", "second"]


def test_each_module_gets_its_own_mode_back():
    model = nn.Sequential(nn.Linear(1, 1), nn.Dropout())
    model[1].eval()
    with same_modes(model):
        model.train()
    assert [module.training for module in model.modules()] == [True, True, False]
