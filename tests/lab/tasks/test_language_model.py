"""Perplexity against a loop over tokens, and what a configuration of a language model may not ask for."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from cases import each
from lab.tasks.starts import unequal_in_start, with_seeds
from lab.training.tiny import tiny, tiny_language_model, write_plain
from normlab.lab.data.tokenizer import EOS, PAD, UNK
from normlab.lab.tasks import TASKS
from normlab.lab.tasks.language_model import PROMPTS, LanguageModel
from normlab.nn import Placement

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    root = tmp_path_factory.mktemp("language_model")
    return LanguageModel.prepare(write_plain(root / "text"), root / "data")


def task_of(prepared, recipe="pre", *, block_len=24, word_dropout=0.0, **train):
    data, corpus = prepared
    data = replace(data, block_len=block_len, word_dropout=word_dropout)
    return LanguageModel(tiny_language_model(data, recipe, **train), corpus, CPU)


def nll_of(model, seen, predicted):
    """Summed over ``predicted``, the continuation of ``seen[0]``, one token at a time."""
    total = 0.0
    for i, token in enumerate(predicted):
        with torch.no_grad():
            logits = model(torch.tensor([seen[: i + 1]]))[0, -1].double()
        total -= F.log_softmax(logits, -1)[token].item()
    return total


def token_by_token(model, stream, block_len):
    tokens = stream.tokens.tolist()
    starts = range(0, len(tokens) - 1, block_len)
    return sum(nll_of(model, tokens[s:], tokens[s + 1 : s + 1 + block_len]) for s in starts)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["pre", "post+rope"])
def test_dev_likelihood_is_that_of_every_token_on_its_own(prepared, recipe):
    task = task_of(prepared, recipe, block_len=7)
    model = task.build().eval()
    dev = task.corpus.dev
    nll = token_by_token(model, dev, 7)
    scores = task.dev_scores(model)
    assert scores["nll"] == pytest.approx(nll / len(dev), rel=1e-5)
    assert scores["perplexity"] == pytest.approx(math.exp(nll / len(dev)), rel=1e-4)
    assert scores["word_perplexity"] == pytest.approx(math.exp(nll / dev.words), rel=1e-4)
    assert scores["bits_per_byte"] == pytest.approx(nll / math.log(2) / dev.bytes, rel=1e-5)


def test_a_model_that_knows_nothing_has_the_perplexity_of_its_vocabulary(prepared):
    task = task_of(prepared)
    model = task.build()
    with torch.no_grad():
        model.embedding.weight.zero_()
    vocab = task.corpus.tokenizer.vocab_size
    for scores in (task.dev_scores(model), task.test(model).scores):
        assert scores["perplexity"] == pytest.approx(vocab, rel=1e-5)
        assert scores["nll"] == pytest.approx(math.log(vocab), rel=1e-6)


def test_scores_do_not_depend_on_the_batch(prepared):
    model = task_of(prepared).build()
    nlls = [task_of(prepared, max_tokens=tokens).dev_scores(model)["nll"] for tokens in (24, 100, 5000)]
    assert nlls == pytest.approx([nlls[0]] * 3, rel=1e-6)
    longer = task_of(prepared, block_len=96).dev_scores(model)["nll"]
    assert abs(longer - nlls[0]) > 1e-4, "more context is another likelihood"


def test_a_block_sees_nothing_of_the_others_but_one_token(prepared):
    task = task_of(prepared, block_len=6)
    model = task.build().eval()
    batch = next(iter_blocks(task))
    before = model(batch.ids)
    changed = batch.ids.clone()
    changed[2] = 9
    after = model(changed)
    others = [row for row in range(len(changed)) if row != 2]
    assert torch.equal(before[others], after[others])
    assert torch.equal(batch.ids[1:, 0], batch.target[:-1, -1]), "it begins with the last token before it"
    assert batch.ids[0, 0] == EOS


def iter_blocks(task):
    from normlab.lab.data.plain import blocks_in_order

    return blocks_in_order(task.corpus.dev.tokens, block_len=6, rows=8)


def test_loss_is_the_sum_over_what_is_predicted_and_empty_rows_cost_nothing(prepared):
    task = task_of(prepared, max_tokens=24 * 7)
    task = LanguageModel(
        replace(task.config, optim=replace(task.config.optim, label_smoothing=0.1)), task.corpus, CPU
    )
    model = task.build().eval()
    last = [task.batch(i) for i in range(task.blocks.steps_per_epoch)][-1]
    rows = (last.target != PAD).any(1)
    assert rows.sum() < len(rows), "the last batch of the epoch has empty rows"
    sums = task.loss(model, last)
    nll = smooth = 0.0
    for ids, target in zip(last.ids[rows], last.target[rows], strict=True):
        log_p = F.log_softmax(model(ids[None])[0].detach().double(), -1)[target != PAD]
        nll -= float(log_p[range(len(log_p)), target[target != PAD]].sum())
        smooth -= float(log_p.mean(-1).sum())
    assert sums.nll.item() == pytest.approx(nll, rel=1e-5)
    assert sums.loss.item() == pytest.approx(0.9 * nll + 0.1 * smooth, rel=1e-5)
    sums.loss.backward()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)


def test_micro_batches_stay_within_the_budget_and_depend_on_index_and_seed(prepared):
    task, again = task_of(prepared, word_dropout=0.2), task_of(prepared, word_dropout=0.2)
    other = LanguageModel(replace(task.config, seeds=replace(task.config.seeds, data=2)), task.corpus, CPU)
    for index in (0, 3, 1000):
        batch = task.batch(index)
        assert batch.padded_tokens <= task.config.train.max_tokens
        assert torch.equal(batch.ids, again.batch(index).ids)
        assert (batch.ids == UNK).any()
        assert not torch.equal(batch.target, other.batch(index).target)


@pytest.mark.parametrize("placement", Placement.registry)
def test_a_decoder_of_every_placement_learns_a_batch(prepared, placement):
    config = task_of(prepared).config
    model = replace(
        config.model,
        encoder_placement=placement,
        decoder_placement=placement,
        embedding="untied",
        dropout=0.0,
    )
    task = LanguageModel(replace(config, model=model), prepared[1], CPU)
    network, batch = task.build(), task.batch(0)
    optimizer = torch.optim.Adam(network.parameters(), lr=3e-3)
    losses = []
    for _ in range(25):
        sums = task.loss(network, batch)
        losses.append(sums.nll.item() / batch.tokens)
        optimizer.zero_grad()
        (sums.loss / batch.tokens).backward()
        optimizer.step()
    assert losses[-1] < losses[0] - 0.3


def test_the_start_depends_on_the_init_seed_and_the_first_batch_alone(prepared, monkeypatch):
    """Admin's factors omega are set from the first batch, and everything else is drawn from the init seed."""
    task = task_of(prepared, "admin")
    assert unequal_in_start(task, with_seeds(task, dropout=2)) == []
    assert "embedding.weight" in unequal_in_start(task, with_seeds(task, init=2))
    other_batches = with_seeds(task, data=2)
    unequal = unequal_in_start(task, other_batches)
    assert unequal
    assert all(name.endswith("omega") for name in unequal)
    first_batch = task.blocks.at(0)
    monkeypatch.setattr(other_batches.blocks, "at", {0: first_batch}.__getitem__)
    assert unequal_in_start(task, other_batches) == [], "the first batch is the same, and no other is read"


def test_its_time_is_that_of_its_text(prepared, monkeypatch):
    task = task_of(prepared)
    clock = iter(range(100))
    monkeypatch.setattr("time.perf_counter", lambda: float(next(clock)))
    validation, test = task.rehearse(task.build())
    assert validation == 1.0
    # a clock that ticks at every look: one second for the scores, one for the continuation of each prompt
    assert test == pytest.approx(len(task.corpus.test) / len(task.corpus.dev) + PROMPTS)


# ------------------------------------------------------------------------------------------ refusals


def changed(config, **parts):
    """The configuration with other fields in its parts."""
    return replace(config, **{name: replace(getattr(config, name), **new) for name, new in parts.items()})


@each(
    ("parts", "sentence"),
    [
        ({"model": {"encoder_layers": 3}}, "encoder_layers is 3, .* has decoder; type --encoder-layers 0"),
        ({"model": {"decoder_layers": 0}}, "decoder_layers is 0, .*; type at least --decoder-layers 1"),
        ({"model": {"encoder_placement": "post"}}, "encoder post and decoder pre; name one placement"),
        ({"train": {"best_by": "perplexiti"}}, "best_by is 'perplexiti', .* did you mean 'perplexity'"),
        ({"train": {"max_tokens": 23}}, "max_tokens is 23, less than one block of 24; raise --max-tokens"),
        ({"data": {"target_vocab_mask": True}}, "set data.target_vocab_mask to false"),
        ({"data": {"dev_src": "b.de"}}, "--dev-src is for the task translation, .* reads --train-text"),
    ],
    ids=str,
)
def test_what_a_language_model_cannot_do_is_refused(prepared, parts, sentence):
    config = tiny_language_model(prepared[0])
    TASKS["language_model"].check(config)
    with pytest.raises(ValueError, match=sentence):
        TASKS["language_model"].check(changed(config, **parts))


@pytest.mark.parametrize(
    ("parts", "sentence"),
    [
        ({"model": {"encoder_layers": 0}}, "encoder_layers is 0, .* has encoder and decoder; type at least"),
        (
            {"data": {"train_text": "a.txt"}},
            (
                r"--train-text is for the task (bert_pretraining|language_model) or (?!\1)"
                "(bert_pretraining|language_model), .* --train-src"
            ),
        ),
    ],
    ids=str,
)
def test_what_a_translation_cannot_do_is_refused(text, parts, sentence):
    config = tiny(text)
    TASKS["translation"].check(config)
    TASKS["translation"].check(changed(config, model={"encoder_placement": "post"}))
    with pytest.raises(ValueError, match=sentence):
        TASKS["translation"].check(changed(config, **parts))


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    from lab.training.tiny import write_text

    return write_text(tmp_path_factory.mktemp("text"))


def test_an_unknown_task_is_told_with_the_nearest():
    with pytest.raises(ValueError, match=r"task 'language', .*'language_model'"):
        TASKS["language"]


def test_z_loss_is_added_to_what_is_differentiated_alone(prepared):
    """Its coefficient times the squares of log Z, summed over the tokens that are predicted."""
    task = task_of(prepared)
    model, batch = task.build().eval(), task.batch(0)
    plain = task.loss(model, batch)
    task.config = replace(task.config, optim=replace(task.config.optim, z_loss=0.5))
    sums = task.loss(model, batch)
    log_z = model(batch.ids).exp().sum(-1).log()[batch.target != PAD]
    assert sums.nll == plain.nll
    assert (sums.loss - plain.loss).item() == pytest.approx(0.5 * log_z.square().sum().item(), rel=1e-4)
    assert sums.loss.requires_grad
