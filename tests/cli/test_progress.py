"""ProgressDisplay reads run folders; these are written as a run writes them."""

import io
import json
import re

import pytest
from rich.console import Console

from normlab.base.metric import Outcome
from normlab.cli.progress import ProgressDisplay, RunBar, Tail
from normlab.lab.config import Config, OptimConfig, SeedConfig, TrainConfig
from normlab.lab.runs import RunFolder, Status
from normlab.lab.tasks.translation import Translation


def config(lr=1e-3, seed=1, steps=100):
    return Config(
        recipe="pre+rmsnorm",
        optim=OptimConfig(lr=lr),
        train=TrainConfig(steps=steps),
        seeds=SeedConfig(seed, seed, seed),
    )


def row(step, loss=3.0, *, norm=0.5, per_step=0.1):
    return {
        "kind": "train",
        "step": step,
        "loss": loss,
        "nll": loss,
        "grad_norm_l2": norm,
        "lr": 1e-3,
        "tokens": 1000 * step,
        "padded_tokens": 1200 * step,
        "seconds": per_step * step,
    }


def dev(step, bleu):
    return {"kind": "dev", "step": step, "nll": 2.0, "bleu": bleu, "seconds": step / 10}


class TestTail:
    def test_a_torn_line_waits_for_its_end(self, tmp_path):
        tail = Tail(tmp_path / "metrics.jsonl")
        assert tail.rows() == (False, [])
        whole, torn = json.dumps(row(1)) + "\n", json.dumps(row(2)) + "\n"
        tail.path.write_text(whole + torn[:20])
        assert tail.rows() == (False, [row(1)])
        assert tail.rows() == (False, [])
        tail.path.write_text(whole + torn)
        assert tail.rows() == (False, [row(2)])

    def test_a_file_cut_back_is_read_anew(self, tmp_path):
        tail = Tail(tmp_path / "metrics.jsonl")
        tail.path.write_text("".join(json.dumps(row(i)) + "\n" for i in (1, 2, 3)))
        assert len(tail.rows()[1]) == 3
        tail.path.write_text(json.dumps(row(1)) + "\n")
        assert tail.rows() == (True, [row(1)])

    def test_a_file_begun_anew_that_is_longer_already_is_read_anew(self, tmp_path):
        tail = Tail(tmp_path / "metrics.jsonl")
        tail.path.write_text(json.dumps(row(1)) + "\n")
        assert tail.rows() == (False, [row(1)])
        again = [row(10), row(200), row(3000)]
        tail.path.write_text("".join(json.dumps(one) + "\n" for one in again))
        assert tail.rows() == (True, again)


class TestRunBar:
    def test_pace_and_what_is_left(self):
        bar = RunBar.of(config(), Translation.metrics)
        bar.state = "running"
        assert bar.remaining_seconds is None
        for step in range(10, 41, 10):
            bar.add(row(step))
        assert bar.tokens_per_second == pytest.approx(1000 / 0.1)
        assert bar.remaining_seconds == pytest.approx(60 * 0.1)

    def test_best_is_the_highest_so_far(self):
        bar = RunBar.of(config(), Translation.metrics)
        for step, bleu in ((10, 1.0), (20, 12.5), (30, 11.0)):
            bar.add(dev(step, bleu))
        assert dict(bar.cells())["best BLEU"] == "12.5"

    def test_numbers_that_are_not_finite_are_shown(self):
        bar = RunBar.of(config(), Translation.metrics)
        bar.add({**row(10), "loss": "nan", "grad_norm_l2": "inf"})
        assert dict(bar.cells())["loss"] == "nan"
        assert dict(bar.cells())["gradient norm"] == "inf"

    def test_the_line_says_everything(self):
        bar = RunBar.of(config(seed=3), Translation.metrics)
        bar.state = "running"
        for step in (10, 20):
            bar.add(row(step))
        bar.add(dev(20, 7.25))
        assert bar.line() == (
            "pre+rmsnorm · 1e-3 · seed 3 [running]: step 20/100, tokens/s 10,000, loss 3.000, "
            "gradient norm 0.5, lr 1e-3, best BLEU 7.2, ETA 8.0 s"
        )


@pytest.fixture
def folders(tmp_path):
    """A run in progress, one that is stuck, and one that nobody has begun."""
    running = RunFolder.create(tmp_path / "a", config(), Translation.metrics)
    stuck = RunFolder.create(tmp_path / "b", config(lr=2e-3), Translation.metrics)
    for step in (10, 50):
        running.append_metrics(row(step))
        stuck.append_metrics(row(step, per_step=0.2))
    running.append_metrics(dev(50, 20.0))
    running.set_status(Status(state="running", step=50))
    stuck.set_status(Status(state="done", step=50, outcome=Outcome("stuck", 50, "above the unigram entropy")))
    with running.lock():  # as the process that trains it does
        yield [running, stuck, RunFolder(tmp_path / "c")]


def test_all_runs_are_summed_up(folders):
    progress = ProgressDisplay(Console(file=io.StringIO()), jobs=2, expected_runs=4)
    progress.watch(folders)
    assert progress.summary().startswith("4 runs: 1 running, 1 stuck, 1 waiting · ETA ")
    mean_run = (0.1 * 100 + 0.2 * 100) / 2
    assert progress.remaining_seconds(4) == pytest.approx((5.0 + 2 * mean_run) / 2)


def test_log_lines_come_only_with_news(folders):
    out = io.StringIO()
    progress = ProgressDisplay(Console(file=out))
    with progress:
        progress.watch(folders)
        first = out.getvalue()
        progress.watch(folders)
        assert out.getvalue() == first
        folders[0].append_metrics(dev(60, 25.0))
        progress.watch(folders)
    assert "\x1b" not in first
    assert re.search(r"pre\+rmsnorm .*\b2e-3 .*\[stuck\].* 50/100", first)
    assert first.count("\n") == 2
    assert out.getvalue().removeprefix(first).count("best BLEU 25.0") == 1


def test_a_terminal_shows_one_row_a_run_and_as_many_as_fit(folders):
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=140, height=20, legacy_windows=False)
    progress = ProgressDisplay(console, jobs=2)
    with progress:
        progress.watch(folders)
    shown = out.getvalue()
    assert re.search(r"pre\+rmsnorm .*\b1e-3 ", shown)
    assert "stuck" in shown
    assert re.search(r"\b3 runs: 1 running, 1 stuck, 1 waiting", shown)
    assert progress.table(height=1).row_count == 1


def test_the_phase_is_shown_with_its_progress(folders, monkeypatch):
    monkeypatch.setattr("normlab.cli.progress.LOG_EVERY_SECONDS", 0.0)
    out = io.StringIO()
    progress = ProgressDisplay(Console(file=out))
    with progress:
        progress.watch(folders)
        folders[0].set_status(Status("running", step=100, phase="translating", phase_done=0.42))
        progress.watch(folders)
    assert re.search(r"pre\+rmsnorm .*\b1e-3 .*\[translating 42%\].* 50/100", out.getvalue())
    column = progress.table(5).columns[1]
    assert next(str(cell) for cell in column.cells) == "translating 42%"


def test_a_run_of_this_process_is_shown_by_its_rows(tmp_path):
    out = io.StringIO()
    progress = ProgressDisplay(Console(file=out))
    add = progress.watch_one(config(), Translation.metrics, tmp_path)
    add(row(10))
    add(dev(10, 3.0))
    assert out.getvalue().count("\n") == 2
    assert "[running]: step 10/100" in out.getvalue()
