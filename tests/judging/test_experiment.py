"""Two commands, run seed after seed: what is kept, used again and resumed."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

import normlab
from cases import each, few
from judging.test_judge import VALIDATOR
from normlab.cli.main import main
from normlab.errors import UserError
from normlab.judging.experiment import Request
from normlab.judging.experimenter import experiment
from normlab.report import contract

SCRIPT = Path(__file__).parent / "train.py"
BASE = f"{sys.executable} train.py --seed={{seed}}"
METRIC = "val_loss: ([0-9.]+)"


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A current folder with a training script."""
    shutil.copy(SCRIPT, tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(candidate="--gain=0.05", baseline="", **how):
    how = {"metric": METRIC, "jobs": 2, **how}
    return experiment(Request(f"{BASE} {baseline}".strip(), f"{BASE} {candidate}", **how))


def begun(here):
    """How many runs the script has begun."""
    lines = (here / "ran.txt").read_text().splitlines() if (here / "ran.txt").exists() else []
    return sum(line.startswith("begin") for line in lines)


def answer_of(plain):
    """What must not depend on how the runs were interrupted."""
    scores = [(row["seed"], row["baseline"]["score"], row["candidate"]["score"]) for row in plain["rows"]]
    return plain["verdict"], plain["decision"], plain["ended_by"], scores


def test_a_gain_is_kept_and_runs_are_used_again(here):
    first = run()
    assert first.verdict == "keep"
    number = begun(here)
    again = run()
    assert answer_of(again.to_dict()) == answer_of(first.to_dict())
    assert (again.ran, begun(here)) == (0, number)
    other = run("--gain=-0.05")
    assert other.verdict == "discard"
    assert other.reused >= min(other.decision.seeds, first.decision.seeds)


@pytest.mark.slow
def test_the_answer_does_not_depend_on_the_number_of_jobs(here):
    answers = [run(jobs=jobs, folder=Path(f"runs-{jobs}")).to_dict() for jobs in (1, 3)]
    assert answer_of(answers[0]) == answer_of(answers[1])


@pytest.mark.slow
def test_a_changed_file_makes_new_runs(here):
    (here / "data.txt").write_text("a")
    first = run(depends=(here / "data.txt",))
    for path in ("train.py", "data.txt"):
        with (here / path).open("a") as file:
            file.write("\n# changed\n")
        changed = run(depends=(here / "data.txt",))
        assert changed.reused == 0
        assert changed.baseline.id != first.baseline.id


@pytest.mark.slow
def test_a_module_beside_the_script_is_one_of_its_files(here):
    (here / "model.py").write_text("width = 8\n")
    (here / "train.py").write_text("import model\n" + SCRIPT.read_text())
    assert set(run().baseline.files) == {"train.py", "model.py"}


def test_a_script_in_a_command_of_a_shell_is_one_of_its_files(here):
    answer = experiment(Request(f"sh -c '{BASE}'", f"sh -c '{BASE} --gain=0.05'", METRIC, max_seeds=1))
    assert set(answer.baseline.files) == {"train.py"}


def test_an_exit_code_that_a_power_cut_has_left_empty_is_none(here):
    first = run(max_seeds=3)
    for record in Path("runs/judge").glob("*/seed-1/run.json"):
        record.unlink()
        (record.parent / "exit").write_text("")
    again = run(max_seeds=3)
    assert again.ran == 2
    assert answer_of(again.to_dict()) == answer_of(first.to_dict())


@pytest.mark.slow
def test_runs_that_diverge_are_results(here):
    answer = run("--gain=0.05 --diverges=2")
    outcomes = [row["candidate"]["outcome"] for row in answer.to_dict()["rows"]]
    assert outcomes[1] == "diverged"
    assert answer.decision.only_baseline == 1
    assert answer.verdict != "keep"
    crashed = run("--gain=0.05 --crashes=2", max_seeds=3)
    assert [run.outcome for run in crashed.runs["candidate"]][:3] == ["trained", "failed", "trained"]


@pytest.mark.slow
@pytest.mark.parametrize("jobs", [1, 2])
def test_a_run_that_is_killed_once_is_tried_again(here, jobs):
    answer = run("--gain=0.05 --killed=2 --times=1", jobs=jobs)
    assert answer.verdict == "keep"
    assert answer.killed == ()
    assert {run.outcome for run in answer.runs["candidate"]} == {"trained"}
    assert lines_of(here).count("begin 0.05 2") == 2


@pytest.mark.slow
@pytest.mark.parametrize("jobs", [1, 2])
def test_a_run_that_is_killed_each_time_leaves_it_undecided(here, jobs):
    answer = run("--gain=0.05 --killed=2", jobs=jobs)
    assert (answer.verdict, answer.seeds) == ("undecided", (1,))
    assert [(k.seed, k.side, k.signal, k.times) for k in answer.killed] == [(2, "candidate", 9, 2)]
    assert answer.ended_by == answer.killed[0].sentence
    assert answer.decision.only_baseline == 0
    described = normlab.judge("runs/judge").changes
    assert {outcome for change in described for outcome in change.outcomes} <= {"trained", "missing"}
    VALIDATOR.validate(contract.judge_document(answer.to_dict()))
    once_more = run("--gain=0.05 --killed=2", jobs=jobs)
    assert (once_more.verdict, lines_of(here).count("begin 0.05 2")) == ("undecided", 4)


@pytest.mark.slow
def test_what_cannot_be_judged_is_refused(here):
    for candidate in ("--crashes=1,2", "--unknown"):
        with pytest.raises(UserError, match="candidate"):
            run(candidate)
    with pytest.raises(UserError, match="no-such-program"):
        experiment(Request(BASE, "no-such-program {seed}", METRIC))
    with pytest.raises(UserError, match="baseline"):
        run(metric="accuracy: ([0-9.]+)")


@each(
    "wrong",
    [
        {"candidate": "python train.py"},
        {"candidate": "python train.py '{seed}"},
        {"candidate": ""},
        {"candidate": BASE},
        {"metric": "loss"},
        {"metric": "loss ("},
        {"take": "first"},
        {"depends": (Path("nowhere"),)},
        {"max_seeds": 0},
    ],
)
def test_a_wrong_request_is_refused_before_anything_runs(here, wrong):
    with pytest.raises(UserError):
        experiment(Request(**{"baseline": BASE, "candidate": f"{BASE} --gain=1", "metric": METRIC, **wrong}))
    assert begun(here) == 0


@pytest.mark.slow
def test_a_command_that_was_mended_is_run_again(here):
    (here / "train.py").write_text("import nowhere\n")
    with pytest.raises(UserError):
        run()
    (here / "nowhere.py").write_text(SCRIPT.read_text())
    (here / "train.py").write_text("import nowhere\n")
    assert run().verdict == "keep"


def test_a_file_that_changes_meanwhile_stops_it(here):
    edit = "from pathlib import Path\nPath('train.py').write_text(Path('train.py').read_text() + '#')\n"
    (here / "train.py").write_text(edit + SCRIPT.read_text())
    with pytest.raises(UserError, match="changed"):
        run(jobs=1)


def test_the_budget_ends_it_undecided(here):
    answer = run("--gain=0.001 --seconds=0.2", budget_s=0.05, jobs=1, patient=True)
    assert answer.verdict == "undecided"
    assert "budget" in answer.ended_by


def test_the_command_line_prints_the_verdict_and_exits_with_it(here, capsys):
    commands = ["judge", "--baseline", BASE, "--candidate", f"{BASE} --gain=-0.05", "--metric", METRIC]
    for typed in ([], ["--json"]):
        with pytest.raises(SystemExit, match="3"):
            main([*commands, *typed, "--out", "page.html"])
        shown = capsys.readouterr().out
    document = json.loads(shown)
    VALIDATOR.validate(document)
    assert document["verdict"] == "discard"
    html = (here / "page.html").read_text(encoding="utf-8")
    assert document["baseline"]["files"]["train.py"] in html
    assert main(["judge", "runs/judge"]) == 0
    assert "--gain=-0.05" in capsys.readouterr().out


# ------------------------------------------------------------------------------------------ interruptions


def command_line(*more):
    words = ["--baseline", f"{BASE} --seconds=0.2", "--candidate", f"{BASE} --seconds=0.2 --gain=0.02"]
    return [sys.executable, "-m", "normlab", "judge", *words, "--metric", METRIC, "--json", *more]


def lines_of(here):
    """What the scripts have written: a line at the beginning and at the end of each run."""
    path = here / "ran.txt"
    return path.read_text().splitlines() if path.exists() else []


def wait_for_lines(here, number, judge):
    """Wait until the scripts have written so many lines, or the judge has given its answer."""
    until = time.monotonic() + 60
    while len(lines_of(here)) < number and judge.poll() is None:
        assert time.monotonic() < until, "no run has begun"
        time.sleep(0.005)


@pytest.mark.slow
@pytest.mark.parametrize("jobs", few([1, 2], 1))
def test_killed_at_ten_moments_it_gives_the_same_answer_and_repeats_nothing(here, jobs):
    """It is killed right after a run has begun or ended, and in the middle of one."""
    whole = command_line("--folder", "whole")
    done = subprocess.run(whole, capture_output=True, text=True, check=False, cwd=here)
    expected = json.loads(done.stdout)
    (here / "ran.txt").unlink()
    command = command_line("--folder", "killed", "--jobs", str(jobs))
    for moment in range(10):
        number = len(lines_of(here)) + 1
        judge = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=here)
        wait_for_lines(here, number, judge)
        time.sleep(0.1 * (moment % 3))
        judge.kill()
        ended = judge.wait()
        assert ended in (-signal.SIGKILL, 0), "only an answer ends a judge before it is killed"
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=here)
    assert answer_of(json.loads(done.stdout)) == answer_of(expected)
    ends = Counter(line for line in lines_of(here) if line.startswith("end"))
    assert set(ends.values()) == {1}, "a run that had ended was repeated"


@pytest.mark.slow
def test_ctrl_c_ends_the_runs_and_the_same_command_continues(here):
    command = command_line("--folder", "stopped")
    judge = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=here)
    wait_for_lines(here, 3, judge)
    judge.send_signal(signal.SIGINT)
    judge.communicate()
    assert judge.returncode == 130
    left = lines_of(here)
    time.sleep(0.5)
    assert lines_of(here) == left, "a run went on"
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=here)
    document = json.loads(done.stdout)
    assert document["verdict"] == "keep"
    assert document["reused"] == sum(line.startswith("end") for line in left)


def test_two_experiments_in_one_folder_are_refused(here):
    from normlab.base.locks import hold

    (here / "runs").mkdir()
    with hold(here / "runs"), pytest.raises(UserError, match="another process"):
        run(folder=here / "runs")


@pytest.mark.wide
def test_a_ray_cluster_gives_the_same_answer(here, monkeypatch):
    pytest.importorskip("ray")
    monkeypatch.setenv("RAY_worker_niceness", "0")  # Ray's 15 would starve on a busy machine
    on_ray = subprocess.run(
        command_line("--folder", "ray", "--on", "ray"), capture_output=True, text=True, check=False, cwd=here
    )
    local = subprocess.run(
        command_line("--folder", "local"), capture_output=True, text=True, check=False, cwd=here
    )
    assert answer_of(json.loads(on_ray.stdout)) == answer_of(json.loads(local.stdout))


@pytest.mark.slow
def test_kept_runs_are_read_as_they_were_judged_and_decide_nothing_once_more(here):
    run("--gain=-0.05", higher_is_better=True, take="mean:2")
    judgement = normlab.judge("runs/judge")
    best = judgement.ranked[0]
    assert best.name.endswith("--gain=-0.05")
    assert best.value(judgement.metric) == pytest.approx((3.9 + 3.35) / 2, abs=0.01)
    assert judgement.looked_at
    with pytest.raises(UserError, match="seeds"):
        normlab.judge("runs/judge", baseline=BASE)


@pytest.mark.slow
def test_kept_runs_of_the_same_words_with_other_files_are_told_apart(here):
    run()
    with (here / "train.py").open("a") as file:
        file.write("\n# changed\n")
    run()
    assert len(normlab.judge("runs/judge").changes) == 4


@pytest.mark.slow
def test_kept_runs_are_read_before_there_is_an_answer(here):
    run()
    (here / "runs/judge/judge.json").unlink()
    with pytest.raises(UserError, match="--metric"):
        normlab.judge("runs/judge")
    assert len(normlab.judge("runs/judge", metric=METRIC).changes) == 2


@pytest.mark.slow
def test_a_command_that_prints_nothing_but_nan_has_diverged(here):
    answer = run("--diverges=" + ",".join(map(str, range(1, 13))), metric="val_loss: ([0-2][0-9.]+|3.[0-8]+)")
    assert answer.verdict == "discard"
