from __future__ import annotations

from functools import partial

import pytest
import torch

from contracts.variants import BY_PLACEMENT, build, inputs, label, loss_of, uniform
from diagnosis.small import untouched
from normlab.diagnosis.probing.passes import Pass, examine, look, real_of
from normlab.diagnosis.probing.step import updated
from normlab.diagnosis.probing.stepping import Slope
from normlab.diagnosis.reading.subject import Subject
from normlab.diagnosis.reading.taps import capture
from normlab.diagnosis.reading.tokens import real_tokens
from normlab.diagnosis.studies.dependency import dependency
from normlab.diagnosis.studies.gradients import parameter_gradients, split, sublayer_gradients
from normlab.diagnosis.studies.output_change import output_change, output_changes
from normlab.diagnosis.studies.representation import norm_parameters, similarity
from normlab.diagnosis.studies.scales import scales
from normlab.diagnosis.studies.updates import updates
from normlab.diagnosis.table import Table

ADAM = partial(torch.optim.Adam, lr=1e-3)


def subject_of(config) -> Subject:
    model = build(config).eval()
    return Subject.of(model, inputs(model), lambda m, batch: loss_of(m, *batch))


@pytest.fixture(scope="module")
def subject() -> Subject:
    return subject_of(uniform("post"))


@pytest.fixture(scope="module")
def passed(subject) -> Pass:
    return examine(subject)


@pytest.mark.parametrize("config", BY_PLACEMENT, ids=label)
def test_a_pass_tells_which_tokens_are_real(config):
    subject = subject_of(config)
    found, expected = real_of(subject, examine(subject)), real_tokens(subject)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], mask) for name, mask in expected.items())
    assert not all(mask.all() for mask in found.values()), "there is padding"


@pytest.mark.parametrize("name", ["rezero", "fixup"])
def test_branches_that_add_nothing_hide_tokens_from_a_pass_on_the_models_own_weights(name):
    subject = subject_of(uniform(name))
    begun = examine(subject).stream[subject.structure.stacks[0].sublayers[0].before]
    assert not begun.any(), "nothing comes back from the decoder's cross-attention"
    assert any(not g.any() for g in examine(subject).slope.gradients.values())


def test_gradients_are_those_of_autograd(subject, passed):
    model, views = subject.model, [v for s in subject.structure.stacks for v in s.sublayers]
    with capture(model, [view.after for view in views]) as seen:
        loss = subject.loss()
    weights = dict(model.named_parameters())
    inner = {view.after: seen[view.after] for view in views}
    expected = torch.autograd.grad(loss, [*inner.values(), *weights.values()])
    found = [passed.stream[tap] for tap in inner] + [passed.slope.gradients[path] for path in weights]
    assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))
    assert passed.slope.loss == loss.item()
    assert passed.seen.tensors.keys() == look(subject).tensors.keys()
    assert not any(x.requires_grad for x in passed.seen.tensors.values())


def test_studies_say_of_a_pass_what_they_say_of_their_own(subject, passed):
    real, seen = real_of(subject, passed), passed.seen
    assert scales(subject, real=real, seen=seen) == scales(subject)
    assert similarity(subject, real=real, seen=seen).columns == similarity(subject).columns
    assert norm_parameters(subject, seen=seen) == norm_parameters(subject)
    assert sublayer_gradients(subject, real=real, passed=passed) == sublayer_gradients(subject)
    assert updates(subject, ADAM, passed=passed) == updates(subject, ADAM)
    own, shared = dependency(subject), dependency(subject, real=real, seen=seen)
    assert shared.column("beta_sq") == pytest.approx(own.column("beta_sq"), rel=1e-4, abs=1e-7)


def test_the_pass_of_the_first_mini_batch_stands_for_it(subject):
    batches = split(subject.batch, 2)
    first = examine(Subject(subject.model, batches[0], subject.loss_of, subject.structure))
    again = parameter_gradients(subject, batches=batches, first=first)
    assert again == parameter_gradients(subject, batches=batches)
    assert again != parameter_gradients(subject, batches=batches[::-1], first=first)


def test_stacks_and_seeds_together_are_those_alone(subject, passed):
    real, stacks = real_of(subject, passed), subject.structure.stacks
    table = output_changes(subject, stacks, optimiser=ADAM, seeds=range(2), real=real, passed=passed)
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
    slope = examine(subject).slope
    kept = Slope(slope.loss, {path: g.clone() for path, g in slope.gradients.items()})
    first = updated(subject, partial(Careless, lr=0.1), slope)
    assert all(torch.equal(g, kept.gradients[path]) for path, g in slope.gradients.items())
    own = updated(subject, partial(torch.optim.SGD, lr=0.1))
    assert all(torch.equal(first[path], w) for path, w in own.items())


def test_a_loss_that_is_not_a_number_is_no_slope(subject, passed):
    with pytest.raises(ValueError, match="the loss is nan, and no update follows"):
        updated(subject, ADAM, passed.slope._replace(loss=float("nan")))


def test_frozen_models_have_none():
    subject = subject_of(uniform("post"))
    subject.model.requires_grad_(requires_grad=False)
    with pytest.raises(ValueError, match="unfreeze"):
        examine(subject)
    assert all(owner.role == "other" for owner in look(subject).owned.values())


def test_nothing_is_left_behind():
    untouched("post", lambda subject: _lengths(examine(subject)))


def _lengths(passed: Pass) -> Table:
    gradients = passed.slope.gradients.items()
    return Table("lengths", tuple({"path": path, "l2": g.norm().item()} for path, g in gradients))
