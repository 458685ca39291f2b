import os
import signal
import subprocess
import threading
import time

import pytest

from lab.training.tiny import tiny
from normlab.lab.config import Config, SeedConfig, run_id
from normlab.lab.data.parallel import prepare
from normlab.lab.runs import RunFolder, Status
from normlab.lab.training import jobs as module
from normlab.lab.training.jobs import Queue


@pytest.fixture
def ready(text, tmp_path):
    data, _ = prepare(text, tmp_path / "data")
    return data


@pytest.fixture
def workers(monkeypatch):
    """Every worker process that is started."""
    started = []
    whole = subprocess.Popen

    def popen(*args, **kwargs):
        started.append(whole(*args, **kwargs))
        return started[-1]

    monkeypatch.setattr(module.subprocess, "Popen", popen)
    return started


STAND_IN = """
import json, os, signal, sys, time
for line in sys.stdin:
    recipe = json.loads(line)["recipe"]
    if recipe == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.3 if recipe == "slow" else 0.01)
    print("done" if recipe != "broken" else "ValueError: broken", flush=True)
"""


def let_workers_run(program, monkeypatch):
    """Start workers with this program in place of the real one; its arguments are the real one's."""
    start = module.subprocess.Popen

    def popen(command, **kwargs):
        assert command[1:4] == ["-P", "-m", "normlab.lab.training.worker"]
        return start([command[0], "-c", program, *command[4:]], **kwargs)

    monkeypatch.setattr(module.subprocess, "Popen", popen)


@pytest.fixture
def stand_in(monkeypatch, workers):
    """Workers that know the protocol and train nothing."""
    let_workers_run(STAND_IN, monkeypatch)
    return workers


def named(recipe, number):
    return Config(recipe=recipe, seeds=SeedConfig(init=number))


# ---------------------------------------------------------------------------------- with stand-in workers


def test_every_run_ends_and_a_failure_takes_only_its_own(stand_in, tmp_path):
    configs = [
        named(r, n) for n, r in enumerate(("fine", "broken", "fine", "killed", "fine", "killed", "fine"))
    ]
    queue, ended = Queue(tmp_path, 2), []
    for config in configs:
        RunFolder.create(tmp_path / run_id(config), config)
        queue.add(config)
    queue.run(ended.append)
    assert sorted(c.seeds.init for c in ended) == list(range(7))
    killed = "the worker process ended with code -9"
    assert queue.failed == {
        run_id(configs[1]): "ValueError: broken",
        run_id(configs[3]): killed,
        run_id(configs[5]): killed,
    }
    status = RunFolder(tmp_path / run_id(configs[3])).status()
    assert (status.state, status.error) == ("failed", killed)
    assert all(w.poll() is not None for w in stand_in), "no process is left behind"
    assert len(stand_in) <= 2 + 2 * 3, "only the dead ones are replaced, a run that never moves is given up"


@pytest.mark.slow
def test_a_run_goes_on_in_another_worker_while_it_gets_further(workers, monkeypatch, tmp_path):
    """Each of nine lives takes it a step further; three that end at the same step would be too many."""
    life = """
import json, os, signal, sys
from pathlib import Path
from dataclasses import replace
from normlab.lab.config import Config, run_id
from normlab.base.io import from_json
from normlab.lab.runs import RunFolder, Status
for line in sys.stdin:
    folder = RunFolder(Path(sys.argv[1]) / run_id(from_json(Config, line)))
    step = folder.status().step + 1
    folder.set_status(Status("running", step=step))
    if step < 9:
        os.kill(os.getpid(), signal.SIGKILL)
    print("done", flush=True)
"""
    let_workers_run(life, monkeypatch)
    config, queue, ended = named("mortal", 1), Queue(tmp_path, 1), []
    RunFolder.create(tmp_path / run_id(config), config)
    queue.add(config)
    queue.run(ended.append)
    assert queue.failed == {}
    assert ended == [config]
    assert len(workers) == 9


def test_a_killed_worker_is_replaced_while_the_other_one_works(workers, monkeypatch, tmp_path):
    """The other one waits until the run of the killed one is done."""
    life = """
import json, os, signal, sys, time
from pathlib import Path
killed, done = (Path(sys.argv[1]) / name for name in ("killed", "done"))
for line in sys.stdin:
    if json.loads(line)["recipe"] == "mortal":
        if not killed.exists():
            killed.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        done.touch()
    until = time.monotonic() + 60
    while not done.exists() and time.monotonic() < until:
        time.sleep(0.01)
    print("done" if done.exists() else "nobody replaced the other worker", flush=True)
"""
    let_workers_run(life, monkeypatch)
    queue = Queue(tmp_path, 2)
    for config in (named("waiting", 1), named("mortal", 2), named("after", 3)):
        RunFolder.create(tmp_path / run_id(config), config)
        queue.add(config)
    queue.run()
    assert queue.failed == {}
    assert len(workers) == 3


def test_what_is_added_on_the_way_is_done_too_by_as_many_as_allowed(stand_in, tmp_path):
    queue, ended = Queue(tmp_path, 3), []

    def done(config):
        ended.append(config.seeds.init)
        if config.seeds.init == 0:
            for number in (1, 2, 3, 4):
                queue.add(named("slow", number))

    queue.add(named("fine", 0))
    queue.run(done)
    assert ended[0] == 0
    assert sorted(ended) == [0, 1, 2, 3, 4]
    assert len(stand_in) == 3


def test_no_more_workers_than_runs_and_none_for_nothing(stand_in, tmp_path):
    Queue(tmp_path, 4).run()
    assert stand_in == []
    queue = Queue(tmp_path, 4)
    queue.add(named("fine", 1))
    queue.run()
    assert len(stand_in) == 1


def test_nothing_is_started_once_its_time_is_over(stand_in, tmp_path):
    queue = Queue(tmp_path, 1, until=time.monotonic() + 0.2)
    for number in range(20):
        queue.add(named("slow", number))
    ended = []
    queue.run(ended.append)
    assert 1 <= len(ended) <= 3
    assert not queue.waiting


def test_the_same_run_is_never_in_two_workers(workers, monkeypatch, tmp_path):
    """Two recipes may resolve to the same run. A worker fails where it finds another one in its run."""
    life = """
import json, sys, time
from pathlib import Path
for line in sys.stdin:
    mark_of_run = Path(sys.argv[1]) / str(json.loads(line)["seeds"]["init"])
    try:
        mark_of_run.touch(exist_ok=False)
    except FileExistsError:
        print("another worker is in this run", flush=True)
        continue
    time.sleep(0.3)
    mark_of_run.unlink()
    print("done", flush=True)
"""
    let_workers_run(life, monkeypatch)
    first, second = named("slow", 1), named("slower", 1)
    assert run_id(first) == run_id(second)
    queue, ended = Queue(tmp_path, 2), []
    for config in (first, second, named("slow", 2)):
        queue.add(config)
    queue.run(lambda config: ended.append(config.recipe))
    assert queue.failed == {}
    assert sorted(ended) == ["slow", "slow", "slower"]
    assert len(workers) == 2


def test_a_run_of_another_process_stays_theirs(stand_in, tmp_path):
    config = named("broken", 1)
    folder = RunFolder.create(tmp_path / run_id(config), config)
    queue = Queue(tmp_path, 1)
    queue.add(config)
    with folder.lock():
        folder.set_status(Status("running", step=5))
        queue.run()
        assert folder.status() == Status("running", step=5)
    assert run_id(config) in queue.failed


def test_the_watch_sees_every_folder(stand_in, tmp_path):
    seen = []
    queue = Queue(tmp_path, 1, lambda folders: seen.append([f.path.name for f in folders]))
    configs = [named("fine", 1), named("fine", 2)]
    for config in configs:
        queue.add(config)
    queue.run()
    assert all(names == [run_id(c) for c in configs] for names in seen)
    assert seen


def test_a_finished_run_has_not_failed_because_no_worker_starts(stand_in, tmp_path):
    config = named("killed", 1)
    folder = RunFolder.create(tmp_path / run_id(config), config)
    folder.set_status(Status("done", step=5))
    queue, ended = Queue(tmp_path, 1), []
    queue.add(config)
    queue.run(ended.append)
    assert ended == [config]
    assert queue.failed == {}
    assert folder.status() == Status("done", step=5)


def test_jobs_are_at_least_one(tmp_path):
    with pytest.raises(ValueError, match=r"jobs .*1, got 0"):
        Queue(tmp_path, 0)


# ------------------------------------------------------------------------------------- with real training


@pytest.mark.slow
def test_the_run_of_a_killed_worker_goes_on(ready, tmp_path, workers, monkeypatch):
    """In a folder with a file that has the name of a library, which no worker may execute."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tokenizers.py").write_text("open('executed', 'w')\nraise SystemExit(3)\n")
    first, second = tiny(ready, steps=300, validate_every_steps=300), tiny(ready, steps=4)

    def kill(folders):
        if len(workers) == 1 and folders[0].metrics():
            workers[0].kill()

    queue, ended = Queue(tmp_path, 1, kill), []
    queue.add(first)
    queue.add(second)
    queue.run(lambda config: ended.append(run_id(config)))
    assert ended == [run_id(first), run_id(second)]
    assert queue.failed == {}
    assert [RunFolder(tmp_path / run).status().state for run in ended] == ["done", "done"]
    assert len(workers) == 2
    assert not (tmp_path / "executed").exists()


@pytest.mark.slow
def test_a_stop_saves_every_run(ready, tmp_path, workers):
    """The stop is SIGTERM, while Ctrl-C is ignored here and in the workers, as in a script's background."""
    before = (
        signal.signal(signal.SIGINT, signal.SIG_IGN),
        signal.signal(signal.SIGTERM, signal.default_int_handler),
    )
    threads = threading.active_count()
    configs = [tiny(ready, steps=100_000, seed=s, validate_every_steps=50_000) for s in (1, 2)]

    def interrupt(folders):
        if all(f.metrics() for f in folders):
            os.kill(os.getpid(), signal.SIGTERM)

    queue = Queue(tmp_path, 2, interrupt)
    for config in configs:
        queue.add(config)
    try:
        with pytest.raises(KeyboardInterrupt):
            queue.run()
    finally:
        for number, handler in zip((signal.SIGINT, signal.SIGTERM), before, strict=True):
            signal.signal(number, handler)
    assert all(w.poll() is not None for w in workers)
    for config in configs:
        folder = RunFolder(tmp_path / run_id(config))
        assert folder.status().state == "interrupted"
        assert (folder.last / "state.json").exists()
    assert threading.active_count() == threads, "no reader is left behind"
