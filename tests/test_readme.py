"""The README's commands and its Python, run as they stand but at smoke size."""

from __future__ import annotations

import doctest
import json
import os
import re
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

import forked
from normlab.base.io import to_json
from normlab.cli import presets
from normlab.cli.main import COMMANDS as KNOWN
from normlab.cli.main import main
from normlab.lab.config import Config
from normlab.lab.data.builtin import generate
from normlab.lab.runs import Runs
from normlab.lab.training import timing
from normlab.lab.training.timing import Seconds

HOME = Path(__file__).resolve().parents[1]
README = (HOME / "README.md").read_text(encoding="utf-8")
FRONT, _, REFERENCE = README.partition("\n# Reference\n")
SMALL = (
    "--steps 3 --dim 16 --ffn-dim 32 --heads 2 --encoder-layers 1 --decoder-layers 1 --vocab-size 150 "
    "--validate-every-steps 3 --max-tokens 512 --threads 1"
)
SCRIPT = """
import torch
from torch import nn

import normlab


class Block(nn.Module):
    def __init__(self, dim=32):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(dim), nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(
            nn.LayerNorm(dim), nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim)
        )

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (4, -1)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(x)


class Decoder(nn.Module):
    def __init__(self, vocabulary=64, dim=32):
        super().__init__()
        self.words, self.places = nn.Embedding(vocabulary, dim), nn.Embedding(16, dim)
        self.blocks = nn.Sequential(*(Block(dim) for _ in range(3)))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, vocabulary, bias=False)

    def forward(self, ids):
        return self.head(self.norm(self.blocks(self.words(ids) + self.places.weight[: ids.shape[1]])))


def loss(model, ids):
    return nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


def setup(width=32, seed=0):
    torch.manual_seed(seed)
    model, ids = Decoder(dim=width), torch.randint(0, 64, (4, 17))
    return normlab.Setup(model, ids, loss=loss, optimizer=lambda m: torch.optim.AdamW(m.parameters()))


if __name__ == "__main__":
    import argparse

    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=2)
    rows = parser.parse_args().batch_size
    model = Decoder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(10):
        optimizer.zero_grad()
        loss(model, torch.randint(0, 64, (rows, 17))).backward()
        optimizer.step()
"""
"""A training script of somebody's, without a mistake."""


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.DOTALL | re.MULTILINE)


COMMANDS = [line for block in blocks("bash") for line in block.splitlines()]


@pytest.fixture
def texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with small texts and a training script of the README's names, made the current one."""
    splits = generate("mixed-de-en", pairs=200, seed=3)
    for name, pairs in (("train", splits.train), ("dev", splits.dev), ("test", splits.test)):
        for side, lines in (("de", pairs.source), ("en", pairs.target), ("txt", pairs.target)):
            (tmp_path / f"{name}.{side}").write_text(
                "\n".join(lines if name == "train" else lines[:20]) + "\n"
            )
    (tmp_path / "train.py").write_text(SCRIPT)
    scores = "base,1,3.31\nbase,2,3.29\nbase,3,3.30\nqknorm,1,3.21\nqknorm,2,3.18\nqknorm,3,3.20\n"
    (tmp_path / "scores.csv").write_text(f"change,seed,val_loss\n{scores}")
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    sys.modules.pop("train", None)


def test_the_front_is_short_and_shows_commands_output_and_pictures():
    assert len(re.sub(r"```.*?```", "", FRONT, flags=re.DOTALL).split()) <= 500
    pictures = re.findall(r"!\[[^]]+\]\(([^)]+)\)", FRONT)
    assert [(HOME / path).stat().st_size < 150_000 for path in pictures] == [True, True]


def test_every_command_is_shown_once_at_least():
    assert {shlex.split(c)[1] for c in COMMANDS} == {name.split()[0] for name in KNOWN}
    assert len(blocks("python")) == 5


def first_two(words: list[str]) -> list[str]:
    """The same command with the first two values of each option that has more."""
    kept, values = [], 0
    for word in words:
        values = 0 if word.startswith("--") else values + 1
        if values <= 2:
            kept.append(word)
    return kept


def smaller(words: list[str]) -> list[str]:
    """The same command at smoke size."""
    if "train.py" in words:
        return words
    if "train.py:setup" in words:
        fewer = {
            "trial": ["--steps", "16", "--rates", "1e-3"],
            "transfer": ["--steps", "16", "--budget", "2s"],
            "diagnose": ["--preset", "cheap"],
        }
        return [*first_two(words), *fewer.get(words[0], [])]
    if "--train-text" in words:
        return [
            *words,
            "--plan",
            *SMALL.split(),
            *"--vocab-size 300 --encoder-layers 0 --block-len 32".split(),
        ]
    if words[0] in ("compare", "train", "check", "diagnose") and "RUN" not in words:
        return [*words, *SMALL.split()]
    if words[0] == "transfer":
        return [*first_two(words), *SMALL.split(), "--steps", "16", "--budget", "2s"]
    return [*words, *SMALL.split(), "--steps", "16"] if words[0] == "trial" else words


def measured_in_a_fork(config: Config, root: Path, setups: Sequence[str]) -> Seconds:
    """Time a run as ``timing`` does in a process of its own, which need not import torch here."""
    with TemporaryDirectory() as folder:
        files = [Path(folder, name) for name in ("in", "out", "err")]
        files[0].write_text(to_json(config))
        began = time.time()
        code = forked.exit_code(_measure, root, *setups, cwd=Path.cwd(), env=os.environ, files=files)
        assert code == 0, files[2].read_text()
        seconds = Seconds(**json.loads(files[1].read_text()))
    return replace(seconds, start=seconds.start - began)  # the process says when it was ready


def _measure(*arguments: object) -> None:
    sys.argv[1:] = map(str, arguments)
    timing.main()


@pytest.mark.slow
def test_every_command_works_in_order(
    texts: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(timing, "_in_process", measured_in_a_fork)
    for command in COMMANDS:
        words = smaller(shlex.split(command)[1:])
        if words[0] == "compare" and "--plan" not in words:
            assert main([*words, "--plan"]) == 0, (command, capsys.readouterr().err)
            words = first_two(words)
        if "RUN" in words:
            trained = next(run for run in Runs("runs") if run.config().recipe == "admin")
            words[words.index("RUN")] = trained.path.name
        assert main(words) == 0, (command, capsys.readouterr().err)
    assert len(list(Runs("runs"))) == 2 * 2 + 2 * 5 + 1 + 1
    assert len((texts / "test.hyp").read_text().splitlines()) == 20
    assert '<section id="differences">' in (texts / "runs" / "comparison.html").read_text()


@pytest.mark.slow
def test_the_examples_of_the_front_run_and_print_what_is_shown(
    texts: Path, capsys: pytest.CaptureFixture[str]
):
    first, watch = re.findall(r"^```python\n(.*?)^```", FRONT, re.DOTALL | re.MULTILINE)
    (texts / "train.py").write_text(first)
    command = shlex.split(blocks("bash")[0])
    with pytest.raises(SystemExit, match="3"):
        main(command[1:])
    shown = blocks("text")[0].replace("…", "...")
    assert doctest.OutputChecker().check_output(shown, capsys.readouterr().out, doctest.ELLIPSIS)
    assert (texts / "check.html").exists()
    known: dict = {}
    exec(first, known)  # noqa: S102 (the README's own code)
    with pytest.warns(UserWarning, match="causality"):  # the watch finds the planted leak, too
        exec(watch, known)  # noqa: S102 (the README's own code)
    assert known["watch"].page.exists()


def test_a_result_has_a_page(texts: Path, capsys: pytest.CaptureFixture[str]):
    exec(blocks("python")[2], {})  # noqa: S102 (the README's own code)
    assert capsys.readouterr().out == "diagnosis.html True\n"


@pytest.mark.slow
def test_the_python_works(texts: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    whole = presets.demo()

    def small() -> Config:
        model = replace(whole.model, dim=16, ffn_dim=32, heads=2, encoder_layers=1, decoder_layers=1)
        train = replace(whole.train, steps=3, precision="fp32", dev_decode_sentences=10)
        data = replace(whole.data, builtin_pairs=300)
        return replace(whole, model=model, train=train, data=data, decode=replace(whole.decode, beam=2))

    monkeypatch.setattr(presets, "demo", small)
    exec(blocks("python")[3], {})  # noqa: S102 (the README's own code)
    printed = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in printed[:2]] == ["post", "pre"]
    assert (texts / "runs" / "comparison.html").stat().st_size < 5_000_000


def test_the_network_of_ones_own_works(capsys: pytest.CaptureFixture[str]):
    exec(blocks("python")[4], {})  # noqa: S102 (the README's own code)
    omega, shape = capsys.readouterr().out.splitlines()
    assert omega.startswith("tensor(")
    assert "'5': " in omega
    assert shape == "torch.Size([8, 10, 32])"
