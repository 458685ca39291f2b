"""Facts about the runs of a comparison."""

import pytest

from normlab.lab.comparison.compare import hardware
from normlab.lab.config import Config
from normlab.lab.runs import RunFolder, Status


@pytest.mark.parametrize(
    ("machines", "said"),
    [
        (["EPYC, 1 thread", "EPYC, 1 thread"], "EPYC, 1 thread"),
        (["EPYC, 1 thread", "EPYC, 2 threads", "EPYC, 1 thread"],
         "EPYC, 1 thread: 2 runs; EPYC, 2 threads: 1 run"),
        (["EPYC, 1 thread", ""], "EPYC, 1 thread: 1 run; hardware not recorded: 1 run"),
    ],
)  # fmt: skip
def test_the_hardware_is_that_of_the_runs(tmp_path, machines, said):
    folders = []
    for number, words in enumerate(machines):
        folders.append(RunFolder.create(tmp_path / str(number), Config()))
        folders[-1].set_status(Status("done", hardware=words))
    assert hardware(folders) == said
