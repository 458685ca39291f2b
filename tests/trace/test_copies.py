"""Copies of a model whose modules hold functions: what runs of the copy, and what of the original."""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cases import each
from normlab.trace.copies import copied_model, proof_of
from normlab.trace.tensors import eager
from normlab.trace.use import use_of

BATCH = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("shift", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x)) + self.shift


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([Part(), Part()])

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = part(x)
        return x


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


class Caller:
    """Wraps a function, and keeps what it returned."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function, self.kept = function, list[Any]()

    def __call__(self, *args: Any) -> Any:
        self.kept.append(self.function(*args))
        return self.kept.pop()


def wrapped(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(*args: Any) -> Any:
        return function(*args)

    return wrapper


def by_closure(module: nn.Module) -> None:
    module.forward = wrapped(module.forward)


def by_method_over_closure(module: nn.Module) -> None:
    earlier = module.forward
    module.forward = types.MethodType(lambda self, *args: earlier(*args), module)


def by_partial(module: nn.Module) -> None:
    module.forward = functools.partial(lambda earlier, *args: earlier(*args), module.forward)


def by_default(module: nn.Module) -> None:
    def forward(x: Tensor, earlier: Any = module.forward) -> Tensor:
        return earlier(x)

    module.forward = forward


def by_compile(module: nn.Module) -> None:
    module.forward = torch.compile(module.forward, backend="eager")


def by_no_grad(module: nn.Module) -> None:
    module.forward = torch.no_grad()(module.forward)


def by_object(module: nn.Module) -> None:
    module.forward = wrapped(Caller(module.forward))


def by_table(module: nn.Module) -> None:
    routes = {"usual": [module.forward]}
    module.forward = lambda x: routes["usual"][0](x)


def by_recursion(module: nn.Module) -> None:
    earlier = module.forward

    def forward(x: Tensor, depth: int = 1) -> Tensor:
        return forward(x, depth - 1) if depth else earlier(x)

    module.forward = forward


def by_pre_hook(module: nn.Module) -> None:
    module.register_forward_pre_hook(lambda _, args: (args[0] * module.get_parameter(name),))
    name = next(n for n, p in module.named_parameters() if p.ndim == 1)


def by_forward_hook(module: nn.Module) -> None:
    hook = functools.partial(lambda held, _, __, y: y + held.sum(), next(module.parameters()))
    module.register_forward_hook(hook)


WRAPPERS = {
    f.__name__: f
    for f in (
        *(by_closure, by_method_over_closure, by_partial, by_default, by_compile, by_no_grad, by_object),
        *(by_table, by_recursion, by_pre_hook, by_forward_hook),
    )
}


@each("place", ["", "parts.1", "parts.1.linear"])
@each("wrap", WRAPPERS.values(), ids=WRAPPERS)
def test_a_copy_runs_its_own_modules_and_weights(wrap, place):
    torch.manual_seed(0)
    model = Model()
    wrap(model.get_submodule(place))
    twin = copied_model(model)
    with torch.no_grad(), eager():
        want = model(BATCH)
        for p in model.parameters():
            p.fill_(torch.nan)
        model.parts[0].shift.fill_(torch.nan)
        with use_of(model) as strayed, use_of(twin) as used:
            assert torch.equal(twin(BATCH), want)
    assert not strayed.paths
    assert {"parts.0", "parts.1.linear", "parts.1.linear.weight", "parts.0.shift"} <= {*used.paths}


@each("wrap", WRAPPERS.values(), ids=WRAPPERS)
def test_a_copy_of_a_copy_does_so_too(wrap):
    model = Model()
    wrap(model)
    first = copied_model(model)
    assert not proof_of(first, BATCH, loss_of).refusal
    second = copied_model(first).double()
    with eager():
        assert second(BATCH.double()).dtype == torch.float64


def test_the_original_keeps_its_functions():
    model = Model()
    by_method_over_closure(model)
    by_object(model.parts[0])
    before = model.forward, model.parts[0].forward, model.parts[0].forward.__closure__[0].cell_contents
    twin = copied_model(model)
    after = model.forward, model.parts[0].forward, model.parts[0].forward.__closure__[0].cell_contents
    assert all(a is b for a, b in zip(before, after, strict=True))
    assert twin.parts[0].forward is not model.parts[0].forward


def test_functions_that_two_modules_share_are_made_again_once():
    model, outside = Model(), torch.ones(4)
    helper = wrapped(model.parts[0].forward)
    model.parts[0].forward = lambda x: helper(x)
    model.first, model.second, model.unbound = helper, (helper, outside), wrapped(torch.tanh)
    twin = copied_model(model)
    assert twin.first is twin.second[0] is not helper
    assert twin.unbound is model.unbound


def test_a_counter_of_the_original_does_not_count_passes_of_the_copy():
    model, calls = Model(), 0
    earlier = model.forward

    def forward(x: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return earlier(x)

    model.forward = forward
    twin = copied_model(model)
    twin(BATCH)
    twin(BATCH)
    assert calls == 0


class Trainer:
    """Holds a model, and cannot be called."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.earlier = model, model.forward


def by_trainer(model: nn.Module) -> None:
    trainer = Trainer(model)
    model.forward = lambda x: trainer.earlier(x)


def by_cached_function(model: nn.Module) -> None:
    earlier = model.parts[0].forward

    @functools.cache
    def forward_of_part() -> Callable[..., Any]:
        return earlier

    model.parts[0].forward = lambda x: forward_of_part()(x)


class Own(Part):
    def __deepcopy__(self, memo: Any) -> Own:
        return self


def by_own_copying(model: nn.Module) -> None:
    model.parts[1] = Own()


class Refuses(Part):
    def __deepcopy__(self, memo: Any) -> Own:
        raise RuntimeError("this part is unique")


def by_refusal(model: nn.Module) -> None:
    model.parts[1] = Refuses()


OPAQUE = {f.__name__: f for f in (by_trainer, by_cached_function, by_own_copying, by_refusal)}


@each("wrap", OPAQUE.values(), ids=OPAQUE)
def test_a_copy_that_is_not_proven_is_refused(wrap):
    model = Model()
    wrap(model)
    state = copy.deepcopy(model.state_dict()) if wrap is not by_refusal else {}
    proof = proof_of(model, BATCH, loss_of)
    assert proof.loss_runs_model
    assert proof.refusal
    assert all(torch.equal(x, state[n]) for n, x in model.state_dict().items() if n in state)
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in model.modules())


def test_a_loss_that_reads_a_part_of_the_original_is_no_proof():
    model = Model()
    assert not proof_of(model, BATCH, loss_of).refusal
    head = model.parts[1].linear.weight[:2]
    for loss in (
        lambda m, x: loss_of(m, x) + model.parts[0].linear.weight.norm(),
        lambda m, x: loss_of(m, x) + head.norm(),  # which has the storage of a parameter
        lambda m, x: model.parts[1](m.parts[0](x)).mean(),
    ):
        assert proof_of(model, BATCH, loss).refusal

    def of_its_size(m: nn.Module, x: Tensor) -> Tensor:
        return loss_of(m, x) / model.parts[0].linear.weight.shape[0]

    assert not proof_of(model, BATCH, of_its_size).refusal


def test_a_loss_may_run_any_part_of_the_model_but_not_none():
    model, other = Model(), Model()
    assert proof_of(model, BATCH, lambda m, x: m.parts[0](x).mean())[:2] == (True, "")
    assert proof_of(model, BATCH, lambda m, x: (x @ m.parts[0].linear.weight).mean())[:2] == (True, "")
    assert not proof_of(model, BATCH, lambda _, x: loss_of(other, x)).loss_runs_model
    by_global = proof_of(model, BATCH, lambda _, x: loss_of(model, x))
    assert by_global.loss_runs_model
    assert by_global.refusal


def test_a_table_that_is_kept_outside_of_the_model_is_needed_only_once():
    class Tabled(Model):
        def forward(self, x: Tensor) -> Tensor:
            if not tables:
                tables.append(self.parts[0].shift.cumsum(0))
            return super().forward(x) + tables[0]

    tables = list[Tensor]()
    assert proof_of(Tabled(), BATCH, loss_of)[:2] == (True, "")
    assert tables


class Forgets(Model):
    """Loses a part when it is copied."""

    def __deepcopy__(self, memo: Any) -> Forgets:
        twin = Forgets()
        del twin.parts[1]
        return twin


def test_a_copy_that_runs_less_than_the_model_is_refused():
    proof = proof_of(Forgets(), BATCH, loss_of)
    assert proof.loss_runs_model
    assert "parts.1" in proof.refusal


def test_what_the_model_raises_is_not_taken_for_a_copy_that_does_not_run():
    with pytest.raises(RuntimeError, match="mat1"):
        proof_of(Model(), BATCH[:, :2], loss_of)


class Keeping(nn.Linear):
    """Keeps what it gave as an attribute, with its graph."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.balance = super().forward(x).pow(2).mean()
        return super().forward(x)


def test_a_model_that_keeps_what_was_computed_is_copied():
    model = nn.Sequential(Keeping(4, 4), nn.Linear(4, 2))
    x = torch.randn(3, 4)
    model(x)
    twin = copied_model(model)
    assert torch.equal(twin[0].balance, model[0].balance)
    assert twin[0].balance.grad_fn is None
    assert model[0].balance.grad_fn is not None
    assert not proof_of(model, x, lambda model, x: model(x).sum() + model[0].balance).refusal
