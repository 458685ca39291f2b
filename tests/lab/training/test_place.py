import re
import sys

import pytest

from normlab.cli.main import main
from normlab.errors import UserError
from normlab.lab.comparison.grid import on_backend
from normlab.lab.comparison.result import CompareRequest
from normlab.lab.config import Config, MachineConfig
from normlab.lab.training.backends import BACKENDS, backend
from normlab.lab.training.jobs import Backend


def test_an_unknown_place_is_refused_with_the_nearest_one():
    for typed, meant in (("rya", "ray"), ("locl", "local")):
        with pytest.raises(UserError, match=f"--on .*'{typed}', .*'{meant}'.*local, ray"):
            backend(typed)


@pytest.mark.parametrize(
    "command", [["compare", "--plan"], ["compare"], ["papers", "reproduce", "xiong2020.fig2a"]]
)
def test_a_command_refuses_it_before_it_writes_anything(command, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main([*command, "--on", "cloud"]) == 2
    assert re.search(r"--on .*'cloud' .*\blocal, ray\b", capsys.readouterr().err)
    assert list(tmp_path.iterdir()) == []


def test_a_missing_library_is_named_with_what_to_type(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "normlab.lab.training.ray", raising=False)
    with pytest.raises(UserError, match=r"'normlab\[cluster\]'"):
        backend("ray")


def test_a_number_that_is_given_stays(monkeypatch):
    monkeypatch.setattr("normlab.lab.training.jobs.usable_cores", lambda: 8)
    local = Backend()
    assert local.share(0, MachineConfig()) == (8, 1)
    assert local.share(3, MachineConfig()) == (3, 2)
    assert local.share(3, MachineConfig(threads=5)) == (3, 5)
    assert local.share(0, MachineConfig(device="cuda")) == (1, 8)


def test_a_request_that_is_placed_twice_is_the_same(monkeypatch):
    class Cluster(Backend):
        def share(self, jobs, machine):
            return jobs or 40, machine.threads or 1

    monkeypatch.setitem(BACKENDS, "ray", Cluster)  # pyrefly: ignore
    request = on_backend(CompareRequest(on="ray", base=Config(machine=MachineConfig(threads=2))))
    assert (request.jobs, request.base.machine.threads) == (40, 2)
    assert on_backend(request) == request
    assert on_backend(CompareRequest(on="ray", jobs=3)).jobs == 3
