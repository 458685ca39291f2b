"""One optimizer step: its random draws, its global batch and the row it leaves."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from lab.training.tiny import run_of, tiny
from normlab.lab.config import SeedConfig
from normlab.lab.tasks.translation import Translation
from normlab.lab.training.trainer import Trainer
from normlab.nn.kernels.wide_products import PRODUCTS, WideProducts


def trainer_of(config, root):
    data, corpus = Translation.prepare(config.data, root / "data")
    return Trainer(Translation(replace(config, data=data), corpus, torch.device("cpu")))


# -------------------------------------------------------------------------------------------- randomness


def first_steps(config, root):
    """What the first three steps begin with, read, draw their dropout from, and lead to."""
    trainer = trainer_of(config, root)
    start = {name: p.tolist() for name, p in trainer.model.named_parameters()}
    batches, dropout_seeds = [], []
    whole = trainer.task.loss

    def noted(model, batch):
        batches.append((batch.source.tolist(), batch.target_in.tolist()))
        dropout_seeds.append(torch.initial_seed())
        return whole(model, batch)

    trainer.task.loss = noted
    losses = [trainer.step().values[0].item() for _ in range(3)]
    return {"start": start, "batches": batches, "dropout seeds": dropout_seeds, "losses": losses}


@pytest.mark.slow
def test_seeds_change_only_what_they_are_for(text, tmp_path):
    config = tiny(text)
    usual = first_steps(config, tmp_path / "usual")

    def changed_by(**seeds):
        config_of_seeds = replace(config, seeds=replace(SeedConfig(1, 1, 1), **seeds))
        steps = first_steps(config_of_seeds, tmp_path / "-".join(seeds))
        return {name for name in usual if steps[name] != usual[name]}

    assert changed_by() == set()
    assert changed_by(init=2) == {"start", "losses"}
    assert changed_by(data=2) == {"batches", "losses"}
    assert changed_by(dropout=2) == {"dropout seeds", "losses"}


@pytest.mark.slow
def test_without_dropout_its_seed_changes_no_loss(text, tmp_path):
    config = tiny(text)
    calm = replace(config, model=replace(config.model, dropout=0.0))
    steps = first_steps(calm, tmp_path / "one")
    with_another_seed = first_steps(replace(calm, seeds=SeedConfig(1, 1, 7)), tmp_path / "other")
    assert steps["dropout seeds"] != with_another_seed["dropout seeds"]
    assert steps["losses"] == with_another_seed["losses"]


def test_every_micro_batch_has_dropout_of_its_own(text, tmp_path, monkeypatch):
    config = tiny(text, grad_accum_steps=2)
    trainer = trainer_of(config, tmp_path)
    seen = []
    whole = trainer.task.loss
    first = trainer.task.batch(0)
    monkeypatch.setattr(trainer.task, "batch", lambda index: first)
    monkeypatch.setattr(
        trainer.task, "loss", lambda model, batch: seen.append(whole(model, batch)) or seen[-1]
    )
    monkeypatch.setattr(trainer.optimizer, "step", lambda: None)
    trainer.step()
    trainer.step()
    assert len({s.loss.item() for s in seen}) == 4, "the same batch and weights, four drops"


# ------------------------------------------------------------------------------------------ grad_accum_steps


def test_accumulated_gradient_is_that_of_the_batches_together(text, tmp_path, monkeypatch):
    config = tiny(text, grad_accum_steps=3, max_tokens=256)
    config = replace(config, model=replace(config.model, dropout=0.0))
    trainer = trainer_of(config, tmp_path)
    trainer.model.double()
    monkeypatch.setattr(trainer.optimizer, "step", lambda: None)
    monkeypatch.setattr(trainer.optimizer, "zero_grad", lambda set_to_none: None)
    record = trainer.step()
    grads = {name: p.grad.clone() for name, p in trainer.model.named_parameters()}

    batches = [trainer.task.batch(i) for i in range(3)]
    assert len({b.tokens for b in batches}) > 1, "equal batches would hide a mean of means"

    def together(name):
        """Rows of all three, padded to the widest."""
        rows = [row for b in batches for row in getattr(b, name)]
        return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)

    tokens = sum(b.tokens for b in batches)
    whole = replace(
        batches[0], **{n: together(n) for n in ("source", "target_in", "target_out")}, tokens=tokens
    )
    trainer.model.zero_grad(set_to_none=True)
    sums = trainer.task.loss(trainer.model, whole)
    (sums.loss / tokens).backward()
    wanted = float(sums.loss.detach()) / tokens
    for name, p in trainer.model.named_parameters():
        torch.testing.assert_close(p.grad, grads[name], rtol=1e-6, atol=1e-7)  # the loss itself is in fp32
    loss, nll, norm = record.values.tolist()
    assert loss == pytest.approx(wanted, rel=1e-5)
    assert nll == pytest.approx(float(sums.nll) / tokens, rel=1e-5)
    assert norm == pytest.approx(math.sqrt(sum(float((g**2).sum()) for g in grads.values())), rel=1e-5)
    assert trainer.progress.tokens == tokens
    assert trainer.progress.padded_tokens == sum(b.source.numel() + b.target_in.numel() for b in batches)


def test_gradients_are_clipped_to_the_norm_that_was_asked_for(text, tmp_path, monkeypatch):
    config = tiny(text)
    trainer = trainer_of(replace(config, optim=replace(config.optim, max_grad_norm=0.01)), tmp_path)
    norms = []

    def look():
        norms.append(torch.nn.utils.get_total_norm([p.grad for p in trainer.model.parameters()]).item())

    monkeypatch.setattr(trainer.optimizer, "step", look)
    record = trainer.step()
    assert norms[0] == pytest.approx(0.01, rel=1e-3)
    assert record.values[2] > 0.1, "the row tells the norm before clipping"


def test_gradients_are_clipped_role_by_role_where_that_is_asked_for(text, tmp_path, monkeypatch):
    config = tiny(text)
    optim = replace(config.optim, max_grad_norm=0.01, clip_by="role")
    trainer, norms = trainer_of(replace(config, optim=optim), tmp_path), {}

    def look():
        for group in trainer.optimizer.param_groups:
            gradients = [p.grad for p in group["params"]]
            norms[group["role"]] = torch.nn.utils.get_total_norm(gradients).item()

    monkeypatch.setattr(trainer.optimizer, "step", look)
    trainer.step()
    assert norms == dict.fromkeys(("embedding", "hidden", "bias", "norm"), pytest.approx(0.01, rel=1e-3))


def test_rows_are_means_since_the_last_row_and_show_a_norm_that_is_not_finite(text, tmp_path):
    run = run_of(tiny(text), tmp_path)
    values = [(2.0, 1.0, 0.5), (4.0, 2.0, math.inf), (6.0, 6.0, 0.25)]
    run.progress.step = 3
    run.rows.pending = [(0.1 * i, torch.tensor(v)) for i, v in enumerate(values)]
    run.rows.flush()
    (row,) = run.folder.metrics()
    assert (row["step"], row["loss"], row["nll"], row["lr"]) == (3, 4.0, 3.0, 0.2)
    assert row["grad_norm_l2"] == math.inf


# --------------------------------------------------------------- bf16 on a processor without instructions


@pytest.fixture
def wide_shapes(monkeypatch):
    """A processor without instructions for bf16; return the shapes of the products that are computed wide."""
    shapes = []

    class Noted(WideProducts):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None) -> Any:
            result = super().__torch_dispatch__(func, types, args, kwargs)
            if func in PRODUCTS and result.dtype == torch.bfloat16:
                shapes.append(tuple(result.shape))
            return result

    monkeypatch.setattr("normlab.lab.training.devices.mkldnn_multiplies_bf16", lambda: False)
    monkeypatch.setattr("normlab.lab.training.devices.WideProducts", Noted)
    return shapes


def test_bf16_is_multiplied_wide_in_both_passes_and_on_dev(text, tmp_path, wide_shapes):
    trainer = trainer_of(tiny(text, precision="bf16"), tmp_path)
    trainer.task.loss(trainer.parallel.model, trainer.batches.at(0))
    assert not wide_shapes, "outside of a step nothing is changed"
    trainer.step()
    weights = {tuple(p.shape) for p in trainer.model.encoder.parameters() if p.dim() == 2}
    assert weights <= set(wide_shapes), "gradients of weights are products of the backward pass"
    wide_shapes.clear()
    trainer.dev_scores(trainer.model)
    assert wide_shapes


def test_a_compiled_loss_is_left_to_the_compiler(text, tmp_path, wide_shapes):
    trainer = trainer_of(tiny(text, precision="bf16"), tmp_path)
    trainer.compiled = trainer.task.loss
    trainer.step()
    assert not wide_shapes
