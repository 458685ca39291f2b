"""The phase of a run stands in its status while it goes on, and no longer."""

from __future__ import annotations

import pytest

from lab.training.tiny import tiny
from normlab.lab.runs import RunFolder
from normlab.lab.training import progress
from normlab.lab.training.train import train


@pytest.fixture
def seen(monkeypatch):
    """Every phase that a status named, with the share that was done."""
    write, found = RunFolder.set_status, []

    def noted(self, status):
        found.append((status.phase, status.phase_done))
        write(self, status)

    monkeypatch.setattr(RunFolder, "set_status", noted)
    return found


def test_validations_and_the_test_are_named_with_the_share_that_is_done(text, tmp_path, monkeypatch, seen):
    monkeypatch.setattr(progress, "EVERY_SECONDS", 0.0)
    folder = train(tiny(text, steps=2, validate_every_steps=2), tmp_path)
    names = [name for name, _ in seen]
    assert list(dict.fromkeys(names)) == ["", "validating", "translating", "testing", "scoring"]
    assert names.index("validating") < names.index("translating") < names.index("testing")
    shares = [share for name, share in seen[names.index("testing") :] if name == "translating"]
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    status = folder.status()
    assert (status.state, status.phase, status.phase_done) == ("done", "", None)


@pytest.mark.slow
def test_short_phases_are_not_written_one_by_one(text, tmp_path, monkeypatch, seen):
    monkeypatch.setattr(progress, "EVERY_SECONDS", 3600.0)
    train(tiny(text, steps=6, validate_every_steps=1), tmp_path)
    assert [name for name, _ in seen if name] == ["validating", "testing"]


def test_a_run_that_fails_is_in_no_phase(text, tmp_path, monkeypatch):
    from normlab.lab.tasks.translation import Translation

    error = RuntimeError("out of memory")

    def broken(self, model):
        self.advance("translating", 0.5)
        raise error

    monkeypatch.setattr(progress, "EVERY_SECONDS", 0.0)
    monkeypatch.setattr(Translation, "dev_scores", broken)
    with pytest.raises(RuntimeError) as raised:
        train(tiny(text, steps=2), tmp_path)
    assert raised.value is error
    (folder,) = (RunFolder(p.parent) for p in tmp_path.glob("*/config.json"))
    assert (folder.status().state, folder.status().phase) == ("failed", "")
