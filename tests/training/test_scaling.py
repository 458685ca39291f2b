"""Loss scaling, with a scaler on the CPU, below the refusal of fp16 there."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import distributed

from normlab.spec.config import TrainConfig
from normlab.store import RunFolder
from normlab.tasks.translation import Translation
from normlab.training.callbacks.flight import Trigger
from normlab.training.checkpoint import load_checkpoint
from normlab.training.parallel import FSDP, SingleProcess
from normlab.training.scaling import Scaling
from normlab.training.trainer import Loop
from training.tiny import tiny

CPU = torch.device("cpu")
SMALL = 2.0**-30
"""Below fp16's smallest number."""


def scaling_of(scale: float, *, enabled: bool = True, interval: int = 2) -> Scaling:
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=interval, enabled=enabled)
    return Scaling(scaler, CPU)


def optimiser_of(weight):
    return torch.optim.Adam([weight], torch.tensor(0.1), fused=True)


def one_step(scaling: Scaling, weight, optimiser, factor: float) -> float:
    """A step on ``factor * w``, through fp16 as autocast has it; its gradient's norm."""
    loss = (weight.to(torch.float16) * factor).float().sum()
    scaling.scaled(loss).backward()
    scaling.unscale(optimiser)
    norm = scaling.step(optimiser, torch.linalg.vector_norm(weight.grad))
    optimiser.zero_grad()
    return norm.item()


def test_a_small_gradient_underflows_without_scaling_and_is_right_with_it():
    for enabled, expected in ((False, 0.0), (True, SMALL)):
        weight = torch.nn.Parameter(torch.ones(1))
        scaling = scaling_of(2.0**20, enabled=enabled)
        scaled = scaling.scaled((weight * SMALL).sum())
        (gradient,) = torch.autograd.grad(scaled, weight)
        weight.grad = gradient.to(torch.float16).float()
        scaling.unscale(optimiser_of(weight))
        assert weight.grad.item() == expected


def test_a_step_that_is_not_finite_is_skipped_counted_and_halves_the_scale():
    weight, scaling = torch.nn.Parameter(torch.ones(1)), scaling_of(1024.0)
    optimiser = optimiser_of(weight)
    assert one_step(scaling, weight, optimiser, 100.0) == 0.0, "100 x 1024 is beyond fp16"
    assert weight.item() == 1.0
    assert scaling.row() == {"loss_scale": 512.0, "skipped_steps": 1}
    assert one_step(scaling, weight, optimiser, 100.0) == 100.0
    assert weight.item() == pytest.approx(0.9)
    one_step(scaling, weight, optimiser, 1.0)
    assert scaling.row() == {"loss_scale": 1024.0, "skipped_steps": 1}, "doubled after two that are finite"
    assert optimiser.state[weight]["step"].item() == 2


def test_a_step_that_is_not_finite_on_another_rank_is_skipped_here_too(tmp_path, monkeypatch):
    """A part of a gradient may be finite although the whole is not."""
    distributed.init_process_group("gloo", f"file://{tmp_path}/meeting", world_size=1, rank=0)
    try:
        scaling = Scaling(FSDP.scaler(None, CPU, enabled=True), CPU)
        scaling.load(scaling.state() | {"scale": 1024.0})
        weight = torch.nn.Parameter(torch.ones(1))
        optimiser, reduce = optimiser_of(weight), distributed.all_reduce
        one_step(scaling, weight, optimiser, 0.5)
        assert weight.item() == pytest.approx(0.9)

        def with_another(found, **more):
            return reduce(found.add_(1.0), **more)

        monkeypatch.setattr(distributed, "all_reduce", with_another)
        one_step(scaling, weight, optimiser, 0.5)
        assert weight.item() == pytest.approx(0.9)
        assert scaling.row()["loss_scale"] == 512.0
    finally:
        distributed.destroy_process_group()


def test_a_loop_scales_as_its_ranks_want_it(text, tmp_path, monkeypatch):
    def scaler(self, device, *, enabled):
        return torch.amp.GradScaler(device.type, init_scale=8.0, enabled=enabled)

    monkeypatch.setattr(SingleProcess, "scaler", scaler)
    assert loop_of(text, tmp_path).scaling.row() == {"loss_scale": 8.0, "skipped_steps": 0}


def test_the_state_goes_on_where_it_was():
    weight, scaling = torch.nn.Parameter(torch.ones(1)), scaling_of(1024.0)
    optimiser = optimiser_of(weight)
    for factor in (100.0, 1.0):
        one_step(scaling, weight, optimiser, factor)
    other = scaling_of(65536.0)
    other.load(scaling.state())
    assert other.state() == scaling.state()
    assert other.row() == {"loss_scale": 512.0, "skipped_steps": 1}
    one_step(other, weight, optimiser, 1.0)
    assert other.row()["loss_scale"] == 1024.0
    other.load({})
    assert other.row()["loss_scale"] == 1024.0, "a run that began in another precision has no state"


def test_without_scaling_everything_passes():
    weight, scaling = torch.nn.Parameter(torch.ones(1)), scaling_of(1024.0, enabled=False)
    loss, norm = weight.sum(), torch.tensor(float("inf"))
    assert scaling.scaled(loss) is loss
    loss.backward()
    optimiser = optimiser_of(weight)
    scaling.unscale(optimiser)
    assert scaling.step(optimiser, norm) is norm
    assert weight.item() == pytest.approx(0.9)
    assert (scaling.row(), scaling.state()) == ({}, {})
    scaling.load({"scale": 2.0})


def loop_of(text, root, **optim):
    config = tiny(text, precision="fp16", steps=8)
    config = replace(config, optim=replace(config.optim, **optim))
    data, corpus = Translation.prepare(config.data, root / "data")
    config = replace(config, data=data)
    return Loop(Translation(config, corpus, CPU), RunFolder.create(root / "run", config), lambda row: None)


def test_a_run_in_fp16_keeps_its_scale_in_the_checkpoint_and_its_skipped_steps_in_the_rows(text, tmp_path):
    loop = loop_of(text, tmp_path, max_grad_norm=1.0)
    before = {n: p.detach().clone() for n, p in loop.model.named_parameters()}
    loop.scaling.load(loop.scaling.state() | {"scale": 2.0**40})
    loop.step()
    assert loop.pending[0][1][2].item() == 0.0
    assert all(torch.equal(before[n], p) for n, p in loop.model.named_parameters())
    loop.scaling.load(loop.scaling.state() | {"scale": 2.0**10})
    for _ in range(3):
        loop.step()
    loop.flush()
    (row,) = loop.folder.metrics()
    assert (row["loss_scale"], row["skipped_steps"]) == (1024.0, 1)
    assert 0 < row["grad_norm_l2"] < 100
    assert row["nll"] < 10
    assert any(not torch.equal(before[n], p) for n, p in loop.model.named_parameters())
    loop.checkpoint("running")
    again = loop_of(text, tmp_path, max_grad_norm=1.0)
    assert again.progress.step == 4
    assert again.scaling.state() == loop.scaling.state()
    for each in (loop, again):
        each.step()
    assert torch.equal(loop.pending[0][1], again.pending[0][1])
    assert (
        load_checkpoint(loop.folder.last, loop.model, run=loop.folder.id())["scaling"]["skipped_steps"] == 1
    )


@pytest.mark.parametrize("saved", [True, False], ids=["from a checkpoint", "from the start"])
def test_steps_that_are_done_again_have_their_scale(text, tmp_path, saved):
    """Which steps are skipped hangs on it, and so does every loss after them."""
    loop = loop_of(text, tmp_path)
    loop.step()
    if saved:
        loop.scaling.load(loop.scaling.state() | {"scale": 2.0**40})
        loop.checkpoint("running")
    for _ in range(3):
        loop.step()
    loop.flush()
    now = loop.scaling.state() | {"scale": 4.0 if saved else 2.0**40}
    loop.scaling.load(now)
    report = loop.recorder.report(Trigger("asked", 4, 4, "asked for"))
    assert report["replay"] == {"from_step": int(saved), "checkpoint": saved, "agrees": True}
    assert loop.scaling.state() == now
    assert now["skipped_steps"] == (3 if saved else 0)


def test_a_run_in_another_precision_has_no_scale(text, tmp_path):
    config = tiny(text, steps=8)
    assert config.train.precision == TrainConfig().precision == "fp32"
    data, corpus = Translation.prepare(config.data, tmp_path / "data")
    config = replace(config, data=data)
    folder = RunFolder.create(tmp_path / "run", config)
    loop = Loop(Translation(config, corpus, CPU), folder, lambda row: None)
    loop.step()
    loop.flush()
    loop.checkpoint("running")
    assert "loss_scale" not in folder.metrics()[0]
    assert "scaling" not in load_checkpoint(folder.last, loop.model, run=folder.id())
