"""Measures of a finished run's weights, against the weights themselves."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from normlab.cli.presets import CONFIGS
from normlab.errors import UserError
from normlab.lab.config import MachineConfig
from normlab.lab.recipes.grammar import resolve
from normlab.lab.setups import task_of
from normlab.lab.tasks.translation import Translation
from normlab.lab.training.checkpoint import load_checkpoint
from normlab.lab.training.train import train
from normlab.lab.training.weights import checkpoint_of
from normlab.papers.end_measures import BATCHES, SENTENCES, measure_run
from normlab.papers.trainings import changed

SMALL = {
    "model.dim": 16,
    "model.ffn_dim": 32,
    "model.encoder_layers": 2,
    "model.decoder_layers": 2,
    "model.dropout": 0.1,
    "data.builtin_pairs": 4000,
    "optim.warmup_steps": 4,
    "train.steps": 6,
    "train.validate_every_steps": 6,
    "train.dev_decode_sentences": 2,
    "train.precision": "fp32",
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A finished run of each placement that keeps its weights at the start and at the end of its warm-up."""
    root = tmp_path_factory.mktemp("runs")
    machine = MachineConfig("cpu", threads=1, probes="", keep_checkpoints="0,4")
    base = replace(changed(CONFIGS["demo"](), SMALL), machine=machine)
    recipes = {"post": "post+warmup", "pre": "pre+warmup", "admin": "admin+warmup"}
    return {name: train(resolve(recipe, base), root) for name, recipe in recipes.items()}


def loaded(folder, weights):
    """The task and the model of a run, with some of its weights."""
    config = folder.config()
    task = task_of(config, folder.path.parent, config.train.max_tokens)
    assert isinstance(task, Translation)
    model = task.build().eval()
    load_checkpoint(checkpoint_of(folder, weights), model, run=folder.id())
    return task, model


def dev_tensors(task, first, count):
    """Source, target input and target output of some dev sentences, the shortest pair first."""
    pad, bos, eos = 0, 2, 3
    pairs = []
    for number in range(first, first + count):
        pair = task.corpus.dev.only(np.arange(len(task.corpus.dev)) == number)
        pairs.append((pair.source.tokens.tolist(), pair.target.tokens.tolist()))
    pairs.sort(key=lambda pair: len(pair[0]) + len(pair[1]))
    columns = (
        [[*source, eos] for source, _ in pairs],
        [[bos, *target] for _, target in pairs],
        [[*target, eos] for _, target in pairs],
    )
    return [
        torch.nn.utils.rnn.pad_sequence(
            [torch.tensor(ids) for ids in column], batch_first=True, padding_value=pad
        )
        for column in columns
    ]


@pytest.mark.slow
def test_all_kept_weights_are_measured_in_their_order(runs):
    for folder in runs.values():
        entries = measure_run(folder, ["gradients", "dependency", "updates"])
        assert [(entry["step"], entry["best"]) for entry in entries] == [(0, False), (4, False), (6, True)]
        assert ["updates" in entry for entry in entries] == [False, True, True]
        for entry in entries:
            assert "refused" not in entry
            assert len(entry["gradients"]["grad_l2"]["encoder"]["ffn ffn_out"]) == 2
            assert len(entry["dependency"]["decoder"]["i_beta_sq"]) == 6


@pytest.mark.slow
def test_gradients_are_those_of_the_mean_over_mini_batches(runs):
    (entry, *_) = measure_run(runs["post"], ["gradients"])
    task, model = loaded(runs["post"], 0)
    matrix = model.get_parameter("decoder.sublayers.5.f.outer.weight")
    found = []
    for number in range(BATCHES):
        source, target_in, target_out = dev_tensors(task, number * SENTENCES, SENTENCES)
        logits = model(source, target_in)
        smoothing = task.config.optim.label_smoothing
        loss = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), target_out.flatten(), ignore_index=0, label_smoothing=smoothing
        )
        found += torch.autograd.grad(loss, matrix)
    expected = torch.stack(found).mean(0).norm().item()
    assert entry["gradients"]["mean_grad_l2"]["decoder"]["ffn ffn_out"][1] == pytest.approx(
        expected, rel=1e-3
    )
    apart = torch.stack([gradient.norm() for gradient in found]).mean().item()
    assert entry["gradients"]["grad_l2"]["decoder"]["ffn ffn_out"][1] == pytest.approx(apart, rel=1e-3)


@pytest.mark.slow
def test_updates_are_the_moves_of_the_kept_weights(runs):
    folder = runs["pre"]
    entries = measure_run(folder, ["updates"])
    before, after = (load_file(folder.steps / step / "model.safetensors") for step in ("0", "4"))
    moved = [
        np.linalg.norm(after[name] - before[name])
        for name in (f"encoder.sublayers.{index}.f.inner.weight" for index in (1, 3))
    ]
    assert entries[1]["updates"]["encoder"]["ffn ffn_in"] == pytest.approx(moved, rel=1e-3)


@pytest.mark.slow
def test_dependency_is_the_share_of_the_own_branch(runs):
    (entry, *_) = measure_run(runs["pre"], ["dependency"])
    task, model = loaded(runs["pre"], 0)
    source, target_in, _ = dev_tensors(task, 0, SENTENCES)
    seen = {}

    def see(_, inputs, output):
        seen["before"], seen["after"] = inputs[0], output

    with torch.no_grad():
        model.encoder.sublayers[0].register_forward_hook(see)
        model(source, target_in)
    real = source != 0
    before, after = seen["before"][real], seen["after"][real]
    spaced = torch.linspace(0, len(before) - 1, 256).long()
    branch = (after - before)[spaced]
    share = branch.var(-1, correction=0) / after[spaced].var(-1, correction=0)
    assert entry["dependency"]["encoder"]["i_beta_sq"][0] == pytest.approx(share.mean().item(), rel=1e-3)
    assert entry["dependency"]["encoder"]["role"] == ["self_attention", "ffn"] * 2


def test_a_model_that_diverged_keeps_what_can_be_measured(runs, monkeypatch):
    def refuse(*_, **__):
        raise UserError("the loss is not finite")

    monkeypatch.setattr("normlab.papers.end_measures.parameter_gradients", refuse)
    entry, *_ = measure_run(runs["post"], ["gradients", "dependency"])
    assert entry["refused"] == {"gradients": "the loss is not finite"}
    assert "dependency" in entry


def test_an_unknown_measure_is_refused(runs):
    with pytest.raises(UserError):
        measure_run(runs["post"], ["gradient"])
