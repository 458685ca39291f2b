"""In a fresh process neither an instrument nor its page loads a room of the laboratory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from cases import few

INSTRUMENTS = {
    "check": "normlab.checks.check",
    "check --ranks": "normlab.parallel.process",
    "trial": "normlab.trials.trial",
    "diagnose": "normlab.diagnosis.diagnose",
    "watch": "normlab.watching.watch",
    "judge": "normlab.judging.judge",
}
LABORATORY = ("normlab.lab", "normlab.nn", "normlab.optim", "normlab.papers")
MODEL = """
import torch, normlab
from pathlib import Path
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x):
        return x + self.mlp(self.norm(x))

torch.manual_seed(0)
model = nn.Sequential(nn.Embedding(12, 8), Block(), Block(), nn.Linear(8, 12))
ids = torch.randint(0, 12, (4, 6))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

def loss(model, ids):
    return nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())

setup = normlab.Setup(model, ids, loss=loss, optimizer=optimizer)
"""
"""A small model that each instrument takes."""
USES = {
    "check": "normlab.check(setup).page('page.html')",
    "trial": "normlab.trial(setup, steps=16, rates=(1e-3, 2e-3)).page('page.html')",
    "diagnose": "normlab.diagnose(setup, preset='cheap').page('page.html')",
    "watch": """
with normlab.watch(model, optimizer, out='.', every_steps=1) as watch:
    value = loss(model, ids)
    watch.loss(value)
    value.backward()
    optimizer.step()
watch.page.rename('page.html')
""",
    "judge": "normlab.judge({'a': [1.0, 2.0, 3.0], 'b': [1.1, 2.2, 3.1]}).page('page.html')",
}
"""A page by each instrument, in the current folder."""
LIST = "\nimport json, sys\nprint(json.dumps(sorted(sys.modules)))"


def loaded_after(code: str, folder: Path) -> set[str]:
    """The modules that a fresh interpreter has after some code."""
    command = [sys.executable, "-c", code + LIST]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


def rooms_entered(modules: set[str]) -> set[str]:
    """The rooms of the laboratory among these modules."""
    return {room for room in LABORATORY for name in modules if name == room or name.startswith(f"{room}.")}


@pytest.mark.slow
@pytest.mark.parametrize("instrument", INSTRUMENTS)
def test_an_instrument_loads_nothing_of_the_laboratory(instrument, tmp_path):
    modules = loaded_after(f"import {INSTRUMENTS[instrument]}", tmp_path)
    assert INSTRUMENTS[instrument] in modules
    assert rooms_entered(modules) == set()


@pytest.mark.slow
@pytest.mark.parametrize("instrument", few(USES, 2))
def test_the_page_of_an_instrument_loads_nothing_of_the_laboratory(instrument, tmp_path):
    modules = loaded_after(MODEL + USES[instrument], tmp_path)
    assert (tmp_path / "page.html").stat().st_size > 1000
    assert rooms_entered(modules) == set()


@pytest.mark.slow
def test_scores_are_judged_without_torch(tmp_path):
    assert "torch" not in loaded_after("import normlab\n" + USES["judge"], tmp_path)


def test_a_room_of_the_laboratory_is_seen():
    assert rooms_entered({"normlab.lab.config", "normlab.base.io"}) == {"normlab.lab"}
    assert rooms_entered({"normlab.labels", "normlab.checks"}) == set()
