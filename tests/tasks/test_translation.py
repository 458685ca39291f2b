import math
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from normlab.data.prepare import prepare
from normlab.data.tokenizer import BOS, EOS, PAD, UNK
from normlab.spec.config import DecodeConfig
from normlab.tasks import translation as module
from normlab.tasks.scores import corpus_bleu
from normlab.tasks.translation import Translation, allowed_types, translate_lines
from run.tiny import tiny, write_text

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


def test_dev_likelihood_is_that_of_every_pair_on_its_own(prepared):
    task = task_of(prepared, "post")
    model = task.build().eval()
    nll, tokens = 0.0, 0
    for i in range(len(task.corpus.dev)):
        target = task.corpus.dev.target[i]
        log_p = log_probabilities(model, task.corpus.dev.source[i], target)
        nll -= float(log_p[range(len(target) + 1), [*target, EOS]].sum())
        tokens += len(target) + 1
    assert task.dev_nll(model) == pytest.approx(nll / tokens, rel=1e-5)


def test_dev_likelihood_stays_finite_under_the_mask(prepared):
    """Dev text may hold a type that training never had on the target side; nothing can be said of it."""
    task = task_of(prepared, target_vocab_mask=True)
    assert task.allowed is not None
    model = task.build().eval()
    before = task.dev_nll(model)
    assert math.isfinite(before)
    counts = np.bincount(task.corpus.dev.target.tokens, minlength=len(task.allowed))
    task.allowed = task.allowed.clone()
    task.allowed[counts.argmax()] = False
    assert counts.max() > 0
    after = task.dev_nll(model)
    assert math.isfinite(after)
    assert after < before + 1


def test_dev_bleu_is_greedy_on_the_first_sentences(prepared, monkeypatch):
    task = task_of(prepared)
    model = task.build().eval()
    text = task.corpus.dev_text
    asked = []
    found = [*text.target[:9], "null"]

    def stand_in(model, tokenizer, lines, decode, *, allowed):
        asked.append((list(lines), decode))
        return found

    monkeypatch.setattr(module, "translate_lines", stand_in)
    assert task.dev_bleu(model) == corpus_bleu(found, text.target[:10]) < 100
    assert asked == [(text.source[:10], DecodeConfig(beam=1))]


@pytest.mark.parametrize("recipe", ["admin", "pre", "pre+fixnorm+scalenorm"])
def test_the_start_depends_on_the_init_seed_and_the_first_batch_alone(prepared, recipe):
    first, second = (task_of(prepared, recipe).build() for _ in range(2))
    for (name, a), (_, b) in zip(first.named_parameters(), second.named_parameters(), strict=True):
        assert torch.equal(a, b), name
    task = task_of(prepared, recipe)
    other = Translation(replace(task.config, seeds=replace(task.config.seeds, init=2)), task.corpus, CPU)
    assert not torch.equal(other.build().embedding.weight, first.embedding.weight)
    assert all(math.isfinite(p.detach().sum()) for p in first.parameters())


# ------------------------------------------------------------------------------------------ translating


def test_lines_keep_their_order_whatever_the_batches(prepared):
    task = task_of(prepared)
    model = task.build()
    lines = [*task.corpus.dev_text.source[:12], "", "   ", task.corpus.dev_text.source[0]]
    decode = DecodeConfig(beam=2)
    alone = [translate_lines(model, task.corpus.tokenizer, [line], decode)[0] for line in lines]
    for max_positions in (1, 40, 4096):
        found = translate_lines(model, task.corpus.tokenizer, lines, decode, max_positions=max_positions)
        assert found == alone
    assert found[12] == found[13] == ""
    assert found[0] == found[14]
    assert translate_lines(model, task.corpus.tokenizer, [], decode) == []


def test_translating_leaves_the_model_in_its_mode(prepared):
    task = task_of(prepared)
    model = task.build()
    for training in (True, False):
        model.train(training)
        translate_lines(model, task.corpus.tokenizer, ["one"], DecodeConfig(beam=1))
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
    allowed = allowed_types(task.config, task.corpus.target_types, CPU)
    assert allowed is not None
    assert torch.equal(allowed, torch.from_numpy(task.corpus.target_types))
    assert allowed_types(task_of(prepared).config, task.corpus.target_types, CPU) is None
    few = torch.zeros_like(allowed)
    few[[EOS, 10, 11]] = True
    model = task.build()
    found = translate_lines(
        model, task.corpus.tokenizer, task.corpus.dev_text.source[:5], DecodeConfig(beam=2), allowed=few
    )
    produced = {token for line in task.corpus.tokenizer.encode(found) for token in line}
    spelt = set("".join(task.corpus.tokenizer.decode([[10], [11]])))
    assert set("".join(found)) <= spelt | {" "}
    assert produced
