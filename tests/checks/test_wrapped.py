"""Models whose forward is wrapped on the instance: tested as copies, or in place where no copy is proven."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import normlab
from cases import each
from normlab.setups.setup import Setup
from normlab.trace.copies import OTHER_MODEL, proof_of
from normlab.trace.facts import Unknown
from normlab.trace.step_under_test import StepUnderTest

from .tiny import DIM, VOCAB, Block, Decoder, first, groups, loss_of, report_of, sound, tokens

ON_COPIES = {"step", "update", "repeats", "state_dict", "meta", "overfit"}
"""Properties that train a copy, or load one."""


def checked(model: nn.Module, loss: Any = loss_of) -> Any:
    optimizer = groups(model)
    return normlab.check(model, tokens(), loss=loss, optimizer=optimizer, step=sound, budget_s=600)


def by_method(model: nn.Module) -> None:
    """Wrap the forward by a method, as trainers do that take further arguments."""
    earlier = model.forward

    def forward(self: nn.Module, *args: Any, fused: bool = False, **kwargs: Any) -> Tensor:
        return earlier(*args, **kwargs)

    model.forward = types.MethodType(forward, model)


def by_compile(model: nn.Module) -> None:
    model.blocks[1].forward = torch.compile(model.blocks[1].forward, backend="eager")


class Caller:
    """Wraps a function, and casts what it returns to a type of its own."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        self.wrapped, self.dtype = forward, torch.float32

    def __call__(self, *args: Any) -> Any:
        return self.wrapped(*args).to(self.dtype)


def by_object(model: nn.Module) -> None:
    for block in model.blocks:
        block.forward = Caller(block.forward)


WRAPPERS = {f.__name__: f for f in (by_method, by_compile, by_object)}


@pytest.mark.slow
@each("wrap", WRAPPERS.values(), ids=WRAPPERS)
def test_a_wrapped_forward_changes_no_answer(wrap):
    torch.manual_seed(0)
    model = Decoder()
    want = checked(model)
    assert want.ok
    wrap(model)
    report = checked(model)
    assert report.ok
    assert report.holds == want.holds


class Trainer:
    """Holds a model as an attribute, and its forward as it was."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.earlier = model, model.forward


def by_trainer(model: nn.Module) -> Any:
    trainer = Trainer(model)
    model.forward = lambda ids: trainer.earlier(ids)
    return loss_of


def by_own_copying(model: nn.Module) -> Any:
    for block in model.blocks:
        block.__class__ = type("Unique", (type(block),), {"__deepcopy__": lambda self, memo: self})
    return loss_of


def by_loss(model: nn.Module) -> Any:
    return lambda _, ids: loss_of(model, ids)


OPAQUE = {f.__name__: f for f in (by_trainer, by_own_copying, by_loss)}
"""Ways of holding the original that no copy can change; each returns the loss."""


@pytest.mark.slow
@each("wrap", OPAQUE.values(), ids=OPAQUE)
def test_what_is_not_proven_is_tested_in_place(wrap):
    torch.manual_seed(0)
    model = Decoder()
    want = checked(model)
    weights = {n: (id(p), p.detach().clone()) for n, p in model.named_parameters()}
    report = checked(model, wrap(model))
    assert report.ok
    assert set(want.holds) - set(report.holds) <= ON_COPIES
    assert report.facts["precision"] == "float64"
    for n, p in model.named_parameters():
        assert (id(p), p.grad) == (weights[n][0], None)
        assert torch.equal(p, weights[n][1])


@pytest.mark.slow
@each("wrap", OPAQUE.values(), ids=OPAQUE)
def test_the_reason_is_given_where_a_copy_is_needed(wrap):
    model = Decoder()
    loss = wrap(model)
    report = checked(model, loss)
    why = proof_of(model, tokens(), loss).refusal
    assert why
    assert {report.untestable[name] for name in ("step", "update", "repeats", "overfit")} == {why}


class Loop:
    """Holds a model beside the one that its step is given."""

    def __init__(self, model: nn.Module, *, trains: bool) -> None:
        self.model, self.trains = model, trains

    def step(self, model: nn.Module, ids: Tensor, optimizer: Any, scheduler: Any) -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(self.model if self.trains else model, ids)
        loss.backward()
        self.norm = float(self.model.head.weight.detach().norm())
        optimizer.step()
        return loss


@pytest.mark.slow
@each("trains", [True, False])
def test_a_step_that_trains_the_original_is_not_judged_and_one_that_reads_it_is(trains):
    torch.manual_seed(0)
    model = Decoder()
    loop = Loop(model, trains=trains)
    optimizer = groups(model)
    names = ("step", "repeats", "overfit")
    report = report_of(*names, model=model, optimizer=optimizer, step=loop.step)
    assert report.judged == (() if trains else names)
    assert tuple(report.untestable) == (names if trains else ())


def test_a_dry_run_refuses_a_step_that_uses_the_original():
    model = Decoder()
    step = StepUnderTest(Setup(model, tokens(), loss=loss_of, optimizer=groups))
    run = step.whole_step.dry_run()
    run.step = Loop(model, trains=True).step
    with pytest.raises(Unknown):
        run.run(tokens())


class Detached(Block):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(self.norm(x)).detach())


class Peeks(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 0.1 * x.roll(-1, 1)


class Asleep(Block):
    """Peeks, too, once its scale is no longer 0."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.zeros(DIM))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * (super().forward(x) - x).roll(-1, 1)


@pytest.mark.slow
@each("wrap", OPAQUE.values(), ids=OPAQUE)
@each("block", [Detached, Peeks, Asleep], ids=lambda cls: cls.__name__)
def test_a_fault_is_found_in_place_as_in_a_copy(block, wrap):
    torch.manual_seed(0)
    model = Decoder()
    model.blocks[2] = block()
    want = first(checked(model))
    assert want[1].startswith("blocks.2")
    assert first(checked(model, wrap(model))) == want


def test_passes_in_place_have_the_weights_that_they_are_given():
    model = Decoder(dropout=0.0)
    nn.init.zeros_(model.blocks[0].down.weight)
    exact = StepUnderTest(Setup(model, tokens(), loss=lambda _, ids: loss_of(model, ids))).exact
    assert exact.model is model
    assert {p.dtype for p in exact.parameters.values()} == {torch.float64}
    assert exact.parameters["blocks.0.down.weight"].any()
    assert not model.blocks[0].down.weight.any()
    mute = exact.again(weights={"head.weight": torch.zeros(VOCAB, DIM, dtype=torch.float64)})
    assert mute.parameters["blocks.0.down.weight"].any()
    torch.testing.assert_close(mute.loss, torch.tensor(VOCAB, dtype=torch.float64).log())


def test_another_model_than_the_one_that_is_given_is_said():
    model, other = Decoder(), Decoder()
    report = checked(model, lambda _, ids: loss_of(other, ids))
    assert report.untestable["overfit"] == OTHER_MODEL
    assert "gradients" not in report.holds


def test_a_copy_of_a_freshly_drawn_model_is_proven_too(monkeypatch: pytest.MonkeyPatch):
    transformers = pytest.importorskip("transformers", reason="the extra normlab[hf] is not installed")
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=VOCAB, **sizes))
    step = StepUnderTest(Setup(model, {"input_ids": tokens(), "labels": tokens()}))
    assert step.fresh.exact(step.unchanged) is not None
    monkeypatch.setattr(transformers.LlamaModel, "__deepcopy__", lambda self, memo: self, raising=False)
    assert step.fresh.of_class is not None
    assert step.fresh.exact(step.unchanged) is None
