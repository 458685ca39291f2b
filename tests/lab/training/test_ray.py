import os
import signal
import subprocess
import sys
import time

import pytest

from lab.training.tiny import tiny
from normlab.base.io import to_json
from normlab.lab.config import run_id
from normlab.lab.data.parallel import prepare
from normlab.lab.runs import RunFolder


@pytest.mark.slow
def test_a_node_that_would_not_train_the_same_run_says_why(text, tmp_path):
    pytest.importorskip("ray", reason="needs Ray: pip install 'normlab[cluster]'")
    from normlab.lab.training.ray import Host

    config = tiny(text, steps=4)
    mark = tmp_path / "mark"
    mark.touch()
    host = Host(tmp_path, tmp_path, {})
    assert host.refusal(str(mark), to_json(config), run_id(config)) == ""
    assert str(tmp_path) in host.refusal(str(tmp_path / "none"), to_json(config), run_id(config))
    assert "version" in host.refusal(str(mark), to_json(config), "another")
    elsewhere = Host(tmp_path, tmp_path / "none", {})
    assert str(tmp_path / "none") in elsewhere.refusal(str(mark), to_json(config), run_id(config))


@pytest.mark.slow
def test_a_host_passes_on_the_answer_and_stops_before_it_begins(text, tmp_path):
    pytest.importorskip("ray", reason="needs Ray: pip install 'normlab[cluster]'")
    from normlab.lab.training.ray import Host

    data, _ = prepare(text, tmp_path / "data")
    config = tiny(data, steps=4)
    stopped = Host(tmp_path, tmp_path, {})
    stopped.interrupt()
    answered, said = stopped.train(to_json(config))
    assert (answered, "code" in said) == (False, True)
    assert Host(tmp_path, tmp_path, {}).train(to_json(config)) == (True, "done")
    assert RunFolder(tmp_path / run_id(config)).status().state == "done"


PARENT = """
import sys
from pathlib import Path
from normlab.lab.training.jobs import Process
from normlab.lab.config import Config
from normlab.base.io import from_json
Process(Path(sys.argv[1])).train(from_json(Config, sys.argv[2]))
"""


@pytest.mark.slow
def test_a_worker_whose_queue_was_killed_saves_its_run(text, tmp_path):
    data, _ = prepare(text, tmp_path / "data")
    config = tiny(data, steps=100_000, validate_every_steps=50_000)
    folder = RunFolder(tmp_path / run_id(config))
    with subprocess.Popen([sys.executable, "-c", PARENT, str(tmp_path), to_json(config)]) as parent:
        wait_for(lambda: folder.there() and folder.metrics())
        os.kill(parent.pid, signal.SIGKILL)
    wait_for(lambda: folder.status().state == "interrupted")
    assert (folder.last / "state.json").exists()


def wait_for(what):
    until = time.monotonic() + 120
    while not what():
        assert time.monotonic() < until
        time.sleep(0.05)
