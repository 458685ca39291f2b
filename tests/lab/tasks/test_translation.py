import math
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from lab.tasks.starts import unequal_in_start, with_seeds
from lab.training.tiny import tiny, write_text
from normlab.lab.config import DecodeConfig
from normlab.lab.data.parallel import prepare
from normlab.lab.data.ragged import Ragged, TokenPairs
from normlab.lab.data.text import Pairs
from normlab.lab.data.tokenizer import BOS, EOS, PAD, UNK
from normlab.lab.tasks import search as module
from normlab.lab.tasks.scores import corpus_bleu
from normlab.lab.tasks.search import Candidate, n_best_lines
from normlab.lab.tasks.task import repeated_share
from normlab.lab.tasks.translation import Translation

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    root = tmp_path_factory.mktemp("translation")
    return prepare(write_text(root / "text"), root / "data")


def task_of(prepared, recipe="pre", **data):
    config, corpus = prepared
    return Translation(tiny(replace(config, **data), recipe), corpus, CPU)


def log_probabilities(model, source, target):
    """`[T + 1, V]` of one pair without padding."""
    with torch.no_grad():
        logits = model(torch.tensor([[*source, EOS]]), torch.tensor([[BOS, *target]]))
    return F.log_softmax(logits[0].double(), dim=-1)


def test_micro_batches_stay_within_the_budget_and_depend_on_index_and_seed(prepared):
    task, again = task_of(prepared), task_of(prepared)
    other = Translation(replace(task.config, seeds=replace(task.config.seeds, data=2)), task.corpus, CPU)
    for index in (0, 3, 100):
        batch = task.batch(index)
        assert batch.source.numel() + batch.target_in.numel() <= task.config.train.max_tokens
        assert torch.equal(batch.source, again.batch(index).source)
    assert not all(
        task.batch(i).source.shape == other.batch(i).source.shape
        and torch.equal(task.batch(i).source, other.batch(i).source)
        for i in range(3)
    )


def test_word_dropout_is_seeded_by_index_and_leaves_what_is_predicted(prepared):
    plain, dropped = task_of(prepared), task_of(prepared, word_dropout=0.3)
    a, b = plain.batch(4), dropped.batch(4)
    assert torch.equal(a.target_out, b.target_out)
    assert torch.equal(b.source, task_of(prepared, word_dropout=0.3).batch(4).source)
    changed = a.source != b.source
    assert (b.source[changed] == UNK).all()
    share = changed.sum() / (a.source > EOS).sum()
    assert 0.15 < share < 0.45


def test_loss_is_the_sum_over_the_real_target_tokens(prepared):
    task = task_of(prepared)
    model = task.build().eval()
    batch = task.batch(0)
    nll = smooth = 0.0
    for source, target in zip(batch.source.tolist(), batch.target_out.tolist(), strict=True):
        ids = target[: target.index(EOS)] if EOS in target else []
        if EOS in source:
            log_p = log_probabilities(model, source[: source.index(EOS)], ids)
            nll -= float(sum(log_p[i, token] for i, token in enumerate([*ids, EOS])))
            smooth -= float(log_p.mean(-1).sum())
    sums = task.loss(model, batch)
    assert sums.nll.item() == pytest.approx(nll, rel=1e-5)
    assert sums.loss.item() == pytest.approx(0.9 * nll + 0.1 * smooth, rel=1e-5)


@pytest.mark.parametrize("decoded", [3, 1000])
def test_dev_likelihood_is_that_of_every_pair_on_its_own(prepared, decoded):
    """Sources are exchanged among the sentences that are decoded."""
    task = task_of(prepared, "post")
    task.config = replace(task.config, train=replace(task.config.train, dev_decode_sentences=decoded))
    model, dev = task.build().eval(), task.corpus.dev

    def nll(count: int, shift: int) -> float:
        ids = [[*dev.target[i], EOS] for i in range(count)]
        read = (log_probabilities(model, dev.source[(i - shift) % count], ids[i][:-1]) for i in range(count))
        return -sum(float(p[range(len(one)), one].sum()) for p, one in zip(read, ids, strict=True)) / sum(
            map(len, ids)
        )

    scores, some = task.dev_scores(model), min(decoded, len(dev))
    assert scores["nll"] == pytest.approx(nll(len(dev), 0), rel=1e-5)
    cost = nll(some, 1) - nll(some, 0)
    assert scores["nll_exchanged"] - scores["nll"] == pytest.approx(cost, rel=1e-3, abs=1e-5)


def test_dev_likelihood_stays_finite_under_the_mask(prepared):
    """Dev text may hold a type that training never had on the target side; nothing can be said of it."""
    task = task_of(prepared, target_vocab_mask=True)
    assert task.allowed is not None
    model = task.build().eval()
    before = task.dev_nlls(model)[0]
    assert math.isfinite(before)
    counts = np.bincount(task.corpus.dev.target.tokens, minlength=len(task.allowed))
    task.allowed = task.allowed.clone()
    task.allowed[counts.argmax()] = False
    assert counts.max() > 0
    after = task.dev_nlls(model)[0]
    assert math.isfinite(after)
    assert after < before + 1


def test_a_single_dev_sentence_has_no_other_source(prepared):
    task = task_of(prepared)
    one = TokenPairs(*(Ragged.of([side[0]]) for side in (task.corpus.dev.source, task.corpus.dev.target)))
    task.corpus = replace(task.corpus, dev=one)
    assert task.dev_scores(task.build()).keys() == {"nll", "bleu", "repeated_share"}


@pytest.mark.parametrize(
    ("outputs", "references", "share"),
    [("aaab", "abcd", 0.75), ("aaab", "aaac", 0.0), ("aabb", "aaab", 0.0), ("a", "b", 0.0)],
)
def test_a_repeated_output_counts_where_no_reference_is_repeated_as_often(outputs, references, share):
    assert repeated_share(list(outputs), list(references)) == share


def test_dev_bleu_is_greedy_on_the_first_sentences(prepared, monkeypatch):
    task = task_of(prepared)
    model = task.build().eval()
    text = task.corpus.dev_text
    asked = []
    found = [*text.target[:9], "null"]

    def stand_in(self, model, lines, decode):
        asked.append((list(lines), decode))
        return found

    monkeypatch.setattr(Translation, "_translate", stand_in)
    scores = task.dev_scores(model)
    assert scores["bleu"] == corpus_bleu(found, text.target[:10]) < 100
    assert scores["repeated_share"] == 0
    assert asked == [(text.source[:10], DecodeConfig(beam=1))]


@pytest.mark.parametrize("recipe", ["admin", "pre", "pre+fixnorm+scalenorm"])
def test_the_start_depends_on_the_init_seed_and_the_first_batch_alone(prepared, recipe, monkeypatch):
    """Only Admin sets something from the first batch, its factors omega."""
    task = task_of(prepared, recipe)
    assert all(p.isfinite().all() for p in task.build().parameters())
    assert unequal_in_start(task, with_seeds(task, dropout=2)) == []
    assert "embedding.weight" in unequal_in_start(task, with_seeds(task, init=2))
    other_batches = with_seeds(task, data=2)
    unequal = unequal_in_start(task, other_batches)
    assert bool(unequal) == (recipe == "admin")
    assert all(name.endswith("omega") for name in unequal)
    first_batch = task.batches.at(0)
    monkeypatch.setattr(other_batches.batches, "at", {0: first_batch}.__getitem__)
    assert unequal_in_start(task, other_batches) == [], "the first batch is the same, and no other is read"


@pytest.mark.parametrize("masked", [False, True])
def test_perplexities_of_the_test_text_are_those_of_every_pair_on_its_own(prepared, masked):
    task = task_of(prepared, target_vocab_mask=masked)
    model, encode = task.build().eval(), task.corpus.tokenizer.encode
    with torch.no_grad():
        model.embedding.weight *= 2  # away from the uniform distribution, which smoothing leaves as it is
    may = torch.ones(task.corpus.tokenizer.vocab_size, dtype=torch.bool)
    if masked:
        may = task.allowed = torch.arange(len(may)) % 7 != 5
    nll = smooth = tokens = 0
    text = task.corpus.test_text
    for source, target in zip(encode(text.source), encode(text.target), strict=True):
        log_p = log_probabilities(model, source, target)
        log_p = log_p - log_p[:, may].logsumexp(-1, keepdim=True)
        for row, token in zip(log_p, [*target, EOS], strict=True):
            if may[token]:
                nll -= float(row[token])
                smooth -= float(0.9 * row[token] + 0.1 * row[may].mean())
                tokens += 1
    found = task.test(model).scores
    assert found["nll"] == pytest.approx(nll / tokens, rel=1e-5)
    assert found["perplexity"] == pytest.approx(math.exp(nll / tokens), rel=1e-4)
    assert found["perplexity_smoothed"] == pytest.approx(math.exp(smooth / tokens), rel=1e-4)
    assert found["perplexity_smoothed"] != pytest.approx(found["perplexity"], rel=1e-3)
    assert {"bleu", "chrf", "bleu_tokenised"} < found.keys()


def test_scores_know_no_dropout_and_leave_the_model_in_its_mode(prepared):
    """A run that is resumed after its last step is scored without a validation before."""
    task = task_of(prepared)
    model = task.build()
    model.dropout.p = 0.5
    found = []
    for training in (True, False):
        model.train(training)
        found.append((task.test(model).scores, task.dev_nlls(model)[0]))
        assert model.training == training
    assert found[0] == found[1]


def test_references_beyond_the_models_positions_are_left_out_of_the_perplexity(prepared):
    task = task_of(prepared)
    model = task.build().eval()
    lengths = [len(ids) + 1 for ids in task.corpus.tokenizer.encode(task.corpus.test_text.target)]
    sides = task.corpus.tokenizer.encode(task.corpus.test_text.source)
    longest = sorted(max(n, len(s) + 1) for n, s in zip(lengths, sides, strict=True))[10]
    whole = task._perplexities(model)
    model.position_encoding.longest = longest
    kept = [i for i, s in enumerate(sides) if max(len(s) + 1, lengths[i]) <= longest]
    assert 10 < len(kept) < len(sides)
    text = task.corpus.test_text
    fewer = Pairs([text.source[i] for i in kept], [text.target[i] for i in kept])
    perplexities = task._perplexities(model)
    model.position_encoding.longest = None
    other = Translation(task.config, replace(task.corpus, test_text=fewer), CPU)
    assert perplexities == other._perplexities(model) != whole
    model.position_encoding.longest = 1
    assert all(math.isnan(value) for value in task._perplexities(model).values())


# ------------------------------------------------------------------------------------------ translating


def translated(model, tokenizer, lines, decode, **options):
    """The best translation of each line."""
    best = n_best_lines(model, tokenizer, lines, decode, count=1, **options)
    return [candidates[0].text for candidates in best]


@pytest.mark.slow
def test_lines_keep_their_order_whatever_the_batches(prepared, monkeypatch):
    task = task_of(prepared)
    model = task.build()
    lines = [*task.corpus.dev_text.source[:12], "", "   ", task.corpus.dev_text.source[0]]
    decode = DecodeConfig(beam=2)
    alone = [translated(model, task.corpus.tokenizer, [line], decode)[0] for line in lines]
    for max_positions in (1, 40, 4096):
        monkeypatch.setattr(module, "SEARCH_POSITIONS", max_positions)
        translations = translated(model, task.corpus.tokenizer, lines, decode)
        assert translations == alone
    assert translations[12] == translations[13] == ""
    assert translations[0] == translations[14]
    assert translated(model, task.corpus.tokenizer, [], decode) == []


def test_translating_leaves_the_model_in_its_mode(prepared):
    task = task_of(prepared)
    model = task.build()
    for training in (True, False):
        model.train(training)
        translated(model, task.corpus.tokenizer, ["one"], DecodeConfig(beam=1))
        assert model.training == training


def test_search_batches_hold_every_line_once_padded_and_within_the_budget():
    random = np.random.default_rng(0)
    ids = [random.integers(4, 90, size=n).tolist() for n in random.integers(0, 30, size=50)]
    seen = []
    for rows, source in module._search_batches(ids, 64):
        assert source.shape == (len(rows), len(ids[rows[0]]) + 1)
        assert source.numel() <= 64
        for row, line in zip(rows, source.tolist(), strict=True):
            assert line == [*ids[row], EOS] + [PAD] * (source.shape[1] - len(ids[row]) - 1)
        seen += rows
    assert sorted(seen) == [i for i in range(50) if ids[i]]


def test_only_types_of_the_target_side_are_produced_under_the_mask(prepared):
    task = task_of(prepared, target_vocab_mask=True)
    allowed = task.allowed
    assert allowed is not None
    assert torch.equal(allowed, torch.from_numpy(task.corpus.target_vocab))
    assert task_of(prepared).allowed is None
    few = torch.zeros_like(allowed)
    few[[EOS, 10, 11]] = True
    model = task.build()
    translations = translated(
        model, task.corpus.tokenizer, task.corpus.dev_text.source[:5], DecodeConfig(beam=2), allowed=few
    )
    produced = {token for line in task.corpus.tokenizer.encode(translations) for token in line}
    spelt = set("".join(task.corpus.tokenizer.decode([[10], [11]])))
    assert set("".join(translations)) <= spelt | {" "}
    assert produced


@pytest.fixture
def searching(prepared):
    """A model that has not learnt, its tokenizer, and lines of which two have no word."""
    task = task_of(prepared)
    return task.build(), task.corpus.tokenizer, [*task.corpus.dev_text.source[:9], "", " \t "]


def test_the_n_best_begin_with_the_best_and_fall(searching):
    for decode in (DecodeConfig(beam=4), DecodeConfig(beam=4, length_penalty_formula="gnmt", min_length=9)):
        few, many = (n_best_lines(*searching, decode, count=count) for count in (2, 4))
        assert [[c.text for c in candidates[:1]] for candidates in many] == [
            [text] for text in translated(*searching, decode)
        ]
        assert [candidates[:2] for candidates in many] == few
        for candidates in many[:9]:
            assert len({c.text for c in candidates}) == len(candidates) == 4
            assert sorted((c.score for c in candidates), reverse=True) == [c.score for c in candidates]
        assert many[9] == many[10] == [Candidate("", 0.0)]


def test_every_translation_begins_with_its_lines_prefix(searching):
    model, tokenizer, lines = searching
    prefixes = ["one", "", "two hundred", *["thirty"] * 8]
    for decode in (DecodeConfig(beam=3), DecodeConfig(sample=True)):
        with_prefixes = n_best_lines(model, tokenizer, lines, decode, count=3, prefixes=prefixes)
        free = n_best_lines(model, tokenizer, lines, decode, count=3)
        for i, candidates in enumerate(with_prefixes[:9]):
            assert all(c.text.startswith(prefixes[i]) for c in candidates)
        assert with_prefixes[1] == free[1]
        assert with_prefixes[9] == [Candidate("", 0.0)]


def test_draws_are_repeated_whatever_the_batches_and_their_number(searching, monkeypatch):
    decode = DecodeConfig(sample=True, temperature=1.5)
    samples = n_best_lines(*searching, decode, count=3)
    model, tokenizer, lines = searching
    monkeypatch.setattr(module, "SEARCH_POSITIONS", 1)
    again = n_best_lines(model, tokenizer, lines[:5], decode, count=2)
    assert [[c.text for c in row] for row in again] == [[c.text for c in row[:2]] for row in samples[:5]]
    other = n_best_lines(*searching, replace(decode, sample_seed=2), count=3)
    texts, others = ({c.text for row in rows[:9] for c in row} - {""} for rows in (samples, other))
    assert min(len(texts), len(others)) > 20
    assert len(texts & others) < 5, "here and there a word alone"
    same = n_best_lines(model, tokenizer, [lines[0]] * 3, decode, count=1)
    assert len({row[0].text for row in same}) == 3, "equal lines have draws of their own"


TOO_MANY = (
    "n_best is 4, but a search gives at most as many as it has beams, 3; "
    "type --beam 4, or --sample to draw them"
)


@pytest.mark.parametrize(
    ("decode", "count", "sentence"),
    [
        (DecodeConfig(beam=3), 0, "n_best is at least 1, got 0"),
        (DecodeConfig(beam=3), 4, TOO_MANY),
        (DecodeConfig(sample=True), -1, "n_best is at least 1, got -1"),
    ],
)
def test_impossible_numbers_of_translations_are_refused(searching, decode, count, sentence):
    with pytest.raises(ValueError, match="n_best is") as refusal:
        n_best_lines(*searching, decode, count=count)
    assert str(refusal.value) == sentence


def test_prefixes_that_cannot_be_are_refused(searching):
    model, tokenizer, lines = searching
    decode = DecodeConfig(beam=2)
    with pytest.raises(ValueError, match="prefix") as refusal:
        n_best_lines(model, tokenizer, lines, decode, count=1, prefixes=["a 漢"] * 11)
    assert str(refusal.value) == (
        "the prefix 'a 漢' has characters that the run's vocabulary does not have; leave them out"
    )
    with pytest.raises(ValueError, match=r"\b11 lines .*\b2 prefixes"):
        n_best_lines(model, tokenizer, lines, decode, count=1, prefixes=["", "one"])
    allowed = torch.ones(tokenizer.vocab_size, dtype=torch.bool)
    allowed[tokenizer.encode(["one"])[0]] = False
    with pytest.raises(ValueError, match="prefix") as refusal:
        n_best_lines(model, tokenizer, lines, decode, count=1, prefixes=["one"] * 11, allowed=allowed)
    assert "target_vocab_mask" in str(refusal.value)
    with pytest.raises(ValueError, match=r"prefix .*\d{4} tokens, .* 1023"):
        n_best_lines(model, tokenizer, lines, decode, count=1, prefixes=["one " * 1200] * 11)


def test_a_diverged_model_translates_into_nothing(searching):
    model, tokenizer, lines = searching
    with torch.no_grad():
        model.embedding.weight.fill_(math.nan)
    for decode in (DecodeConfig(beam=2), DecodeConfig(sample=True)):
        candidates = n_best_lines(model, tokenizer, lines, decode, count=2)
        assert candidates == [[Candidate("", -math.inf)]] * 9 + [[Candidate("", 0.0)]] * 2


def test_bleu_has_the_tokens_of_the_target_language_on_dev_and_on_test(prepared, monkeypatch):
    task = task_of(prepared, target_lang="zh")
    pairs = Pairs(["eins", "zwei"], ["我们今天去北京,好吗?", "他们明天来上海。"])
    task.corpus = replace(task.corpus, dev_text=pairs, test_text=pairs)
    written = ["我们明天去北京,好吗?", "他们今天来上海。"]
    monkeypatch.setattr(Translation, "_translate", lambda self, model, lines, decode: written)
    model = task.build()
    expected = corpus_bleu(written, pairs.target, target_lang="zh")
    assert expected > corpus_bleu(written, pairs.target) + 1
    assert task.dev_bleu(written) == expected
    tested = task.test(model)
    assert tested.scores["bleu"] == expected
    assert "tok:zh" in tested.signatures["bleu"]
    assert float(task.combine("bleu", tested.examples["bleu"].sum(axis=0))) == pytest.approx(expected)
