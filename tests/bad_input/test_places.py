"""Files that are no regular ones: what a person names is written to, what lies in a run folder is refused."""

from __future__ import annotations

import os
import re
import stat
import threading
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest

from bad_input.damage import MODEL
from bad_input.prompt import GOOD, lacking, refused
from normlab.base.files import write_output, write_text_atomic
from normlab.cli.main import main


@contextmanager
def kept(descriptor: int) -> Generator[None]:
    """Put a descriptor back after the block."""
    saved = os.dup(descriptor)
    try:
        yield
    finally:
        os.dup2(saved, descriptor)
        os.close(saved)


def test_what_is_no_regular_file_is_written_to_and_stays(tmp_path, monkeypatch):
    device, target, link, pipe = (tmp_path / name for name in ("null", "target", "link", "pipe"))
    device.symlink_to(os.devnull)
    write_output(device, "lost")
    assert device.is_char_device()
    assert Path(os.devnull).is_char_device()
    link.symlink_to(target)
    for text in ("new", "newer"):
        write_output(link, text)
        assert link.is_symlink()
        assert target.read_text() == text
    os.mkfifo(pipe)
    read = list[str]()
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()))
    reader.start()
    write_output(pipe, "through")
    reader.join()
    assert read == ["through"]
    assert pipe.is_fifo()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["link", "null", "pipe", "target"]


@pytest.mark.parametrize("write", [write_output, write_text_atomic])
def test_a_file_keeps_its_mode(tmp_path, write):
    path = tmp_path / "a.txt"
    path.write_text("old")
    path.chmod(0o600)
    write(path, "new")
    assert path.read_text() == "new"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_standard_output_by_its_name_goes_on_after_what_was_printed(tmp_path):
    file = tmp_path / "out.txt"
    file.write_text("before\n")
    with kept(1):
        with file.open("ab") as stream:
            os.dup2(stream.fileno(), 1)
        write_output(Path("/dev/stdout"), "translation\n")
        write_output(file, "the file itself\n")
    assert file.read_text() == "before\ntranslation\nthe file itself\n"


def test_a_page_goes_where_it_is_named(run, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("normlab.report.run.run_page", lambda path: "a page")
    (tmp_path / "page").symlink_to(tmp_path / "there.html")
    assert main(["run", "report", str(run), "--page", "page"]) == 0
    assert (tmp_path / "there.html").read_text() == "a page"
    assert main(["run", "report", str(run), "--page", os.devnull]) == 0
    assert Path(os.devnull).is_char_device()
    capsys.readouterr()


@pytest.mark.parametrize("name", ["config.json", MODEL, "new.txt", "last/new.txt"])
@pytest.mark.parametrize("words", ["run translate {run} dev_src.txt --output", "run report {run} --page"])
def test_no_output_goes_into_a_run_folder(run, tmp_path, capsys, words, name):
    typed = [word.replace("{run}", str(run)) for word in words.split()]
    (tmp_path / "link").symlink_to((run / name).absolute())
    for place in (str(run / name), "link"):
        assert not lacking(refused([*typed, place], capsys), f"{place} | {run.name} | outside of run folders")


def test_no_output_replaces_an_input(run, tmp_path, capsys):
    (tmp_path / "table.tsv").write_text("de\ten\nein\tone\n")
    (tmp_path / "link").symlink_to(tmp_path / "dev_src.txt")
    (tmp_path / "comparison.json").write_text("{}")
    (tmp_path / "p.jsonl").write_text("{}\n")
    translate, same = ["run", "translate", str(run)], "an input of this command, and its output too"
    for words in (
        [*translate, "dev_tgt.txt", "dev_src.txt", "--output", "dev_src.txt"],
        [*translate, "dev_src.txt", "--output", "link"],
        [*translate, "table.tsv#de", "--output", "table.tsv"],
        ["run", "report", "comparison.json", "--page", "comparison.json"],
        ["run", "report", "--runs", ".", "--page", "comparison.json"],
        ["run", "report", "p.jsonl", "--page", "p.jsonl"],
    ):
        assert not lacking(refused(words, capsys), f"{words[-1]} | {same}")


def test_no_output_replaces_standard_input(run, tmp_path, capsys):
    before = (tmp_path / "dev_src.txt").read_bytes()
    with (tmp_path / "dev_src.txt").open("rb") as text, kept(0):
        os.dup2(text.fileno(), 0)
        said = refused(["run", "translate", str(run), "--output", "dev_src.txt"], capsys)
    assert re.search(r"dev_src\.txt .*\binput\b", said)
    assert (tmp_path / "dev_src.txt").read_bytes() == before


def test_a_page_goes_to_standard_output_by_its_path_and_not_by_a_dash(run, tmp_path, capsys, monkeypatch):
    sentence = refused(["run", "report", str(run), "--page", "-"], capsys)
    assert not lacking(sentence, "'-' | --page /dev/stdout")
    monkeypatch.setattr("normlab.report.run.run_page", lambda path: "a page")
    standard_output = tmp_path / "out.txt"
    with standard_output.open("wb") as stream, kept(1):
        os.dup2(stream.fileno(), 1)
        assert main(["run", "report", str(run), "--page", "/dev/stdout"]) == 0
    assert standard_output.read_text() == "a page"


VICTIM = "not of this run"


@pytest.mark.parametrize("name", ["lock", "log.txt", "metrics.jsonl", "run.html"])
def test_a_symlink_in_a_run_folder_is_not_followed(run, tmp_path, capsys, name):
    victim = tmp_path / "victim"
    victim.write_text(VICTIM)
    (run / name).unlink(missing_ok=True)
    (run / name).symlink_to(victim.resolve())
    said = refused(["run", "report", str(run)] if name == "run.html" else GOOD, capsys)
    assert name in said
    assert victim.read_text() == VICTIM


@pytest.mark.parametrize(
    "name", ["lock", "log.txt", "metrics.jsonl", "status.json", "scores.json", "run.html"]
)
def test_a_pipe_in_a_run_folder_is_refused_and_holds_up_nobody(run, capsys, name):
    (run / name).unlink(missing_ok=True)
    os.mkfifo(run / name)
    shown = name in ("metrics.jsonl", "run.html")
    command = ["run", "report", str(run)] if shown else ["train", "--config", str(run / "config.json")]
    if name == "scores.json":
        assert main(["run", "list"]) == 0
        said = capsys.readouterr().out
    else:
        assert main(command) == 2
        said = capsys.readouterr().err
    assert f"{run / name} " in said
    assert "pipe" in said
