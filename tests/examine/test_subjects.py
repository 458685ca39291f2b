"""What becomes of a configuration, a run's checkpoints, and the name of anybody's model."""

import sys
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from contracts.variants import CONFIG, build
from diagnosis.small import BATCH, labelled
from normlab.examine.subjects import SMALL_TOKENS, Case, of_config, of_run
from normlab.nn import Placement
from normlab.spec.config import Config
from normlab.store import RunFolder
from normlab.training.checkpoint import load_checkpoint
from normlab.training.train import train
from training.tiny import tiny, tiny_language_model, write_plain

MODULE = """
import torch

class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.inner = torch.nn.LayerNorm(8), torch.nn.Linear(8, 8)

    def forward(self, x):
        return x + self.inner(self.norm(x))

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList(Block() for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x

def build():
    torch.manual_seed(0)
    return Net()

ready = build()

def batch():
    return torch.randn(3, 5, 8)

def loss(model, x):
    return model(x).square().mean()

def failing():
    raise OSError("no weights")

number = 3
"""


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """A module of somebody's in the current directory, under a name of its own."""
    name = f"mine_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p])
    yield name
    sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def trained(text, tmp_path_factory):
    """A run whose best checkpoint is not its last."""
    folder = train(tiny(text, "pre", steps=12, validate_every_steps=6), tmp_path_factory.mktemp("runs"))
    status = folder.status()
    folder.set_status(replace(status, best_step=6))
    return folder


# ------------------------------------------------------------------------------------------------- placements


def test_a_placement_whose_stream_shows_no_sum_is_read_as_our_own_sublayer():
    class Sphere(Placement, name="sphere_of_a_test"):
        """Steps on the unit sphere towards the branch's output, at a rate for each channel."""

        normed = False

        def build(self, site):
            self.rate = nn.Parameter(torch.linspace(0.1, 0.5, site.dim))

        def read(self, stream):
            return stream

        def write(self, stream, y):
            return F.normalize(stream + self.rate * (F.normalize(y, dim=-1) - stream), dim=-1)

    try:
        model = build(replace(CONFIG, encoder_placement="sphere_of_a_test", decoder_placement="pre"))
    finally:
        del Placement.registry["sphere_of_a_test"]
    found = Case("spheres", model, BATCH[:2], loss=labelled).diagnosed("standard")
    encoder, decoder = found.structure.stacks
    assert [view.role for view in encoder.sublayers] == ["self_attention", "ffn"] * 2
    assert {view.placement for view in encoder.sublayers} == {"other"}
    assert {view.placement for view in decoder.sublayers} == {"pre"}
    assert not [f for f in found.at_least("warning") if f.name in ("not_done", "not_finite")]


# --------------------------------------------------------------------------------------------- configurations


def test_a_configuration_is_taken_at_its_start_on_its_own_text(text, tmp_path):
    case = of_config(tiny(text, "post+warmup"), tmp_path, tokens=256)
    assert case.title == "post+warmup, 1+1 layers of width 16"
    assert set(case.batch) == {"source", "target_in"}
    assert case.facts["warm-up"] == "4 steps to this rate"
    positions = sum(x.numel() for x in case.batch.values())
    assert positions <= 256
    assert all(sum(x.numel() for x in b.values()) <= SMALL_TOKENS for b in case.batches)


def test_its_loss_is_that_of_training_a_token(text, tmp_path):
    case = of_config(tiny(text, "pre"), tmp_path, tokens=256)
    case.model.eval()
    loss = case.loss(case.model, case.batch)
    logits = case.model(**case.batch).flatten(0, 1)
    target = case.batch.batch.target_out.flatten()
    log_p = logits.log_softmax(-1)[target != 0]
    smoothed = 0.9 * -log_p.gather(1, target[target != 0, None]).mean() + 0.1 * -log_p.mean()
    torch.testing.assert_close(loss, smoothed)


def test_a_language_model_too(tmp_path):
    config = tiny_language_model(write_plain(tmp_path / "text"), "pre")
    found = of_config(config, tmp_path, tokens=256).diagnosed("cheap")
    assert found.model == "Decoder"
    assert "Pre-LN with 2 layers" in str(found)
    assert not [f for f in found.findings if f.name == "not_done"]


def test_a_whole_diagnosis_of_a_configuration(text, tmp_path):
    case = of_config(tiny(text, "post", lr=2e-3), tmp_path, tokens=512)
    found = case.diagnosed("full")
    assert not [f for f in found.findings if f.name == "not_done"], str(found)
    assert found.facts["optimiser"] == "Adam, lr 0.002"
    assert set(found.tables["curvature"].column("quantity")) > {"critical_lr", "largest_eigenvalue"}


# ----------------------------------------------------------------------------------------------------- runs


def test_the_checkpoints_of_a_run(trained, tmp_path):
    assert checkpoints(trained) == ["last", "best"]
    same = RunFolder.create(tmp_path / "same", Config())
    same.set_status(replace(trained.status(), best_step=12))
    assert checkpoints(same) == ["last"]


def test_a_run_is_taken_at_its_checkpoint_with_its_optimiser(trained):
    last, best = (of_run(trained, name, tokens=256) for name in ("last", "best"))
    expected = last.model.state_dict()
    load_checkpoint(trained.last, last.model)
    assert all(torch.equal(expected[name], w) for name, w in last.model.state_dict().items())
    assert last.facts["checkpoint"] == "last, step 12"
    assert last.optimiser.state
    assert not isinstance(best.optimiser, torch.optim.Optimizer)
    assert last.title.endswith("last checkpoint")
    found = last.diagnosed("cheap")
    assert found.facts["optimiser"].startswith("Adam during its training, lr 0.00")


def test_a_run_without_that_checkpoint(tmp_path):
    folder = RunFolder.create(tmp_path / "new", Config())
    with pytest.raises(
        FileNotFoundError, match="no checkpoint 'last' yet; train it on: normlab train --config"
    ):
        of_run(folder, "last", tokens=256)


# ------------------------------------------------------------------------------------------- anybody's model


@pytest.mark.parametrize("model", ["build", "ready", "Net"])
def test_a_model_of_somebodys_is_found_by_name(mine, model):
    case = of_names(f"{mine}:{model}", f"{mine}:batch", f"{mine}:loss", lr=1e-3)
    found = case.diagnosed("cheap")
    assert (case.title, found.model) == ("Net", "Net")
    assert "Pre-LN with 3 layers" in str(found)


def test_blocks_and_branches_may_be_named(mine):
    case = of_names(f"{mine}:build", f"{mine}:batch", f"{mine}:loss")
    found = case.diagnosed("cheap", blocks=("blocks",), branches=("inner",))
    assert "named by the caller" in str(found)


@pytest.mark.parametrize(
    ("model", "batch", "loss", "sentence"),
    [
        (
            "nowhere.at.all:build",
            "batch",
            "",
            r"--model: cannot import 'nowhere.at.all'.*it is looked for in",
        ),
        ("{}", "batch", "", r"--model '\w+' is not a module and a name in it.*my_package\.my_module:model"),
        ("{}:builds", "batch", "", r"has no 'builds'; it has .*build"),
        (
            "{}:batch",
            "batch",
            "",
            r"gives a Tensor, not a torch\.nn\.Module; name a function that returns one",
        ),
        ("{}:number", "batch", "", r"gives a int, not a torch\.nn\.Module"),
        ("{}:failing", "batch", "", r"called without arguments and raised OSError: no weights"),
        ("{}:loss", "batch", "", r"--model \w+:loss was called without arguments and raised TypeError"),
        ("{}:build", "none", "", r"--batch: '\w+' has no 'none'"),
        ("{}:build", "batch", "losses", r"--loss: '\w+' has no 'losses'"),
    ],
)
def test_what_cannot_be_found_is_said(mine, model, batch, loss, sentence):
    with pytest.raises(ValueError, match=sentence):
        of_names(model.format(mine), f"{mine}:{batch}", f"{mine}:{loss}" if loss else "")


def test_a_module_that_fails_on_import(tmp_path, monkeypatch):
    (tmp_path / "failing_on_import.py").write_text("1 / 0")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p])
    with pytest.raises(ValueError, match="cannot import 'failing_on_import': ZeroDivisionError"):
        of_names("failing_on_import:build", "failing_on_import:batch")
