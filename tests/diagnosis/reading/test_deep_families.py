"""BERT and GPT-2 with 24 layers and random weights: what theory says of Post-LN and Pre-LN is found."""

from __future__ import annotations

import pytest
import torch

from diagnosis.following import alike, shape_of
from normlab.diagnosis import Diagnosis, diagnose

tf = pytest.importorskip("transformers", reason="the extra normlab[hf] is not installed")

LAYERS, DIM = 24, 64
IDS = torch.randint(5, 90, (8, 16), generator=torch.Generator().manual_seed(1))
SPECIAL = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "attn_implementation": "eager"}
BERT = {"hidden_size": DIM, "num_hidden_layers": LAYERS, "num_attention_heads": 2, "intermediate_size": 256}
GPT2 = {"n_embd": DIM, "n_layer": LAYERS, "n_head": 2}


def found(name: str, config: str, **sizes: int) -> Diagnosis:
    """Start with the standard deviation of Xavier for a square matrix, as theory does, and diagnose."""
    torch.manual_seed(0)
    model = getattr(tf, name)(
        getattr(tf, config)(vocab_size=100, initializer_range=DIM**-0.5, **SPECIAL, **sizes)
    )
    return diagnose(model, {"input_ids": IDS, "labels": IDS}, lr=5e-4, preset="standard")


@pytest.fixture(scope="module")
def bert():
    return found("BertForMaskedLM", "BertConfig", **BERT)


@pytest.fixture(scope="module")
def gpt2():
    return found("GPT2LMHeadModel", "GPT2Config", **GPT2)


def numbers(diagnosis: Diagnosis, name: str) -> dict[str, float]:
    (one,) = [f for f in diagnosis.findings if f.name == name]
    return dict(one.numbers)


pytestmark = pytest.mark.slow


def test_the_placement_is_recognised(bert, gpt2):
    assert shape_of(bert.structure) == {"bert.encoder.layer": alike(LAYERS, "self_attention ffn", "post")}
    assert shape_of(gpt2.structure) == {"transformer.h": alike(LAYERS, "self_attention ffn", "pre")}
    said = [next(f.sentence for f in d.findings if f.name == "placement") for d in (bert, gpt2)]
    assert said[0].startswith("bert.encoder is Post-LN with 24 layers: in each after = norm(")
    assert said[1].startswith("transformer is Pre-LN with 24 layers: in each after = before + branch")
    assert [f for d in (bert, gpt2) for f in d.findings if f.name in ("not_done", "unread")] == []


def test_post_ln_leans_on_its_branches_and_pre_ln_does_not(bert, gpt2):
    post, pre = numbers(bert, "residual_dependency"), numbers(gpt2, "residual_dependency")
    assert post["sum_beta_sq"] > 1.5 * post["sum_1_over_i"]
    assert post["mean_beta_sq"] > 0.3
    assert pre["sum_beta_sq"] < 1.5 * pre["sum_1_over_i"]
    severe = [f.severity for d in (bert, gpt2) for f in d.findings if f.name == "residual_dependency"]
    assert severe == ["warning", "note"]


def test_the_output_changes_like_n_in_post_ln_and_like_log_n_in_pre_ln(bert, gpt2):
    post, pre = numbers(bert, "output_change"), numbers(gpt2, "output_change")
    assert post["aic_linear"] < post["aic_log"] - 2
    assert pre["aic_log"] < pre["aic_linear"] - 2
    assert pre["exponent"] < post["exponent"]


def test_hidden_states_keep_their_scale_in_post_ln_and_grow_in_pre_ln(bert, gpt2):
    assert numbers(bert, "hidden_scale")["factor"] == pytest.approx(1, rel=1e-3)
    assert 2 < numbers(gpt2, "hidden_scale")["factor"] < 10 * 2 * LAYERS


def test_tokens_become_alike_in_post_ln_first(bert, gpt2):
    assert numbers(bert, "similarity")["last"] > numbers(gpt2, "similarity")["last"] + 0.2
