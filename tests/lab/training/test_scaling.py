"""Loss scaling, with a scaler on the CPU: these tests go around the check that refuses fp16 there."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import distributed

from lab.training.tiny import run_of, tiny
from normlab.lab.config import TrainConfig
from normlab.lab.training.checkpoint import open_checkpoint
from normlab.lab.training.devices import Scaling
from normlab.lab.training.parallel import FSDP, SingleProcess
from normlab.watching.flight import Trigger

CPU = torch.device("cpu")
SMALL = 2.0**-30
"""Below fp16's smallest number."""


def scaling_of(scale: float, *, enabled: bool = True, interval: int = 2) -> Scaling:
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=interval, enabled=enabled)
    return Scaling(scaler, CPU)


def optimizer_of(weight):
    return torch.optim.Adam([weight], torch.tensor(0.1), fused=True)


def one_step(scaling: Scaling, weight, optimizer, factor: float) -> float:
    """Take a step on ``factor * w``, through fp16 as autocast has it; return its gradient's norm."""
    loss = (weight.to(torch.float16) * factor).float().sum()
    scaling.scale(loss).backward()
    scaling.unscale(optimizer)
    norm = scaling.step(optimizer, torch.linalg.vector_norm(weight.grad))
    optimizer.zero_grad()
    return norm.item()


def test_a_small_gradient_underflows_without_scaling_and_is_right_with_it():
    for enabled, expected in ((False, 0.0), (True, SMALL)):
        weight = torch.nn.Parameter(torch.ones(1))
        scaling = scaling_of(2.0**20, enabled=enabled)
        scaled = scaling.scale((weight * SMALL).sum())
        (gradient,) = torch.autograd.grad(scaled, weight)
        weight.grad = gradient.to(torch.float16).float()
        scaling.unscale(optimizer_of(weight))
        assert weight.grad.item() == expected


def test_a_step_that_is_not_finite_is_skipped_counted_and_halves_the_scale():
    weight, scaling = torch.nn.Parameter(torch.ones(1)), scaling_of(1024.0)
    optimizer = optimizer_of(weight)
    assert one_step(scaling, weight, optimizer, 100.0) == 0.0, "100 x 1024 is beyond fp16"
    assert weight.item() == 1.0
    assert scaling.row() == {"loss_scale": 512.0, "skipped_steps": 1}
    assert one_step(scaling, weight, optimizer, 100.0) == 100.0
    assert weight.item() == pytest.approx(0.9)
    one_step(scaling, weight, optimizer, 1.0)
    assert scaling.row() == {"loss_scale": 1024.0, "skipped_steps": 1}, "doubled after two that are finite"
    assert optimizer.state[weight]["step"].item() == 2


@pytest.mark.usefixtures("one_rank")
def test_a_step_that_is_not_finite_on_another_rank_is_skipped_here_too(monkeypatch):
    """A part of a gradient may be finite although the whole is not."""
    scaling = Scaling(FSDP.scaler(None, CPU, enabled=True), CPU)
    scaling.load_state_dict(scaling.state_dict() | {"scale": 1024.0})
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer, reduce = optimizer_of(weight), distributed.all_reduce
    one_step(scaling, weight, optimizer, 0.5)
    assert weight.item() == pytest.approx(0.9)

    def with_another(found, **more):
        return reduce(found.add_(1.0), **more)

    monkeypatch.setattr(distributed, "all_reduce", with_another)
    one_step(scaling, weight, optimizer, 0.5)
    assert weight.item() == pytest.approx(0.9)
    assert scaling.row()["loss_scale"] == 512.0


def test_a_trainer_scales_as_its_ranks_want_it(text, tmp_path, monkeypatch):
    def scaler(self, device, *, enabled):
        return torch.amp.GradScaler(device.type, init_scale=8.0, enabled=enabled)

    monkeypatch.setattr(SingleProcess, "scaler", scaler)
    assert started(text, tmp_path).trainer.scaling.row() == {"loss_scale": 8.0, "skipped_steps": 0}


def test_the_state_goes_on_where_it_was():
    weight, scaling = torch.nn.Parameter(torch.ones(1)), scaling_of(1024.0)
    optimizer = optimizer_of(weight)
    for factor in (100.0, 1.0):
        one_step(scaling, weight, optimizer, factor)
    other = scaling_of(65536.0)
    other.load_state_dict(scaling.state_dict())
    assert other.state_dict() == scaling.state_dict()
    assert other.row() == {"loss_scale": 512.0, "skipped_steps": 1}
    one_step(other, weight, optimizer, 1.0)
    assert other.row()["loss_scale"] == 1024.0
    other.load_state_dict({})
    assert other.row()["loss_scale"] == 1024.0, "a run that began in another precision has no state"


def test_without_scaling_everything_passes():
    weight, scaling = torch.nn.Parameter(torch.ones(1)), scaling_of(1024.0, enabled=False)
    loss, norm = weight.sum(), torch.tensor(float("inf"))
    assert scaling.scale(loss) is loss
    loss.backward()
    optimizer = optimizer_of(weight)
    scaling.unscale(optimizer)
    assert scaling.step(optimizer, norm) is norm
    assert weight.item() == pytest.approx(0.9)
    assert (scaling.row(), scaling.state_dict()) == ({}, {})
    scaling.load_state_dict(scaling_of(2.0).state_dict())


def started(text, root, **optim):
    config = tiny(text, precision="fp16", steps=8)
    return run_of(replace(config, optim=replace(config.optim, **optim)), root)


def test_a_run_in_fp16_keeps_its_scale_in_the_checkpoint_and_its_skipped_steps_in_the_rows(text, tmp_path):
    run = started(text, tmp_path, max_grad_norm=1.0)
    trainer = run.trainer
    before = {n: p.detach().clone() for n, p in trainer.model.named_parameters()}
    scale(trainer, 2.0**40)
    run.step()
    assert run.rows.pending[0][1][2].item() == 0.0
    assert all(torch.equal(before[n], p) for n, p in trainer.model.named_parameters())
    scale(trainer, 2.0**10)
    for _ in range(3):
        run.step()
    run.rows.flush()
    (row,) = run.folder.metrics()
    assert (row["loss_scale"], row["skipped_steps"]) == (1024.0, 1)
    assert 0 < row["grad_norm_l2"] < 100
    assert row["nll"] < 10
    assert any(not torch.equal(before[n], p) for n, p in trainer.model.named_parameters())
    run.checkpoint("running")
    again = started(text, tmp_path, max_grad_norm=1.0)
    assert again.progress.step == 4
    assert again.trainer.scaling.state_dict() == trainer.scaling.state_dict()
    for each in (run, again):
        each.step()
    assert torch.equal(run.rows.pending[0][1], again.rows.pending[0][1])
    assert open_checkpoint(run.folder.last).values["scaling"]["skipped_steps"] == 1


def scale(trainer, to):
    trainer.scaling.load_state_dict(trainer.scaling.state_dict() | {"scale": to})


@pytest.mark.parametrize("saved", [True, False], ids=["from a checkpoint", "from the start"])
def test_steps_that_are_done_again_have_their_scale(text, tmp_path, saved):
    """Which steps are skipped depends on it, and so does every loss after them."""
    run = started(text, tmp_path)
    run.step()
    if saved:
        scale(run.trainer, 2.0**40)
        run.checkpoint("running")
    for _ in range(3):
        run.step()
    run.rows.flush()
    scale(run.trainer, 4.0 if saved else 2.0**40)
    now = run.trainer.scaling.state_dict()
    run.recorder.report(4, Trigger("asked", 4, 4, "asked for"))
    (report,) = run.folder.flights()
    assert report["replay"] == {"from_step": int(saved), "checkpoint": saved, "agrees": True}
    assert run.trainer.scaling.state_dict() == now
    assert now["skipped_steps"] == (3 if saved else 0)


def test_a_run_in_another_precision_has_no_scale(text, tmp_path):
    config = tiny(text, steps=8)
    assert config.train.precision == TrainConfig().precision == "fp32"
    run = run_of(config, tmp_path)
    run.step()
    run.rows.flush()
    run.checkpoint("running")
    assert "loss_scale" not in run.folder.metrics()[0]
    assert "scaling" not in open_checkpoint(run.folder.last).values
