"""BERT's pre-training against a computation prediction by prediction, and against Hugging Face's BERT."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from lab.training.test_train import interrupt_at, without_seconds
from lab.training.test_train_language_model import files
from lab.training.tiny import tiny_bert, write_plain
from normlab.errors import UserError
from normlab.lab.data.tokenizer import EOS, PAD
from normlab.lab.runs import RunFolder
from normlab.lab.runs.examples import read_examples
from normlab.lab.tasks.bert import BertPretraining
from normlab.lab.training.train import train
from normlab.nn import Encoder

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    root = tmp_path_factory.mktemp("bert")
    return BertPretraining.prepare(replace(write_plain(root / "text"), block_len=32), root / "data")


def task_of(prepared, recipe="pre", *, dropout=0.1, whole_words=False, **train):
    data, corpus = prepared
    config = tiny_bert(replace(data, whole_word_masking=whole_words), recipe, **train)
    return BertPretraining(replace(config, model=replace(config.model, dropout=dropout)), corpus, CPU)


def row_by_row(model, batch):
    """The masked-LM losses and the next-sentence losses, each row alone and without its padding."""
    masked, following = [], []
    for row in range(len(batch.ids)):
        length = int((batch.ids[row] != PAD).sum())
        ids, segments = batch.ids[row : row + 1, :length], batch.segments[row : row + 1, :length]
        words, sentence = model(ids, segments)
        for place, target in zip(batch.positions[row], batch.targets[row], strict=True):
            if target != PAD:
                masked.append(-torch.log_softmax(words[0, place].double(), -1)[target].item())
        following.append(-torch.log_softmax(sentence[0].double(), -1)[batch.random[row]].item())
    return masked, following


@pytest.mark.parametrize("recipe", ["pre", "post+rope"])
@pytest.mark.parametrize("whole_words", [False, True])
def test_the_loss_is_the_mean_over_masked_tokens_and_the_mean_over_pairs(prepared, recipe, whole_words):
    task = task_of(prepared, recipe, whole_words=whole_words)
    model, batch = task.build().eval(), task.batch(3)
    with torch.no_grad():
        sums = task.loss(model, batch)
        masked, following = row_by_row(model, batch)
    assert len(masked) == batch.tokens
    assert float(sums.nll) == pytest.approx(sum(masked), rel=1e-5)
    mean = sum(masked) / len(masked) + sum(following) / len(following)
    assert float(sums.loss) / batch.tokens == pytest.approx(mean, rel=1e-5)


def test_dev_and_test_are_scored_prediction_by_prediction(prepared):
    task = task_of(prepared)
    model = task.build().eval()
    scores = task.dev_scores(model)
    with torch.no_grad():
        masked, following = row_by_row(model, task._dev)
    assert scores["nll"] == pytest.approx(np.mean(masked), rel=1e-5)
    likely = 100 * np.mean(np.array(following) < math.log(2))
    assert scores["next_sentence_accuracy"] == pytest.approx(likely)
    assert len(following) == len(task._spans(task.corpus.dev))
    places, targets = task._dev.positions, task._dev.targets
    assert set(task._dev.ids.gather(1, places)[targets != PAD].tolist()) == {len(model.token_bias) - 1}
    evaluation = task.test(model)
    for name, examples in evaluation.examples.items():
        assert task.combine(name, examples.sum(0)) == pytest.approx(evaluation.scores[name])
        assert len(examples) == 30, "a document is a line"


def test_always_the_commonest_token_is_right_as_often_as_it_occurs(prepared):
    task = task_of(prepared)
    model = task.build()
    tokens = np.asarray(task.corpus.train.tokens)
    counts = np.bincount(tokens[tokens > EOS], minlength=task.corpus.tokenizer.vocab_size)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model.token_bias[: len(counts)] = torch.tensor(np.log(np.maximum(counts, 1e-9) / counts.sum()))
        model.token_bias[len(counts) :] = -30
    scores = task.dev_scores(model)
    right = (task._dev.targets[task._dev.targets != PAD] == counts.argmax()).float().mean()
    assert scores["masked_accuracy"] == pytest.approx(100 * float(right), abs=1e-4)
    assert scores["nll"] == pytest.approx(task.corpus.unigram_entropy_nats, rel=0.1)


def test_the_scores_depend_on_no_seed_and_no_batch(prepared):
    task = task_of(prepared)
    model = task.build()
    wanted = task.dev_scores(model)
    for other in (task_of(prepared, max_tokens=40), task_of(prepared, max_tokens=4000)):
        assert other.dev_scores(model) == pytest.approx(wanted, rel=1e-5)
    corpus = prepared[1]
    seeded = BertPretraining(replace(task.config, seeds=replace(task.config.seeds, data=9)), corpus, CPU)
    assert seeded.dev_scores(model) == wanted
    assert not torch.equal(seeded.batch(0).ids, task.batch(0).ids)
    assert torch.equal(task_of(prepared).batch(5).ids, task.batch(5).ids)


@pytest.mark.parametrize(
    ("changes", "flag"),
    [
        ({"pretokenizer": "moses", "source_lang": "de", "target_lang": "en"}, "pretokenizer"),
        ({"word_dropout": 0.1}, "word_dropout"),
        ({"target_vocab_mask": True}, "target_vocab_mask"),
        ({"block_len": 4}, "--block-len"),
        ({"block_len": 600}, "--max-tokens"),
    ],
)
def test_what_makes_no_sense_is_refused(prepared, changes, flag):
    config = tiny_bert(prepared[0])
    BertPretraining.check(config)
    with pytest.raises(UserError, match=flag):
        BertPretraining.check(replace(config, data=replace(config.data, **changes)))


@pytest.mark.parametrize("recipe", ["pre", "admin+warmup"])
def test_an_interrupted_run_goes_on_as_if_nothing_had_been(prepared, tmp_path, monkeypatch, recipe):
    config = tiny_bert(prepared[0], recipe, grad_accum_steps=2, max_tokens=128)
    whole = train(config, tmp_path / "whole")
    interrupt_at(monkeypatch, 5)
    with pytest.raises(KeyboardInterrupt):
        train(config, tmp_path / "parts")
    train(config, tmp_path / "parts")
    parts = RunFolder(tmp_path / "parts" / whole.path.name)
    assert without_seconds(parts) == without_seconds(whole)
    assert files(parts) == files(whole)


@pytest.mark.slow
def test_it_learns_and_leaves_a_whole_folder(prepared, tmp_path):
    folder = train(tiny_bert(prepared[0], steps=150, validate_every_steps=50, lr=1e-2), tmp_path)
    assert folder.status().outcome.state == "trained"
    scores = json.loads(folder.scores.read_text())
    assert set(scores) == {"nll", "masked_accuracy", "next_sentence_accuracy"}
    entropy = prepared[1].unigram_entropy_nats
    assert scores["nll"] < 0.95 * entropy
    assert set(read_examples(folder.examples)) == set(scores)


def hugging_face(model: Encoder, longest: int):
    """Hugging Face's BERT with our weights."""
    transformers = pytest.importorskip("transformers")
    dim, layers = model.segments.shape[1], len(model.encoder.sublayers) // 2
    config = transformers.BertConfig(
        vocab_size=len(model.token_bias),
        hidden_size=dim,
        num_hidden_layers=layers,
        num_attention_heads=model.encoder.sublayers[0].f.heads,
        intermediate_size=model.encoder.sublayers[1].f.inner.out_features,
        hidden_act="gelu",
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        max_position_embeddings=longest,
        layer_norm_eps=1e-5,
    )
    theirs = transformers.BertForPreTraining(config).to(model.segments.dtype)
    bert, cls = theirs.bert, theirs.cls

    def copied(to, of):
        to.load_state_dict(of.state_dict())

    with torch.no_grad():
        bert.embeddings.position_embeddings.weight.copy_(model.position_encoding.weight)
        bert.embeddings.token_type_embeddings.weight.copy_(model.segments)
        copied(bert.embeddings.LayerNorm, model.embedding_norm)
        for layer, attention, ffn in zip(
            bert.encoder.layer, model.encoder.sublayers[::2], model.encoder.sublayers[1::2], strict=True
        ):
            own = layer.attention.self
            for part, weight, bias in zip(
                (own.query, own.key, own.value),
                attention.f.qkv.weight.chunk(3),
                attention.f.qkv.bias.chunk(3),
                strict=True,
            ):
                part.weight.copy_(weight)
                part.bias.copy_(bias)
            copied(layer.attention.output.dense, attention.f.out)
            copied(layer.attention.output.LayerNorm, attention.place.norm)
            copied(layer.intermediate.dense, ffn.f.inner)
            copied(layer.output.dense, ffn.f.outer)
            copied(layer.output.LayerNorm, ffn.place.norm)
        copied(bert.pooler.dense, model.pooler)
        copied(cls.predictions.transform.dense, model.transform)
        copied(cls.predictions.transform.LayerNorm, model.transform_norm)
        copied(cls.seq_relationship, model.next_sentence)
        cls.predictions.bias.copy_(model.token_bias)
        bert.embeddings.word_embeddings.weight.copy_(model.embedding.weight)
    theirs.tie_weights()
    assert cls.predictions.decoder.weight is bert.embeddings.word_embeddings.weight
    return theirs


def their_loss(theirs, batch):
    labels = torch.full_like(batch.ids, -100)
    for row, (places, targets) in enumerate(zip(batch.positions, batch.targets, strict=True)):
        labels[row, places[targets != PAD]] = targets[targets != PAD]
    return theirs(
        input_ids=batch.ids,
        attention_mask=(batch.ids != PAD).long(),
        token_type_ids=batch.segments,
        labels=labels,
        next_sentence_label=batch.random,
    ).loss


@pytest.mark.parametrize(
    ("dtype", "steps", "tolerance"),
    [(torch.float64, 20, 1e-6), pytest.param(torch.float32, 50, 1e-3, marks=pytest.mark.slow)],
)
def test_hugging_faces_bert_with_our_weights_has_our_loss_at_every_step_of_a_training(
    prepared, dtype, steps, tolerance
):
    """With the same batches and AdamW the curves are equal up to the rounding of the dtype, which grows in
    training.
    """
    task = task_of(prepared, "post", dropout=0.0)
    model, generator = task.build(), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    model = model.to(dtype)
    theirs = hugging_face(model, 32)
    optimizers = [torch.optim.AdamW(m.parameters(), 5e-3, eps=1e-6) for m in (model, theirs)]
    curves = ([], [])
    for step in range(steps):
        batch = task.batch(step)
        losses = task.loss(model, batch).loss / batch.tokens, their_loss(theirs, batch)
        for optimizer, loss, curve in zip(optimizers, losses, curves, strict=True):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            curve.append(loss.item())
    assert curves[0][0] == pytest.approx(curves[1][0], rel=1e-5)
    assert curves[0][-1] < curves[0][0] - 0.3
    assert curves[0] == pytest.approx(curves[1], rel=tolerance)
