"""One optimiser step: its random draws, its global batch and the row it leaves."""

import math
from dataclasses import replace

import pytest
import torch

from normlab.spec.config import SeedConfig
from normlab.store import RunFolder
from normlab.tasks.translation import Translation
from normlab.training.trainer import Loop
from training.tiny import tiny


def loop_of(config, root):
    """A loop at its start, outside of any run."""
    data, corpus = Translation.prepare(config.data, root / "data")
    folder = RunFolder.create(root / "loop", config)
    task = Translation(replace(config, data=data), corpus, torch.device("cpu"))
    return Loop(task, folder, lambda row: None)


# -------------------------------------------------------------------------------------------- randomness


def first_losses(config, root, steps=3):
    loop = loop_of(config, root)
    start = {name: p.detach().clone() for name, p in loop.model.named_parameters()}
    for _ in range(steps):
        loop.step()
    return start, [values[0].item() for _, values in loop.pending]


def test_seeds_change_only_what_they_are_for(text, tmp_path):
    config = tiny(text)
    start, losses = first_losses(config, tmp_path / "a")
    same_start, same = first_losses(config, tmp_path / "b")
    assert losses == same

    def with_seeds(**seeds):
        return replace(config, seeds=replace(SeedConfig(1, 1, 1), **seeds))

    other_start, other = first_losses(with_seeds(dropout=2), tmp_path / "c")
    assert all(torch.equal(start[n], other_start[n]) and torch.equal(start[n], same_start[n]) for n in start)
    assert all(a != b for a, b in zip(losses, other, strict=True))

    _, other = first_losses(with_seeds(data=2), tmp_path / "d")
    assert losses[0] != other[0]
    other_start, _ = first_losses(with_seeds(init=2), tmp_path / "e", steps=1)
    assert not torch.equal(start["embedding.weight"], other_start["embedding.weight"])

    calm = replace(config, model=replace(config.model, dropout=0.0))
    _, losses = first_losses(calm, tmp_path / "f")
    _, other = first_losses(replace(calm, seeds=SeedConfig(1, 1, 7)), tmp_path / "g")
    assert losses == other, "without dropout its seed changes nothing"


def test_every_micro_batch_has_dropout_of_its_own(text, tmp_path, monkeypatch):
    config = tiny(text, grad_accum_steps=2)
    loop = loop_of(config, tmp_path)
    seen = []
    whole = loop.task.loss
    first = loop.task.batch(0)
    monkeypatch.setattr(loop.task, "batch", lambda index: first)
    monkeypatch.setattr(loop.task, "loss", lambda model, batch: seen.append(whole(model, batch)) or seen[-1])
    monkeypatch.setattr(loop.optimiser, "step", lambda: None)
    loop.step()
    loop.step()
    assert len({s.loss.item() for s in seen}) == 4, "the same batch and weights, four drops"


# ------------------------------------------------------------------------------------------ grad_accum_steps


def test_accumulated_gradient_is_that_of_the_batches_together(text, tmp_path, monkeypatch):
    config = tiny(text, grad_accum_steps=3, max_tokens=256)
    config = replace(config, model=replace(config.model, dropout=0.0))
    loop = loop_of(config, tmp_path)
    loop.model.double()
    monkeypatch.setattr(loop.optimiser, "step", lambda: None)
    monkeypatch.setattr(loop.optimiser, "zero_grad", lambda set_to_none: None)
    loop.step()
    grads = {name: p.grad.clone() for name, p in loop.model.named_parameters()}

    batches = [loop.task.batch(i) for i in range(3)]
    assert len({b.tokens for b in batches}) > 1, "equal batches would hide a mean of means"

    def together(name):
        """Rows of all three, padded to the widest."""
        rows = [row for b in batches for row in getattr(b, name)]
        return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)

    tokens = sum(b.tokens for b in batches)
    whole = replace(
        batches[0], **{n: together(n) for n in ("source", "target_in", "target_out")}, tokens=tokens
    )
    loop.model.zero_grad(set_to_none=True)
    sums = loop.task.loss(loop.model, whole)
    (sums.loss / tokens).backward()
    wanted = float(sums.loss.detach()) / tokens
    for name, p in loop.model.named_parameters():
        torch.testing.assert_close(p.grad, grads[name], rtol=1e-6, atol=1e-7)  # the loss itself is in fp32
    loss, nll, norm = loop.pending[0][1].tolist()
    assert loss == pytest.approx(wanted, rel=1e-5)
    assert nll == pytest.approx(float(sums.nll) / tokens, rel=1e-5)
    assert norm == pytest.approx(math.sqrt(sum(float((g**2).sum()) for g in grads.values())), rel=1e-5)
    assert loop.progress.tokens == tokens
    assert loop.progress.positions == sum(b.source.numel() + b.target_in.numel() for b in batches)


def test_gradients_are_clipped_to_the_norm_that_was_asked_for(text, tmp_path, monkeypatch):
    config = tiny(text)
    loop = loop_of(replace(config, optim=replace(config.optim, max_grad_norm=0.01)), tmp_path)
    norms = []

    def look():
        norms.append(torch.nn.utils.get_total_norm([p.grad for p in loop.model.parameters()]).item())

    monkeypatch.setattr(loop.optimiser, "step", look)
    loop.step()
    assert norms[0] == pytest.approx(0.01, rel=1e-3)
    assert loop.pending[0][1][2] > 0.1, "the row tells the norm before clipping"


def test_rows_are_means_since_the_last_row_and_show_a_norm_that_is_not_finite(text, tmp_path):
    loop = loop_of(tiny(text), tmp_path)
    values = [(2.0, 1.0, 0.5), (4.0, 2.0, math.inf), (6.0, 6.0, 0.25)]
    loop.progress.step = 3
    loop.pending = [(0.1 * i, torch.tensor(v)) for i, v in enumerate(values)]
    loop.flush()
    (row,) = loop.folder.metrics()
    assert (row["step"], row["loss"], row["nll"], row["lr"]) == (3, 4.0, 3.0, 0.2)
    assert row["grad_norm_l2"] == math.inf
