"""The prompt itself: help without torch, sentences instead of tracebacks, exit codes."""

import errno
import re
import subprocess
import sys

import pytest

from cases import each
from normlab.cli import errors
from normlab.cli.main import COMMANDS, OVERVIEW, load, main
from normlab.cli.recipes import RecipesCommand


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (["traim"], "there is not a command 'traim', did you mean 'train'"),
        (["compare", "--config", "dem"], "did you mean 'demo'"),
        (["compare", "--config", "missing/config.json"], "there is no file missing/config.json"),
        (["compare", "--lrs"], "at least one of lrs, but got none"),
        (["compare", "--seeds", "0"], "seeds must be at least 1, got 0"),
        (["run", "translate", "abc", "--runs", "nowhere"], "no runs in nowhere; make one: normlab train"),
        (["run", "score", "missing.txt", "missing.txt"], "missing.txt"),
        (
            ["run", "report", "--runs", "nowhere"],
            "no comparison in nowhere/comparison.json; make one: normlab compare",
        ),
    ],
)
def test_a_mistake_is_one_sentence_and_exit_code_2(args, sentence, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert main(args) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("normlab: ")
    assert said.err.count("\n") == 1
    assert sentence in said.err


@pytest.mark.parametrize(
    "args", [["compare", "--precision", "fp8"], ["train", "--no-such"], ["run", "score"]]
)
def test_a_mistake_that_the_parser_sees_exits_with_2(args, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(args)
    assert stopped.value.code == 2
    assert "Traceback" not in capsys.readouterr().err


def test_an_unknown_recipe_names_the_nearest(capsys, tmp_path):
    assert main(["train", "--recipe", "pree", "--out", str(tmp_path)]) == 2
    assert "mean 'pre'" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_debugging_shows_where_it_comes_from(capsys, monkeypatch):
    monkeypatch.setenv("NORMLAB_DEBUG", "1")
    assert main(["traim"]) == 2
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code", "sentence"),
    [
        (KeyboardInterrupt(), 130, "\nstopped\n"),
        (PermissionError(13, "Permission denied", "runs"), 2, "Permission denied: 'runs'"),
    ],
)
def test_what_stops_a_command_is_said(error, code, sentence, capsys, monkeypatch):
    def fail(self):
        raise error

    monkeypatch.setattr(RecipesCommand, "run", fail)
    assert main(["recipes"]) == code
    assert sentence in capsys.readouterr().err


@each(
    ("error", "beginning"),
    [
        (
            RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 112 bytes."),
            "out of memory for 112 bytes more; ",
        ),
        (
            RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity"),
            "out of memory for 2.00 GiB more; ",
        ),
        (MemoryError(), "out of memory; "),
    ],
)
@each(("command", "flag"), [("translate", "--beam"), ("train", "--max-tokens"), ("diagnose", "--tokens")])
def test_too_little_memory_is_said_with_what_to_lower(error, beginning, command, flag, capsys):
    assert errors.report(error, [command]) == errors.USAGE_ERROR
    sentence = capsys.readouterr().err
    assert sentence.startswith(f"normlab: {beginning}")
    assert flag in sentence
    assert sentence.count("\n") == 1  # so there is no traceback


def test_a_missing_folder_is_named_and_one_that_is_there_is_not_made(tmp_path, capsys, monkeypatch):
    def said(path):
        error = FileNotFoundError(errno.ENOENT, "No such file or directory", str(path))
        assert errors.report(error, ["train"]) == errors.USAGE_ERROR
        return capsys.readouterr().err

    assert f" -p {tmp_path}/a\n" in said(tmp_path / "a" / "b")
    assert "mkdir" not in said(tmp_path / "b")
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert "current folder" in said("runs")


def test_another_error_of_torch_is_not_one_of_memory(capsys):
    assert errors.report(RuntimeError("size mismatch"), ["train"]) == errors.BUG
    told = capsys.readouterr().err
    assert "RuntimeError: size mismatch" in told
    assert "memory" not in told


def test_what_is_not_utf8_is_refused(capsys):
    # Python writes a byte of an argument that is not UTF-8 as a surrogate like this one
    assert main(["run", "translate", "abc", "--prefix", "\udce4"]) == 2
    said = capsys.readouterr().err
    assert "'\\udce4'" in said
    assert "UTF-8" in said


@each(
    ("command", "flags", "goes_on"),
    [
        ("compare", ["--config", "demo"], True),
        ("train", ["--config", "demo"], True),
        ("explain", [], False),
        ("recipes", [], False),
        ("run list", [], False),
        ("papers list", [], False),
    ],
)
def test_only_what_trains_goes_on_where_it_was_stopped(command, flags, goes_on, capsys, monkeypatch):
    def stop(self):
        raise KeyboardInterrupt

    monkeypatch.setattr(load(command), "run", stop)
    assert main([*command.split(), *flags]) == 130
    told = capsys.readouterr().err
    assert "stopped" in told
    assert ("the same command continues it" in told) is goes_on


@pytest.mark.slow
def test_a_reader_that_stops_early_is_no_error():
    script = "import sys; from normlab.cli.main import main; sys.exit(main(['recipes']))"
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as run:
        assert run.stdout is not None
        assert run.stderr is not None
        run.stdout.close()
        assert run.stderr.read() == b""


def test_the_overview_names_every_command(capsys):
    assert main([]) == 0
    assert capsys.readouterr().out.rstrip() == OVERVIEW
    words = re.split(r"[^a-z]+", OVERVIEW)
    assert {word for name in COMMANDS for word in name.split()} <= set(words)
    assert len(re.findall(r"^  [a-z]+ ", OVERVIEW, re.MULTILINE)) == 13


@pytest.mark.parametrize(
    "name", ["check", "trial", "diagnose", "train", "compare", "run", "papers reproduce"]
)
def test_a_bare_command_says_what_to_type_and_does_nothing(name, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert main(name.split()) == 2
    said = capsys.readouterr()
    assert f"normlab {name} " in said.err
    assert said.out == ""
    assert list(tmp_path.iterdir()) == []


def test_every_command_has_help(capsys):
    for name in COMMANDS:
        with pytest.raises(SystemExit) as stopped:
            main([*name.split(), "--help"])
        assert stopped.value.code == 0
        text = capsys.readouterr().out
        assert text.startswith(f"usage: normlab {name}")
        assert "{None}" not in text


@pytest.mark.parametrize("args", [["--help"], ["compare", "--help"], ["--version"]])
def test_help_imports_nothing_heavy(args):
    heavy = {"torch", "altair", "polars", "jinja2", "sacrebleu", "numpy"}
    heavy |= set() if "compare" in args else {"pydantic"}  # which reads the configuration of the defaults
    script = (
        "import sys; from normlab.cli.main import main\n"
        f"try: main({args})\n"
        "except SystemExit: pass\n"
        f"print('heavy:', *{heavy} & sys.modules.keys())"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "heavy:"


def test_defaults_shown_in_help_are_those_of_the_configuration(capsys):
    from normlab.cli.presets import CONFIGS

    steps = CONFIGS["multi30k"]().train.steps
    assert steps != CONFIGS["demo"]().train.steps
    with pytest.raises(SystemExit):
        main(["train", "--config", "multi30k", "--help"])
    assert f"(default: {steps})" in capsys.readouterr().out
