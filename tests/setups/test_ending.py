"""A script ends when enough was seen of it, whatever exceptions it catches."""

from __future__ import annotations

import sys

import pytest

from normlab.setups.script import setup_from_script

BEGIN = """
import torch
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

steps = 0

def step():
    global steps
    steps += 1
    optimizer.zero_grad()
    model(torch.randn(6, 4)).pow(2).mean().backward()
    optimizer.step()
"""
IN_A_LOOP = """
try:
    for _ in range(40):
        try:
            step()
            done = True
        except:
            print("skipped")
            continue
        done = False
finally:
    print("cleaned up after", steps)
"""
IN_A_FUNCTION = """
def guarded():
    try:
        step()
    except BaseException:
        return None

try:
    for _ in range(40):
        guarded()
finally:
    print("cleaned up after", steps)
"""
BY_ANOTHER_CALL = """
def train():
    for _ in range(40):
        step()

try:
    for _ in range(40):
        try:
            try:
                train()
            finally:
                print("one more")
        except:
            print("begun again")
finally:
    print("cleaned up after", steps)
"""
WITH_A_SCALER = """
scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
try:
    for _ in range(40):
        try:
            steps += 1
            optimizer.zero_grad()
            scaler.scale(model(torch.randn(6, 4)).pow(2).mean()).backward()
            scaler.unscale_(optimizer)  # raises where the step before was ended
            scaler.step(optimizer)
            scaler.update()
        except:
            print("skipped")
finally:
    print("cleaned up after", steps)
"""


@pytest.mark.parametrize(
    "loop",
    [IN_A_LOOP, IN_A_FUNCTION, BY_ANOTHER_CALL, WITH_A_SCALER],
    ids=["loop", "function", "call", "scaler"],
)
def test_a_loop_that_catches_everything_ends(tmp_path, capfd, loop):
    (tmp_path / "train.py").write_text(BEGIN + loop)
    tracing = sys.gettrace()
    with setup_from_script(str(tmp_path / "train.py")) as named:
        assert not named.setup.cannot
        assert named.facts["recorded"] == "1 micro-batch"
    assert sys.gettrace() is tracing
    (cleaned,) = [line for line in capfd.readouterr().err.splitlines() if line.startswith("cleaned up")]
    assert int(cleaned.split()[-1]) < 20
