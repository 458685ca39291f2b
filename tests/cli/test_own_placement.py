"""A placement, a norm and a schedule of the user's own, from a module outside the package, at the prompt."""

from __future__ import annotations

import json

import pytest
from safetensors.torch import load_file

from cli.typed import TINY, normlab
from normlab.lab.runs import Runs

MODULE = r'''
import torch
from torch import nn

from normlab.nn import Norm, Placement
from normlab.optim import SCHEDULES


class TwoLanes(Placement, name="twolanes"):
    r"""Two lanes: read :math:`\mathrm{LN}(w_1 a + w_2 b)`, write :math:`a + f, w_3 b + f` with a trained w.

    Start :math:`w = (1/2, 1/2, 0.9)`. Doe and Roe 2026, Section 2 (arXiv 2601.00001).
    """

    def build(self, site):
        self.norm = site.norm(site.dim)
        self.w = nn.Parameter(torch.tensor([0.5, 0.5, 0.9]))

    def read(self, stream):
        a, b = stream
        return self.norm(self.w[0] * a + self.w[1] * b)

    def write(self, stream, y):
        a, b = stream
        return a + y, self.w[2] * b + y

    @classmethod
    def begin(cls, site):
        return Lanes()

    @classmethod
    def end(cls, site):
        return Join(site.final_norm())


class Lanes(nn.Module):
    def forward(self, x):
        return x, x


class Join(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.norm = norm

    def forward(self, stream):
        return self.norm(stream[0] + stream[1])


class MaxNorm(Norm, name="maxnorm"):
    def __init__(self, dim):
        super().__init__()
        self.g = nn.Parameter(torch.ones(dim))

    def forward(self, x):
        return self.g * x / (x.abs().amax(-1, keepdim=True) + 1e-6)


@SCHEDULES.register("half")
def half(step, state):
    r""":math:`1/2` of the peak."""
    return 0.5
'''
OWN = ["--import", "own.lanes"]
RECIPE = "twolanes+maxnorm+half+warmup"
TEXT = "seven\ntwo hundred and three\n"


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.delenv("NORMLAB_IMPORT", raising=False)
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "lanes.py").write_text(MODULE)
    return tmp_path


@pytest.mark.slow
def test_a_placement_of_ones_own_is_listed_trained_and_searched(here):
    listed = normlab("recipes", *OWN, cwd=here).stdout
    line = next(line for line in listed.splitlines() if line.startswith("  twolanes"))
    assert "LN(w₁ a + w₂ b)" in line
    assert line.rstrip().endswith("Doe and Roe 2026, Section 2 (arXiv 2601.00001)")
    explained = normlab("recipes", RECIPE, *OWN, cwd=here).stdout
    assert "w = (1/2, 1/2, 0.9)" in explained

    train = ["train", "--recipe", RECIPE, "--lr", "3e-3", *TINY]
    refused = normlab(*train, cwd=here)
    assert refused.returncode == 2
    assert refused.stderr.rstrip().endswith("add --import my_package.my_module")
    assert not (here / "runs").exists()

    trained = normlab(*train, *OWN, cwd=here)
    assert trained.returncode == 0, trained.stderr
    (folder,) = Runs(here / "runs")
    assert folder.config().model.norm == "maxnorm"
    assert folder.config().own_code
    weights = load_file(folder.best / "model.safetensors")
    lanes = [w for name, w in weights.items() if name.endswith("place.w")]
    assert len(lanes) == 5
    assert all(abs(w[:2] - 0.5).max() > 1e-4 for w in lanes), "the placement's own parameter is trained"

    run = folder.path.name
    assert run in normlab("run", "list", cwd=here).stdout
    assert normlab("run", "report", run, cwd=here).returncode == 0, "showing a run needs no code of its own"
    translate = ["run", "translate", run, "--beam", "3"]
    unknown = normlab(*translate, cwd=here, input=TEXT)
    assert unknown.returncode == 2
    assert "'twolanes'" in unknown.stderr
    assert "--import my_package.my_module" in unknown.stderr
    translated = normlab(*translate, *OWN, cwd=here, input=TEXT)
    assert translated.returncode == 0, translated.stderr
    assert translated.stdout.count("\n") == 2

    (here / "own" / "lanes.py").write_text(MODULE.replace("0.9]", "0.8]"))
    again = normlab("train", "--config", f"runs/{run}/config.json", *OWN, cwd=here)
    assert again.returncode == 0, again.stderr
    assert len(list(Runs(here / "runs"))) == 2, "other code gives other numbers, and so another run"


@pytest.mark.slow
def test_a_placement_of_ones_own_is_compared_in_worker_processes(here):
    recipes = ["--recipes", "twolanes", "enc:pre/dec:twolanes+maxnorm", "--lrs", "3e-3", "--seeds", "2"]
    done = normlab("compare", *recipes, "--jobs", "2", "--exchanges", "100", *TINY, *OWN, cwd=here)
    assert done.returncode == 0, done.stderr
    comparison = json.loads((here / "runs" / "comparison.json").read_text())
    assert comparison["failed"] == []
    assert [len(r["runs"]) for r in comparison["recipes"]] == [2, 2]
    assert comparison["recipes"][0]["explained"]["placement"].startswith("twolanes: Two lanes: read LN(w₁ a")
    assert "--import own.lanes" in comparison["command"]
    assert "Two lanes: " in (here / "runs" / "comparison.html").read_text()
