"""A language model at the prompt: train, replay, list, its page, and what is refused."""

import io

from rich.console import Console

from normlab.cli.main import main
from normlab.cli.progress import Progress
from normlab.spec.config import Config
from normlab.store import Runs
from training.tiny import write_plain

SMALL = ["--dim", "16", "--ffn-dim", "32", "--heads", "2", "--decoder-layers", "1", "--max-tokens", "256"]
SHORT = ["--vocab-size", "80", "--block-len", "16", "--steps", "12", "--validate-every-steps", "6"]


def test_every_command_copes_with_a_language_model(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = write_plain(tmp_path / "text")
    given = ["--train-text", text.train_text, "--dev-text", text.dev_text, "--test-text", text.test_text]
    assert main(["train", *given, "--recipe", "pre+rope+swiglu+warmup", *SMALL, *SHORT]) == 0
    printed = capsys.readouterr()
    assert "best checkpoint: step 12, dev perplexity " in printed.out
    assert "\ntest perplexity " in printed.out
    assert " bits a byte\n" in printed.out
    assert "best perplexity " in printed.err

    (folder,) = Runs(tmp_path / "runs")
    config = folder.config()
    assert (config.task, config.model.encoder_layers, config.model.positions) == ("language_model", 0, "rope")
    assert (config.model.encoder_placement, config.model.decoder_placement) == ("pre", "pre")
    assert main(["train", "--config", f"runs/{folder.path.name}/config.json", "--out", "again"]) == 0
    assert (tmp_path / "again" / folder.path.name / "scores.json").read_bytes() == folder.scores.read_bytes()
    capsys.readouterr()

    assert main(["runs"]) == 0
    assert capsys.readouterr().out.splitlines()[1].count("perplexity ") == 2
    assert main(["report", folder.path.name]) == 0
    page = (folder.path / "run.html").read_text()
    assert "Dev perplexity" in page
    assert "On the test text" in page
    assert "BLEU" not in page.partition("<main>")[2].partition('<section id="run-')[0]

    assert main(["translate", folder.path.name, text.test_text]) == 2
    assert "translates nothing" in capsys.readouterr().err
    assert main(["compare", *given, "--recipes", "pre", "--out", "compared"]) == 2
    assert "a comparison scores translations" in capsys.readouterr().err
    assert main(["train", *given, "--config", "demo"]) == 2
    assert "--train-text is for the task language_model" in capsys.readouterr().err
    assert main(["train", *given, *SMALL, "--recipe", "enc:post/dec:pre"]) == 2
    assert "name one placement for both" in capsys.readouterr().err


def test_the_live_table_has_a_column_for_what_there_is():
    def header(row):
        progress = Progress(Console(file=io.StringIO(), width=200))
        progress.watch_one(Config())(row)
        return [str(column.header).replace("\n", " ") for column in progress.table(5).columns]

    perplexity = header({"kind": "dev", "step": 1, "nll": 2.0, "seconds": 1.0})
    bleu = header({"kind": "dev", "step": 1, "nll": 2.0, "bleu": 3.0, "seconds": 1.0})
    assert ("best perplexity" in perplexity, "best BLEU" in perplexity) == (True, False)
    assert ("best perplexity" in bleu, "best BLEU" in bleu) == (False, True)
