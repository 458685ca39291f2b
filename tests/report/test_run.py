import re
from pathlib import Path

import pytest

from normlab.lab.comparison.result import Comparison
from normlab.lab.config import Config
from normlab.lab.runs.folder import RunFolder, Status
from normlab.report.run import run_page
from normlab.report.runs import marks
from normlab.report.runs import view as view_of
from report.shown import alarms


def test_a_run_that_trained(comparison: Comparison, root: Path) -> None:
    html = run_page(root / comparison.recipes[2].runs[0])
    assert "trained: BLEU 36.7 " in html
    assert "7,200 target tokens" in html


def test_a_run_that_diverged(comparison: Comparison, root: Path) -> None:
    html = run_page(root / comparison.recipes[0].trials[2].run)
    assert "diverged at step 800" in html


@pytest.mark.parametrize(
    ("state", "words"),
    [("running", "is running"), ("interrupted", "was interrupted"), ("failed", "ended in an error")],
)
def test_a_run_without_an_outcome(tmp_path: Path, state: str, words: str) -> None:
    folder = RunFolder.create(tmp_path / "r", Config(recipe="pre"))
    with folder.lock():  # who holds it is alive
        folder.set_status(Status(state=state, step=7, error="disk full" if state == "failed" else ""))
        html = run_page(folder.path)
    assert f"{words} (step 7)" in html
    assert ("disk full" in html) == (state == "failed")


def test_a_forced_run_is_marked_with_the_reason(tmp_path: Path) -> None:
    config = Config(recipe="deepnorm+smallinit", forced="beta is a gain on Xavier")
    folder = RunFolder.create(tmp_path / "r", config)
    (alarm,) = alarms(run_page(folder.path))
    assert config.forced in alarm
    view = view_of(tmp_path, "r")
    assert marks(view) == ["forced"]
    assert "Forced" not in run_page(RunFolder.create(tmp_path / "s", Config()).path)


def test_no_run_there(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=re.escape(f"{tmp_path}/none")):
        run_page(tmp_path / "none")
