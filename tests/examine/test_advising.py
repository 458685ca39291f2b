"""Changes of a plan: which are tried, what they change, and what cannot be forecast."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import normlab
from diagnosis.labelled import BATCH, loss
from diagnosis.test_forecasting import started
from normlab.diagnosis import diagnose
from normlab.diagnosis.forecasting import WARMUP
from normlab.errors import UserError
from normlab.examine.advice import Alternative
from normlab.examine.advising import (
    FACTORS,
    WRITTEN,
    Advisor,
    advise_case,
    advise_recipe,
    do_of,
    scaled,
    usual,
    writing,
)
from normlab.examine.subjects import Case
from normlab.recipes.grammar import resolve
from normlab.spec.config import Config, DataConfig, ModelConfig, OptimConfig, TrainConfig

LR = 5e-3


def config(recipe: str = "post") -> Config:
    base = Config(
        model=ModelConfig(dim=16, ffn_dim=32, heads=2, encoder_layers=1, decoder_layers=1, dropout=0.0),
        data=DataConfig(builtin="dates-de-en", builtin_pairs=200, vocab_size=100),
        optim=OptimConfig(lr=LR, warmup_steps=20),
        train=TrainConfig(steps=20, max_tokens=256),
    )
    return resolve(recipe, base)


def test_other_recipes_keep_the_rest_of_the_configuration():
    plan = config("post+rmsnorm")
    assert {name: do_of(other, plan) for name, other in usual(plan)} == {
        f"a warm-up of {WARMUP} steps": f"--recipe post+rmsnorm+warmup --warmup-steps {WARMUP}",
        "pre+rmsnorm": "--recipe pre+rmsnorm",
        "admin+rmsnorm": "--recipe admin+rmsnorm",
        "deepnorm+rmsnorm": "--recipe deepnorm+rmsnorm",
        "post+rmsnorm+smallinit": "--recipe post+rmsnorm+smallinit",
    }
    assert {replace(other.optim, warmup_steps=0) for _, other in usual(plan)} == {plan.optim}


def test_a_plan_with_a_warm_up_is_compared_with_one_without():
    plan = config("pre+smallinit+warmup")
    names = [name for name, _ in usual(plan)]
    assert names == ["no warm-up", "admin+smallinit+warmup", "post+smallinit+warmup"], "not with DeepNorm's"
    assert do_of(next(usual(plan))[1], plan) == "--recipe pre+smallinit"


def test_a_recipe_that_is_not_there_is_refused():
    with pytest.raises(UserError, match="unknown part 'scalnorm'"):
        advise_recipe(config(), Path("unused"), tokens=256, others=("pre+scalnorm",))


def test_each_has_forecasts_at_the_same_rates(tmp_path):
    seen: list[Alternative] = []
    found = advise_recipe(
        config("post+warmup"), tmp_path, tokens=256, others=("pre",), advisor=Advisor(seen.append)
    )
    assert [one.name for one in found.alternatives] == ["the plan", "pre"]
    assert tuple(seen) == found.alternatives
    for one in found.alternatives:
        rates = [LR, *(LR * factor for factor in FACTORS)]
        assert [tried.lr for tried in one.tried] == pytest.approx(sorted(rates))
    assert {tried.warmup_steps for tried in found.plan.tried} == {20}
    assert {tried.warmup_steps for tried in found.alternatives[1].tried} == {0}


def test_any_model_is_advised_without_a_rewrite():
    model = started()
    before = {name: p.clone() for name, p in model.named_parameters()}
    found = advise_case(Case("any", model, BATCH, loss, lr=1e-2), Advisor(factors=()))
    assert [one.name for one in found.alternatives] == [
        "the plan",
        f"a warm-up of {WARMUP} steps",
        "RAdam",
        WRITTEN,
    ]
    assert all(one.answer is not None for one in found.alternatives)
    assert "torch.optim.RAdam(model.parameters(), lr=1e-2" in found.alternatives[2].do
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_output_matrices_are_divided_in_a_copy():
    model = started()
    factors = writing(diagnose(model, BATCH, loss=loss, lr=1e-2, studies=["structure", "updates"]))
    layers = len(model.gpt.layers)
    assert set(factors) == {f"gpt.layers.{i}.attention.out.weight" for i in range(layers)}
    assert set(factors.values()) == {(2 * layers) ** -0.5}
    copy = scaled(model, factors)
    for path, p in model.named_parameters():
        assert torch.equal(copy.get_parameter(path), p * factors.get(path, 1.0))


def test_a_training_that_has_begun_is_not_advised():
    model = started()
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-3)
    loss(model, BATCH).backward()
    optimiser.step()
    found = normlab.advise(model, BATCH, loss=loss, optimiser=optimiser)
    assert [one.answer for one in found.alternatives] == [None]
    assert found.plan.why == "its training has begun, and a forecast is for a first step"


def test_a_model_without_a_stream_is_not_advised():
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 4))
    with pytest.raises(UserError, match="no residual stream was found"):
        normlab.advise(model, torch.randn(3, 4), loss=lambda m, x: m(x).square().mean(), lr=1e-3)
