"""Flags of docs/training.md: what they set, what is said afterwards, and the page's own commands."""

from __future__ import annotations

import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
import tyro

from lab.training.tiny import tiny, tiny_language_model, write_plain, write_text
from normlab.base.io import to_json
from normlab.cli.main import COMMANDS, main
from normlab.cli.train import TrainCommand
from normlab.lab.runs import RunFolder, Runs
from normlab.lab.training.train import train
from normlab.report.run import run_page

PAGE = (Path(__file__).parents[2] / "docs" / "training.md").read_text(encoding="utf-8")
LINES = [
    line
    for block in re.findall(r"^```bash\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    for line in block.splitlines()
]


def test_a_language_models_recipe_for_another_task_is_said(capsys):
    for config, said in (("demo", True), ("language_model", False)):
        args = ["--config", config, "--recipe", "like:llama", "--precision", "fp32"]
        tyro.cli(TrainCommand, args=args, default=TrainCommand.defaults(args)).resolved()
        assert ("--config language_model" in capsys.readouterr().err) == said


def test_flags_are_fields_of_the_configuration(tmp_path):
    words = (
        "--average-last 3 --early-stopping-patience 20 --stop-lr 1e-6 --decay-factor 0.5 --decay-patience 2"
    )
    words += " --decay-patience 2 --keep-checkpoints log --tensorboard --init-from abc"
    args = words.split()
    config = tyro.cli(TrainCommand, args=args, default=TrainCommand.defaults(args)).resolved()
    assert (config.train.average_last, config.train.early_stopping_patience, config.train.init_from) == (
        3,
        20,
        "abc",
    )
    assert (config.optim.stop_lr, config.optim.decay_factor, config.optim.decay_patience) == (1e-6, 0.5, 2)
    assert (config.machine.keep_checkpoints, config.machine.tensorboard) == ("log", True)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A folder with a run that was stopped early and has an average of its last weights."""
    root = tmp_path_factory.mktemp("training")
    config = tiny(write_text(root / "text"), steps=50, validate_every_steps=2, dev_decode_sentences=2)
    config = replace(config, train=replace(config.train, average_last=2, early_stopping_patience=1))
    config = replace(config, machine=replace(config.machine, keep_checkpoints="log"))
    (root / "config.json").write_text(to_json(config))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("normlab.lab.tasks.translation.Translation.dev_nlls", lambda self, model: (2.0, 1.0))
        patch.setattr("normlab.lab.tasks.translation.Translation.dev_bleu", lambda self, model: 1.0)
        train(config, root / "runs")
    return root


@pytest.fixture
def folder(runs, monkeypatch) -> RunFolder:
    monkeypatch.chdir(runs)
    return next(iter(Runs("runs")))


def said(capsys, *words):
    capsys.readouterr()
    code = main(list(words))
    out, err = capsys.readouterr()
    return code, out, err


@pytest.mark.slow
def test_a_finished_run_says_both_scores_and_why_it_ended(folder, runs, capsys):
    ended = "ended at step 4: a validation brought no new best dev score"
    code, out, _ = said(capsys, "train", "--config", "config.json", "--out", "runs")
    assert code == 0
    assert ended in out.splitlines()
    assert re.search("^best checkpoint: step 2, dev .*\ntest BLEU [0-9.]+, chrF", out, re.MULTILINE)
    assert re.search("^average of steps 2, 4: dev BLEU 1.0\nits test BLEU [0-9.]+, chrF", out, re.MULTILINE)
    _, out, _ = said(capsys, "run", "list")
    assert f"{folder.path.name}: {ended}" in out
    page = run_page(folder.path)
    assert ended[0].upper() + ended[1:] in page
    assert "average of" in page


@pytest.mark.slow
def test_an_edited_average_is_named(folder, runs, capsys):
    state = folder.average / "state.json"
    whole = state.read_text()
    state.write_text(whole.replace('"steps"', '"stepps"'))
    code, _, err = said(capsys, "train", "--config", "config.json", "--out", "runs")
    state.write_text(whole)
    assert code == 2
    assert str(state) in "".join(err.split())


@pytest.mark.slow
def test_translate_says_which_weights_it_uses(folder, runs, capsys):
    run, text = folder.path.name, str(runs / "text" / "test_src.txt")
    for words, which in (
        ([], "the average of the weights after steps 2, 4"),
        (["--weights", "best"], "the best weights on dev, after step 2"),
        (["--weights", "last"], "the weights after step 4"),
        (["--step", "1"], "the weights after step 1"),
    ):
        code, out, err = said(capsys, "run", "translate", run, text, *words)
        assert (code, err) == (0, f"translating with {which}\n")
        assert len(out.splitlines()) == 30
        if not words:
            assert out == folder.outputs.read_text()
        if words == ["--weights", "best"]:
            assert out == folder.best_outputs.read_text()
    assert said(capsys, "run", "translate", run, text, "--step", "1", "--weights", "last") == (
        2,
        "",
        "normlab: --step is 1 and --weights last, and both name weights; leave one out\n",
    )
    code, _, err = said(capsys, "run", "translate", run, text, "--step", "3")
    assert code == 2
    assert re.search(r"\bstep 3;.* 0, 1, 2, 4;", err)


@pytest.mark.slow
def test_a_start_from_another_run_is_said(folder, runs, capsys):
    words = ["--config", "config.json", "--out", "runs", "--steps", "1", "--encoder-layers", "2"]
    code, out, _ = said(capsys, "train", *words, "--init-from", folder.path.name[:8])
    assert code == 0
    first = out.splitlines()[0]
    assert first.startswith(f"starts from the average weights of {folder.path.name}: ")
    assert ": encoder.sublayers.2." in first


def test_a_step_without_a_run_is_refused(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert said(capsys, "diagnose", "--step", "4") == (
        2,
        "",
        "normlab: --step is for a run; name the run, as in normlab diagnose RUN --step\n",
    )


def test_the_page_has_a_command_of_each_kind():
    assert {shlex.split(line)[1] for line in LINES} == {"train", "compare", "run", "diagnose"}
    assert {name.split()[0] for name in COMMANDS} >= {shlex.split(line)[1] for line in LINES}


@pytest.mark.slow
def test_the_commands_of_the_page_work(tmp_path, monkeypatch):
    pytest.importorskip("tensorboard")
    small = tiny(write_text(tmp_path / "text"), steps=3, validate_every_steps=1, dev_decode_sentences=2)
    (tmp_path / "small.json").write_text(to_json(small))
    plain = tiny_language_model(write_plain(tmp_path / "plain"), steps=3, validate_every_steps=1)
    plain = replace(plain, optim=replace(plain.optim, warmup_steps=1))
    (tmp_path / "plain.json").write_text(to_json(plain))
    (tmp_path / "test.de").write_bytes((tmp_path / "text" / "test_src.txt").read_bytes())
    monkeypatch.chdir(tmp_path)
    latest = ""
    for line in LINES:
        _, command, *words = shlex.split(line.replace("RUN", latest).replace("language_model", "plain.json"))
        if command == "train":
            before = {folder.path.name for folder in Runs("runs")}
            words = ["--config", "small.json", "--seed", "2", *words]
        assert main([command, *words]) == 0, line
        if command == "train" and "plain.json" not in words:
            (latest,) = {folder.path.name for folder in Runs("runs")} - before
    assert (tmp_path / "runs" / latest / "diagnosis-step-0.html").exists()
    assert list((tmp_path / "runs" / latest / "tensorboard").iterdir())
