import json
from pathlib import Path

import pytest

from normlab.lab.comparison.result import Comparison
from normlab.lab.config import Config, OptimConfig
from normlab.lab.runs.folder import RunFolder
from normlab.report import runs
from normlab.report.page import Code, Details, PageTable


def test_a_run_is_read(comparison: Comparison, root: Path) -> None:
    trial = comparison.recipes[1].trials[1]
    seen = runs.view(root, trial.run)
    assert seen.problem == ""
    assert seen.config is not None
    assert seen.config.optim.lr == trial.lr
    assert (seen.outcome, runs.seed_of(seen)) == ("trained", "0")
    assert seen.scores["chrf"] == pytest.approx(seen.scores["bleu"] + 20.0)
    frame = runs.run_frame(seen, "train", ("nll", "lr"))
    assert frame.columns == ["step", "nll", "lr"]
    assert len(frame) == 80


def test_a_missing_folder_and_a_damaged_one(tmp_path: Path) -> None:
    assert runs.view(tmp_path, "none").problem
    folder = RunFolder.create(tmp_path / "torn", Config())
    (folder.path / "status.json").write_text("{", encoding="utf-8")
    torn = runs.view(tmp_path, "torn")
    assert "status.json" in torn.problem
    assert torn.outcome == "missing"
    assert "missing" in runs.run_details(torn, {}).summary


def test_a_run_that_has_only_begun(tmp_path: Path) -> None:
    RunFolder.create(tmp_path / "new", Config())
    seen = runs.view(tmp_path, "new")
    assert (seen.problem, seen.outcome, seen.best) == ("", "new", "")
    assert runs.run_frame(seen, "dev", ("bleu",)).is_empty()


def test_what_differs_and_what_does_not(tmp_path: Path) -> None:
    for name, lr in (("a", 1e-3), ("b", 2e-3)):
        RunFolder.create(tmp_path / name, Config(recipe=name, optim=OptimConfig(lr=lr)))
    views = [runs.view(tmp_path, name) for name in ("a", "b")]
    common = runs.shared(views)
    assert "optim.lr" not in common
    assert common["model.dim"] == "256"
    assert common["optim.betas"] == "0.9 0.98"
    assert not any(key.startswith("machine") or key == "recipe" for key in common)
    (table,) = [b for b in runs.run_details(views[0], common).blocks if isinstance(b, PageTable)]
    assert [[cell.text for cell in row] for row in table.rows] == [["optim.lr", "0.001"]]


def test_the_exact_configuration_is_there(comparison: Comparison, root: Path) -> None:
    run = comparison.recipes[0].runs[0]
    details = runs.run_details(runs.view(root, run), {})
    assert details.anchor == f"run-{run}"
    (code,) = [b.text for b in details.blocks if isinstance(b, Code)]
    assert code == f"normlab train --config {root}/{run}/config.json --out again"
    (exact,) = [b.blocks[0] for b in details.blocks if isinstance(b, Details)]
    assert isinstance(exact, Code)
    assert json.loads(exact.text) == json.loads((root / run / "config.json").read_text("utf-8"))


@pytest.mark.parametrize(
    ("root", "shown"),
    [
        ("out/runs", "out/runs/ab/config.json"),
        (".", "ab/config.json"),
        ("../runs", "../runs/ab/config.json"),
        ("{here}/out/runs", "out/runs/ab/config.json"),
        ("/other/runs", "/other/runs/ab/config.json"),
        ("my runs", "'my runs/ab/config.json'"),
    ],
)
def test_the_command_that_repeats_a_run_finds_it_from_here(
    root: str, shown: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = Path(root.format(here=tmp_path)) / "ab"
    content = {"imports": ["own.lanes"]}
    monkeypatch.setattr("normlab.lab.runs.folder.read_json", lambda path: content)
    command = RunFolder(folder).repeat_command()
    assert command == f"normlab train --config {shown} --out again --import own.lanes"
