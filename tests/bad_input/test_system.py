"""What the system refuses: no space, no permission, somebody else in the folder, a closed terminal."""

from __future__ import annotations

import errno
import itertools
import os
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest
from safetensors import SafetensorError

from bad_input.damage import MODEL
from bad_input.disk import small_disk
from bad_input.prompt import GOOD, lacking, refused
from normlab.base import files, locks
from normlab.cli.main import main
from normlab.lab.data.ragged import ArrayWriter
from normlab.lab.runs import RunFolder
from normlab.lab.training import checkpoint

HOLD = """
import fcntl, sys
with open(sys.argv[1], "w") as file:
    fcntl.flock(file, fcntl.LOCK_EX)
    file.write(sys.argv[2])
    file.flush()
    print(flush=True)
    input()
"""

IN_TERMINAL = """
import fcntl, sys, termios
from normlab.cli.main import main
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
sys.exit(main())
"""


def full(*args: object, **kwargs: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def safetensors_full(*args: object, **kwargs: object) -> None:
    raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")


# ----------------------------------------------------------------------------------------------- no space


@pytest.mark.slow
@pytest.mark.parametrize(
    ("where", "name", "fails", "file"),
    [
        (files.os, "fsync", full, r"runs/\w{12}/config\.json"),
        (checkpoint, "save_file", safetensors_full, r"runs/\w{12}/best\.new/model\.safetensors"),
        (files, "row_line", full, r"runs/\w{12}/metrics\.jsonl"),
        (ArrayWriter, "append", full, r"runs/data/\w{12}"),
    ],
    ids=["a file", "a checkpoint", "a line of metrics", "the prepared data"],
)
def test_a_full_disk_stops_the_run_and_the_same_command_goes_on(
    place, trained, capsys, monkeypatch, where, name, fails, file
):
    if where is files.os:  # the same os as everybody's: only the run's own files
        monkeypatch.setattr(files, "os", _Full())
    else:
        monkeypatch.setattr(where, name, fails)
    said = refused(GOOD, capsys)
    monkeypatch.undo()
    monkeypatch.chdir(place)
    assert re.match(f"No space left on device: '{file}'; make room", said)
    assert main(GOOD) == 0
    assert _weights(Path("runs")) == _weights(trained)


class _Full:
    """The module ``os`` on a full disk."""

    fsync = staticmethod(full)

    def __getattr__(self, name: str) -> object:
        return getattr(os, name)


@pytest.mark.slow
def test_a_really_full_disk(place, trained, capsys):
    with small_disk(place, "160k") as disk:
        words = [*GOOD, "--out", str(disk)]
        assert main(words) == 2
        said = capsys.readouterr().err.splitlines()[-1]
        assert not lacking(said, f"No space left on device | '{disk}/ | make room")
        subprocess.run(["mount", "-o", "remount,size=8m", str(disk)], check=True)
        assert main(words) == 0
        assert _weights(disk) == _weights(trained)


def _weights(runs: Path) -> bytes:
    (path,) = runs.glob(f"*/{MODEL}")
    return path.read_bytes()


# ------------------------------------------------------------------------------------------- no permission


def test_no_permission(texts, capsys, monkeypatch):
    with tempfile.TemporaryDirectory() as folder:
        for path in texts.glob("*.txt"):
            (Path(folder) / path.name).write_bytes(path.read_bytes())
        (Path(folder) / "dev_src.txt").chmod(0)
        Path(folder).chmod(0o555)
        monkeypatch.chdir(folder)
        with _nobody():
            assert main(GOOD) == 2
            assert main([*GOOD, "--dev-src", "dev_tgt.txt"]) == 2
    for name, said in zip(("dev_src.txt", "runs"), capsys.readouterr().err.splitlines(), strict=True):
        assert not lacking(said, f"Permission denied | '{name}' | chmod | chown")


class _nobody:
    """Root may do everything, so somebody else runs the block."""

    def __enter__(self) -> None:
        self.user = os.geteuid()
        if self.user == 0:
            os.seteuid(65534)

    def __exit__(self, *error: object) -> None:
        os.seteuid(self.user)


# ------------------------------------------------------------------------------------- somebody else is there


@pytest.mark.slow
def test_another_process_is_in_the_folder(run, trained, capsys):
    here = socket.gethostname()
    command = [sys.executable, "-S", "-c", HOLD, str(run / "lock"), f"{here} 4712"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert not lacking(refused(GOOD, capsys), f"another process | {run} | 4712 | {here}")
        process.kill()
    assert main(GOOD) == 0
    assert _weights(Path("runs")) == _weights(trained)


def test_another_host_is_in_the_folder(run, capsys, monkeypatch):
    """Its lock does not reach this host, and its clock goes backwards: only the file is touched."""
    monkeypatch.setattr(locks, "_WATCH_SECONDS", 5.0)
    lock, stop = run / "lock", threading.Event()
    lock.write_text("far-away 77")

    def touch() -> None:
        for seconds in itertools.count(1_000_000_000, -60):
            if stop.wait(0.02):
                return
            os.utime(lock, (seconds, seconds))

    toucher = threading.Thread(target=touch)
    toucher.start()
    said = refused(GOOD, capsys)
    stop.set()
    toucher.join()
    assert not lacking(said, f"another process | {run} | 77 | far-away")
    assert lock.read_text() == "far-away 77", "it is theirs"


def test_a_host_that_is_gone_is_waited_for_and_followed(run, trained, monkeypatch):
    monkeypatch.setattr(locks, "_WATCH_SECONDS", 0.1)
    (run / "lock").write_text("far-away 77")
    assert main(GOOD) == 0
    assert _weights(Path("runs")) == _weights(trained)
    assert (run / "lock").read_text() == ""


def test_whoever_is_in_a_folder_says_so_and_shows_that_it_lives(tmp_path, monkeypatch):
    monkeypatch.setattr(locks, "_BEAT_SECONDS", 0.01)
    lock = tmp_path / "lock"
    with RunFolder(tmp_path).lock():
        assert lock.read_text() == f"{socket.gethostname()} {os.getpid()}"
        os.utime(lock, (0, 0))
        until = time.monotonic() + 5
        while lock.stat().st_mtime == 0 and time.monotonic() < until:
            time.sleep(0.01)
        assert lock.stat().st_mtime > 0
    assert lock.read_text() == ""


# --------------------------------------------------------------------------------------- clock and terminal


@pytest.mark.slow
def test_a_clock_that_is_set_back_changes_nothing(place, trained, monkeypatch):
    hours = itertools.count(2_000_000_000, -3600)
    monkeypatch.setattr(time, "time", lambda: float(next(hours)))
    monkeypatch.setattr(time, "time_ns", lambda: next(hours) * 10**9)
    assert main(GOOD) == 0
    assert _weights(Path("runs")) == _weights(trained)
    (made,) = (RunFolder(path.parent) for path in Path("runs").glob("*/config.json"))
    seconds = [row["seconds"] for row in made.metrics()]
    assert seconds == sorted(seconds)
    assert seconds[0] > 0


@pytest.mark.slow
def test_a_closed_terminal_saves_the_run(place):
    """The terminal is gone for good, so that every word to it fails; the same command goes on elsewhere."""
    steps = GOOD.index("--steps") + 1
    words = [*GOOD[:steps], "4000", *GOOD[steps + 1 :]]
    terminal, theirs = os.openpty()
    command = [sys.executable, "-c", IN_TERMINAL, *words]
    with subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True
    ) as process:
        os.close(theirs)
        seen = b""
        while b"loss" not in seen:
            seen += os.read(terminal, 1 << 16)
        os.close(terminal)
        assert process.wait(60) == 130
    (made,) = (RunFolder(path.parent) for path in Path("runs").glob("*/config.json"))
    assert made.status().state == "interrupted"
    assert 0 < made.status().step < 4000
    assert (made.path / MODEL).exists()
