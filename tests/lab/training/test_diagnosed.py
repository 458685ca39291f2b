"""What a diagnosis examines: a configuration, a run's checkpoints, anybody's setup."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from contracts.variants import CONFIG, build
from diagnosis.small import BATCH, labelled
from lab.training.tiny import tiny, tiny_language_model, write_plain
from normlab.checks.check import check
from normlab.diagnosis.diagnose import diagnose_named
from normlab.errors import UserError
from normlab.lab.config import Config
from normlab.lab.runs import RunFolder
from normlab.lab.setups import SMALL_TOKENS, checkpoints, setup_from_config, setup_from_run
from normlab.lab.training.checkpoint import load_checkpoint
from normlab.lab.training.train import train
from normlab.nn import Placement
from normlab.setups.named import NamedSetup
from normlab.setups.setup import Setup
from normlab.trace.optimizers import copied
from zoo import PreNorm, Stack


@pytest.fixture(scope="module")
def trained(text, tmp_path_factory):
    """A run whose best checkpoint is not its last."""
    folder = train(tiny(text, "pre", steps=12, validate_every_steps=6), tmp_path_factory.mktemp("runs"))
    status = folder.status()
    folder.set_status(replace(status, best_step=6))
    return folder


# ------------------------------------------------------------------------------------------------- placements


@pytest.mark.slow
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
    diagnosis = diagnose_named(NamedSetup("spheres", Setup(model, BATCH[:2], labelled)), "standard")
    encoder, decoder = diagnosis.structure.stacks
    assert [view.role for view in encoder.sublayers] == ["self_attention", "ffn"] * 2
    assert {view.placement for view in encoder.sublayers} == {"other"}
    assert {view.placement for view in decoder.sublayers} == {"pre"}
    assert not [f for f in diagnosis.at_least("warning") if f.name in ("not_done", "not_finite")]


# --------------------------------------------------------------------------------------------- configurations


def test_a_configuration_is_taken_at_its_start_on_its_own_text(text, tmp_path):
    source = setup_from_config(tiny(text, "post+warmup"), tmp_path, tokens=256)
    assert source.title == "post+warmup, 1+1 layers of width 16"
    assert source.facts["warm-up"] == "4 steps to this rate"
    assert source.warmup_steps == 4
    batch = source.setup.batch
    assert batch.source.numel() + batch.target_in.numel() <= 256
    assert len(source.mini_batches()) == 4
    assert all(b.source.numel() + b.target_in.numel() <= SMALL_TOKENS for b in source.mini_batches())


@pytest.mark.slow
def test_a_configuration_that_leaves_the_precision_open_has_a_name_for_each_start(text, trained, tmp_path):
    config = tiny(text, "pre")
    config = replace(config, train=replace(config.train, precision="auto"))
    begun = replace(config, train=replace(config.train, init_from=str(trained.path)))
    drawn, loaded = (setup_from_config(one, tmp_path, tokens=256) for one in (config, begun))
    assert drawn.name.startswith("pre-")
    assert loaded.name.startswith("pre-")
    assert drawn.name != loaded.name
    assert loaded.facts["weights"] == str(trained.path)


def test_its_loss_is_that_of_training_a_token(text, tmp_path):
    setup = setup_from_config(tiny(text, "pre"), tmp_path, tokens=256).setup
    model, batch = setup.model.eval(), setup.batch
    loss = setup.loss(model, batch)
    logits = model(batch.source, batch.target_in).flatten(0, 1)
    target = batch.target_out.flatten()
    log_p = logits.log_softmax(-1)[target != 0]
    smoothed = 0.9 * -log_p.gather(1, target[target != 0, None]).mean() + 0.1 * -log_p.mean()
    torch.testing.assert_close(loss, smoothed)


def test_a_language_model_too(tmp_path):
    config = tiny_language_model(write_plain(tmp_path / "text"), "pre")
    diagnosis = diagnose_named(setup_from_config(config, tmp_path, tokens=256), "cheap")
    assert diagnosis.model == "Decoder"
    (placement,) = [f for f in diagnosis.findings if f.name == "placement"]
    assert (placement.numbers["layers"], placement.numbers["pre"]) == (2, 4)
    assert not [f for f in diagnosis.findings if f.name == "not_done"]


def test_a_whole_diagnosis_of_a_configuration(text, tmp_path):
    diagnosis = diagnose_named(setup_from_config(tiny(text, "post", lr=2e-3), tmp_path, tokens=512), "full")
    assert not [f for f in diagnosis.findings if f.name == "not_done"], str(diagnosis)
    assert diagnosis.facts["optimizer"] == "Adam, lr 2e-3"
    assert set(diagnosis.tables["curvature"].column("quantity")) > {"critical_lr", "largest_eigenvalue"}


# ----------------------------------------------------------------------------------------------------- runs


def test_the_checkpoints_of_a_run(trained, tmp_path):
    assert checkpoints(trained) == ["last", "best"]
    same = RunFolder.create(tmp_path / "same", Config())
    same.set_status(replace(trained.status(), best_step=12))
    assert checkpoints(same) == ["last"]


def test_a_run_is_taken_at_its_checkpoint_with_its_optimizer(trained):
    last, best = (setup_from_run(trained, name, tokens=256) for name in ("last", "best"))
    model = last.setup.model
    expected = model.state_dict()
    load_checkpoint(trained.last, model)
    assert all(torch.equal(expected[name], w) for name, w in model.state_dict().items())
    assert last.facts["checkpoint"] == "last, step 12"
    assert last.setup.optimizer.state
    assert not isinstance(best.setup.optimizer, torch.optim.Optimizer)
    assert last.title.endswith("last checkpoint")
    diagnosis = diagnose_named(last, "cheap")
    assert diagnosis.facts["optimizer"].startswith("Adam during its training, lr ")


def test_a_run_without_that_checkpoint(tmp_path):
    folder = RunFolder.create(tmp_path / "new", Config())
    with pytest.raises(FileNotFoundError, match=r"'last' .*train --config"):
        setup_from_run(folder, "last", tokens=256)


@pytest.mark.slow
def test_a_check_at_a_checkpoint_steps_at_the_rate_of_the_runs_next_step(trained):
    for name in ("last", "best"):
        setup = setup_from_run(trained, name, tokens=256).setup
        _, (optimizer,), _ = copied(setup)
        assert all(float(group["lr"]) == pytest.approx(setup.lr) for group in optimizer.param_groups)
        report = check(setup)
        assert not {"groups", "update"} & {failure.property for failure in report.failures}, str(report)


# ------------------------------------------------------------------------------------------- anybody's setup


def square(model, x):
    return model(x).square().mean()


def setup(**more):
    return NamedSetup(
        "Net", Setup(Stack(*(PreNorm(8) for _ in range(3))), torch.randn(3, 5, 8), square, **more)
    )


def test_a_setup_is_stepped_by_its_optimizer_or_by_an_adam():
    plain = diagnose_named(setup(), "cheap", 1e-3)
    (placement,) = [f for f in plain.findings if f.name == "placement"]
    assert "Pre-LN" in placement.sentence
    assert placement.numbers["layers"] == 3
    assert plain.facts["optimizer"] == "Adam, lr 1e-3"
    own = setup(optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.25))
    assert diagnose_named(own, "cheap").facts["optimizer"] == "SGD, lr 0.25"


@pytest.mark.parametrize(
    ("optimizer", "lr", "words"),
    [
        (lambda model: torch.optim.SGD(model.parameters(), lr=0.25), 1.0, "brings its own learning rate"),
        (lambda model: 1 / 0, None, "optimizer raised ZeroDivisionError"),
        (lambda model: None, None, "optimizer returned None, which has no param_groups"),
        (lambda model: [torch.optim.SGD(model.parameters(), lr=1.0)] * 2, None, "2 optimizers"),
    ],
)
def test_an_optimizer_that_a_diagnosis_cannot_step_with(optimizer, lr, words):
    with pytest.raises(UserError, match=words):
        diagnose_named(setup(optimizer=optimizer), "cheap", lr)
