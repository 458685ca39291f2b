"""Whole models: what they need, what their heads compute, and that they learn."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from cases import each
from contracts.variants import CONFIG, VOCAB, build, perturbed, tokens
from normlab.nn import PAD, Cache, Decoder, Encoder, Seq2Seq

BERT = replace(CONFIG, decoder_layers=0, activation="gelu", position_encoding="learned")
GPT = replace(CONFIG, encoder_layers=0, encoder_placement="pre", decoder_placement="pre")


def test_positions_grow_as_they_are_needed():
    model = perturbed(CONFIG)
    ids = torch.full((1, 700), 5)
    at_once = model.embed(ids)
    torch.testing.assert_close(model.embed(ids[:, :3], 699), at_once[:, 699:].expand(1, 3, -1))
    torch.testing.assert_close(perturbed(CONFIG).embed(ids[:, :3], 699), at_once[:, 699:].expand(1, 3, -1))
    assert not any(name.startswith("position_encoding") for name in model.state_dict())


@each(
    ("kind", "layers", "sentence"),
    [
        (Seq2Seq, (0, 2), "encoder_layers is 0, and this model needs at least 1"),
        (Seq2Seq, (2, 0), "decoder_layers is 0, and this model needs at least 1"),
        (Decoder, (2, 2), "encoder_layers is 2, and this model needs 0"),
        (Encoder, (2, 1), "decoder_layers is 1, and this model needs 0"),
        (Encoder, (0, 0), "encoder_layers is 0, and this model needs at least 1"),
    ],
)
def test_a_model_needs_its_stacks_and_no_other(kind, layers, sentence):
    with pytest.raises(ValueError, match=f"^{sentence}"):
        kind(replace(CONFIG, encoder_layers=layers[0], decoder_layers=layers[1]), VOCAB)


def test_the_heads_of_an_encoder():
    """Masked-LM: E LN(GELU(W h + b)) + b_v; next sentence: W_2 tanh(W_1 h_0 + b_1) + b_2."""
    model, ids = perturbed(BERT), tokens()[0]
    segments = torch.arange(6).expand(3, 6) // 3
    words, sentence = model(ids, segments)
    assert words.shape == (3, 6, VOCAB)
    assert sentence.shape == (3, 2)
    hidden = model.hidden(ids, segments)
    inner = F.gelu(hidden @ model.transform.weight.T + model.transform.bias)
    normed = F.layer_norm(inner, (16,), model.transform_norm.weight, model.transform_norm.bias)
    torch.testing.assert_close(words, normed @ model.embedding.weight.T + model.token_bias)
    pooled = torch.tanh(hidden[:, 0] @ model.pooler.weight.T + model.pooler.bias)
    torch.testing.assert_close(sentence, pooled @ model.next_sentence.weight.T + model.next_sentence.bias)
    # The logits of some positions alone, as a masked LM wants them.
    torch.testing.assert_close(model.token_logits(hidden[ids == ids[0, 0]]), words[ids == ids[0, 0]])


def test_segments_are_vectors_added_to_the_embeddings():
    model, ids = perturbed(BERT), tokens()[0]
    first = torch.zeros_like(ids)
    torch.testing.assert_close(model(ids), model(ids, first))
    seen = model(ids, first + 1)[0]
    with torch.no_grad():
        model.segments[0] = model.segments[1]
    torch.testing.assert_close(model(ids, first)[0], seen)


def trained(model, loss, steps=30):
    """Loss before and after some steps of Adam."""
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    losses = []
    for _ in range(steps + 1):
        optimizer.zero_grad()
        value = loss()
        value.backward()
        optimizer.step()
        losses.append(value.item())
    return losses[0], losses[-1]


def test_an_encoder_learns_words_and_sentences():
    torch.manual_seed(0)
    model = build(replace(BERT, dropout=0.1))
    ids = torch.randint(4, VOCAB, (8, 9))
    masked = torch.rand(ids.shape) < 0.15
    seen, follows = ids.masked_fill(masked, 1), torch.arange(8) % 2

    def losses():
        words, sentence = model(seen, torch.arange(9).expand(8, 9) // 5)
        return F.cross_entropy(words[masked], ids[masked]), F.cross_entropy(sentence, follows)

    before = [part.item() for part in losses()]
    trained(model, lambda: sum(losses()))
    after = [part.item() for part in losses()]
    assert all(b < 0.6 * a for a, b in zip(before, after, strict=True)), (before, after)


def test_a_language_model_learns():
    torch.manual_seed(0)
    model = build(replace(GPT, dropout=0.1))
    ids = torch.arange(10).remainder(9).add(4).expand(4, 10)
    before, after = trained(
        model, lambda: F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
    )
    assert after < 0.5 * before


@torch.no_grad()
def test_a_language_model_goes_on_from_its_own_words():
    """Greedy decoding has the same logits step by step with the cache as from whole prefixes."""
    model = perturbed(GPT)
    cache = Cache(2, 1, 8, torch.device("cpu"))
    ids = torch.tensor([[4], [9]])
    for _ in range(7):
        logits = model.embedding.logits(model.decode_step(ids[:, -1:], cache))
        torch.testing.assert_close(logits[:, 0], model(ids)[:, -1])
        logits[..., PAD] = float("-inf")
        ids = torch.cat((ids, logits.argmax(-1)), 1)
    assert len(set(ids.flatten().tolist())) > 2
