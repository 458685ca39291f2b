"""Hugging Face's Marian and our Post-LN model with its weights: our outputs are those of ``generate``."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from normlab.lab.config import ModelConfig
from normlab.nn import Seq2Seq
from normlab.nn.decode import Bounds, Hypothesis, likeliest, nucleus, search
from scripts import script

transformers = pytest.importorskip("transformers", reason="Hugging Face's Marian comes with the extra hf")

VOCAB, DIM, LAYERS, HEADS = 23, 16, 2, 4
ROOM = 60
"""Marian stops after this many tokens; we allow each output at least as many."""


@pytest.fixture(scope="module")
def marian() -> nn.Module:
    """Random weights, of sizes and a seed that were chosen so that outputs end early and late."""
    shape = {
        f"{side}_{name}": value
        for side in ("encoder", "decoder")
        for name, value in {"layers": LAYERS, "attention_heads": HEADS, "ffn_dim": 24}.items()
    }
    config = transformers.MarianConfig(
        **shape,
        vocab_size=VOCAB,
        d_model=DIM,
        activation_function="relu",
        scale_embedding=True,
        pad_token_id=0,
        bos_token_id=2,
        eos_token_id=3,
        decoder_start_token_id=2,
        forced_eos_token_id=None,
    )
    model = transformers.MarianMTModel(config).eval()
    torch.manual_seed(3)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "norm" not in name and "embed_positions" not in name:
                p.copy_(torch.randn(p.shape) / 4)
        model.model.decoder.layers[-1].final_layer_norm.bias.copy_(2 * model.model.shared.weight[3])
    return model


def ours(marian: nn.Module) -> Seq2Seq:
    config = ModelConfig(
        dim=DIM, ffn_dim=24, heads=HEADS, encoder_layers=LAYERS, decoder_layers=LAYERS, dropout=0.0
    )
    return script("peers").like_marian(marian, config, VOCAB)


def sources() -> Tensor:
    """`[12, 9]` of 2 to 9 tokens with EOS, padded."""
    ids = torch.randint(4, VOCAB, (12, 9), generator=torch.Generator().manual_seed(7))
    lengths = 2 + torch.arange(12) % 8
    ids[torch.arange(12), lengths - 1] = 3
    return ids.masked_fill(torch.arange(9) >= lengths[:, None], 0)


def generated(marian: nn.Module, **how: object) -> tuple[list[list[int]], list[float]]:
    """Ids of every output without BOS, EOS and padding, and their scores, none where it is greedy."""
    source = sources()
    found = marian.generate(
        source,
        attention_mask=(source != 0).long(),
        max_new_tokens=ROOM,
        return_dict_in_generate=True,
        output_scores=True,
        **how,
    )
    rows = [row[1:] for row in found.sequences.tolist()]
    scores = getattr(found, "sequences_scores", torch.zeros(0)).tolist()
    return [row[: row.index(3)] if 3 in row else row for row in rows], scores


def searched(marian: nn.Module, beams: int, bounds: Bounds, alpha: float = 1.0) -> list[Hypothesis]:
    """The K best of every sentence with K beams, one after the other."""
    found = search(ours(marian), sources(), bounds, beams=beams, length_penalty=alpha)
    return [h for hypotheses in found for h in hypotheses[:beams]]


def test_the_models_are_the_same(marian):
    source, target = sources(), torch.randint(4, VOCAB, (12, 6), generator=torch.Generator().manual_seed(8))
    with torch.no_grad():
        theirs = marian(source, attention_mask=(source != 0).long(), decoder_input_ids=target).logits
        torch.testing.assert_close(ours(marian)(source, target), theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("least", [0, 12])
def test_greedy_outputs_are_the_same(marian, least):
    theirs, _ = generated(marian, num_beams=1, do_sample=False, min_new_tokens=least)
    assert [h.ids[:ROOM] for h in searched(marian, 1, Bounds(ROOM, least))] == theirs
    assert len({len(ids) for ids in theirs}) > 4


@pytest.mark.parametrize("least", [0, 9])
@pytest.mark.parametrize("alpha", [0.0, 0.6, 1.0, 2.0])
@pytest.mark.parametrize("beams", [2, 5])
def test_the_n_best_of_a_beam_are_the_same_with_the_same_scores(marian, beams, alpha, least):
    how = {"num_beams": beams, "num_return_sequences": beams, "length_penalty": alpha, "early_stopping": True}
    theirs, scores = generated(marian, **how, min_new_tokens=least)
    assert max(map(len, theirs)) < ROOM, "where Marian stops, its outputs have no end and no score of one"
    found = searched(marian, beams, Bounds(ROOM, least), alpha)
    assert [h.ids for h in found] == theirs
    assert [h.score for h in found] == pytest.approx(scores, abs=1e-4)


@pytest.mark.parametrize("beams", [1, 4])
def test_outputs_with_a_forced_prefix_are_the_same(marian, beams):
    """Their score is that of what follows the prefix alone; where alpha is 0 the order is the same."""
    how = {"early_stopping": True, "length_penalty": 0.0, "num_return_sequences": beams} if beams > 1 else {}
    theirs, _ = generated(
        marian, num_beams=beams, decoder_input_ids=torch.tensor([[2, 9, 4, 9]]).expand(12, -1), **how
    )
    bounds = Bounds(ROOM, prefix=torch.tensor([[9, 4, 9]]).expand(12, -1))
    assert [h.ids[:ROOM] for h in searched(marian, beams, bounds, 0.0)] == [ids[:ROOM] for ids in theirs]


def test_types_left_to_draw_from_are_the_same(marian):
    logits = 3 * torch.randn(40, VOCAB, generator=torch.Generator().manual_seed(2))
    ids = torch.zeros(40, 1, dtype=torch.long)
    for count in (1, 4, VOCAB):
        theirs = transformers.TopKLogitsWarper(count)(ids, logits.clone())
        assert torch.equal(likeliest(logits, count), theirs)
    for mass in (0.1, 0.5, 0.9):
        theirs = transformers.TopPLogitsWarper(mass)(ids, logits.clone())
        assert torch.equal(nucleus(logits, mass), theirs)
