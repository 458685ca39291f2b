"""The commands and the Python of docs/data.md, run as they stand but at smoke size."""

from __future__ import annotations

import json
import os
import re
import shlex
from pathlib import Path

import pytest

from normlab.cli.main import main
from normlab.lab.data.builtin import generate
from normlab.lab.data.sentencepiece_model import SentencePieces
from normlab.lab.runs import Runs

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "data.md").read_text(encoding="utf-8")
SMALL = (
    "--steps 2 --dim 16 --ffn-dim 32 --heads 2 --encoder-layers 1 --decoder-layers 1 --vocab-size 150 "
    "--validate-every-steps 2 --max-tokens 512 --threads 1"
).split()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)


COMMANDS = [line for block in blocks("bash") for line in block.splitlines()]


def write(path: Path, lines: list[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{line}\n" for line in lines), "utf-8")


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with everything that the page names, small, made the current one."""
    datasets = pytest.importorskip("datasets", reason="needs normlab[hf]")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    splits = generate("mixed-de-en", pairs=60, seed=3)
    text = {
        name: list(zip(pairs.source[:60], pairs.target[:60], strict=True))
        for name, pairs in vars(splits).items()
    }
    text = {name: pairs if name == "train" else pairs[:4] for name, pairs in text.items()}
    write(tmp_path / "pairs.tsv", ["de\ten", *("\t".join(pair) for pair in text["train"])])
    write(tmp_path / "dev.tsv", ["\t".join(pair) for pair in text["dev"]])
    for name, pairs in text.items():
        for number, (gl, de) in enumerate((("gl", "de"), ("en", "en"))):
            lines = [pair[number] for pair in pairs]
            write(tmp_path / "sets" / "ted.gl-en" / f"{name}.{gl}", lines)
            for split in {"dev": ["val"], "test": ["test2016", "test2017"]}.get(name, [name]):
                write(tmp_path / "sets" / "multi30k" / f"{split}.{de}", lines)
        rows = [json.dumps({"translation": {"de": pair[0], "en": pair[1]}}) for pair in pairs]
        split = {"dev": "validation"}.get(name, name)
        write(tmp_path / "iwslt2017" / "iwslt2017-de-en" / f"{split}.jsonl", rows)
    rows = [json.dumps({"sentence1": "a", "sentence2": "b", "label": i % 2}) for i in range(4)]
    write(tmp_path / "glue" / "rte" / "validation.jsonl", rows)
    for folder, config in (("iwslt2017", "iwslt2017-de-en"), ("glue", "rte")):
        card = ["---", "configs:", f"- config_name: {config}", f"  data_dir: {config}", "---"]
        write(tmp_path / folder / "README.md", card)
    (tmp_path / "spm.model").write_bytes(
        SentencePieces.train([t for p in text["train"] for t in p], 120)._model
    )
    for name in ("output.zh", "reference.zh"):
        write(tmp_path / name, ["我们今天去北京。"])
    monkeypatch.setenv("NORMLAB_DATA", str(tmp_path / "sets"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.slow
def test_every_command_works(place: Path, capsys: pytest.CaptureFixture[str]):
    trained = 0
    for command in COMMANDS:
        words = [os.path.expandvars(word) for word in shlex.split(command)[1:]]
        small = [*SMALL, "--probes", ""] if words[0] == "train" else []
        assert main([*words, *small]) == 0, (command, capsys.readouterr().err)
        trained += words[0] == "train"
    assert trained == 8
    assert len(list(Runs(place / "runs"))) == 7, "the same text from a table and a data set is one run"
    assert "tok:zh" in capsys.readouterr().out


def test_the_python_works(place: Path, capsys: pytest.CaptureFixture[str]):
    (code,) = blocks("python")
    exec(code, {})  # noqa: S102 (the page's own code)
    assert capsys.readouterr().out == "4 ['0', '1', '0', '1']\n"
