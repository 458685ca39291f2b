"""The pytest plugin in a project: three scripts, a setup and a configuration, beside tests of its own."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path

import pytest

from cases import wide
from normlab.checks.property import ORDER

pytest_plugins = ["pytester"]

INSTALLED = "normlab" in {entry.name for entry in entry_points(group="pytest11")}
PLUGIN = [] if INSTALLED else ["-p", "normlab.pytest_plugin"]
MODEL = """
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, ahead, dim=16):
        super().__init__()
        self.norm, self.maps, self.ahead = nn.LayerNorm(dim), nn.Linear(dim, 3 * dim), ahead
        self.out, self.last = nn.Linear(dim, dim), nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in self.maps(self.norm(x)).chunk(3, -1))
        seen = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril(self.ahead)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(self.last(x))


class LM(nn.Module):
    def __init__(self, ahead=0, dim=16, vocabulary=31):
        super().__init__()
        self.words, self.places = nn.Embedding(vocabulary, dim), nn.Embedding(16, dim)
        self.blocks = nn.ModuleList([Block(ahead), Block(0)])
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, vocabulary, bias=False)

    def forward(self, ids):
        x = self.words(ids) + self.places(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def loss(model, ids):
    return nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
"""
SCRIPT = """
import argparse, tempfile, warnings
import torch
from lm import LM, loss

tempfile.mkstemp(prefix="{name}.", suffix=".ran", dir=".")  # one a run: old files stay
warnings.warn("of this script's own")
parser = argparse.ArgumentParser()
parser.add_argument("--rows", type=int, required={required})
rows = parser.parse_args().rows or 4
model = LM(ahead={ahead})
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for _ in range(3):
    optimizer.zero_grad()
    loss(model, torch.randint(0, 31, (rows, 13))).backward()
    optimizer.step()
"""
SETUP = """
import tempfile
import torch, normlab
from lm import LM, loss

tempfile.mkstemp(prefix="setups.", suffix=".ran", dir=".")

def setup(seed=0):
    torch.manual_seed(seed)
    ids = torch.randint(0, 31, (4, 13))
    return normlab.Setup(LM(), ids, loss=loss, optimizer=lambda m: torch.optim.AdamW(m.parameters(), lr=1e-3))
"""
CONFIGURATION = {
    "architectures": ["GPT2LMHeadModel"],
    "model_type": "gpt2",
    "n_layer": 2,
    "n_head": 2,
    "n_embd": 16,
    "n_positions": 32,
    "vocab_size": 60,
    "bos_token_id": 1,
    "eos_token_id": 1,
}
SOURCES = ["sound.py", "leaky.py", "needy.py", "setups.py:setup", "hf:gpt"]
OWN_TESTS = """
import sys

def test_of_the_project():
    assert True

def test_that_fails():
    assert False
"""
WHAT_WAS_LOADED = """
import sys
from pathlib import Path

def pytest_sessionfinish():
    Path("loaded.txt").write_text(str("torch" in sys.modules))
"""


@pytest.fixture
def project(pytester, monkeypatch):
    """A project with three scripts (one leaks, one needs an argument), a setup and a configuration."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    scripts = [
        ("sound", {"required": False, "ahead": 0}),
        ("leaky", {"required": False, "ahead": 1}),
        ("needy", {"required": True, "ahead": 0}),
    ]
    files = {name: SCRIPT.format(name=name, **how) for name, how in scripts}
    pytester.makepyfile(lm=MODEL, setups=SETUP, test_own=OWN_TESTS, **files)
    pytester.makeconftest(WHAT_WAS_LOADED)
    (pytester.path / "gpt").mkdir()
    (pytester.path / "gpt" / "config.json").write_text(json.dumps(CONFIGURATION))
    return pytester


def run(project, *typed):
    return project.runpytest_subprocess(*PLUGIN, "-p", "no:cacheprovider", *typed)


def outcomes(result) -> dict[str, str]:
    """Each test's outcome, as ``-v`` prints it, with or without workers."""
    line = re.compile(r"^(?:\[gw\d\] \[ *\d+%\] (\w+) )?(\S+::\S+)(?: (\w+) .*)?$")
    found = [found for text in result.outlines if (found := line.match(text.rstrip()))]
    return {f[2]: f[1] or f[3] for f in found if f[1] or f[3]}


def named(*sources):
    return [word for source in sources for word in ("--normlab", source)]


@pytest.mark.slow
@pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed")
@pytest.mark.parametrize("workers", ["", wide("-n 2"), wide("-n 2 --dist loadgroup")])
def test_each_property_of_each_source_is_a_test_and_each_source_is_checked_once(project, workers):
    result = run(project, "-v", "-W", "error::UserWarning", *named(*SOURCES), *workers.split())
    found = outcomes(result)
    assert len(found) == len(SOURCES) * len(ORDER) + 2
    own = {name: outcome for name, outcome in found.items() if not name.startswith("normlab::")}
    assert own == {"test_own.py::test_of_the_project": "PASSED", "test_own.py::test_that_fails": "FAILED"}
    for source in ("sound.py", "setups.py:setup", "hf:gpt"):
        of_source = {found[f"normlab::{source}::{name}"] for name in ORDER}
        assert of_source == {"PASSED", "SKIPPED"}, source
        assert found[f"normlab::{source}::causality"] == "PASSED"
    assert found["normlab::leaky.py::causality"] == "FAILED"
    assert found["normlab::leaky.py::targets"] == "PASSED"
    of_needy = [found[f"normlab::needy.py::{name}"] for name in ORDER]
    assert sorted(set(of_needy)) == ["ERROR", "SKIPPED"]
    assert of_needy.count("ERROR") == 1
    ran = [path.name.partition(".")[0] for path in project.path.glob("*.ran")]
    assert sorted(ran) == ["leaky", "needy", "setups", "sound"]


def test_collecting_runs_no_check_and_loads_no_torch(project):
    result = run(project, "--collect-only", "-q", *named(*SOURCES))
    assert result.ret == 0
    for source in SOURCES:
        assert f"normlab::{source}::causality" in result.outlines
    assert re.search(rf"^{len(SOURCES) * len(ORDER) + 2} tests", result.stdout.str(), re.MULTILINE)
    assert (project.path / "loaded.txt").read_text() == "False"
    assert not list(project.path.glob("*.ran"))


@pytest.mark.slow
def test_a_failure_is_its_evidence_and_advice_and_a_skip_its_reason(project):
    result = run(project, "-rs", *named("leaky.py"), "-k", "causality or padding")
    result.assert_outcomes(failed=1, skipped=1, deselected=len(ORDER))
    output = result.stdout.str()
    assert re.search(r"✗ causality .*\bblocks\.0: \w", output)
    assert "    → " in output
    assert "Traceback" not in output
    assert "pytest_plugin.py" not in output
    assert re.search(r"SKIPPED \[1\] leaky\.py:1: padding: \w+", output)


@pytest.mark.slow
def test_arguments_reach_the_script_and_tests_are_chosen_by_the_marker(project):
    result = run(
        project, "-m", "normlab", "--normlab", "needy.py", "--normlab-args", "--rows 6", "-k", "rows"
    )
    result.assert_outcomes(passed=1, deselected=len(ORDER) + 1)


@pytest.mark.slow
def test_the_configuration_names_sources_for_runs_that_name_no_file(project):
    project.makepyprojecttoml(
        '[tool.pytest.ini_options]\nnormlab = ["leaky.py -- --rows 5"]\nnormlab_budget = 20\n'
        '[tool.normlab.check]\nallow = ["causality"]\n'
    )
    result = run(project, "-v", "-k", "causality or targets")
    result.assert_outcomes(xfailed=1, passed=1, deselected=len(ORDER))
    result = run(project, "-v", "test_own.py", "-k", "own")
    assert {*outcomes(result)} == {"test_own.py::test_of_the_project", "test_own.py::test_that_fails"}


@pytest.mark.slow
def test_a_run_that_judges_too_little_does_not_pass(project):
    project.makepyfile(
        broken="""
        import normlab
        from setups import setup

        def nan():
            given = setup()
            given.model.head.weight.data.fill_(float("nan"))
            return given
        """
    )
    project.makepyprojecttoml('[tool.normlab.check]\nallow = ["finite"]\n')
    result = run(project, "-v", "-m", "normlab", *named("broken.py:nan"))
    result.assert_outcomes(xfailed=1, failed=1, skipped=len(ORDER) - 2, deselected=2)


@pytest.mark.slow
def test_the_fixture_fails_with_the_report_unless_a_failure_is_allowed(project):
    project.makepyfile(
        test_own="""
        import torch
        from lm import LM, loss

        ids = torch.arange(52).reshape(4, 13) % 31

        def test_sound(normlab_check):
            assert normlab_check(LM(), ids, loss=loss, budget_s=20).ok

        def test_leaky(normlab_check):
            normlab_check(LM(ahead=1), ids, loss=loss, budget_s=20)

        def test_allowed(normlab_check):
            report = normlab_check(LM(ahead=1), ids, loss=loss, budget_s=20, allow=("causality",))
            assert report.allowed == ("causality",)
        """
    )
    result = run(project, "-v")
    found = {name.partition("::")[2]: outcome for name, outcome in outcomes(result).items()}
    assert found == {"test_sound": "PASSED", "test_leaky": "FAILED", "test_allowed": "PASSED"}
    output = result.stdout.str()
    assert re.search(r"✗ causality .*\bblocks\.0\b", output)
    assert "pytest_plugin.py" not in output


def test_the_plugin_loads_nothing_heavy():
    code = "import pytest, sys; before = {*sys.modules}; import normlab.pytest_plugin"
    code += "; print(*{*sys.modules} - before)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert set(done.stdout.split()) == {"normlab", "normlab.pytest_plugin"}


def test_the_plugin_is_registered_as_an_entry_point():
    text = (Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8")
    assert 'normlab = "normlab.pytest_plugin"' in text.partition("[project.entry-points.pytest11]")[2]
