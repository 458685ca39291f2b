"""A script that is only looked at changes no file that was there, and saves nothing."""

from __future__ import annotations

import atexit
import builtins
import io
import os
import posix
import shutil
import sqlite3
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from normlab.errors import UserError
from normlab.setups.files import KeptFileError
from normlab.setups.script import setup_from_script
from normlab.setups.withheld import saving_withheld
from setups.doors import hashes, script, with_checkpoints

PATCHED = [
    (builtins, "open"),
    (io, "open"),
    (torch, "save"),
    (os, "remove"),
    (os, "unlink"),
    (os, "rename"),
    (os, "replace"),
    (os, "open"),
    (os, "truncate"),
    (os, "rmdir"),
    (os, "mkdir"),
    (os, "utime"),
    (shutil, "rmtree"),
    (atexit, "register"),
    (sqlite3, "connect"),
]


@pytest.mark.slow
@pytest.mark.parametrize("batches", [1, 8])
def test_what_a_script_saves_is_withheld_and_listed(tmp_path, batches):
    folder = with_checkpoints(tmp_path)
    before = hashes(folder)
    with setup_from_script(script("door_saving"), [str(folder), "6"], batches=batches) as named:
        withheld = named.facts["withheld"]
        seen = len(named.setup.batches) if batches > 1 else 1
    assert hashes(folder) == before
    assert f"{folder}/latest.pt in " in withheld
    assert "door_saving.py:" in withheld
    assert seen == min(batches, 6)


def test_what_is_patched_is_put_back_whatever_is_raised():
    before = [getattr(module, name) for module, name in PATCHED]
    finders = list(sys.meta_path)
    with pytest.raises(KeyError), saving_withheld():
        raise KeyError
    assert [getattr(module, name) for module, name in PATCHED] == before
    assert sys.meta_path == finders


def test_a_name_that_was_bound_meanwhile_saves_afterwards(tmp_path):
    with saving_withheld() as withheld:
        save = torch.save
        save({}, tmp_path / "withheld.pt")
    save({}, tmp_path / "saved.pt")
    assert [path.name for path in tmp_path.iterdir()] == ["saved.pt"]
    assert len(withheld.lines) == 1


def test_a_module_that_is_imported_meanwhile_is_withheld(tmp_path, monkeypatch):
    monkeypatch.delitem(sys.modules, "safetensors.torch", raising=False)
    with saving_withheld() as withheld:
        from safetensors.torch import save_file

        save_file({"x": torch.ones(2)}, tmp_path / "x.safetensors")
    assert len(withheld.lines) == 1
    save_file({"x": torch.ones(2)}, tmp_path / "x.safetensors")
    assert (tmp_path / "x.safetensors").is_file()


def test_a_script_reads_what_it_has_written_over_a_file_that_was_there(tmp_path):
    file = tmp_path / "state.txt"
    file.write_text("before\n")
    with saving_withheld() as withheld:
        with file.open("a") as opened:
            opened.write("after\n")
        assert file.read_text() == "before\nafter\n"
    assert file.read_text() == "before\n"
    assert len(withheld.lines) == 1


def test_new_files_are_written_removed_and_renamed(tmp_path):
    with saving_withheld() as withheld:
        (tmp_path / "cache").mkdir()
        (tmp_path / "cache" / "old").write_text("x")
        (tmp_path / "cache" / "old").replace(tmp_path / "new")
        shutil.rmtree(tmp_path / "cache")
    assert [path.name for path in tmp_path.iterdir()] == ["new"]
    assert not withheld.lines


def test_event_files_are_withheld(tmp_path):
    tensorboard = pytest.importorskip("torch.utils.tensorboard")
    with saving_withheld() as withheld:
        writer = tensorboard.SummaryWriter(str(tmp_path / "runs"))
        writer.add_scalar("loss", 1.0, 0)
        writer.flush()
    writer.close()
    assert not hashes(tmp_path)
    assert len(withheld.lines) == 1


def test_distributed_checkpoints_are_withheld(tmp_path):
    import torch.distributed.checkpoint as dcp

    with saving_withheld() as withheld:
        dcp.save({"x": torch.ones(2)}, checkpoint_id=tmp_path / "dcp")
    assert not hashes(tmp_path)
    assert len(withheld.lines) == 1


def write_by_descriptor(path):
    descriptor = os.open(path, os.O_WRONLY | os.O_TRUNC)
    os.write(descriptor, b"after")
    os.close(descriptor)


def move_new_file_over(path):
    new = path.with_name("new")
    new.write_text("after")
    shutil.move(new, path)


def insert_row(path):
    with sqlite3.connect(path) as database:
        database.execute("create table if not exists losses (loss real)")
        database.execute("insert into losses values (1.0)")
    database.close()


def write_through_link(path):
    other = path.with_name("other")
    os.link(path, other)
    other.write_text("after")


WAYS = {
    "os.open": write_by_descriptor,
    "os.truncate": lambda path: os.truncate(path, 0),
    "os.remove": lambda path: os.remove(path=path),
    "pathlib": lambda path: path.write_text("after"),
    "unlink": Path.unlink,
    "replace": move_new_file_over,
    "copy": lambda path: shutil.copy(__file__, path),
    "numpy": lambda path: np.savetxt(path, np.ones(3)),
    "tofile": lambda path: np.ones(3).tofile(path),
    "memmap": lambda path: np.memmap(path, mode="r+").fill(7),
    "jit": lambda path: torch.jit.save(torch.jit.script(torch.nn.Linear(1, 1)), path),
    "jit of a module": lambda path: torch.jit.script(torch.nn.Linear(1, 1)).save(str(path)),
    "sqlite": insert_row,
    "link": write_through_link,
    "touch": lambda path: os.utime(path, (0, 0)),
    "chmod": lambda path: path.chmod(0o600),
}


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_a_file_that_was_there_stays_as_it_is(tmp_path, way):
    file = tmp_path / "data.db"
    insert_row(file)
    file.chmod(0o644)
    before, about = file.read_bytes(), file.stat()
    with saving_withheld() as withheld:
        way(file)
    assert file.read_bytes() == before
    assert (file.stat().st_mtime_ns, file.stat().st_mode) == (about.st_mtime_ns, about.st_mode)
    if way is not write_through_link:  # which only makes a new file
        assert [line for line in withheld.lines if "data.db" in line]


def write_by_posix_open(path):
    descriptor = posix.open(path, os.O_WRONLY)
    os.write(descriptor, b"after")
    os.close(descriptor)


PAST_THE_PATCHES = {
    "open": write_by_posix_open,
    "truncate": lambda path: posix.truncate(path, 0),
    "remove": posix.remove,
    "rename": lambda path: posix.rename(path, f"{path}.old"),
    "second link": lambda path: posix.link(path, f"{path}.too"),
    "io": lambda path: io.FileIO(path, "w").close(),
    "utime": posix.utime,
}


@pytest.mark.parametrize("way", PAST_THE_PATCHES.values(), ids=PAST_THE_PATCHES)
def test_what_no_patch_redirects_is_refused(tmp_path, way):
    file = tmp_path / "log.txt"
    file.write_text("before")
    with saving_withheld() as withheld, pytest.raises(KeptFileError, match=r"log\.txt"):
        way(file)
    assert file.read_text() == "before"
    assert len(withheld.lines) == 1
    posix.remove(file)


def state_of(file):
    """What a change of a file changes: what it holds, and what the system tells of it; None if it is gone."""
    if not file.exists():
        return None
    about = file.stat()
    return file.read_bytes(), about.st_mode, about.st_nlink, about.st_mtime_ns


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
def test_files_of_its_own_are_changed_in_every_way(tmp_path):
    saved_by_torch = ["jit", "jit of a module"]  # which is withheld wherever it goes
    unchanged = []
    with saving_withheld() as withheld:
        for name, way in {**PAST_THE_PATCHES, **WAYS}.items():
            file = tmp_path / name / "data.db"
            file.parent.mkdir()
            insert_row(file)
            os.utime(file, (1, 1))
            before = state_of(file)
            way(file)
            if state_of(file) == before:
                unchanged.append(name)
    assert unchanged == saved_by_torch
    assert [line for line in withheld.lines if not line.startswith(f"{tmp_path}/jit")] == []


def test_what_it_renames_over_a_file_is_read_from_there(tmp_path):
    best = tmp_path / "best.txt"
    best.write_text("before")
    with saving_withheld():
        move_new_file_over(best)
        assert best.read_text() == "after"
        best.unlink()
        with pytest.raises(FileNotFoundError):
            best.read_text()
        with best.open("x") as file:
            file.write("again")
        assert best.read_text() == "again"
    assert [path.read_text() for path in tmp_path.iterdir()] == ["before"]


def test_a_folder_that_it_removes_can_be_made_again(tmp_path):
    folder = tmp_path / "out"
    folder.mkdir()
    (folder / "old").write_text("before")
    with saving_withheld() as withheld:
        shutil.rmtree(folder)
        folder.mkdir()
        (folder / "new").write_text("after")
    assert {path.name for path in folder.iterdir()} == {"old", "new"}
    assert len(withheld.lines) == 1


@pytest.mark.parametrize("target", ["older", "best.pt"])
def test_a_link_that_it_sets_anew_stays_as_it_was(tmp_path, target):
    folder = with_checkpoints(tmp_path)
    (folder / "last").symlink_to(target)
    with saving_withheld():
        for _ in range(2):
            os.remove(folder / "last")
            os.symlink("latest.pt", folder / "last")
    assert os.readlink(folder / "last") == target


def test_an_empty_folder_that_was_there_is_not_removed(tmp_path):
    with saving_withheld():
        tmp_path.rmdir()
        tmp_path.mkdir()
    assert tmp_path.is_dir()


def test_what_is_opened_and_not_changed_is_not_listed(tmp_path):
    lock = tmp_path / "cache.lock"
    lock.touch()
    with saving_withheld() as withheld:
        os.close(os.open(lock, os.O_RDWR | os.O_CREAT | os.O_TRUNC))
    assert not withheld.lines


def test_other_threads_of_the_process_write_their_files(tmp_path):
    begun, ended = threading.Event(), threading.Event()

    def write():
        begun.wait()
        (tmp_path / "log.txt").write_text("after")
        ended.set()

    (tmp_path / "log.txt").write_text("before")
    thread = threading.Thread(target=write)
    thread.start()
    with saving_withheld():
        begun.set()
        ended.wait()
    thread.join()
    assert (tmp_path / "log.txt").read_text() == "after"


AT_EXIT = """
import atexit, os, sys, torch
from normlab.setups.withheld import saving_withheld

name = sys.argv[1]
with saving_withheld():
    from torch import save
    atexit.register(save, {}, name)
    atexit.register(lambda: open(name, "w").write("after"))
    atexit.register(os.remove, name)
atexit.register(print, "ended")
"""


@pytest.mark.slow
def test_nothing_is_saved_when_the_process_ends(tmp_path):
    (tmp_path / "register.py").write_text(AT_EXIT)
    (tmp_path / "ckpt.pt").write_text("before")
    command = [sys.executable, "register.py", "ckpt.pt"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert (ended.stdout, ended.stderr) == ("ended\n", "")
    assert (tmp_path / "ckpt.pt").read_text() == "before"


UNREGISTERED = """
import atexit
from normlab.setups.withheld import saving_withheld

called = []
with saving_withheld():
    atexit.register(called.append, 1)
    atexit.unregister(called.append)
atexit._run_exitfuncs()
assert not called
"""


@pytest.mark.slow
def test_what_is_registered_can_be_unregistered():
    # in a process of its own, as torch takes back operators of its own when exit functions run
    subprocess.run([sys.executable, "-c", UNREGISTERED], check=True)


SCRIPT = """
import sys
from posix import open as open_, O_WRONLY
import torch
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    if step == int(sys.argv[1]):
        open_("log.txt", O_WRONLY)
    model(torch.randn(2, 4)).sum().backward()
    optimizer.step()
"""


def test_a_script_that_is_refused_ends_with_what_was_seen(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(SCRIPT)
    Path("log.txt").write_text("before")
    with pytest.raises(UserError, match=r"log\.txt in train\.py:9"), setup_from_script("train.py", ["0"]):
        pass
    with setup_from_script("train.py", ["1"]) as named:
        assert type(named.setup.model) is torch.nn.Linear
        assert "log.txt" in named.facts["withheld"]
    assert Path("log.txt").read_text() == "before"
