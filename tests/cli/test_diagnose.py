"""``normlab diagnose``: the three ways to say what is looked at, the gate, and what is refused."""

import json
import re
import sys

import pytest

from cases import each
from cli.typed import TINY, normlab
from lab.training.tiny import NAMES, tiny, write_text
from normlab.cli.main import main

SMALL = ["--dim", "16", "--ffn-dim", "32", "--heads", "2", "--encoder-layers", "2", "--decoder-layers", "2"]
SMALL += ["--vocab-size", "150", "--threads", "1", "--tokens", "256", "--preset", "cheap"]

MODULE = """
import torch

class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.inner = torch.nn.LayerNorm(8), torch.nn.Linear(8, 8)

    def forward(self, x):
        return self.norm(x + self.inner(x))

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList(Block() for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x

def square(model, x):
    return model(x).square().mean()

def without_loss():
    return {"model": Net(), "batches": torch.randn(3, 5, 8)}

def setup(**more):
    return {**without_loss(), "loss": square, **more}

def stepped():
    return setup(optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.25))
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty current directory with somebody's module in it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p])
    (tmp_path / "my_net_of_this_test.py").write_text(MODULE)
    yield tmp_path
    sys.modules.pop("my_net_of_this_test", None)


MINE = ["my_net_of_this_test.py:setup"]


@pytest.mark.slow
def test_a_recipe_prints_its_findings_and_writes_a_page(here, capsys):
    data = write_text(here / "text")
    text = [word for name in NAMES for word in (f"--{name.replace('_', '-')}", getattr(data, name))]
    assert main(["diagnose", "--recipe", "post", "--lr", "5e-4", *text, *SMALL]) == 0
    said = capsys.readouterr().out
    assert said.splitlines()[0].startswith(("nothing found in ", "warning: "))
    assert (title := "post, 2+2 layers of width 16") in said.splitlines()
    # as typed, although a linear decay over 4,000 steps takes off a 4,000th in the first step
    assert "Adam, lr 5e-4" in said
    assert re.search(r"^note +encoder .*Post-LN", said, re.MULTILINE)
    assert "layers = 2, sublayers = 4, post = 4;" in said
    (page,) = (here / "runs").glob("diagnosis-post-*.html")
    assert said.splitlines()[-1].endswith(f"page: runs/{page.name}")
    assert title in page.read_text()
    stored = json.loads(page.with_suffix(".json").read_text())
    assert stored["preset"] == "cheap"
    assert set(stored["tables"]) >= {"scales", "sublayer_gradients", "attention"}


@pytest.mark.slow
def test_a_second_recipe_leaves_the_page_of_the_first(here):
    data = write_text(here / "text")
    text = [word for name in NAMES for word in (f"--{name.replace('_', '-')}", getattr(data, name))]
    for recipe in ("post", "pre", "post"):
        assert main(["diagnose", "--recipe", recipe, *text, *SMALL]) == 0
    assert len(list((here / "runs").glob("diagnosis-*.html"))) == 2


@pytest.mark.slow
def test_a_model_of_ones_own(here, capsys):
    assert main(["diagnose", *MINE, "--preset", "cheap", "--out", "pages"]) == 0
    assert re.search(r"\bblocks .*Post-LN .*3 layers", capsys.readouterr().out)
    assert (here / "pages" / "diagnosis-my_net_of_this_test.py-setup.html").exists()


@pytest.mark.slow
def test_a_model_of_ones_own_is_stepped_by_ones_own_optimizer(here, capsys):
    assert main(["diagnose", "my_net_of_this_test.py:stepped", "--preset", "cheap"]) == 0
    assert "SGD, lr 0.25" in capsys.readouterr().out
    assert main(["diagnose", "my_net_of_this_test.py:stepped", "--lr", "1"]) == 2
    assert "(--lr)" in capsys.readouterr().err


@pytest.mark.slow
def test_a_run_is_looked_at_through_its_checkpoints(here, capsys):
    from normlab.lab.training.train import train

    folder = train(tiny(write_text(here / "text"), "pre"), here / "runs")
    assert main(["diagnose", folder.path.name[:6], *SMALL[-4:], "--checkpoints", "last", "best"]) == 0
    said = capsys.readouterr().out
    assert "last checkpoint" in said
    assert "best checkpoint" in said
    assert f"page: runs/{folder.path.name}/diagnosis.html" in said
    assert (folder.path / "diagnosis-best.html").exists()


@pytest.mark.slow
def test_the_flight_recorder_is_asked_about_a_run(here, capsys):
    from normlab.lab.training.train import train

    folder = train(tiny(write_text(here / "text"), "pre"), here / "runs")
    assert main(["diagnose", str(folder.path), "--flight"]) == 0
    said = capsys.readouterr().out
    (report,) = folder.flights()
    assert said.startswith(report["verdict"]["sentence"])
    assert "Flight recorder" in (folder.path / "run.html").read_text(encoding="utf-8")


def test_everything_as_json(here, capsys):
    assert main(["diagnose", *MINE, "--preset", "cheap", "--json"]) == 0
    stored = json.loads(capsys.readouterr().out)
    assert stored["model"] == "Net"
    assert stored["findings"][0]["severity"] in ("problem", "warning", "note")


@pytest.mark.parametrize(
    ("gate", "severities", "code"),
    [("problem", ["note", "warning"], 0), ("problem", ["problem", "warning"], 3), ("", ["problem"], 0)],
)
def test_the_gate_closes_for_findings_as_severe(here, gate, severities, code, monkeypatch, capsys):
    from normlab.diagnosis import Finding, find

    module = sys.modules["normlab.diagnosis.diagnose"]
    planted = tuple(Finding("planted", s, f"a {s}", "", {}) for s in severities)
    monkeypatch.setattr(module, "find", lambda tables, lr: planted)
    assert find is not module.find
    words = ["diagnose", *MINE, "--preset", "cheap", *(["--fail-on", gate] if gate else [])]
    if code:
        with pytest.raises(SystemExit) as stopped:
            main(words)
        assert stopped.value.code == code
        assert "1 problem" in capsys.readouterr().err
    else:
        assert main(words) == 0
    assert (here / "runs" / "diagnosis-my_net_of_this_test.py-setup.html").exists()


@each(
    ("words", "sentence"),
    [
        (["my_net_of_this_test.py:without_loss"], "Net puts out no loss"),
        (["no_such_module:f"], "raised ModuleNotFoundError"),
        (["0123abcd"], "no run in runs"),
        (["--recipe", "pree"], "did you mean 'pre'"),
        ([*MINE, "--blocks", "layer"], "blocks='layer' fits no module of the model"),
    ],
)
def test_what_cannot_be_looked_at_is_one_sentence(here, words, sentence, capsys):
    assert main(["diagnose", *words]) == 2
    said = capsys.readouterr().err
    assert sentence in said
    assert len([line for line in said.splitlines() if not line.startswith("running ")]) == 1


@pytest.mark.slow
def test_as_a_user_types_it(tmp_path):
    words = [w for w in TINY if w not in ("--steps", "30", "--validate-every-steps", "15")]
    done = normlab("diagnose", "--recipe", "pre", "--fail-on", "problem", *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert len(list((tmp_path / "runs").glob("diagnosis-pre-*.html"))) == 1
