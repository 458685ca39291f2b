"""No room or no permission in the middle of a checkpoint: the last one stays whole, the run goes on later."""

from __future__ import annotations

import json
import os
import resource
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from safetensors.torch import load_file

from bad_input.damage import MODEL
from bad_input.disk import small_disk
from bad_input.prompt import GOOD, lacking
from normlab.cli.main import main
from normlab.lab.runs import RunFolder
from normlab.lab.runs.manifest import read_state

WORDS = [*GOOD, "--checkpoint-every-steps", "1"]
"""Checkpoints of the steps 1 to 4."""
STOPPED = 3


@contextmanager
def stopped_by(monkeypatch: pytest.MonkeyPatch, trouble: Callable[[Path], None]) -> Iterator[None]:
    """Do this to the run's folder when its third checkpoint has just begun."""
    count, sync = [0], RunFolder.sync_rows

    def begun(self: RunFolder) -> None:
        sync(self)
        count[0] += 1
        if count[0] == STOPPED:
            trouble(self.path)

    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "sync_rows", begun)
        yield
    assert count == [STOPPED], "it stopped there"


def whole_and_of_step_two(run: Path) -> None:
    assert read_state(run / "last", run=run.name)["progress"]["step"] == STOPPED - 1
    assert load_file(run / MODEL)
    assert not (run / "last.new").exists(), "what nobody can use takes no room"


def same_end(run: Path, trained: Path) -> bool:
    return (run / MODEL).read_bytes() == (trained / run.name / MODEL).read_bytes()


def only_run(runs: Path) -> Path:
    (config,) = runs.glob("*/config.json")
    return config.parent


@pytest.mark.slow
def test_a_limit_to_the_size_of_files(place, trained, capsys, monkeypatch):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    limit = (trained / only_run(trained).name / MODEL).stat().st_size - 1

    def limited(run: Path) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))

    try:
        with stopped_by(monkeypatch, limited):
            assert main(WORDS) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    run = only_run(Path("runs"))
    said = capsys.readouterr().err.splitlines()[-1]
    assert not lacking(said, f"File too large | '{run}/last.new/model.safetensors'")
    assert json.loads((run / "status.json").read_text())["state"] == "failed"
    whole_and_of_step_two(run)
    assert main(WORDS) == 0
    assert same_end(run, trained)


@pytest.mark.slow
def test_a_disk_that_is_full_by_then(place, trained, capsys, monkeypatch):
    with small_disk(place, "8m") as disk:
        filler = disk / "filler"

        def filled(run: Path) -> None:
            with suppress(OSError), filler.open("wb", buffering=0) as file:
                while True:
                    file.write(bytes(1 << 12))

        words = [*WORDS, "--out", str(disk)]
        with stopped_by(monkeypatch, filled):
            assert main(words) == 2
        said = capsys.readouterr().err.splitlines()[-1]
        run = only_run(disk)
        filler.unlink()
        assert not lacking(said, f"No space left on device | '{run}/last.new | make room | same command")
        whole_and_of_step_two(run)
        assert main(words) == 0
        assert same_end(run, trained)


@pytest.mark.slow
def test_a_folder_that_may_no_longer_be_written(texts, trained, capsys, monkeypatch):
    with tempfile.TemporaryDirectory() as folder:
        for path in texts.glob("*.txt"):
            (Path(folder) / path.name).write_bytes(path.read_bytes())
        Path(folder).chmod(0o777)
        monkeypatch.chdir(folder)
        user = os.geteuid()
        if user == 0:  # root may do everything, so somebody else runs it
            os.seteuid(65534)
        try:
            with stopped_by(monkeypatch, lambda run: run.chmod(0o555)):
                assert main(WORDS) == 2
            run = only_run(Path("runs"))
            said = capsys.readouterr().err.splitlines()[-1]
            assert not lacking(said, f"Permission denied | '{run}/last.new' | chmod")
            whole_and_of_step_two(run)
            run.chmod(0o755)
            assert main(WORDS) == 0
        finally:
            os.seteuid(user)
        assert same_end(run, trained)
