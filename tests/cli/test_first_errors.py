"""The first mistakes of a newcomer: each ends with code 2 and one sentence that says what to type next."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch

from cases import each
from normlab.cli.main import main

MODEL = """
import torch
from torch import nn

class Tiny(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(31, 16), nn.Linear(16, 31)

    def forward(self, ids):
        return self.head(self.embed(ids))

def loss(model, ids):
    return nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())

def batch():
    return torch.randint(0, 31, (4, 13))
"""
SETUPS = """
import torch, normlab
from tiny_of_this_test import *

def a_tuple(): return Tiny(), batch()
def alone(): return Tiny()
def nothing(): Tiny()
def no_batch(): return normlab.Setup(Tiny())
def no_tensor(): return normlab.Setup(Tiny(), batch(), loss=lambda model, ids: 3.0)
def no_loss(): return normlab.Setup(Tiny(), batch())
def a_criterion(): return normlab.Setup(Tiny(), (batch(), batch()), loss=nn.CrossEntropyLoss())
def many_losses(): return normlab.Setup(Tiny(), batch(), loss=lambda model, ids: model(ids))
def elsewhere(): return normlab.Setup(Tiny(), batch().to("meta"), loss=loss)
def a_word(): return normlab.Setup(Tiny(), batch(), loss=loss, optimizer="adam")
def a_class(): return normlab.Setup(Tiny, batch(), loss=loss)
def out_of_vocabulary(): return normlab.Setup(Tiny(), batch() + 31, loss=loss)
def on_gpu(): return normlab.Setup(Tiny().to("cuda"), batch(), loss=loss)
"""
LOOP = """
from tiny_of_this_test import *
model = Tiny()
optimizer = torch.optim.AdamW(model.parameters())
"""
ARGUMENTS = """
import argparse
parser = argparse.ArgumentParser()
parser.add_argument("--data", required=True)
parser.parse_args()
"""
FILES = {
    "tiny_of_this_test.py": MODEL,
    "setups_of_this_test.py": SETUPS,
    "evaluates.py": "from tiny_of_this_test import *\nloss(Tiny(), batch())\n",
    "never_steps.py": f"{LOOP}loss(model, batch()).backward()\n",
    "only_steps.py": f"{LOOP}optimizer.step()\n",
    "no_data.py": "open('data/train.bin')\n",
    "needs_package.py": "import a_package_that_nobody_has\n",
    "needs_folder.py": "import sys\nsys.path.clear()\nimport neighbour\n",
    "raises.py": "raise RuntimeError('no data')\n",
    "needs_argument.py": ARGUMENTS,
    "on_gpu.py": f"{LOOP}model.to('cuda')\n",
    "old.py": 'print "hello"\n',
    "empty.py": "",
    "notebook.ipynb": "{}",
    "config.yaml": "a: 1\n",
    "folder/train.py": "",
    "folder/other.py": "",
    "bare/notes.txt": "",
    "gpt/config.json": '{"model_type": "gpt2"}',
    "neighbour/__init__.py": "",
}


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with the files of somebody who has never used normlab."""
    monkeypatch.chdir(tmp_path)
    for name, content in FILES.items():
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text(content)
    yield
    for name in ("tiny_of_this_test", "setups_of_this_test"):
        sys.modules.pop(name, None)


def sentence(capsys, typed: str) -> str:
    """What a command that ends with code 2 says: one sentence, and nothing on standard output."""
    capsys.readouterr()
    try:
        code = main(typed.split())
    except SystemExit as stopped:  # the parser's own errors
        code = stopped.code
    out, err = capsys.readouterr()
    assert code == 2
    assert out == ""
    assert "Traceback" not in err
    said = [line for line in err.splitlines() if line.startswith("normlab: ")]
    assert len(said) == 1
    return said[0]


@pytest.mark.slow
@each(
    ("typed", "to_type"),
    [
        ("chek never_steps.py", "check"),
        ("never_steps.py", "normlab check never_steps.py"),
        ("check nofile", "normlab check train.py"),
        ("check never_step.py", "never_steps.py"),
        ("check missing/train.py", "missing/train.py"),
        ("check never_steps", "normlab check never_steps.py"),
        ("check folder", "normlab check folder/train.py"),
        ("watch folder", "normlab watch folder/train.py"),
        ("check bare", "train.py"),
        ("check gpt", "normlab check hf:gpt"),
        ("check notebook.ipynb", "jupyter nbconvert --to script notebook.ipynb"),
        ("check config.yaml", "train.py"),
        ("check -m folder/train.py", "normlab check -m folder.train"),
        ("trial nofile", "normlab trial train.py"),
        ("diagnose nofile", "normlab diagnose train.py"),
        ("watch notebook.ipynb", "jupyter nbconvert --to script notebook.ipynb"),
        ("check needs_argument.py --data x", "normlab check needs_argument.py -- "),
        ("check -m folder.train --data x", "normlab check -m folder.train -- "),
        ("explain causalty", "causality"),
    ],
)
def test_a_word_that_names_nothing(here, capsys, typed, to_type):
    assert to_type in sentence(capsys, typed)


@pytest.mark.slow
@each(
    ("script", "to_type"),
    [
        ("tiny_of_this_test.py", "normlab check tiny_of_this_test.py:setup"),
        ("setups_of_this_test.py", "normlab check setups_of_this_test.py:no_batch"),
        ("evaluates.py", "normlab check evaluates.py:setup"),
        ("never_steps.py", "normlab check never_steps.py:setup"),
        ("only_steps.py", "normlab check only_steps.py:setup"),
        ("empty.py", "normlab check empty.py:setup"),
        ("needs_argument.py", "needs_argument.py -- "),
        ("needs_package.py", "pip install a_package_that_nobody_has"),
        ("needs_folder.py", "PYTHONPATH=."),
        ("no_data.py", "no_data.py:1"),
        ("raises.py", "raises.py:1"),
        ("old.py", f"Python 3.{sys.version_info.minor}"),
    ],
)
def test_a_script_that_shows_no_step(here, capsys, script, to_type):
    assert to_type in sentence(capsys, f"check {script}")


@pytest.mark.slow
@each(
    ("function", "facts"),
    [
        ("a_tuple", "tuple|Tiny|Tensor|normlab.Setup("),
        ("alone", "Tiny|normlab.Setup("),
        ("nothing", "normlab.Setup("),
        ("no_batch", "'batches'"),
        ("no_tensor", "loss(model, batch)"),
        ("no_loss", "Tiny|loss="),
        ("a_criterion", "loss="),
        ("many_losses", "[4, 13, 31]"),
        ("elsewhere", "meta|cpu"),
        ("a_word", "'adam'|torch.optim.Optimizer"),
        ("a_class", "Tiny|torch.nn.Module"),
        ("out_of_vocabulary", "IndexError"),
        ("missing", "'missing'|a_tuple"),
    ],
)
def test_a_function_that_returns_no_step(here, capsys, function, facts):
    said = sentence(capsys, f"check setups_of_this_test.py:{function}")
    assert [fact for fact in facts.split("|") if fact not in said] == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@each("source", ["on_gpu.py", "setups_of_this_test.py:on_gpu"])
def test_a_gpu_that_is_not_there(here, capsys, source):
    said = sentence(capsys, f"check {source}")
    assert "torch.cuda.is_available()" in said
    assert re.search(r"of_this_test\.py:\d+|on_gpu\.py:\d+", said)  # the user's line, not torch's


def test_a_run_that_does_not_exist_is_sought_among_those_that_do(here, capsys):
    Path("runs/0123abcd").mkdir(parents=True)
    Path("runs/0123abcd/config.json").write_text("{}")
    assert "0123abcd" in sentence(capsys, "check 99")
