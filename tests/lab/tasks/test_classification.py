"""Classification of pairs: its rows, its scores, and what it takes from a pre-trained run."""

from __future__ import annotations

import json
import lzma
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from lab.training.test_train import interrupt_at, without_seconds
from lab.training.test_train_language_model import files
from lab.training.test_weights import keeping, weights
from lab.training.tiny import tiny_bert, write_plain
from normlab.errors import UserError
from normlab.lab.config import DataConfig
from normlab.lab.data.builtin import generate
from normlab.lab.data.labelled import columns_of
from normlab.lab.data.tokenizer import BOS, EOS, PAD
from normlab.lab.runs import RunFolder
from normlab.lab.tasks.classification import Classification, cut
from normlab.lab.training.train import train

CPU = torch.device("cpu")


def write_pairs(folder):
    """Pairs of written-out numbers, equal or not, in two tables written as MRPC's are."""
    numbers = generate("numbers-de-en", pairs=400, seed=3).train.target
    random = np.random.default_rng(1)
    rows = []
    for first, other in zip(numbers[:160], numbers[160:], strict=False):
        same = random.random() < 0.7
        rows.append(f"{first}\t{first if same else other}\t{'same' if same else 'other'}")
    for name, part in (("train", rows[:120]), ("test", rows[120:])):
        text = "\ufeff" + "".join(f"{row}\r\n" for row in ["#1 String\t#2 String\tlabel", *part])
        (folder / f"{name}.tsv.xz").write_bytes(lzma.compress(text.encode()))
    columns = "#1 String,#2 String,label"
    return {f"{n}_pairs": f"{folder / n}.tsv#{columns}" for n in ("train", "test")}


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory):
    root = tmp_path_factory.mktemp("pretrained")
    return train(tiny_bert(replace(write_plain(root / "text"), block_len=32), steps=4), root / "runs")


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    return write_pairs(tmp_path_factory.mktemp("pairs"))


def fine_tuning(pretrained, pairs, recipe="pre", **train_options):
    config = tiny_bert(DataConfig(**pairs, tokenizer="", block_len=32), recipe, **train_options)
    start = replace(config.train, init_from=str(pretrained.path))
    return replace(config, task="classification", train=start)


@pytest.fixture(scope="module")
def task(pretrained, pairs, tmp_path_factory):
    config = fine_tuning(pretrained, pairs)
    data = replace(config.data, tokenizer=str(pretrained.tokenizer))
    data, corpus = Classification.prepare(data, tmp_path_factory.mktemp("data"))
    return Classification(replace(config, data=data), corpus, CPU)


def test_a_tenth_of_the_training_pairs_is_dev_where_there_is_none(task):
    assert [len(split) for split in (task.corpus.train, task.corpus.dev, task.corpus.test)] == [108, 12, 40]
    assert task.corpus.labels == ("other", "same")
    share = np.bincount(task.corpus.train.labels) / 108
    assert task.corpus.unigram_entropy_nats == pytest.approx(-(share * np.log(share)).sum())


def test_inputs_with_more_positions_than_the_model_has_learned_are_refused(task):
    Classification.check_text(task.config, task.corpus)
    fewer = replace(task.config, model=replace(task.config.model, max_positions=31))
    with pytest.raises(UserError, match=r"block_len .*32, .*--block-len 31"):
        Classification.check_text(fewer, task.corpus)


def test_a_row_is_both_sentences_between_special_tokens(task):
    batch = task.batch(0)
    known = {}
    for row in range(len(task.corpus.train)):
        first, second = (side[row] for side in vars(task.corpus.train.pairs).values())
        first, second = cut(first, second, 29)
        known[tuple(first), tuple(second)] = task.corpus.train.labels[row]
    for ids, segments, label in zip(
        batch.ids.tolist(), batch.segments.tolist(), batch.labels.tolist(), strict=True
    ):
        end = len(ids) - ids.count(PAD)
        middle = ids.index(EOS)
        assert (ids[0], ids[end - 1]) == (BOS, EOS)
        assert segments == [int(middle < i < end) for i in range(len(ids))]
        assert known[tuple(ids[1:middle]), tuple(ids[middle + 1 : end - 1])] == label


def test_the_longer_sentence_is_cut():
    assert cut([1] * 9, [2] * 3, 8) == ([1] * 5, [2] * 3)
    assert cut([1] * 9, [2] * 8, 8) == ([1] * 4, [2] * 4)
    assert cut([1], [2], 8) == ([1], [2])


def test_scores_are_those_of_a_loop_over_the_pairs(task):
    model = task.build().eval()
    with torch.no_grad():
        model.classifier.weight.mul_(30)
        batch = task._batch(task.corpus.test, np.arange(40))
        first, second = model(batch.ids, batch.segments).T
        # So that half the pairs get the second label.
        model.classifier.bias[0] += (second - first).sort().values[19:21].mean()
    nll, right, counts = [], [], {"hit": 0, "false": 0, "missed": 0}
    logits = []
    for row, label in enumerate(task.corpus.test.labels.tolist()):
        one = task._batch(task.corpus.test, np.array([row]))
        with torch.no_grad():
            logits.append(model(one.ids, one.segments)[0].double())
        said = int(logits[-1].argmax())
        nll.append(-torch.log_softmax(logits[-1], -1)[label].item())
        right.append(said == label)
        counts["hit"] += said == label == 1
        counts["false"] += said == 1 != label
        counts["missed"] += said != 1 == label
    evaluation = task.test(model)
    assert 0 < sum(right) < 40
    precision = counts["hit"] / (counts["hit"] + counts["false"])
    recall = counts["hit"] / (counts["hit"] + counts["missed"])
    assert evaluation.scores["accuracy"] == pytest.approx(100 * np.mean(right))
    assert evaluation.scores["nll"] == pytest.approx(np.mean(nll), rel=1e-5)
    assert evaluation.scores["f1"] == pytest.approx(200 * precision * recall / (precision + recall))
    assert [output == "same" for output in evaluation.outputs] == [int(x.argmax()) == 1 for x in logits]


def test_a_model_that_ignores_its_pair_loses_nothing_when_pairs_are_exchanged(task):
    model = task.build()
    reading = task.dev_scores(model)
    assert reading["nll_exchanged"] != pytest.approx(reading["nll"], abs=1e-4)
    with torch.no_grad():
        model.classifier.weight.zero_()
    ignoring = task.dev_scores(model)
    assert ignoring["nll_exchanged"] == pytest.approx(ignoring["nll"])


def test_it_takes_the_encoder_whole_and_its_tokenizer_and_goes_on(pretrained, pairs, tmp_path, monkeypatch):
    config = keeping(fine_tuning(pretrained, pairs, max_tokens=256), "log")
    whole = train(config, tmp_path / "whole")
    first, given = weights(whole.steps / "0"), load_file(pretrained.best / "model.safetensors")
    note = json.loads(whole.start.read_text())
    assert set(first) - set(note["taken"]) == {"classifier.weight", "classifier.bias"}
    assert all(torch.equal(first[name], given[name]) for name in note["taken"])
    assert {name.split(".")[0] for name in note["left_over"]} == {
        *("transform", "transform_norm", "token_bias", "next_sentence")
    }
    assert whole.tokenizer.read_bytes() == pretrained.tokenizer.read_bytes()
    assert set(json.loads(whole.scores.read_text())) == {"accuracy", "f1", "nll"}
    interrupt_at(monkeypatch, 5)
    with pytest.raises(KeyboardInterrupt):
        train(config, tmp_path / "parts")
    train(config, tmp_path / "parts")
    parts = RunFolder(tmp_path / "parts" / whole.path.name)
    assert without_seconds(parts) == without_seconds(whole)
    assert files(parts) == files(whole)


def test_the_id_does_not_depend_on_where_the_pretrained_run_lies(pretrained, pairs, tmp_path):
    moved = RunFolder(shutil.copytree(pretrained.path, tmp_path / pretrained.path.name))
    ids = [train(fine_tuning(of, pairs, steps=1), tmp_path / "runs").path.name for of in (pretrained, moved)]
    assert ids[0] == ids[1]


@pytest.mark.parametrize("changes", [{"encoder_layers": 3}, {"encoder_layers": 1}, {"ffn_dim": 48}])
def test_a_run_of_another_model_is_refused(pretrained, pairs, tmp_path, changes):
    config = fine_tuning(pretrained, pairs)
    with pytest.raises(UserError, match=r"config\.json"):
        train(replace(config, model=replace(config.model, **changes)), tmp_path)
    with pytest.raises(UserError, match=r"encoder\.end"):
        train(fine_tuning(pretrained, pairs, "post"), tmp_path)


def test_what_is_missing_is_named(pretrained, pairs, tmp_path):
    config = fine_tuning(pretrained, pairs)
    for changed, flag in (
        (replace(config, train=replace(config.train, init_from="")), "--init-from"),
        (replace(config, data=replace(config.data, train_pairs="")), "--train-pairs"),
        (replace(config, data=replace(config.data, block_len=4)), "--block-len"),
    ):
        with pytest.raises(UserError, match=flag):
            train(changed, tmp_path)
    table = pairs["train_pairs"].partition("#")[0]
    for spec in (table, f"{table}#label", f"{table}#1,2,3,4"):
        with pytest.raises(UserError, match="FIRST,SECOND,LABEL"):
            columns_of(spec)
    other = tmp_path / "other.tsv"
    other.write_text("one\ttwo\tunheard of\n")
    with pytest.raises(UserError, match="'unheard of'"):
        train(replace(config, data=replace(config.data, test_pairs=f"{other}#1,2,3")), tmp_path)


def test_columns_of_a_hugging_face_data_set_are_read(tmp_path):
    pytest.importorskip("datasets")
    (tmp_path / "set").mkdir()
    rows = [{"a": f"one {i}", "b": f"two {i}", "label": i % 2} for i in range(4)]
    (tmp_path / "set" / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    columns = columns_of(f"hf:{tmp_path / 'set'}#train.a,b,label")
    assert columns["first"] == ["one 0", "one 1", "one 2", "one 3"]
    assert columns["label"] == ["0", "1", "0", "1"]
