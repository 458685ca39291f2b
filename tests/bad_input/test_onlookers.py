"""A run whose terminal leaves, or that starts without one, in a folder whose files are somebody else's."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from bad_input.damage import MODEL
from bad_input.prompt import GOOD, runs_made
from normlab.cli.main import keep_streams, main
from normlab.lab.runs import RunFolder

NORMLAB = [sys.executable, "-m", "normlab"]


@pytest.mark.slow
def test_a_run_outlives_its_terminal_and_the_reader_of_its_output(place):
    """``nohup normlab train 2>&1 | head -1``, and the terminal is closed."""
    steps = GOOD.index("--steps") + 1
    words = [*GOOD[:steps], "40", *GOOD[steps + 1 :]]
    with subprocess.Popen(
        ["nohup", *NORMLAB, *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as process:
        assert process.stdout is not None
        while b"running" not in process.stdout.readline():
            pass
        process.stdout.close()
        process.send_signal(signal.SIGHUP)
        assert process.wait(600) == 0
    (name,) = runs_made()
    status = RunFolder(Path("runs") / name).status()
    assert (status.state, status.step) == ("done", 40)


@pytest.mark.slow
def test_a_run_needs_no_standard_streams_and_executes_no_file_of_its_folder(place, trained):
    for name in ("tokenizers.py", "torch.py", "typing_extensions.py"):
        Path(name).write_text("open('executed', 'w')\nraise SystemExit(3)\n")
    closed = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh"]
    assert subprocess.run([*closed, *NORMLAB, *GOOD], check=False).returncode == 0
    assert not Path("executed").exists()
    (name,) = runs_made()
    assert (Path("runs") / name / MODEL).read_bytes() == (trained / name / MODEL).read_bytes()


def test_output_goes_nowhere_once_its_reader_is_gone(monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.setattr(sys, "stderr", None)
    kept = os.dup(1), os.dup(2)
    try:
        read, write = os.pipe()
        os.dup2(write, 1)
        os.close(write)
        os.close(2)
        keep_streams()
        sys.stdout.write("heard\n")
        sys.stdout.flush()
        said = os.read(read, 100)
        os.close(read)
        for stream in (sys.stdout, sys.stderr):
            stream.write("x" * 100_000)
            stream.flush()
            assert not stream.isatty()
    finally:
        for descriptor, before in enumerate(kept, start=1):
            os.dup2(before, descriptor)
            os.close(before)
    assert said == b"heard\n"


def test_a_full_disk_is_still_an_error_of_what_is_printed(monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.setattr(sys, "stderr", sys.stderr)
    kept = os.dup(1)
    try:
        full = os.open("/dev/full", os.O_WRONLY)
        os.dup2(full, 1)
        os.close(full)
        keep_streams()
        failed = ""
        try:
            sys.stdout.write("lost\n")
            sys.stdout.flush()
        except OSError as error:
            failed = str(error)
            os.dup2(kept, 1)
            sys.stdout.flush()
    finally:
        os.dup2(kept, 1)
        os.close(kept)
    assert os.strerror(errno.ENOSPC) in failed


@pytest.mark.slow
def test_a_signal_that_is_ignored_stays_ignored(place, trained):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert main(GOOD) == 0
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
