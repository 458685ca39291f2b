"""A language model at the prompt: train, replay, list, its page, and what is refused."""

import re

import pytest

from lab.training.tiny import write_plain
from normlab.cli.main import main
from normlab.lab.runs import Runs

SMALL = ["--dim", "16", "--ffn-dim", "32", "--heads", "2", "--decoder-layers", "1", "--max-tokens", "256"]
BITS = "bits per byte"
"""What its metric is called."""
SHORT = ["--vocab-size", "300", "--block-len", "16", "--steps", "12", "--validate-every-steps", "6"]


@pytest.mark.slow
def test_every_command_copes_with_a_language_model(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = write_plain(tmp_path / "text")
    given = ["--train-text", text.train_text, "--dev-text", text.dev_text, "--test-text", text.test_text]
    assert main(["train", *given, "--recipe", "pre+rope+swiglu+warmup", *SMALL, *SHORT]) == 0
    printed = capsys.readouterr()
    assert re.search(rf"\bstep 12, dev {BITS} \d", printed.out)
    assert re.search(rf"^test {BITS} \d", printed.out, re.MULTILINE)
    assert f"best {BITS} " in printed.err

    (folder,) = Runs(tmp_path / "runs")
    config = folder.config()
    assert (config.task, config.model.encoder_layers, config.model.position_encoding) == (
        "language_model",
        0,
        "rope",
    )
    assert (config.model.encoder_placement, config.model.decoder_placement) == ("pre", "pre")
    assert main(["train", "--config", f"runs/{folder.path.name}/config.json", "--out", "again"]) == 0
    assert (tmp_path / "again" / folder.path.name / "scores.json").read_bytes() == folder.scores.read_bytes()
    capsys.readouterr()

    assert main(["run", "list"]) == 0
    assert capsys.readouterr().out.splitlines()[1].count(f"{BITS} ") == 2
    assert main(["run", "report", folder.path.name]) == 0
    page = (folder.path / "run.html").read_text()
    assert f"Dev {BITS}" in page
    assert "test text" in page
    assert "BLEU" not in page.partition("<main>")[2].partition('<section id="run-')[0]

    assert main(["run", "translate", folder.path.name, text.test_text]) == 2
    assert "`normlab run sample`" in capsys.readouterr().err
    assert main(["train", *given, "--config", "demo"]) == 2
    assert re.search(r"--train-text .*\blanguage_model\b", capsys.readouterr().err)
    assert main(["train", *given, *SMALL, "--recipe", "enc:post/dec:pre"]) == 2
    assert "enc:post/dec:pre" in capsys.readouterr().err
