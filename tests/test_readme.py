"""The README's commands and its Python, run as they stand but at smoke size."""

from __future__ import annotations

import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from normlab.cli import presets
from normlab.cli.main import main
from normlab.config.config import Config
from normlab.data.builtin import generate
from normlab.runs import Runs

README = (Path(__file__).resolve().parents[1] / "README.md").read_text(encoding="utf-8")
SMALL = (
    "--steps 3 --dim 16 --ffn-dim 32 --heads 2 --encoder-layers 1 --decoder-layers 1 --vocab-size 150 "
    "--validate-every-steps 3 --max-tokens 512 --threads 1"
)


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.DOTALL | re.MULTILINE)


COMMANDS = [line for block in blocks("bash") for line in block.splitlines()]


@pytest.fixture
def texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with small parallel files of the README's names, made the current one."""
    splits = generate("mixed-de-en", pairs=200, seed=3)
    for name, pairs in (("train", splits.train), ("dev", splits.dev), ("test", splits.test)):
        for side, lines in (("de", pairs.source), ("en", pairs.target)):
            (tmp_path / f"{name}.{side}").write_text(
                "\n".join(lines if name == "train" else lines[:20]) + "\n"
            )
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_readme_has_commands_and_python():
    assert {shlex.split(c)[1] for c in COMMANDS} == {
        "compare",
        "train",
        "translate",
        "score",
        "runs",
        "report",
        "recipes",
        "check",
        "trial",
        "diagnose",
        "fold",
        "papers",
        "reproduce",
    }
    assert len(blocks("python")) == 3


def first_two(words: list[str]) -> list[str]:
    """The same command with the first two values of each option that has more."""
    kept, values = [], 0
    for word in words:
        values = 0 if word.startswith("--") else values + 1
        if values <= 2:
            kept.append(word)
    return kept


def test_every_command_works_in_order(texts: Path, capsys: pytest.CaptureFixture[str]):
    for command in COMMANDS:
        words = shlex.split(command)[1:]
        if words[0] in ("compare", "train", "check", "diagnose") and "RUN" not in words:
            words += SMALL.split()
        if words[0] == "trial":
            words += [*SMALL.split(), "--steps", "16"]
        if words[0] == "compare":
            assert main([*words, "--plan"]) == 0, (command, capsys.readouterr().err)
            words = first_two(words)
        if "RUN" in words:
            trained = next(run for run in Runs("runs") if run.config().recipe == "admin")
            words[words.index("RUN")] = trained.path.name
        assert main(words) == 0, (command, capsys.readouterr().err)
    assert len(list(Runs("runs"))) == 2 * 2 + 2 * 5 + 1 + 1
    assert len((texts / "test.hyp").read_text().splitlines()) == 20
    assert "which differences are real" in (texts / "runs" / "comparison.html").read_text().lower()


def test_the_first_example_prints_what_is_shown(capsys: pytest.CaptureFixture[str]):
    exec(blocks("python")[0], {})  # noqa: S102 (the README's own code)
    assert capsys.readouterr().out == blocks("text")[0]


def test_the_python_works(texts: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    whole = presets.demo()

    def small() -> Config:
        model = replace(whole.model, dim=16, ffn_dim=32, heads=2, encoder_layers=1, decoder_layers=1)
        train = replace(whole.train, steps=3, precision="fp32", dev_decode_sentences=10)
        data = replace(whole.data, builtin_pairs=300)
        return replace(whole, model=model, train=train, data=data, decode=replace(whole.decode, beam=2))

    monkeypatch.setattr(presets, "demo", small)
    exec(blocks("python")[1], {})  # noqa: S102 (the README's own code)
    printed = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in printed[:2]] == ["post", "pre"]
    assert (texts / "runs" / "comparison.html").stat().st_size < 5_000_000


def test_the_network_of_ones_own_works(capsys: pytest.CaptureFixture[str]):
    exec(blocks("python")[2], {})  # noqa: S102 (the README's own code)
    omega, shape = capsys.readouterr().out.splitlines()
    assert omega.startswith("tensor(")
    assert "'5': " in omega
    assert shape == "torch.Size([8, 10, 32])"
