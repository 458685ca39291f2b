"""Models and batches that cannot be diagnosed: the same sentence at the prompt and from Python."""

import importlib
import re
import shlex
import sys
from pathlib import Path

import pytest
import torch

import normlab
from cases import each
from normlab.cli.main import main
from normlab.errors import UserError

MODULE = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x):
        return self.norm(x + self.inner(x))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(8, 2)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)

class Flat(Net):
    def forward(self, x):
        return self.head(x)

def build():
    torch.manual_seed(0)
    return Net()

def one_inner():
    net = build()
    for block in net.blocks:
        block.inner = net.blocks[0].inner
    return net

def no_blocks():
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))

def frozen():
    return build().requires_grad_(False)

def elsewhere():
    return build().to("meta")

def partly_elsewhere():
    net = build()
    net.blocks[1].to("meta")
    return net

def poisoned():
    net = build()
    with torch.no_grad():
        net.blocks[2].inner.weight[0, :2] = float("nan")
    return net

def no_module():
    return {"layers": 3}

def batch():
    return torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(0))

def narrow():
    return batch()[..., :7]

def keyworded():
    return {"inputs": batch()}

def elsewhere_batch():
    return batch().to("meta")

def empty():
    return batch()[:0]

def absent():
    raise FileNotFoundError("no data here")

def loss(model, x):
    return model(x).square().mean()

def not_a_number(model, x):
    return model(x).mean() * float("nan")

def wrong(model):
    return 0

def setup(seed=0):
    return {"model": MODEL(), "batches": BATCH(), "loss": LOSS}
"""

BAD = [
    ("build", "narrow", "loss", "the loss raised RuntimeError: mat1 and mat2"),
    ("build", "keyworded", "loss", "the loss raised TypeError: linear()"),
    ("frozen", "batch", "loss", "no parameter of Net is trained"),
    ("elsewhere", "batch", "loss", "14 parameters of Net are on the device meta"),
    ("partly_elsewhere", "batch", "loss", "4 parameters of Net are on the device meta"),
    ("build", "elsewhere_batch", "loss", "the model is on cpu and the batch on meta"),
    ("build", "empty", "loss", "the batch has a tensor of shape [0, 5, 8]"),
    ("build", "batch", "wrong", "the loss raised TypeError"),
    ("build", "batch", "not_a_number", "the loss is nan before any step"),
    ("poisoned", "batch", "loss", "normlab.check says where that begins"),
    ("build", "batch", "None", "Net puts out no loss"),
    ("no_blocks", "batch", "loss", "no residual stream was found in Sequential"),
]
NAME = "bad_input_of_this_test"


@pytest.fixture
def theirs(tmp_path, monkeypatch):
    """Somebody's module in an empty current directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    (tmp_path / f"{NAME}.py").write_text(MODULE)
    importlib.invalidate_caches()
    yield importlib.import_module(NAME)
    sys.modules.pop(NAME, None)


def setup(model="build", batch="batch", loss="loss"):
    """A file whose setup has these parts."""
    parts = f"MODEL, BATCH, LOSS = {model}, {batch}, {loss}"
    Path("mine.py").write_text(f"{MODULE}\n{parts}\n")
    return "mine.py:setup"


def refused(words, capsys):
    """The one sentence that refuses a command, which writes nothing."""
    assert main(["diagnose", *words]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert not Path("runs").exists()
    (sentence,) = (line for line in told.err.splitlines() if not line.startswith("running "))
    return sentence


@pytest.mark.slow
@each(("model", "batch", "loss", "sentence"), BAD)
def test_the_same_sentence_at_the_prompt_and_from_python(theirs, capsys, model, batch, loss, sentence):
    said = refused([setup(model, batch, loss)], capsys)
    assert sentence in said
    function = getattr(theirs, loss, None)
    with pytest.raises(UserError) as raised:
        normlab.diagnose(getattr(theirs, model)(), getattr(theirs, batch)(), loss=function)
    assert said.startswith(f"normlab: {raised.value}")


@pytest.mark.slow
@each(
    ("words", "sentence"),
    [
        ("0123abcd", "no run in runs"),
        (
            "0123abcd --lr 1e-3",
            "0123abcd has a configuration or a setup of its own, so normlab would ignore --lr",
        ),
        ("0123abcd --recipe pre --heads 2 --train-src a.txt", "--recipe and --train-src and --heads"),
        ("0123abcd --config multi30k", "would ignore --config"),
        ("mine.py:setup --force", "would ignore --force"),
        ("0123abcd --flight --fail-on problem", "--flight makes no diagnosis, so it would ignore --fail-on"),
        ("--flight", "name the run, as in normlab diagnose RUN --flight"),
        ("mine.py:no_module", "no_module() has no 'layers'"),
        ("mine.py:absent", "raised FileNotFoundError: no data here"),
        ("mine.py:built", "has no 'built'"),
        ("no_such_one:build", "raised ModuleNotFoundError"),
        ("mine.py:setup --blocks layers", "On the command line: --blocks encoder.layer"),
    ],
)
def test_what_was_typed_is_told_back(theirs, capsys, words, sentence):
    setup()
    assert sentence in refused(shlex.split(words), capsys)


def test_a_preset_that_there_is_not(theirs, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["diagnose", setup(), "--preset", "quick"])
    assert stopped.value.code == 2
    told = capsys.readouterr()
    words = " ".join((told.out + told.err).replace("│", " ").split())
    assert re.search(r"'quick' .*'--preset'.*'cheap'", words)
    with pytest.raises(ValueError, match=r"'quick'; .*\bcheap, .*full$"):
        normlab.diagnose(theirs.build(), theirs.batch(), loss=theirs.loss, preset="quick")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    "compiled", [lambda net, x: torch.jit.trace(net, x), lambda net, x: torch.jit.script(net)]
)
def test_a_model_compiled_by_torchscript_is_refused(theirs, compiled):
    model = compiled(theirs.build(), theirs.batch())
    with pytest.raises(UserError, match=r"TorchScript.*torch\.jit\.trace"):
        normlab.diagnose(model, theirs.batch(), loss=theirs.loss)


def test_blocks_that_share_a_module_are_read(theirs):
    found = normlab.diagnose(theirs.one_inner(), theirs.batch(), loss=theirs.loss, preset="standard")
    (stack,) = found.structure.stacks
    assert (stack.name, len(stack.sublayers)) == ("blocks", 3)
    assert {(view.placement, view.relation) for view in stack.sublayers} == {
        ("post", "after = norm(before + branch)")
    }
    assert [f.sentence for f in found.findings if f.name == "not_done" and "KeyError" in f.sentence] == []
    assert len(found.tables["residual_dependency"]) == 3
