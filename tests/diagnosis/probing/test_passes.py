from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

from cases import each
from contracts.variants import build, inputs, label, loss_of, uniform
from diagnosis.following import READABLE
from diagnosis.small import subject_read, untouched
from normlab.diagnosis.studies.gradients import parameter_gradients
from normlab.diagnosis.studies.output_change import output_change
from normlab.diagnosis.subject import BackwardPass, Subject, split
from normlab.diagnosis.tables import Table
from normlab.nn import PAD
from normlab.trace.autograd import Gradients

ADAM = partial(torch.optim.Adam, lr=1e-3)


def subject_of(config) -> Subject:
    model = build(config).eval()
    return subject_read(model, inputs(model), lambda m, batch: loss_of(m, *batch))


@pytest.fixture(scope="module")
def subject() -> Subject:
    return subject_of(uniform("post"))


@pytest.fixture(scope="module")
def backward(subject) -> BackwardPass:
    return subject.backward


@pytest.mark.slow
@each("config", READABLE, ids=label)
def test_a_pass_tells_which_tokens_are_real(config):
    subject = subject_of(config)
    given, model = subject.batch, subject.model
    real = [tokens != PAD for tokens in given if tokens.dtype == torch.long][: len(subject.structure.stacks)]
    masks = subject.masks
    assert [mask.tolist() for mask in masks.values()] == [mask.tolist() for mask in real], model
    assert not all(mask.all() for mask in masks.values()), "there is padding"


@pytest.mark.parametrize("name", ["rezero", "fixup"])
def test_branches_that_add_nothing_hide_tokens_from_a_pass_on_the_models_own_weights(name):
    subject = subject_of(uniform(name))
    begun = subject.backward.stream[subject.structure.stacks[0].sublayers[0].before]
    assert not begun.any(), "nothing comes back from the decoder's cross-attention"
    assert any(not g.any() for g in subject.backward.slope.gradients.values())


def test_gradients_are_those_of_autograd(subject, backward):
    model, views = subject.model, [v for s in subject.structure.stacks for v in s.sublayers]
    weights = dict(model.named_parameters())
    with subject.trace(view.after for view in views).with_graph() as passed:
        loss, inner = passed.loss, {view.after: passed.taps[view.after] for view in views}
        expected = torch.autograd.grad(loss, [*inner.values(), *weights.values()])
    found = [backward.stream[tap] for tap in inner] + [backward.slope.gradients[path] for path in weights]
    assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))
    assert backward.slope.loss == loss.item()
    assert backward.forward.tensors.keys() == subject.forward.tensors.keys()
    assert not any(x.requires_grad for x in backward.forward.tensors.values())


def test_studies_of_a_subject_share_one_forward_pass(subject, backward):
    assert subject.forward is backward.forward
    alone = subject.on(subject.batch).forward.tensors
    assert all(torch.equal(x, alone[tap]) for tap, x in backward.forward.tensors.items())


def test_the_first_mini_batch_is_passed_once(subject):
    batches = split(subject.batch, 2)
    several = replace(subject, batches=batches)
    assert several.small.batch is batches[0]
    own = [subject.trace(batch=batch).slope.gradients["embedding.weight"] for batch in batches]
    row = parameter_gradients(several).where(parameter="embedding.weight").rows[0]
    assert row["mean_grad_l2"] == pytest.approx(((own[0] + own[1]) / 2).norm().item())
    assert several.small.backward.slope.gradients["embedding.weight"].equal(own[0])


def test_stacks_and_seeds_together_are_those_alone(subject):
    stacks = [stack.name for stack in subject.structure.stacks]
    table = output_change(subject, stacks=stacks, optimizer=ADAM, seeds=range(2))
    for stack in stacks:
        for seed in range(2):
            last = stack == stacks[-1] and not seed
            alone = output_change(subject, optimizer=ADAM if last else None, seeds=[seed], stacks=[stack])
            assert table.where(stack=stack, seed=seed) == alone


def test_an_optimizer_that_writes_to_gradients_writes_to_its_own():
    class Careless(torch.optim.SGD):
        def step(self, closure=None):
            loss = super().step(closure)
            for group in self.param_groups:
                for p in group["params"]:
                    p.grad.zero_()
            return loss

    subject = subject_of(uniform("pre"))
    slope = subject.backward.slope
    kept = Gradients(slope.loss, {path: g.clone() for path, g in slope.gradients.items()})
    first = subject.trace().update(partial(Careless, lr=0.1), slope)
    assert all(torch.equal(g, kept.gradients[path]) for path, g in slope.gradients.items())
    own = subject.trace().update(partial(torch.optim.SGD, lr=0.1))
    assert all(torch.equal(first[path], w) for path, w in own.items())


def test_a_loss_that_is_not_a_number_is_no_slope(subject, backward):
    with pytest.raises(ValueError, match=r"\bnan\b"):
        subject.trace().update(ADAM, backward.slope._replace(loss=float("nan")))


def test_frozen_models_have_none():
    subject = subject_of(uniform("post"))
    subject.model.requires_grad_(requires_grad=False)
    with pytest.raises(ValueError, match="unfreeze"):
        _ = subject.backward
    assert all(owner.role == "other" for owner in subject.forward.owned.values())


def test_nothing_is_left_behind():
    untouched("post", lambda subject: _lengths(subject.backward))


def _lengths(backward: BackwardPass) -> Table:
    gradients = backward.slope.gradients.items()
    return Table("lengths", tuple({"path": path, "l2": g.norm().item()} for path, g in gradients))
