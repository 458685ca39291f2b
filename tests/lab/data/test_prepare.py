import json
import lzma
import math
import os
import re
import socket
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from normlab.lab.config import DataConfig
from normlab.lab.data import corpus as corpora
from normlab.lab.data import parallel as module
from normlab.lab.data.builtin import generate
from normlab.lab.data.parallel import Corpus, prepare
from normlab.lab.data.text import read_lines
from normlab.lab.data.tokenizer import EOS, PAD
from normlab.lab.data.vocabulary import vocabulary

NAMES = ("train_src", "train_tgt", "dev_src", "dev_tgt", "test_src", "test_tgt")


def files_config(folder, **changes):
    """Six small files, and the configuration that names them."""
    splits = generate("dates-de-en", pairs=300, seed=0)
    texts = [
        *(splits.train.source, splits.train.target),
        *(splits.dev.source[:20], splits.dev.target[:20]),
        *(splits.test.source[:30], splits.test.target[:30]),
    ]
    paths = {}
    for name, lines in zip(NAMES, texts, strict=True):
        paths[name] = str(folder / f"{name}.txt")
        Path(paths[name]).write_text("".join(f"{line}\n" for line in lines), "utf-8")
    return DataConfig(**{**paths, "vocab_size": 150, **changes})


def test_built_in_corpus(tmp_path):
    config = DataConfig(builtin="times-en-fr", builtin_pairs=200, builtin_seed=4, vocab_size=120)
    filled, corpus = prepare(config, tmp_path)
    assert replace(filled, digest="") == config
    assert len(filled.digest) == 64
    splits = generate("times-en-fr", pairs=200, seed=4)
    assert (corpus.dev_text, corpus.test_text) == (splits.dev, splits.test)
    assert len(corpus.train) == 200
    assert corpus.tokenizer.decode([corpus.train.source[i] for i in range(200)]) == splits.train.source
    assert corpus.tokenizer.decode([corpus.train.target[i] for i in range(200)]) == splits.train.target
    assert corpus.tokenizer.decode([corpus.dev.target[i] for i in range(500)]) == splits.dev.target
    assert corpus.facts["Corpus"] == "built-in times-en-fr, seed 4"


def test_files(tmp_path):
    config = files_config(tmp_path)
    _, corpus = prepare(config, tmp_path / "data")
    assert corpus.folder.parent == tmp_path / "data"
    assert [path.name for path in (tmp_path / "data").iterdir()] == [corpus.folder.name], (
        "nothing is left behind"
    )
    assert len(corpus.train) == 300
    assert (len(corpus.dev), len(corpus.dev_text), len(corpus.test_text)) == (20, 20, 30)
    assert isinstance(corpus.train.source.tokens, np.memmap)
    assert corpus.train.source.tokens.dtype == np.uint16
    assert corpus.facts["Test text"] == "test_src.txt, test_tgt.txt"
    assert str(tmp_path) not in json.dumps(corpus.facts)


def test_entropy_and_types_are_those_of_the_target_side(tmp_path):
    _, corpus = prepare(files_config(tmp_path, max_len=18), tmp_path / "data")
    kept = range(len(corpus.train))
    assert 0 < len(kept) < 300
    counts = Counter(token for i in kept for token in (*corpus.train.target[i], EOS))
    total = sum(counts.values())
    entropy = -sum(n / total * math.log(n / total) for n in counts.values())
    assert corpus.unigram_entropy_nats == pytest.approx(entropy, abs=1e-12)
    assert corpus.target_vocab.shape == (corpus.tokenizer.vocab_size,)
    assert set(np.flatnonzero(corpus.target_vocab)) == set(counts)


def test_pairs_left_out_of_training_are_counted_and_dev_is_never_cut(tmp_path):
    config = files_config(tmp_path)
    texts = {name: read_lines(getattr(config, name)) for name in NAMES}
    for side in ("src", "tgt"):
        texts[f"train_{side}"][7] = "der erste Mai, " * 60
        for name in ("train", "dev", "test"):
            texts[f"{name}_{side}"][3] = " "
        texts[f"dev_{side}"][5] = "der erste Mai, " * 60
    texts["train_tgt"][9] = ""
    for name in NAMES:
        Path(getattr(config, name)).write_text("".join(f"{line}\n" for line in texts[name]))
    _, corpus = prepare(config, tmp_path / "data")
    left_out = json.loads((corpus.folder / "manifest.json").read_text())["pairs"]
    assert left_out == {"read": 300, "kept": 297, "left out": {"empty side": 2, "too long": 1}}
    assert re.findall(r"\d+", corpus.facts["Training pairs"])[:4] == ["297", "300", "2", "1"]
    assert corpus.dev_text.source == texts["dev_src"]
    assert corpus.test_text.target == texts["test_tgt"]
    assert corpus.dev.source[3] == []
    assert len(corpus.dev.source[5]) > config.max_len


def test_max_len_counts_the_end_of_the_sentence(tmp_path):
    config = files_config(tmp_path)
    _, corpus = prepare(config, tmp_path / "data")
    source, target = corpus.train.lengths
    longest = int(max(source.max(), target.max()))
    for max_len, kept in ((longest + 1, 300), (longest, np.sum(np.maximum(source, target) < longest))):
        _, corpus = prepare(replace(config, max_len=max_len), tmp_path / "data")
        assert len(corpus.train) == kept


def test_prepared_once_and_found_again(tmp_path):
    config = files_config(tmp_path)
    filled, corpus = prepare(config, tmp_path / "data")
    stamp = (corpus.folder / "tokenizer.json").stat().st_mtime_ns
    time.sleep(0.01)
    assert prepare(filled, tmp_path / "data")[1].folder == corpus.folder
    assert (corpus.folder / "tokenizer.json").stat().st_mtime_ns == stamp
    loaded = Corpus.load(corpus.folder)
    assert loaded.train.source[5] == corpus.train.source[5]
    assert loaded.unigram_entropy_nats == corpus.unigram_entropy_nats
    other, corpus = prepare(replace(config, vocab_size=140), tmp_path / "data")
    assert other.digest == filled.digest
    assert corpus.folder != loaded.folder


def test_what_a_killed_process_left_is_done_again(tmp_path):
    config = files_config(tmp_path)
    _, corpus = prepare(config, tmp_path / "data")
    for damage in ("manifest.json", "dev.src.txt"):
        (corpus.folder / damage).unlink()
        with pytest.raises(FileNotFoundError, match=corpus.folder.name):
            Corpus.load(corpus.folder)
        assert len(prepare(config, tmp_path / "data")[1].dev_text) == 20
    os.truncate(corpus.folder / "train.src.tokens.npy", 100)
    assert len(prepare(config, tmp_path / "data")[1].train.source[299]) > 3


def test_a_file_that_was_changed_is_made_again_and_each_is_read_once(tmp_path, monkeypatch):
    read, whole = [], corpora.sha256_of
    monkeypatch.setattr(corpora, "sha256_of", lambda path: read.append(path.name) or whole(path))
    config = files_config(tmp_path)
    _, corpus = prepare(config, tmp_path / "data")
    tokens = corpus.folder / "train.src.tokens.npy"
    good = tokens.read_bytes()
    read.clear()
    prepare(config, tmp_path / "data")
    assert sorted(read) == sorted(p.name for p in corpus.folder.iterdir() if p.name != "manifest.json")
    tokens.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    prepare(config, tmp_path / "data")
    assert tokens.read_bytes() == good


def test_what_killed_preparations_left_is_deleted_and_no_other_process_is_disturbed(tmp_path):
    data, host = tmp_path / "data", socket.gethostname()
    names = f"{host}-x1y2", f"{host}-z3a4", "far-away-x1y2"
    dead, alive, elsewhere = (data / f".0123456789ab-{name}" for name in names)
    for place in (dead, alive, elsewhere):
        place.mkdir(parents=True)
        (place / "train.src.tokens.npy").write_bytes(b"half of it")
    with corpora._locked(alive):
        _, corpus = prepare(files_config(tmp_path), data)
    assert sorted(p.name for p in data.iterdir()) == sorted([alive.name, elsewhere.name, corpus.folder.name])


def test_two_at_once(tmp_path):
    config = files_config(tmp_path)
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda _: prepare(config, tmp_path / "data"), range(4)))
    assert len({corpus.folder for _, corpus in results}) == 1
    assert all(len(corpus.train) == 300 for _, corpus in results)
    assert len(list((tmp_path / "data").iterdir())) == 1


def test_digest_is_of_the_text_alone(tmp_path):
    config = files_config(tmp_path)
    packed = {}
    for name in NAMES:
        packed[name] = str(tmp_path / f"{name}.xz")
        lines = read_lines(getattr(config, name))
        with lzma.open(packed[name], "wt", encoding="utf-8", newline="\r\n") as stream:
            stream.write("\n".join(lines))
    digest = prepare(config, tmp_path / "data")[0].digest
    assert prepare(replace(config, **packed), tmp_path / "data")[0].digest == digest

    swapped = replace(config, train_src=config.train_tgt, train_tgt=config.train_src)
    assert prepare(swapped, tmp_path / "data")[0].digest != digest


def test_a_changed_text_is_not_taken_for_the_old_one(tmp_path):
    config, _ = prepare(files_config(tmp_path), tmp_path / "data")
    lines = read_lines(config.test_tgt)
    Path(config.test_tgt).write_text("\n".join(["changed", *lines[1:]]))
    with pytest.raises(ValueError, match="digest"):
        prepare(config, tmp_path / "data")
    assert prepare(replace(config, digest=""), tmp_path / "data")[0].digest != config.digest


@pytest.mark.parametrize("side", ["src", "tgt"])
def test_a_text_that_changes_meanwhile_is_refused(tmp_path, monkeypatch, side):
    config = files_config(tmp_path)
    path = Path(getattr(config, f"train_{side}"))

    def learn(*args):
        found = vocabulary(*args)
        lines = read_lines(path)
        path.write_text("".join(f"{line}\n" for line in [*lines[:-1], lines[-1] + " more"]))
        return found

    monkeypatch.setattr(module, "vocabulary", learn)
    with pytest.raises(ValueError, match=rf"train_{side}\.txt changed"):
        prepare(config, tmp_path / "data")
    assert list((tmp_path / "data").iterdir()) == []


def test_without_test_text_dev_serves(tmp_path):
    config = files_config(tmp_path, test_src="", test_tgt="")
    _, corpus = prepare(config, tmp_path / "data")
    assert corpus.test_text == corpus.dev_text
    assert corpus.facts["Test text"] == "none given, so the dev text"


@pytest.mark.parametrize(
    ("without", "flags"),
    [
        (["dev_src", "dev_tgt"], "also give --dev-src, --dev-tgt"),
        (["test_tgt"], "also give --test-tgt"),
        (["train_src", "train_tgt"], "also give --train-src, --train-tgt"),
    ],
)
def test_missing_files_are_asked_for(tmp_path, without, flags):
    with pytest.raises(ValueError, match=flags):
        prepare(files_config(tmp_path, **dict.fromkeys(without, "")), tmp_path / "data")


def test_no_pair_left(tmp_path):
    with pytest.raises(ValueError, match=r"\b300 .*\b300 are longer"):
        prepare(files_config(tmp_path, max_len=3), tmp_path / "data")
    assert list((tmp_path / "data").iterdir()) == []


@pytest.mark.slow
@pytest.mark.skipif(
    not Path(os.environ.get("NORMLAB_DATA", "-"), "multi30k").is_dir(),
    reason="needs Multi30k in $NORMLAB_DATA/multi30k",
)
def test_multi30k_is_prepared_in_seconds_and_padded_little(tmp_path):
    from normlab.lab.data.batches import PairBatches
    from normlab.lab.data.shapes import plan_shapes

    folder = Path(os.environ["NORMLAB_DATA"], "multi30k")
    sets = {"train": "train", "dev": "val", "test": "test2016"}
    paths = {
        f"{name}_{side}": str(folder / f"{sets[name]}.{'de' if side == 'src' else 'en'}.xz")
        for name in sets
        for side in ("src", "tgt")
    }
    start = time.monotonic()
    _, corpus = prepare(DataConfig(**paths, vocab_size=8000), tmp_path)
    assert time.monotonic() - start < 20, "usually 2.5 s"
    assert (len(corpus.train), len(corpus.dev), len(corpus.test_text)) == (29_000, 1014, 1000)
    batches = PairBatches(corpus.train, plan_shapes(corpus.train, 4096), seed=1)
    real = positions = 0
    for step in range(batches.steps_per_epoch):
        batch = batches.at(step)
        real += batch.tokens + int((batch.source != PAD).sum())
        positions += batch.source.numel() + batch.target_in.numel()
    assert real / positions > 0.9
