"""Ranks that raise, die or wait for each other end with a sentence, and none of them stays alive."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from normlab.errors import UserError
from normlab.parallel.check import check_ranks

BEGINS = """
import os, signal, time
import torch
import torch.distributed as dist

dist.init_process_group("nccl")
rank = dist.get_rank()
print("rank", rank, "has begun", os.getpid(), flush=True)
open(f"{os.path.dirname(__file__)}/{rank}.pid", "w").write(str(os.getpid()))
"""
"""How each script begins: every rank leaves the number of its process beside the script."""


def write(folder: Path, code: str) -> str:
    path = folder / "train.py"
    path.write_text(BEGINS + code, encoding="utf-8")
    return str(path)


def is_alive(number: int) -> bool:
    try:
        os.kill(number, 0)
    except ProcessLookupError:
        return False
    stat = Path(f"/proc/{number}/stat")
    return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] != "Z"


def alive(folder: Path) -> list[int]:
    """The ranks that are alive, of those that have left their number; they may take a moment to end."""
    numbers = [int(path.read_text()) for path in folder.glob("*.pid")]
    assert numbers
    for _ in range(100):
        left = [number for number in numbers if is_alive(number)]
        if not left:
            return []
        time.sleep(0.05)
    return left


@pytest.mark.wide
def test_a_rank_that_dies_is_named_with_its_last_lines(tmp_path):
    script = write(tmp_path, "if rank == 1:\n    os.kill(os.getpid(), signal.SIGSEGV)\ndist.barrier()\n")
    with pytest.raises(UserError, match=r"rank 1 .*\b11\b.*: rank 1"):
        check_ranks(script, ranks=2, budget_s=120)
    assert alive(tmp_path) == []


@pytest.mark.wide
def test_a_rank_that_waits_for_ever_is_ended(tmp_path):
    script = write(tmp_path, "if rank == 0:\n    dist.barrier()\ntime.sleep(1000)\n")
    began = time.monotonic()
    with pytest.raises(UserError, match=r"rank 0 .*\brank 1 "):
        check_ranks(script, ranks=2, budget_s=20)
    assert time.monotonic() - began < 120
    assert alive(tmp_path) == []


@pytest.mark.slow
def test_a_rank_that_raises_is_named(tmp_path):
    script = write(tmp_path, "if rank == 1:\n    raise ValueError('no such shard')\ndist.barrier()\n")
    sentence = r"rank 1 of 2: .* raised ValueError: no such shard \(.*train.py:11\)"
    with pytest.raises(UserError, match=sentence):
        check_ranks(script, ranks=2, budget_s=120)
    assert alive(tmp_path) == []


@pytest.mark.wide
def test_no_rank_outlives_the_one_that_asked(tmp_path):
    script = write(tmp_path, "time.sleep(1000)\n")
    code = f"from normlab.parallel.check import check_ranks\ncheck_ranks({script!r}, ranks=2, budget_s=500)"
    asking = subprocess.Popen([sys.executable, "-c", code])
    for _ in range(2000):
        if len([*tmp_path.glob("*.pid")]) == 2:
            break
        time.sleep(0.05)
    asking.send_signal(signal.SIGKILL)
    asking.wait()
    assert alive(tmp_path) == []


@pytest.mark.wide
def test_a_script_that_insists_on_float32_is_compared_in_that(tmp_path):
    rest = """
torch.manual_seed(0)
inputs, targets = torch.randn(64, 8, dtype=torch.float32), torch.randn(64, 3, dtype=torch.float32)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for i in range(4):
    rows = torch.arange(16 * i, 16 * i + 16).chunk(dist.get_world_size())[rank]
    optimizer.zero_grad()
    torch.nn.functional.mse_loss(model(inputs[rows]), targets[rows]).backward()
    optimizer.step()
"""
    report = check_ranks(write(tmp_path, rest), ranks=2, budget_s=240)
    assert report.failures == ()
    assert report.facts["precision"].startswith("float32, as the script does not run in float64")


def test_one_rank_is_too_few():
    with pytest.raises(UserError, match="2 or more"):
        check_ranks("train.py", ranks=1)


def test_a_property_that_may_fail_must_be_one():
    with pytest.raises(UserError, match="ranks_dat"):
        check_ranks("train.py", ranks=2, allow=["ranks_dat"])
