"""Models and batches that cannot be diagnosed: the same sentence at the prompt and from Python."""

import importlib
import re
import shlex
import sys
from pathlib import Path

import pytest
import torch

import normlab
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
"""

CALLED = (
    "A dict is passed as keywords, a tuple or list as arguments, anything else as it is; pass call=lambda "
    "model, batch: … to call the model in another way"
)
NO_STREAM = (
    "no residual stream was found in Sequential: no numbered siblings with modules inside ran. Name the "
    'container of the blocks, or the blocks by globs, as in blocks="encoder.layer" or blocks="stage*"; where '
    "sums are not seen between modules, name the modules whose outputs are added, as in "
    'branches=("attn", "mlp"); sums with factors are seen in float32 only, as model.float() has it'
)
HOLLOW = (
    'are on the device meta and hold no numbers, first {}; build the model outside of torch.device("meta"), '
    'or give it weights: model.to_empty(device="cpu"), then model.load_state_dict(…)'
)
BROKEN_LOSS = (
    "the loss raised TypeError: wrong() takes 1 positional argument but 2 were given; give loss=lambda "
    "model, batch: … that calls the model on the batch and returns a scalar"
)
NO_LOSS = (
    "Net puts out no loss: give a batch with labels, or a function loss=lambda model, batch: … that returns "
    "a differentiable scalar"
)
TAKES = "--batch with what the model's forward takes"
TYPED_LOSS = "--loss my_package.my_module:loss"

BAD = [
    (
        "build",
        "narrow",
        "loss",
        (
            "Net raised RuntimeError on the batch (Tensor): mat1 and mat2 shapes cannot be multiplied "
            f"(15x7 and 8x8). {CALLED}"
        ),
        TAKES,
    ),
    (
        "build",
        "keyworded",
        "loss",
        (
            "Net raised TypeError on the batch (keywords inputs): Net.forward() got an unexpected keyword "
            f"argument 'inputs'. {CALLED}"
        ),
        TAKES,
    ),
    (
        "frozen",
        "batch",
        "loss",
        (
            "no parameter of Net is trained, so it has no gradients to look at; unfreeze the "
            "ones to examine, as in model.requires_grad_()"
        ),
        "",
    ),
    ("elsewhere", "batch", "loss", f"14 parameters of Net {HOLLOW.format('blocks.0.norm.weight')}", ""),
    ("partly_elsewhere", "batch", "loss", f"4 parameters of Net {HOLLOW.format('blocks.1.norm.weight')}", ""),
    (
        "build",
        "elsewhere_batch",
        "loss",
        (
            "the model is on cpu and the batch on meta; move one of them, or rather make the batch on "
            "cpu: on meta it holds no numbers"
        ),
        "",
    ),
    (
        "build",
        "empty",
        "loss",
        "the batch has a tensor of shape [0, 5, 8], with nothing in it; give one of some sequences",
        "",
    ),
    ("build", "batch", "wrong", BROKEN_LOSS, TYPED_LOSS),
    ("build", "batch", "", NO_LOSS, TYPED_LOSS),
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


def typed(**names):
    return [word for flag, name in names.items() if name for word in (f"--{flag}", f"{NAME}:{name}")]


def refused(words, capsys):
    """What was said of it; nothing was written."""
    assert main(["diagnose", *words]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert not Path("runs").exists()
    return told.err


@pytest.mark.parametrize(("model", "batch", "loss", "sentence", "flags"), BAD)
def test_the_exact_sentence_at_the_prompt_and_from_python(
    theirs, capsys, model, batch, loss, sentence, flags
):
    spelt = f". On the command line: {flags}" if flags else ""
    assert refused(typed(model=model, batch=batch, loss=loss), capsys) == f"normlab: {sentence}{spelt}\n"
    function = getattr(theirs, loss) if loss else None
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
        normlab.diagnose(getattr(theirs, model)(), getattr(theirs, batch)(), loss=function)


OWN = "--model {0}:build --batch {0}:batch"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (
            "--model {0}:build",
            (
                "--batch is missing: a model of yours needs a batch; give both, as in --batch "
                "my_package.my_module:batch"
            ),
        ),
        (
            "--batch {0}:batch",
            (
                "--model is missing: a model of yours needs a batch; give both, as in --model "
                "my_package.my_module:model"
            ),
        ),
        (f"0123abcd {OWN}", "both a run and --model were given; leave one of them out"),
        ("0123abcd", "no runs in runs; make one: normlab train"),
        (
            "0123abcd --lr 1e-3",
            "a run has its own learning rate; leave --lr out, or name a recipe instead of the run",
        ),
        (
            "0123abcd --recipe pre --heads 2 --train-src a.txt",
            (
                "a run has its own configuration, so that nothing reads --recipe and --train-src and "
                "--heads; leave that out, or name a recipe instead"
            ),
        ),
        (
            "0123abcd --config multi30k",
            (
                "a run has its own configuration, so that nothing reads --config; leave that out, or name a "
                "recipe instead"
            ),
        ),
        (
            f"{OWN} --seed 7 --force",
            (
                "a model of yours has no configuration, so that nothing reads --seed and --force; leave that "
                "out, or name a recipe instead"
            ),
        ),
        (
            "0123abcd --flight --fail-on problem",
            "--flight makes no diagnosis, so that --fail-on says nothing; leave it out",
        ),
        ("--flight", "--flight does a run's steps again; name the run, as in normlab diagnose RUN --flight"),
        (
            "--model {0} --batch {0}:batch",
            (
                "--model '{0}' is not a module and a name in it; type them as in --model "
                "my_package.my_module:model"
            ),
        ),
        (
            "--model {0}:no_module --batch {0}:batch",
            "--model {0}:no_module gives a dict, not a torch.nn.Module; name a function that returns one",
        ),
        (
            "--model {0}:build --batch {0}:absent",
            "--batch {0}:absent was called without arguments and raised FileNotFoundError: no data here",
        ),
        (
            f"{OWN} --loss {{0}}:loss --blocks layers",
            (
                "blocks='layers' fits no module of the model; the paths begin blocks, blocks.0, "
                "blocks.0.norm, blocks.0.inner, blocks.1, blocks.1.norm, blocks.1.inner, blocks.2, …. "
                "On the command line: --blocks encoder.layer"
            ),
        ),
    ],
)
def test_what_was_typed_is_told_back(theirs, capsys, words, sentence):
    said = refused(shlex.split(words.format(NAME)), capsys)
    assert said == f"normlab: {sentence.format(NAME)}\n"


def test_a_name_that_does_not_exist_is_told_with_those_that_do(theirs, capsys):
    said = refused([*typed(model="built", batch="batch")], capsys)
    assert said.startswith(f"normlab: --model: {NAME!r} has no 'built'; it has Block, Net, Flat, build, ")


def test_a_module_that_does_not_exist_is_told_with_where_it_was_looked_for(theirs, capsys, tmp_path):
    said = refused(["--model", "no_such_one:build", "--batch", f"{NAME}:batch"], capsys)
    assert said == (
        "normlab: --model: cannot import 'no_such_one': ModuleNotFoundError: No module named 'no_such_one'; "
        f"it is looked for in {tmp_path} and among what is installed\n"
    )


def test_a_model_without_a_stream_gets_a_preflight_and_the_flags_to_type(theirs, capsys):
    assert main(["diagnose", *typed(model="no_blocks", batch="batch", loss="loss")]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert said.startswith(f"warning: {NO_STREAM}; type --blocks and --branches")
    found = normlab.diagnose(theirs.no_blocks(), theirs.batch(), loss=theirs.loss)
    assert [f.sentence for f in found.at_least("warning")] == [NO_STREAM]


@pytest.mark.parametrize(
    ("model", "loss", "said"),
    [
        (
            "poisoned",
            "loss",
            "2 of the 64 entries of the parameter blocks.2.inner.weight are infinite or not",
        ),
        ("build", "not_a_number", "the loss is nan before any step"),
    ],
)
def test_numbers_that_are_not_finite_are_the_first_line_of_every_report(theirs, capsys, model, loss, said):
    words = [*typed(model=model, batch="batch", loss=loss), "--sarif", "a.sarif", "--junit", "a.xml"]
    with pytest.raises(SystemExit) as gate:
        main(["preflight", *words])
    assert gate.value.code == 3
    told = capsys.readouterr().out
    assert told.startswith(f"problem: {said}")
    for path in ("a.sarif", "a.xml"):
        assert said in Path(path).read_text()
    (page,) = Path("runs").glob("preflight-*.html")
    assert said[1:] in page.read_text(), "its first letter is a capital there"


def test_a_preset_that_there_is_not(theirs, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["diagnose", *typed(model="build", batch="batch", loss="loss"), "--preset", "quick"])
    assert stopped.value.code == 2
    told = capsys.readouterr()
    words = " ".join((told.out + told.err).replace("│", " ").split())
    assert "invalid choice 'quick' for argument '--preset'. Expected one of ('preflight', 'cheap'" in words
    with pytest.raises(
        ValueError, match=r"^there is no preset 'quick'; there are preflight, cheap, standard, full$"
    ):
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
    assert "blocks: 3 layers, 3 sublayers\n  3 x branch: post, after = norm(before + branch)" in str(
        found.structure
    )
    assert [f.sentence for f in found.findings if f.name == "not_done" and "KeyError" in f.sentence] == []
    assert len(found.tables["residual_dependency"]) == 3
