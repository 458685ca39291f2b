"""BERT at the prompt: pre-train, fine-tune, list, the pages and a diagnosis."""

import pytest

from lab.tasks.test_classification import write_pairs
from lab.training.tiny import write_plain
from normlab.cli.main import main
from normlab.lab.runs import Runs

SMALL = ["--dim", "16", "--ffn-dim", "32", "--heads", "2", "--encoder-layers", "1", "--max-tokens", "256"]
SHORT = ["--block-len", "32", "--steps", "12", "--validate-every-steps", "6", "--warmup-steps", "2"]


@pytest.mark.slow
def test_every_command_copes_with_pre_training_and_fine_tuning(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = write_plain(tmp_path / "text")
    given = ["--train-text", text.train_text, "--dev-text", text.dev_text, "--test-text", text.test_text]
    learn = ["train", "--config", "bert", *given, "--vocab-size", "80", *SMALL, *SHORT]
    assert main([*learn, "--recipe", "pre"]) == 0
    printed = capsys.readouterr().out
    assert "\ntest masked-LM NLL " in printed
    assert ", masked accuracy " in printed
    (pretrained,) = Runs(tmp_path / "runs")
    assert main(["diagnose", "--config", "bert", *given, "--vocab-size", "80", *SMALL, *SHORT[:2]]) in (0, 3)
    assert main(["diagnose", pretrained.path.name]) in (0, 3)

    pairs = write_pairs(tmp_path)
    tuned = [
        "train",
        "--train-pairs",
        pairs["train_pairs"],
        "--test-pairs",
        pairs["test_pairs"],
        *SMALL,
        *SHORT,
    ]
    capsys.readouterr()
    assert main([*tuned, "--recipe", "pre", "--init-from", pretrained.path.name, "--out", "tuned"]) == 2
    assert "no run" in capsys.readouterr().err
    assert main([*tuned, "--recipe", "pre", "--init-from", str(pretrained.path), "--out", "tuned"]) == 0
    assert "test accuracy " in capsys.readouterr().out
    (folder,) = Runs(tmp_path / "tuned")
    assert folder.config().task == "classification"
    assert main(["run", "list", "--runs", "tuned"]) == 0
    for run in (pretrained, folder):
        assert main(["run", "report", str(run.path)]) == 0
        assert "test text" in (run.path / "run.html").read_text()

    again = ["compare", *learn[1:], "--recipes", "pre", "post", "--lrs", "1e-3", "--seeds", "2"]
    assert main([*again, "--jobs", "1", "--exchanges", "100", "--out", "compared"]) == 0
    assert "masked-LM NLL" in (tmp_path / "compared" / "comparison.html").read_text()
