import subprocess
import sys
from dataclasses import replace

import pytest

from lab.training.tiny import tiny
from normlab.base.io import to_json
from normlab.lab.config import run_id
from normlab.lab.data.parallel import prepare
from normlab.lab.runs import RunFolder
from normlab.lab.training.train import train


@pytest.fixture
def ready(text, tmp_path):
    """Data that is prepared, as the queue's configurations have it."""
    data, _ = prepare(text, tmp_path / "data")
    return data


@pytest.mark.slow
def test_one_line_in_one_line_out(ready, tmp_path):
    good = tiny(ready, steps=4)
    broken = replace(good, model=replace(good.model, heads=3))
    other = tiny(ready, steps=5)
    lines = "".join(to_json(c) + "\n" for c in (good, broken, other))
    command = [sys.executable, "-m", "normlab.lab.training.worker", str(tmp_path)]
    ended = subprocess.run(command, input=lines, capture_output=True, text=True, check=False)
    assert ended.returncode == 0
    first, second, third = ended.stdout.splitlines()
    assert (first, third) == ("done", "done")
    assert "3 heads" in second
    assert ended.stderr == "", "what a run prints goes to its own log"
    for config, state in ((good, "done"), (broken, "failed"), (other, "done")):
        assert RunFolder(tmp_path / run_id(config)).status().state == state
    assert "Traceback" in RunFolder(tmp_path / run_id(broken)).log.read_text()
    assert "Traceback" not in RunFolder(tmp_path / run_id(other)).log.read_text()
    here, there = train(good, tmp_path / "here"), RunFolder(tmp_path / run_id(good))
    assert here.path.name == there.path.name, "the queue knows the folder beforehand"
    assert (here.last / "model.safetensors").read_bytes() == (there.last / "model.safetensors").read_bytes()


CHATTY = """
import os, sys
from normlab.lab.training import worker

def train(config, root):
    print("from Python")
    print("to the error stream", file=sys.stderr)
    os.system("echo from a program")
    if config.recipe == "interrupted":
        raise KeyboardInterrupt
    if config.recipe == "two lines":
        raise RuntimeError("first\\nsecond")

worker.train = train
sys.exit(worker.main())
"""


@pytest.mark.slow
def test_whatever_a_run_prints_does_not_disturb_the_answers(ready, tmp_path):
    configs = [
        replace(tiny(ready, steps=n), recipe=r)
        for n, r in enumerate(("fine", "two lines", "interrupted", "never"), 1)
    ]
    lines = "".join(to_json(c) + "\n" for c in configs)
    command = [sys.executable, "-c", CHATTY, str(tmp_path)]
    ended = subprocess.run(command, input=lines, capture_output=True, text=True, check=False)
    assert ended.stdout.splitlines() == ["done", "RuntimeError: first second"]
    assert ended.returncode == 130
    log = RunFolder(tmp_path / run_id(configs[0])).log.read_text()
    assert {"from Python", "to the error stream", "from a program"} <= set(log.splitlines())
    assert not (tmp_path / run_id(configs[3])).exists(), "an interrupted worker starts nothing more"


@pytest.mark.slow
def test_a_worker_whose_queue_is_gone_ends_without_a_word(ready, tmp_path):
    configs = [replace(tiny(ready, steps=n), recipe="fine") for n in (1, 2)]
    command = [sys.executable, "-c", CHATTY, str(tmp_path)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as worker:
        assert worker.stdout is not None
        worker.stdout.close()
        _, said = worker.communicate("".join(to_json(c) + "\n" for c in configs))
    assert (worker.returncode, said) == (0, "")
    log = RunFolder(tmp_path / run_id(configs[0])).log.read_text()
    assert "Traceback" not in log
    assert "BrokenPipe" not in log
    assert not (tmp_path / run_id(configs[1])).exists(), "nobody waits for more"
