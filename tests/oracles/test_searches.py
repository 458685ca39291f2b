"""Beam search against a plain Python one that decodes every prefix whole, and against trying everything."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor

from contracts.variants import SIZE, VOCAB, perturbed
from normlab.nn import Cache, Seq2Seq, decode
from normlab.nn.decode import beam_search
from normlab.spec.config import DecodeConfig
from normlab.tasks.translation import translate_lines
from oracles import searches


class Bigrams:
    """A "model" whose next token depends on the last one alone, through a table `[V, V]` of logits."""

    def __init__(self, table: Tensor) -> None:
        self.embedding = SimpleNamespace(logits=lambda tokens: table[tokens])
        self.positions = SimpleNamespace(longest=None)

    def encode(self, source: Tensor) -> tuple[Tensor, Tensor]:
        return source, source != 0

    def decode_step(self, tokens: Tensor, memory: Tensor, real: Tensor, cache: Cache) -> Tensor:
        cache.begin_position()
        return tokens


def sources(count: int) -> Tensor:
    """`[count, 7]` of all lengths from 1 to 7, padded."""
    ids = torch.randint(4, VOCAB, (count, 7), generator=torch.Generator().manual_seed(13))
    return ids.masked_fill(torch.arange(7) >= 1 + torch.arange(count)[:, None] % 7, 0)


def searcher(placement: str = "post", seed: int = 25) -> Seq2Seq:
    """A model (seeds were looked for) that ends its outputs early, late and at the limit."""
    config = replace(SIZE, encoder_placement=placement, decoder_placement=placement)
    return perturbed(config, seed=seed)


def next_log_p(model: Seq2Seq, source: Tensor, allowed: Tensor | None = None) -> searches.NextLogP:
    """Full decoding of one sentence without padding; a prefix is computed once."""
    known: dict[tuple[int, ...], np.ndarray] = {}

    @torch.no_grad()
    def log_p(prefix: list[int]) -> np.ndarray:
        if tuple(prefix) not in known:
            scores = model(source[source != 0][None], torch.tensor([prefix]))[0, -1].float()
            if allowed is not None:
                scores[~allowed] = float("-inf")
            known[tuple(prefix)] = torch.log_softmax(scores, -1).numpy()
        return known[tuple(prefix)]

    return log_p


@pytest.fixture
def best_scores(monkeypatch) -> list[float]:
    """The scores of the hypotheses that searches return, in the order of the sentences."""
    scores: list[float] = []
    original = decode._Finished.best

    def best(finished: decode._Finished) -> list[int]:
        scores.append(max(score for score, _ in finished.found))
        return original(finished)

    monkeypatch.setattr(decode._Finished, "best", best)
    return scores


@pytest.mark.parametrize("beams", [1, 3, 5])
@pytest.mark.parametrize("alpha", [0.0, 1.0])
@pytest.mark.parametrize(("placement", "seed"), [("post", 25), ("residual", 15)])
def test_a_batch_equals_plain_searches_one_by_one(best_scores, placement, seed, alpha, beams):
    model, source = searcher(placement, seed), sources(9)
    found = beam_search(model, source, beams=beams, length_penalty=alpha, max_len_ratio=-1.0)
    for row, ids in enumerate(source):
        limit = 10 - int((ids != 0).sum())
        score, best = searches.beam_search(next_log_p(model, ids), beams, limit, alpha)[0]
        assert found[row] == best
        assert best_scores[row] == pytest.approx(score, abs=1e-5)
    assert len({len(ids) for ids in found}) > 1, "a search whose sentences all end alike tests little"


@pytest.mark.parametrize("beams", [1, 3])
def test_sentences_that_wait_to_be_left_out_find_nothing_more(beams):
    """In a large batch few ended sentences wait for others; each gives what it gives alone."""
    model, source = searcher("residual", 15), sources(40)
    how = {"beams": beams, "length_penalty": 3.0}  # longer hypotheses, were there any, would win
    assert beam_search(model, source, **how) == [beam_search(model, ids[None], **how)[0] for ids in source]


@pytest.mark.parametrize("alpha", [0.0, 1.0, 3.0])
def test_a_beam_as_wide_as_the_space_finds_the_best_of_all(best_scores, alpha):
    """Four words and EOS, at most 4 tokens: 85 hypotheses."""
    model, source = searcher(), sources(6)[[0, 5]]
    words = [5, 7, 8, 11]
    allowed = torch.zeros(VOCAB, dtype=torch.bool)
    allowed[[3, *words]] = True
    for ids in source:
        ratio = -6 / int((ids != 0).sum())
        best_scores.clear()
        (found,) = beam_search(
            model, ids[None], beams=86, length_penalty=alpha, max_len_ratio=ratio, allowed=allowed
        )
        score, best = searches.exhaustive_search(next_log_p(model, ids, allowed), words, 4, alpha)
        assert best_scores == [pytest.approx(score, abs=1e-5)]
        assert found == best[: len(found)] == best


def table(**log_p: dict[int, float]) -> Tensor:
    """A bigram table: ``t5={6: 0.9}`` gives token 6 after 5 the probability 0.9 and the others none.

    After a token without a row everything may follow but the end.
    """
    rows = torch.zeros(8, 8)
    rows[:, 3] = -1e4
    for name, following in log_p.items():
        rows[int(name[1:])] = torch.tensor([np.log(following.get(v, 1e-12)) for v in range(8)])
    return rows


def test_the_length_penalty_decides_between_short_and_long():
    # EOS at once: 0.5 in one token. 5 6 EOS: 0.4 x 0.9 x 0.9 loses as a product and wins per token.
    model = Bigrams(table(t2={3: 0.5, 5: 0.4}, t5={6: 0.9}, t6={3: 0.9}))
    found = {
        a: beam_search(model, torch.tensor([[4, 3]]), beams=4, length_penalty=a)[0] for a in (0.0, 1.0, 2.0)
    }
    assert found == {0.0: [], 1.0: [5, 6], 2.0: [5, 6]}


@pytest.mark.parametrize("beams", [1, 4])
def test_an_output_ends_at_its_sentence_limit(beams):
    model = Bigrams(table(t2={5: 1.0}, t5={5: 1.0}))
    source = torch.tensor([[4, 4, 4, 4, 3, 0], [4, 3, 0, 0, 0, 0], [4, 4, 4, 4, 4, 3]])
    found = beam_search(model, source, beams=beams, max_len_ratio=2.0)
    assert [len(ids) + 1 for ids in found] == [20, 14, 22], "EOS counts"
    assert {word for ids in found for word in ids} == {5}


@pytest.mark.parametrize("beams", [1, 4])
def test_masked_types_are_never_produced(beams):
    allowed = torch.ones(VOCAB, dtype=torch.bool)
    allowed[[0, 1, 2, 4, 6, 9]] = False
    free, masked = (beam_search(searcher(), sources(12), beams=beams, allowed=a) for a in (None, allowed))
    assert not allowed[[word for ids in free for word in ids]].all()
    assert allowed[[word for ids in masked for word in ids]].all()
    assert any(masked)


def test_a_row_of_padding_is_searched_without_harm():
    model, source = searcher(), sources(3)
    alone = beam_search(model, source, beams=3)
    with_empty = beam_search(model, torch.cat((source, torch.zeros_like(source[:1]))), beams=3)
    assert with_empty[:3] == alone
    assert len(with_empty) == 4


class Letters:
    """A tokenizer: "ab" is [4, 5]."""

    def encode(self, lines: list[str]) -> list[list[int]]:
        return [[ord(c) - ord("a") + 4 for c in line.strip()] for line in lines]

    def decode(self, ids: list[list[int]]) -> list[str]:
        return ["".join(chr(i - 4 + ord("a")) for i in row if i > 3) for row in ids]


@pytest.mark.parametrize("max_positions", [4096, 8])
def test_lines_keep_their_order_and_empty_ones_stay_empty(max_positions):
    model = searcher().train()
    lines = ["abc", "", "ihgfedcba", "   ", "d", "e", "ab"]
    decode_config = DecodeConfig(beam=2, max_len_ratio=1.0)
    found = translate_lines(model, Letters(), lines, decode_config, max_positions=max_positions)
    assert model.training
    model.eval()
    for line, text in zip(lines, found, strict=True):
        ids = Letters().encode([line])[0]
        expected = beam_search(model, torch.tensor([[*ids, 3]]), beams=2, max_len_ratio=1.0) if ids else [[]]
        assert text == Letters().decode(expected)[0]
    assert translate_lines(model, Letters(), [], decode_config) == []
    assert translate_lines(model, Letters(), ["", ""], decode_config) == ["", ""]
