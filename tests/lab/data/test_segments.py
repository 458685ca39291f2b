"""Pairs of segments against the text that they were cut from, document by document."""

from __future__ import annotations

import numpy as np
import pytest

from normlab.errors import UserError
from normlab.lab.data.sentence_pairs import Shuffled, Spans, joined
from normlab.lab.data.tokenizer import BOS, EOS, PAD

DOCUMENTS, LINES, SPAN = 40, 9, 30


@pytest.fixture(scope="module")
def documents():
    """Documents of lines of 1 to 12 tokens; every token occurs once, so that it tells where it is from."""
    sizes = np.random.default_rng(5).integers(1, 13, (DOCUMENTS, LINES))
    texts, next_id = [], 10
    for line_sizes in sizes.tolist():
        document = []
        for size in line_sizes:
            document.append(list(range(next_id, next_id + size)))
            next_id += size
        texts.append(document)
    return texts


def stream(documents):
    """EOS, and then every line with EOS at its end; an empty line between documents."""
    tokens = [EOS]
    for document in documents:
        for line in [*document, []]:
            tokens += [*line, EOS]
    return np.array(tokens)


@pytest.fixture(scope="module")
def spans(documents):
    return Spans.of(stream(documents), span_len=SPAN)


def segments_of(pairs):
    for ids, segments in zip(*(side.tolist() for side in pairs[:2]), strict=True):
        length = len(ids) - ids.count(PAD)
        assert PAD not in ids[:length]
        first, second = ids.index(EOS), length - 1
        assert (ids[0], ids[second], ids.count(EOS), ids.count(BOS)) == (BOS, EOS, 2, 1)
        assert segments == [0] * (first + 1) + [1] * (second - first) + [0] * (len(ids) - length)
        yield ids[1:first], ids[first + 1 : second]


def test_a_pair_is_consecutive_or_of_two_documents(documents, spans):
    home = {token: i for i, document in enumerate(documents) for line in document for token in line}
    begins = {line[0] for document in documents for line in document}
    last = [document[-1][-1] for document in documents]
    *pairs, random = spans.pairs(np.arange(len(spans)), 3)
    after = [b for _, b in segments_of(spans.pairs(np.arange(len(spans)), 4))]
    for number, (a, b) in enumerate(segments_of(pairs)):
        assert a == list(range(a[0], a[-1] + 1))
        assert b == list(range(b[0], b[-1] + 1))
        assert len({home[token] for token in a}) == len({home[token] for token in b}) == 1
        assert len(a) + len(b) <= SPAN
        if random[number]:
            assert home[a[0]] != home[b[0]]
        else:
            assert b[0] == a[-1] + 1, "B follows A"
        if len(a) + len(b) == SPAN and not random[number]:
            assert b[0] in begins, "a span of several lines is cut between two"
        if random[number] and b[-1] != last[home[b[0]]]:
            start, stop = spans.bounds[number]
            assert len(a) + len(b) == stop - start, "a random B is as long as the true one"
    assert after != [b for _, b in segments_of(pairs)], "other seeds, other pairs"


def test_spans_hold_every_token_once(documents, spans):
    lengths = [sum(map(len, document)) for document in documents]
    covered = np.concatenate([spans.text[a:b] for a, b in spans.bounds])
    assert len(np.unique(covered)) == len(covered) == sum(lengths) - sum(n % SPAN == 1 for n in lengths)


def test_half_of_the_pairs_are_random_and_spread_over_all_other_documents(documents):
    spans = Spans.of(stream(documents[:3] + documents[20:]), span_len=SPAN)
    chosen = np.zeros(20_000, np.int64)
    *_, random = spans.pairs(chosen, 1)
    assert random.mean() == pytest.approx(0.5, abs=0.015)  # four standard errors
    strangers = np.bincount(spans._of_another_document(chosen, np.arange(20_000) / 20_000))
    own = spans.document[0]
    others = spans.document != own
    assert (strangers[: others.argmax()] == 0).all()
    assert strangers[others].min() > 0
    assert np.ptp(strangers[others]) <= 1, "all are alike likely"


def test_a_document_of_one_line_is_cut_anywhere():
    lines = [[[10 * i + j for j in range(10)]] for i in range(1, 4)]
    tokens = np.array([EOS] + [token for ((line),) in lines for token in [*line, EOS]])
    spans = Spans.of(tokens, span_len=SPAN)
    assert len(spans) == 3
    cuts = {len(a) for seed in range(40) for a, _ in segments_of(spans.pairs(np.arange(3), seed))}
    assert cuts == set(range(1, 10))


def test_a_text_of_one_document_is_refused():
    with pytest.raises(UserError, match="several documents"):
        Spans.of(np.array([EOS, 7, 8, 9, EOS]), span_len=SPAN)


def test_rows_have_few_widths():
    assert joined([([5] * 10, [6] * 3)], most=100)[0].shape == (1, 32)
    assert joined([([5] * 29, [6])], most=100)[0].shape == (1, 64)
    assert joined([([5] * 29, [6])], most=40)[0].shape == (1, 40)


def test_every_example_occurs_once_an_epoch_in_batches_of_one_size():
    order = Shuffled(10, rows=4, seed=1)
    drawn = [order.at(i) for i in range(5)]
    assert all(len(rows) == 4 for rows in drawn)
    epochs = np.concatenate(drawn).reshape(2, 10)
    assert np.array_equal(np.sort(epochs), np.tile(np.arange(10), (2, 1)))
    assert not np.array_equal(*epochs)
    assert np.array_equal(Shuffled(10, rows=4, seed=1).at(3), drawn[3]), "it needs nothing but the index"
