"""A run's log: everything that is needed to repeat it."""

from __future__ import annotations

import gzip
import hashlib
import os
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy
import pytest
import sacrebleu
import sentencepiece
import tokenizers
import torch

import normlab
from lab.training.test_train import interrupt_at, without_seconds
from lab.training.tiny import tiny
from normlab.base.io import from_json
from normlab.cli.main import main
from normlab.lab.config import Config, DataConfig
from normlab.lab.data.vocabulary import SentencePieces
from normlab.lab.runs import RunFolder
from normlab.lab.training import log
from normlab.lab.training.jobs import Queue
from normlab.lab.training.train import train

ROOT = Path(__file__).parents[4]


def blocks(folder):
    """The facts of each start by name, and the lines of validations and of the end."""
    starts: list[dict[str, str]] = []
    others: list[str] = []
    for line in folder.log.read_text().splitlines():
        name, colon, value = line.partition(": ")
        if line.startswith("=== ") and " ended " not in line:
            starts.append({"===": line})
        elif colon and not line.startswith(("step ", "=== ")):
            starts[-1][name] = value
        else:
            others.append(line)
    return starts, others


def test_the_log_says_what_a_run_was(text, tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("NORMLAB_DATA", "/some where")
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "avx2")
    monkeypatch.setenv("ONEDNN_VERBOSE", "0")
    config = tiny(text)
    interrupt_at(monkeypatch, 7)
    with pytest.raises(KeyboardInterrupt):
        train(config, tmp_path)
    folder = train(config, tmp_path)
    (first, second), lines = blocks(folder)
    date = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d[+-]\d\d:\d\d"
    assert re.fullmatch(f"=== {date} {folder.path.name} starts", first.pop("==="))
    assert re.fullmatch(f"=== {date} {folder.path.name} goes on from step 7", second.pop("==="))
    assert first == second
    assert first["normlab"].startswith(f"{normlab.__version__}, semantics ")
    versions = {m.__name__: m.__version__ for m in (torch, numpy, tokenizers, sentencepiece, sacrebleu)}
    for name, version in versions.items():
        assert f"{name} {version}" in first["packages"]
    assert sys.version.split()[0] in first["python"]
    assert "torch" in first["hardware"]
    assert (first["threads"], first["precision"]) == ("1", "fp32")
    given = {"NORMLAB_DATA=/some where", "OMP_NUM_THREADS=1", "ATEN_CPU_CAPABILITY=avx2", "ONEDNN_VERBOSE=0"}
    assert given <= set(shlex.split(first["environment"]))
    assert first["seeds"] == "init 1, data 1, dropout 1"
    assert first["data digest"] == folder.config().data.digest
    content = Path(text.train_src).read_bytes()
    digest = hashlib.sha256(content).hexdigest()
    assert first["train_src"] == f"{text.train_src}, {len(content):,} bytes, sha256 {digest}"
    assert from_json(Config, first["config"]) == folder.config()
    count = sum(p.numel() for p in torch.nn.Module.parameters(_model(folder)))
    assert first["parameters"] == f"{count:,}"
    assert re.match(
        r"step 6: dev nll \d\.\d+, bleu [\d.]+, nll_exchanged \d\.\d+, repeated_share [\d.]+, after ",
        lines[0],
    )
    assert lines[1].startswith("step 12: dev nll ")
    assert re.match(f"=== {date} ended at step 12, {folder.status().outcome.state}: ", lines[2])
    assert len(lines) == 3


def test_every_file_of_a_text_is_named_with_its_content(text, tmp_path, monkeypatch):
    """Also in the folder of local sets, packed, and as columns of a table; so is a tokenizer's file."""
    root = tmp_path / "sets"
    root.mkdir()
    monkeypatch.setenv("NORMLAB_DATA", str(root))
    sides = [Path(getattr(text, f"train_{side}")).read_text("utf-8").splitlines() for side in ("src", "tgt")]
    rows = zip(*sides, strict=True)
    (root / "pairs.tsv.gz").write_bytes(gzip.compress("".join(f"{s}\t{t}\n" for s, t in rows).encode()))
    SentencePieces.train(sides[0] + sides[1], 80).save(root / "spm")
    columns = {f"train_{side}": f"$NORMLAB_DATA/pairs.tsv#{k}" for k, side in enumerate(("src", "tgt"), 1)}
    data = replace(text, **columns, tokenizer="$NORMLAB_DATA/spm")
    (block,), _ = blocks(train(tiny(data, steps=1), tmp_path))
    for field, spec, name in (
        *((field, spec, "pairs.tsv.gz") for field, spec in columns.items()),
        ("tokenizer", data.tokenizer, "spm"),
    ):
        content = (root / name).read_bytes()
        digest = hashlib.sha256(content).hexdigest()
        assert block[field] == f"{spec}, {len(content):,} bytes, sha256 {digest}"


def test_a_column_of_a_data_set_is_named_with_the_package_that_reads_it(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets", reason="needs normlab[hf]")
    monkeypatch.setattr(log, "_commit", str)
    spec = "hf:./set#train.de"
    config = replace(tiny(DataConfig()), data=DataConfig(train_src=spec))
    folder = RunFolder.create(tmp_path / "run", config)
    lines = log.facts(folder, config, torch.nn.Linear(1, 1), torch.device("cpu"))
    assert f"train_src: {spec}" in lines
    (packages,) = (line for line in lines if line.startswith("packages: "))
    assert packages.endswith(f", datasets {datasets.__version__}")


def _model(folder):
    from normlab.lab.data.vocabulary import load
    from normlab.lab.tasks.task import build_model
    from normlab.nn import Seq2Seq

    config = folder.config()
    return build_model(Seq2Seq, config.model, load(folder.tokenizer).vocab_size, config.seeds.init)


@pytest.mark.slow
def test_the_command_in_the_log_repeats_the_run(text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = train(tiny(text, steps=4), "runs")
    (block,), _ = blocks(folder)
    assert block["directory"] == str(tmp_path)
    command, *words = shlex.split(block["repeat"])
    assert command == "normlab"
    assert main(words) == 0
    again = type(folder)(tmp_path / "again" / folder.path.name)
    assert without_seconds(again) == without_seconds(folder)
    assert again.scores.read_bytes() == folder.scores.read_bytes()


def test_the_commit_is_named_and_so_is_what_changed_since(text, tmp_path):
    if not (ROOT / ".git").exists():
        pytest.skip("these sources are in no repository")
    folder = train(tiny(text, steps=1), tmp_path)
    (block,), _ = blocks(folder)

    def git(*words):
        return subprocess.run(["git", "-C", ROOT, *words], capture_output=True, text=True).stdout.strip()

    assert f", commit {git('rev-parse', 'HEAD')}" in block["normlab"]


@pytest.mark.slow
def test_a_run_in_a_worker_has_the_same_log(text, tmp_path):
    from normlab.lab.tasks.translation import Translation

    data, _ = Translation.prepare(text, tmp_path / "data")
    queue = Queue(tmp_path, 1)
    queue.add(replace(tiny(text, steps=2), data=data))
    queue.run()
    (folder,) = queue.folders
    (block,), lines = blocks(folder)
    assert {"repeat", "packages", "config", "train_src"} <= block.keys()
    assert lines[-1].split(" ended at step ")[1].startswith("2, ")


@pytest.mark.slow
def test_threads_hold_for_torch_and_for_the_tokenizer(text, tmp_path):
    """In a process of its own, since the tokenizer's pool of threads is made once."""
    if not Path("/proc/self/task").exists():
        pytest.skip("threads are counted in /proc")
    code = """
import os, sys, torch
from pathlib import Path
from dataclasses import replace
from normlab.lab.training.devices import prepare_process
from normlab.lab.config import MachineConfig
import tokenizers
prepare_process(MachineConfig(threads=int(sys.argv[1])))
before = len(os.listdir("/proc/self/task"))
tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
tokenizer.encode_batch_fast(["a b c"] * 1000)
print(torch.get_num_threads(), len(os.listdir("/proc/self/task")) - before)
"""
    environment = {
        k: v for k, v in os.environ.items() if k not in ("RAYON_NUM_THREADS", "TOKENIZERS_PARALLELISM")
    }
    found = {}
    for threads in ("1", "3"):
        words = [sys.executable, "-c", code, threads]
        said = subprocess.run(words, capture_output=True, text=True, check=True, env=environment).stdout
        found[threads] = said.split()
    assert found == {"1": ["1", "1"], "3": ["3", "3"]}
