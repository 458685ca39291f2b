"""A watch whose folder has rows, whose trainer raises, whose model has sparse gradients or no loss to see."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest
import torch
from torch import nn

import normlab
from normlab.watching.trainers import watched
from watching.test_loop import Small, Trainer, batches, looped, loss_of
from watching.watching import hooks_of, rows_of, steps_of


@pytest.mark.slow
def test_a_resumed_loop_goes_on_with_its_rows(tmp_path):
    looped(tmp_path, every_steps=2)
    looped(tmp_path, every_steps=2, first_step=6)
    assert steps_of(rows_of(tmp_path / "watch.jsonl")) == [0, 2, 4, 6, 8, 10]
    looped(tmp_path, every_steps=2, first_step=8, steps=1)
    assert steps_of(rows_of(tmp_path / "watch.jsonl")) == [0, 2, 4, 6, 8]
    with pytest.raises(ValueError, match="first_step is -1"):
        normlab.watch(Small(), torch.optim.SGD(Small().parameters()), first_step=-1)


@pytest.mark.slow
def test_a_training_that_begins_anew_sets_the_earlier_files_aside(tmp_path):
    looped(tmp_path, every_steps=2)
    rows = rows_of(tmp_path / "watch.jsonl")
    looped(tmp_path, every_steps=3)
    assert rows_of(tmp_path / "watch.1.jsonl") == rows
    assert steps_of(rows_of(tmp_path / "watch.jsonl")) == [0, 3]
    looped(tmp_path, every_steps=3)
    names = {path.name for path in tmp_path.iterdir()}
    assert {"watch.html", "watch.1.html", "watch.1.flight.json", "watch.2.jsonl", "watch.2.html"} <= names


def test_torchtitan_goes_on_from_the_step_that_its_checkpoint_has(tmp_path):
    trainer = Trainer(1e-2)
    with watched(trainer, out=tmp_path, every_steps=2):
        trainer.step = 5  # as after a checkpoint of 4 steps, in the first step of train()
        trainer.train(4)
    assert steps_of(rows_of(tmp_path / "watch.jsonl")) == [4, 6]


class Pair(Small):
    """A model that puts out logits and its loss, as nanoGPT's does."""

    def forward(self, ids):
        logits = super().forward(ids)
        return logits, nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


@pytest.mark.slow
def test_the_loss_in_a_tuple_is_seen(tmp_path):
    torch.manual_seed(0)
    model = Pair()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3.0)
    watch = normlab.watch(model, optimizer, out=tmp_path)
    for ids in batches(40):
        model(ids)[1].backward()
        optimizer.step()
        optimizer.zero_grad()
    with pytest.warns(UserWarning, match="flight recorder: "):
        watch.close()
    assert "the loss" in watch.reports[-1]["trigger"]["words"]


def test_without_a_loss_the_page_says_so(tmp_path):
    with pytest.warns(UserWarning, match=r"watch\.loss"):
        looped(tmp_path, watch_loss=False)
    assert "No loss" in (tmp_path / "watch.html").read_text()


@pytest.mark.slow
def test_sparse_gradients_are_measured(tmp_path):
    found = []
    for sparse in (False, True):
        torch.manual_seed(0)
        model = Small()
        model.tok_embeddings.sparse = sparse
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with normlab.watch(model, optimizer, out=tmp_path / f"{sparse}.jsonl", every_steps=1) as watch:
            for ids in batches(2):
                loss = loss_of(model, ids)
                watch.loss(loss)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        rows = rows_of(watch.path)
        found.append({(r["step"], r["module"], r["signal"], r["statistic"]): r["value"] for r in rows})
        assert watch.reports == []
    assert (1, "tok_embeddings", "update", "ratio") in found[1]
    assert found[1] == pytest.approx(found[0], rel=1e-4)


class Odd(nn.Module):
    """Puts out a sparse tensor, which no statistic is defined for."""

    def forward(self, x):
        return x.to_sparse()


def test_a_measurement_that_fails_inside_the_model_does_not_end_the_training(tmp_path):
    model = nn.Sequential(nn.Linear(4, 4), Odd())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    probes = [normlab.diagnosis.Probe("*", "output", "similarity")]
    watch = normlab.watch(model, optimizer, out=tmp_path, probes=probes)
    with pytest.warns(UserWarning, match="not measured"):
        loss = model(torch.ones(2, 4)).to_dense().square().mean()
    watch.loss(loss)
    loss.backward()
    optimizer.step()
    watch.close()
    assert hooks_of(model) == 0


@pytest.mark.slow
def test_a_process_that_ends_by_an_error_leaves_its_page(tmp_path):
    script = """
        import sys
        import torch
        import normlab

        layer = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        model = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        watch = normlab.watch(model, optimizer, out=sys.argv[1])
        loss = model(torch.randn(2, 4, 16)).square().mean()
        watch.loss(loss)
        loss.backward()
        optimizer.step()
        raise SystemExit("loader failed")
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert "loader failed" in done.stderr
    assert "Update" in (tmp_path / "watch.html").read_text()
