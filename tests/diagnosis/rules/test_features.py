"""The features of a forecast: what they are made of, and what they do not depend on."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from normlab.diagnosis import Tables, diagnose
from normlab.diagnosis.rules.features import BY_RATE, STUDIES, features
from normlab.errors import UserError
from normlab.nn import Decoder
from normlab.spec.model import ModelConfig
from normlab.tasks.build import build_model

VOCAB, ROWS, TIME, STEPS, LR = 40, 6, 9, 100, 1e-5


def loss(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(model(batch)[:, :-1].flatten(0, 1), batch[:, 1:].flatten())


def measured(
    lr: float = LR, *, placement: str = "post", layers: int = 3, warmup: int = 10
) -> dict[str, float]:
    config = ModelConfig(
        dim=32, ffn_dim=64, heads=2, encoder_layers=0, decoder_layers=layers, decoder_placement=placement
    )
    model = build_model(Decoder, config, VOCAB, 1)
    batch = torch.randint(4, VOCAB, (ROWS, TIME), generator=torch.Generator().manual_seed(2))
    found = diagnose(
        model,
        batch,
        loss=loss,
        optimiser=partial(torch.optim.Adam, lr=lr),
        studies=STUDIES,
        warmup_steps=warmup,
    )
    return features(Tables(found.tables, lr), steps=STEPS)


def test_features_of_the_rate_follow_it_and_the_others_of_the_model_do_not():
    one, ten = measured(), measured(10 * LR)
    for name in BY_RATE:
        assert ten[name] - one[name] == pytest.approx(1.0, abs=0.1), name
    still = "loss logits amplification growth similarity stream dependency attention_logit sublayers".split()
    assert {name: ten[name] for name in still} == pytest.approx({name: one[name] for name in still}, rel=1e-4)
    assert ten["change"] - one["change"] == pytest.approx(2.0, abs=0.2), (
        "a small step moves the output like its square"
    )


def test_a_deep_post_ln_is_amplified_and_a_pre_ln_is_not():
    post, pre = measured(layers=8), measured(placement="pre", layers=8)
    assert post["dependency"] > 1.5 * pre["dependency"]
    assert post["growth"] > pre["growth"]


def test_the_warm_up_is_its_share_and_its_first_step():
    with_one, without = measured(warmup=10), measured(warmup=0)
    assert with_one["warmup_share"] == 0.1
    assert without["warmup_share"] == without["warmup"] == 0
    assert with_one["change"] == pytest.approx(without["change"], rel=1e-3)
    assert without["first_change"] == without["change"]
    assert with_one["first_change"] - with_one["change"] == pytest.approx(-2.0, abs=0.1)


def test_a_rehearsal_at_a_large_rate_goes_far_and_makes_tokens_alike():
    calm, wild = measured(1e-3), measured(1.0)
    assert wild["moved"] - calm["moved"] > 2
    assert wild["rehearsed_worst"] > calm["rehearsed_worst"]
    assert wild["rehearsed_similarity"] > calm["rehearsed_similarity"]
    assert wild["rehearsed_logit"] > calm["rehearsed_logit"]
    assert wild["rehearsed_loss"] > calm["rehearsed_loss"]


def test_what_was_not_measured_is_left_out():
    found = features(Tables({}, 1e-3), steps=STEPS)
    assert found == {"sublayers": 0.0, "warmup": 0.0, "warmup_share": 0.0, "steps": 2.0}


def test_a_study_that_does_not_exist_is_named_with_the_nearest():
    with pytest.raises(UserError, match=r"'updatez'.*updates"):
        diagnose(torch.nn.Linear(2, 2), torch.ones(1, 2), studies=["updatez"])
