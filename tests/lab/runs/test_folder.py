import json
import math
import os
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace

import pytest

from cases import each
from normlab.base.files import write_json_atomic
from normlab.base.metric import Outcome
from normlab.lab import config as config_module
from normlab.lab.config import Config, DataConfig, MachineConfig, OptimConfig, run_id
from normlab.lab.runs import RunBusyError, RunFolder, Runs, Status
from normlab.lab.runs.folder import read_config
from normlab.lab.runs.manifest import CheckpointError

CONFIG = Config(
    recipe="pre",
    data=DataConfig(train_src="a.de"),
    optim=OptimConfig(lr=2e-3),
    machine=MachineConfig(threads=2),
)


@pytest.fixture
def folder(tmp_path):
    return RunFolder.create(tmp_path / "runs" / run_id(CONFIG), CONFIG)


def train_row(step, **changes):
    return {
        "kind": "train",
        "step": step,
        "loss": 2.0,
        "nll": 1.5,
        "grad_norm_l2": 1.0,
        "seconds": 0.5,
        **changes,
    }


# ------------------------------------------------------------------------------------------ configuration


def test_configuration_reads_back_with_its_id_and_semantics(folder):
    assert folder.config() == CONFIG
    content = json.loads((folder.path / "config.json").read_text())
    assert content["id"] == folder.path.name == run_id(CONFIG)
    assert content["semantics"] == config_module.SEMANTICS
    assert content["config"]["machine"]["threads"] == 2


def test_creating_again_keeps_what_is_there(folder):
    folder.append_metrics(train_row(1))
    assert len(RunFolder.create(folder.path, CONFIG).metrics()) == 1


def test_a_run_of_older_semantics_is_stale(folder, monkeypatch):
    assert not folder.stale()
    monkeypatch.setattr(config_module, "SEMANTICS", config_module.SEMANTICS + 1)
    assert folder.stale()


def test_configuration_alone_in_a_file_is_understood(tmp_path):
    write_json_atomic(tmp_path / "mine.json", CONFIG)
    assert read_config(tmp_path / "mine.json") == CONFIG


def test_wrong_configurations_are_named(folder, tmp_path):
    path = folder.path / "config.json"
    write_json_atomic(path, {"config": {"optim": {"learning_rte": 1}}})
    with pytest.raises(ValueError, match=r"config\.json: .*'optim\.learning_rte'"):
        folder.config()
    with pytest.raises(FileNotFoundError, match=r"nowhere/config\.json"):
        RunFolder(tmp_path / "nowhere").config()


# ------------------------------------------------------------------------------------------------ metrics


def test_rows_read_back_in_order_with_numbers_that_are_not_finite(folder):
    rows = [
        train_row(1, loss=0.1 + 0.2),
        train_row(2, loss=math.inf, nll=-math.inf, grad_norm_l2=math.nan),
        {"kind": "dev", "step": 2, "nll": 1.0, "bleu": 0.0, "seconds": 1.0},
    ]
    for row in rows:
        folder.append_metrics(row)
    read = folder.metrics()
    assert read[0] == rows[0]
    assert (read[1]["loss"], read[1]["nll"]) == (math.inf, -math.inf)
    assert math.isnan(read[1]["grad_norm_l2"])
    assert read[2] == rows[2]
    lines = (folder.path / "metrics.jsonl").read_text().splitlines()
    assert json.loads(lines[1], parse_constant=pytest.fail)["grad_norm_l2"] == "nan"


def test_no_metrics_is_an_empty_list(folder):
    assert folder.metrics() == []
    folder.cut_rows(0)
    assert folder.metrics() == []


@pytest.mark.parametrize(
    "torn", ['{"kind": "tra', '{"kind": "dev", "step": 2', '{"a": "\udcc3', "\0\0\0", '{"kin\n']
)
def test_a_torn_last_line_is_ignored_and_cut_away(folder, torn):
    folder.append_metrics(train_row(1))
    with (folder.path / "metrics.jsonl").open("ab") as file:
        file.write(torn.encode(errors="surrogateescape"))
    assert folder.metrics() == [train_row(1)]
    folder.cut_rows(5)
    folder.append_metrics(train_row(2))
    assert folder.metrics() == [train_row(1), train_row(2)]


def test_a_damaged_line_in_the_middle_is_named(folder):
    folder.append_metrics(train_row(1))
    with (folder.path / "metrics.jsonl").open("a") as file:
        file.write("rubbish\n")
    folder.append_metrics(train_row(2))
    with pytest.raises(ValueError, match=r"metrics\.jsonl .*line 2"):
        folder.metrics()


def test_cutting_drops_what_came_after_a_step_and_keeps_bytes_before(folder):
    for step in (1, 2, 2, 3):
        folder.append_metrics(train_row(step, loss=math.nan))
    before = (folder.path / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    folder.cut_rows(2)
    assert (folder.path / "metrics.jsonl").read_bytes() == b"".join(before[:3])


def test_rows_that_are_gone_since_a_checkpoint_are_told(folder):
    metrics = folder.path / "metrics.jsonl"
    assert folder.row_sizes() == {}
    for step in (1, 2, 30):
        folder.append_metrics(train_row(step))
    sizes = folder.row_sizes()
    assert sizes == {"metrics.jsonl": metrics.stat().st_size}
    folder.append_metrics(train_row(4000))
    folder.require_rows(sizes, folder.last)
    folder.require_rows({}, folder.last)
    first, *others = metrics.read_bytes().splitlines(keepends=True)
    for content, why in ((b"".join(others), "is not what"), (first, "shorter"), (None, "missing")):
        metrics.unlink() if content is None else metrics.write_bytes(content)
        with pytest.raises(CheckpointError, match=rf"metrics\.jsonl .*{why}.*last"):
            folder.require_rows(sizes, folder.last)
    folder.lost.touch()
    folder.require_rows(sizes, folder.last)


# --------------------------------------------------------------------------------------- status and lock

HOLD = """
import sys, time
from normlab.lab.runs import RunFolder
with RunFolder(sys.argv[1]).lock():
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def holder(folder):
    """Another process, which holds the lock of the run folder."""
    command = [sys.executable, "-c", HOLD, str(folder.path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_a_second_process_is_told_and_a_dead_one_lets_go(folder, holder):
    with pytest.raises(RunBusyError, match=r"another process"), folder.lock():
        pytest.fail("two processes in one run")
    holder.kill()
    holder.wait()
    with folder.lock():
        pass


def test_running_is_only_what_a_process_is_in(folder, holder):
    folder.set_status(Status("running", step=5))
    assert folder.status().state == "running"
    holder.kill()
    holder.wait()
    assert folder.status() == Status("interrupted", step=5)
    folder.set_status(Status("done", step=9))
    assert folder.status() == Status("done", step=9)


@each(
    ("said", "seconds_ago", "state", "host"),
    [
        ("far-away 77", 3, "running", "far-away"),
        ("far-away 77", -3, "running", "far-away"),
        ("far-away 77", 60, "interrupted", ""),
        ("far-away 77", -3600, "interrupted", ""),
        ("", 0, "interrupted", ""),
        (f"{socket.gethostname()} 77", 0, "interrupted", ""),
    ],
)
def test_a_process_of_another_host_is_there_while_it_touches_its_lock(folder, said, seconds_ago, state, host):
    folder.set_status(Status("running", step=5))
    lock, then = folder.path / "lock", time.time() - seconds_ago
    lock.write_text(said)
    os.utime(lock, (then, then))
    assert (folder.status(), folder.elsewhere()) == (Status(state, step=5), host)


def test_the_lock_is_free_again_after_an_error(folder):
    with pytest.raises(ZeroDivisionError), folder.lock():
        _ = 1 / 0
    with folder.lock():
        folder.set_status(Status("running"))
        assert folder.status().state == "running", "its own process counts as well"


def test_asking_for_the_status_does_not_keep_a_trainer_out(folder):
    folder.set_status(Status("running"))
    stop = threading.Event()

    def ask():
        while not stop.is_set():
            folder.status()

    asker = threading.Thread(target=ask)
    asker.start()
    refused = []
    try:
        for _ in range(50):
            try:
                with folder.lock():
                    pass
            except RunBusyError as error:
                refused.append(str(error))
    finally:
        stop.set()
        asker.join()
    assert refused == []


def test_status_reads_back(folder):
    assert folder.status() == Status()
    status = Status(
        state="failed",
        step=7,
        outcome=Outcome("diverged", 6, "loss is nan at step 6"),
        best_step=4,
        best_dev={"nll": math.inf, "f1": 0.5},
        train_seconds=1.25,
        error="ValueError: no",
        hardware="a machine",
    )
    folder.set_status(status)
    assert folder.status() == status
    write_json_atomic(folder.path / "status.json", {"stat": "done"})
    with pytest.raises(ValueError, match=r"status\.json: .*'stat', .*'state'"):
        folder.status()


# ------------------------------------------------------------------------------------------------- finding


@pytest.fixture
def runs(tmp_path):
    for name in ("ab12", "ab34", "cd56", "cd5678"):
        RunFolder.create(tmp_path / name, replace(CONFIG, recipe=name))
    (tmp_path / "data").mkdir()
    (tmp_path / "comparison.json").write_text("{}")
    return Runs(tmp_path)


def test_runs_are_the_folders_with_a_configuration(runs, tmp_path):
    assert [f.path.name for f in runs] == ["ab12", "ab34", "cd56", "cd5678"]
    assert list(Runs(tmp_path / "nowhere")) == []


@pytest.mark.parametrize(("prefix", "name"), [("ab1", "ab12"), ("cd567", "cd5678"), ("cd56", "cd56")])
def test_a_run_is_found_by_what_its_id_begins_with(runs, prefix, name):
    assert runs.find(prefix).path == runs.root / name


def test_what_is_not_one_run_is_told(runs, tmp_path):
    with pytest.raises(ValueError, match=r"'ab' .*\b2 .*\bab12, ab34;"):
        runs.find("ab")
    with pytest.raises(FileNotFoundError, match=r"'zz' .*\bab12, .*\bcd5678\b"):
        runs.find("zz")
    with pytest.raises(FileNotFoundError, match=r"data.*: normlab train"):
        Runs(tmp_path / "data").find("ab")


def test_only_some_of_many_candidates_are_named(tmp_path):
    for i in range(11):
        RunFolder.create(tmp_path / f"a{i:02}", CONFIG)
    with pytest.raises(ValueError, match=r"\b11 .*a00, .*, a07 .*\b3 more"):
        Runs(tmp_path).find("a")
