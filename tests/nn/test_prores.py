"""ProRes: branches that open over the steps of training, which a saved count keeps."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from contracts.variants import build, inputs, uniform
from lab.training.tiny import run_of, tiny
from normlab.errors import UserError
from normlab.lab.training.checkpoint import load_checkpoint
from normlab.lab.training.export import family_of
from normlab.nn import after_step
from normlab.trace.tensors import counts

T = 3


def alphas(stack):
    return [sublayer.place.alpha.item() for sublayer in stack]


def test_the_sublayers_of_a_layer_open_alike_and_those_of_later_layers_later():
    model = build(uniform("prores", residual_warmup_steps=T))
    found = []
    for _ in range(8):
        found.append(alphas(model.encoder))
        after_step(model)
    assert found == [[min(t / T, 1)] * 2 + [min(t / (2 * T), 1)] * 2 for t in range(8)]


def test_the_model_begins_without_its_branches_and_ends_as_pre_ln():
    model, plain = build(uniform("prores", residual_warmup_steps=T)).eval(), build(uniform("pre")).eval()
    plain.load_state_dict(model.state_dict(), strict=False)
    shut, expected = model(*inputs(model)), plain(*inputs(model))
    assert all(torch.equal(s.place.write(x := torch.ones(2, 3, 16), 9 * x), x) for s in model.encoder)
    assert not torch.allclose(shut, expected)
    for _ in range(2 * T):
        after_step(model)
    assert torch.equal(model(*inputs(model)), expected)


@pytest.fixture
def config(text):
    whole = tiny(text, "prores", steps=4, grad_accum_steps=2, ema_decay=0.5)
    return replace(whole, model=replace(whole.model, residual_warmup_steps=T))


def test_a_run_counts_optimizer_steps_and_goes_on_with_the_same_bits(config, tmp_path):
    """With micro-batches; the weights that are kept hold the count, and another run can begin with it."""
    whole, first = (run_of(config, tmp_path, name=name) for name in ("whole", "cut"))
    expected = [whole.trainer.step().values for _ in range(4)]
    for _ in range(2):
        first.trainer.step()
    first.checkpoint("running")
    again = run_of(config, tmp_path, name="cut")
    assert {int(count) for count in counts(again.trainer.model).values()} == {2}
    for one in expected[2:]:
        assert torch.equal(again.trainer.step().values, one)
    fresh = again.trainer.task.build()
    load_checkpoint(first.folder.last, fresh)
    assert {int(count) for count in counts(fresh).values()} == {2}
    again.validation.run()
    start = again.trainer.parallel.state_dict(again.trainer.optimizer)["model"]
    assert {int(start[name]) for name in counts(fresh)} == {4}


def test_no_family_of_hugging_face_has_the_factor(config):
    with pytest.raises(UserError, match=r"decoder_placement .*prores"):
        family_of(replace(config, task="language_model"))
