from __future__ import annotations

from functools import partial

import pytest
import torch

from cases import each
from contracts.variants import BY_PLACEMENT, build, inputs, label, loss_of, uniform
from diagnosis.small import untouched
from normlab.diagnosis.probing.passes import BackwardPass, backward_pass, forward_pass, padding_masks_of
from normlab.diagnosis.reading.subject import Subject, find_padding_masks, split
from normlab.diagnosis.studies.dependency import dependency
from normlab.diagnosis.studies.gradients import parameter_gradients, sublayer_gradients
from normlab.diagnosis.studies.output_change import output_change, output_changes
from normlab.diagnosis.studies.representation import norm_parameters, similarity
from normlab.diagnosis.studies.scales import scales
from normlab.diagnosis.studies.updates import updates
from normlab.diagnosis.table import Table
from normlab.trace.step import Gradients

ADAM = partial(torch.optim.Adam, lr=1e-3)


def subject_of(config) -> Subject:
    model = build(config).eval()
    return Subject.of(model, inputs(model), lambda m, batch: loss_of(m, *batch))


@pytest.fixture(scope="module")
def subject() -> Subject:
    return subject_of(uniform("post"))


@pytest.fixture(scope="module")
def backward(subject) -> BackwardPass:
    return backward_pass(subject)


@each("config", BY_PLACEMENT, ids=label)
def test_a_pass_tells_which_tokens_are_real(config):
    subject = subject_of(config)
    found, expected = padding_masks_of(subject, backward_pass(subject)), find_padding_masks(subject)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], mask) for name, mask in expected.items())
    assert not all(mask.all() for mask in found.values()), "there is padding"


@pytest.mark.parametrize("name", ["rezero", "fixup"])
def test_branches_that_add_nothing_hide_tokens_from_a_pass_on_the_models_own_weights(name):
    subject = subject_of(uniform(name))
    begun = backward_pass(subject).stream[subject.structure.stacks[0].sublayers[0].before]
    assert not begun.any(), "nothing comes back from the decoder's cross-attention"
    assert any(not g.any() for g in backward_pass(subject).loss_gradients.gradients.values())


def test_gradients_are_those_of_autograd(subject, backward):
    model, views = subject.model, [v for s in subject.structure.stacks for v in s.sublayers]
    weights = dict(model.named_parameters())
    with subject.trace(view.after for view in views).with_graph() as passed:
        loss, inner = passed.loss, {view.after: passed.taps[view.after] for view in views}
        expected = torch.autograd.grad(loss, [*inner.values(), *weights.values()])
    found = [backward.stream[tap] for tap in inner] + [
        backward.loss_gradients.gradients[path] for path in weights
    ]
    assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))
    assert backward.loss_gradients.loss == loss.item()
    assert backward.forward.tensors.keys() == forward_pass(subject).tensors.keys()
    assert not any(x.requires_grad for x in backward.forward.tensors.values())


def test_studies_say_of_a_pass_what_they_say_of_their_own(subject, backward):
    masks, forward = padding_masks_of(subject, backward), backward.forward
    assert scales(subject, padding_masks=masks, forward=forward) == scales(subject)
    assert similarity(subject, padding_masks=masks, forward=forward).columns == similarity(subject).columns
    assert norm_parameters(subject, forward=forward) == norm_parameters(subject)
    assert sublayer_gradients(subject, padding_masks=masks, backward=backward) == sublayer_gradients(subject)
    assert updates(subject, ADAM, backward=backward) == updates(subject, ADAM)
    own, shared = dependency(subject), dependency(subject, padding_masks=masks, forward=forward)
    assert shared.column("beta_sq") == pytest.approx(own.column("beta_sq"), rel=1e-4, abs=1e-7)


def test_the_pass_of_the_first_mini_batch_stands_for_it(subject):
    batches = split(subject.batch, 2)
    first = backward_pass(Subject(subject.model, batches[0], subject.loss_of, subject.structure))
    again = parameter_gradients(subject, batches=batches, first=first)
    assert again == parameter_gradients(subject, batches=batches)
    assert again != parameter_gradients(subject, batches=batches[::-1], first=first)


def test_stacks_and_seeds_together_are_those_alone(subject, backward):
    masks, stacks = padding_masks_of(subject, backward), subject.structure.stacks
    table = output_changes(
        subject, stacks, optimiser=ADAM, seeds=range(2), padding_masks=masks, backward=backward
    )
    for stack in stacks:
        for seed in range(2):
            last = stack is stacks[-1] and not seed
            alone = output_change(subject, optimiser=ADAM if last else None, seed=seed, stack=stack.name)
            own = table.where(stack=stack.name, seed=seed)
            assert [{k: row[k] for k in alone.columns} for row in own] == list(alone)


def test_an_optimiser_that_writes_to_gradients_writes_to_its_own():
    class Careless(torch.optim.SGD):
        def step(self, closure=None):
            loss = super().step(closure)
            for group in self.param_groups:
                for p in group["params"]:
                    p.grad.zero_()
            return loss

    subject = subject_of(uniform("pre"))
    loss_gradients = backward_pass(subject).loss_gradients
    kept = Gradients(loss_gradients.loss, {path: g.clone() for path, g in loss_gradients.gradients.items()})
    first = subject.trace().update(partial(Careless, lr=0.1), loss_gradients)
    assert all(torch.equal(g, kept.gradients[path]) for path, g in loss_gradients.gradients.items())
    own = subject.trace().update(partial(torch.optim.SGD, lr=0.1))
    assert all(torch.equal(first[path], w) for path, w in own.items())


def test_a_loss_that_is_not_a_number_is_no_slope(subject, backward):
    with pytest.raises(ValueError, match="the loss is nan, and no update follows"):
        subject.trace().update(ADAM, backward.loss_gradients._replace(loss=float("nan")))


def test_frozen_models_have_none():
    subject = subject_of(uniform("post"))
    subject.model.requires_grad_(requires_grad=False)
    with pytest.raises(ValueError, match="unfreeze"):
        backward_pass(subject)
    assert all(owner.role == "other" for owner in forward_pass(subject).owned.values())


def test_nothing_is_left_behind():
    untouched("post", lambda subject: _lengths(backward_pass(subject)))


def _lengths(backward: BackwardPass) -> Table:
    gradients = backward.loss_gradients.gradients.items()
    return Table("lengths", tuple({"path": path, "l2": g.norm().item()} for path, g in gradients))
