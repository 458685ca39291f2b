"""Beam search against a plain Python one that decodes every prefix whole, and against trying everything."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from functools import cache
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor

from beams import beam_search
from contracts.variants import CONFIG, VOCAB, perturbed
from normlab.lab.config import DecodeConfig
from normlab.lab.tasks.search import n_best_lines
from normlab.nn import Cache, Seq2Seq
from normlab.nn.decode import FREE, LENGTH_PENALTIES, MAX_LEN, Bounds, Hypothesis, search
from oracles import searches
from oracles.searches import Asked


class Bigrams:
    """A "model" whose next token depends on the last one alone, through a table `[V, V]` of logits."""

    def __init__(self, table: Tensor) -> None:
        self.logits = lambda tokens: table[tokens]
        self.position_encoding = SimpleNamespace(longest=None)

    def encode(self, source: Tensor) -> tuple[Tensor, Tensor]:
        return source, source != 0

    def decode_step(self, tokens: Tensor, memory: Tensor, real: Tensor, cache: Cache) -> Tensor:
        cache.begin_step()
        return tokens


def sources(count: int) -> Tensor:
    """`[count, 7]` of all lengths from 1 to 7, padded."""
    ids = torch.randint(4, VOCAB, (count, 7), generator=torch.Generator().manual_seed(13))
    return ids.masked_fill(torch.arange(7) >= 1 + torch.arange(count)[:, None] % 7, 0)


@cache
def searcher(placement: str = "post", seed: int = 25) -> Seq2Seq:
    """A shared model, of a seed that was chosen so that its outputs end early, late and at the limit."""
    config = replace(CONFIG, encoder_placement=placement, decoder_placement=placement)
    return perturbed(config, seed=seed)


@cache
@torch.no_grad()
def logits(model: Seq2Seq, source: tuple[int, ...], prefix: tuple[int, ...]) -> Tensor:
    """`[V]` after a prefix of one sentence without padding, by full decoding; computed once for all tests."""
    return model(torch.tensor([source]), torch.tensor([prefix]))[0, -1].float()


def next_log_p(model: Seq2Seq, source: Tensor, allowed: Tensor | None = None) -> searches.NextLogP:
    sentence = tuple(source[source != 0].tolist())

    def log_p(prefix: list[int]) -> np.ndarray:
        scores = logits(model, sentence, tuple(prefix))
        if allowed is not None:
            scores = scores.masked_fill(~allowed, float("-inf"))
        return torch.log_softmax(scores, -1).numpy()

    return log_p


def agree(found: list[Hypothesis], expected: searches.Ended) -> None:
    """The same outputs, each with its score, the best one first; others of equal scores may change places."""
    assert [h.score for h in found] == pytest.approx([score for score, _ in expected], abs=1e-5)
    assert len(found) == len({tuple(h.ids) for h in found}), "an output is found once"
    score_of = {tuple(ids): score for score, ids in expected}
    assert {tuple(h.ids): h.score for h in found} == pytest.approx(score_of, abs=1e-5)
    assert found[0].ids == expected[0][1]


FORMULAS = [("power", 0.0), ("power", 1.0), ("gnmt", 0.6), ("gnmt", 2.0)]


@pytest.mark.parametrize("beams", [1, 3, 5])
@pytest.mark.parametrize(
    ("formula", "alpha", "placement", "seed"),
    [(*how, *model) for how, model in zip(FORMULAS, 2 * [("post", 25), ("residual", 15)], strict=True)],
)
def test_a_batch_equals_plain_searches_one_by_one(placement, seed, formula, alpha, beams):
    model, source = searcher(placement, seed), sources(9)
    batch = search(model, source, Bounds(-1.0), beams=beams, length_penalty=alpha, formula=formula)
    for found, ids in zip(batch, source, strict=True):
        asked = Asked(10 - int((ids != 0).sum()), alpha, gnmt=formula == "gnmt")
        agree(found, searches.beam_search(next_log_p(model, ids), beams, asked))
    assert len({len(found[0].ids) for found in batch}) > 1, "sentences that all end alike test little"


@pytest.mark.parametrize("beams", [1, 4])
@pytest.mark.parametrize("least", [0, 3, 6])
def test_least_lengths_and_prefixes_equal_plain_searches(least, beams):
    """Three sentences: no prefix, one token, more tokens than the limit leaves room for."""
    model, source = searcher("residual", 15), sources(9)[[3, 4, 5]]
    prefixes: list[tuple[int, ...]] = [(), (7,), (5, 9, 5, 4, 8, 6, 6, 10)]
    prefix = torch.tensor([[*ids, *(FREE for _ in range(8 - len(ids)))] for ids in prefixes])
    free = search(model, source, Bounds(-1.0), beams=beams)
    batch = search(model, source, Bounds(-1.0, min_length=least, prefix=prefix), beams=beams)
    for found, ids, begin in zip(batch, source, prefixes, strict=True):
        limit = max(10 - int((ids != 0).sum()), least + 1, len(begin) + 1)
        agree(
            found,
            searches.beam_search(next_log_p(model, ids), beams, Asked(limit, least=least, prefix=begin)),
        )
        assert all(len(h.ids) >= least and tuple(h.ids[: len(begin)]) == begin for h in found)
    assert [h[0].ids for h in batch] != [h[0].ids for h in free]


@pytest.mark.parametrize(("least", "longest"), [(0, 0), (MAX_LEN, 0), (7, 7)])
def test_what_has_no_room_is_refused(least, longest):
    model = Bigrams(table(t2={3: 1.0}))
    model.position_encoding.longest = longest
    prefix = torch.full((1, 2 if least else MAX_LEN), 5)
    with pytest.raises(ValueError, match="min_length") as refusal:
        search(model, torch.tensor([[4, 3]]), Bounds(1.5, least, prefix))
    assert str(refusal.value) == (
        f"min_length is {least} and the longest prefix has {prefix.shape[1]} tokens, but an output has at "
        f"most {(longest or MAX_LEN) - 1} before its end; lower min_length or shorten the prefix"
    )


@pytest.mark.parametrize("beams", [1, 3])
def test_sentences_that_wait_to_be_left_out_find_nothing_more(beams):
    """In a large batch few ended sentences wait for others; each gives what it gives alone."""
    model, source = searcher("residual", 15), sources(40)
    how = {"beams": beams, "length_penalty": 3.0}  # longer hypotheses, were there any, would win
    assert beam_search(model, source, **how) == [beam_search(model, ids[None], **how)[0] for ids in source]


@pytest.mark.parametrize(("least", "prefix"), [(0, ()), (2, ()), (0, (7,)), (3, (8, 5))])
@pytest.mark.parametrize(("formula", "alpha"), FORMULAS)
def test_a_beam_as_wide_as_the_space_finds_everything_in_order(formula, alpha, least, prefix):
    """Four words and EOS, at most 4 tokens: 85 hypotheses. The n best of a search are the n best of all."""
    model, source = searcher(), sources(6)[[0, 5]]
    words = [5, 7, 8, 11]
    allowed = torch.zeros(VOCAB, dtype=torch.bool)
    allowed[[3, *words]] = True
    for ids in source:
        bounds = Bounds(
            -6 / int((ids != 0).sum()), least, torch.tensor([prefix]).long() if prefix else None, allowed
        )
        (found,) = search(model, ids[None], bounds, beams=86, length_penalty=alpha, formula=formula)
        asked = Asked(4, alpha, gnmt=formula == "gnmt", least=least, prefix=prefix)
        expected = searches.exhaustive_search(next_log_p(model, ids, allowed), words, asked)
        assert len(expected) == {(0, ()): 85, (2, ()): 80, (0, (7,)): 21, (3, (8, 5)): 4}[least, prefix]
        agree(found, expected)


def test_the_formulas_are_those_that_were_published():
    assert {name: lp(7, 0.5) for name, lp in LENGTH_PENALTIES.items()} == {
        "power": pytest.approx(7**0.5),
        "gnmt": pytest.approx(2**0.5),
    }
    for name in LENGTH_PENALTIES:
        assert DecodeConfig(length_penalty_formula=name).length_penalty_formula == name
    with pytest.raises(ValueError, match=r"'power' .*'gnmt', .*'google'"):
        DecodeConfig(length_penalty_formula="google")


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

    encode_target = encode

    def decode(self, ids: list[list[int]]) -> list[str]:
        return ["".join(chr(i - 4 + ord("a")) for i in row if i > 3) for row in ids]


def translated(model, lines, decode):
    best = n_best_lines(model, Letters(), lines, decode, count=1)
    return [candidates[0].text for candidates in best]


@pytest.mark.parametrize("max_positions", [4096, 8])
def test_lines_keep_their_order_and_empty_ones_stay_empty(max_positions, monkeypatch):
    monkeypatch.setattr("normlab.lab.tasks.search.SEARCH_POSITIONS", max_positions)
    model = deepcopy(searcher()).train()
    lines = ["abc", "", "ihgfedcba", "   ", "d", "e", "ab"]
    decode_config = DecodeConfig(beam=2, max_len_ratio=1.0)
    found = translated(model, lines, decode_config)
    assert model.training
    model.eval()
    for line, text in zip(lines, found, strict=True):
        ids = Letters().encode([line])[0]
        expected = beam_search(model, torch.tensor([[*ids, 3]]), beams=2, max_len_ratio=1.0) if ids else [[]]
        assert text == Letters().decode(expected)[0]
    assert translated(model, [], decode_config) == []
    assert translated(model, ["", ""], decode_config) == ["", ""]
