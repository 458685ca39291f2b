"""Probes in training: one-way, at their cadence, cut back like metrics, and right."""

import json
from dataclasses import replace

import pytest
import torch

from lab.training.tiny import PowerCutError, run_of, tiny
from normlab.diagnosis import PRESETS, Record
from normlab.lab.runs import RunFolder
from normlab.lab.training import probing
from normlab.lab.training.parallel import SingleProcess
from normlab.lab.training.probing import Probing
from normlab.lab.training.train import train
from normlab.watching.meter import Meter

KEY = ("step", "stack", "index", "module", "signal", "statistic")
LAST = ("last/model.safetensors", "last/optimizer.safetensors", "best/model.safetensors", "test.hyp.txt")


def watched(config, preset, every=3):
    return replace(config, machine=replace(config.machine, probes=preset, probe_every_steps=every))


def probe_of(row):
    return row["module"], f"{row['signal']}.{row['statistic']}"


def left_by(folder):
    rows = [{k: v for k, v in row.items() if k != "seconds"} for row in folder.metrics()]
    return rows, {name: (folder.path / name).read_bytes() for name in LAST}


def killed_at(step):
    def cut(row):
        if row["step"] == step:
            raise PowerCutError

    return PowerCutError, cut


@pytest.mark.slow
@pytest.mark.parametrize(
    ("preset", "grad_accum_steps", "precision"),
    [("full", 2, "bf16"), ("standard", 1, "fp32"), ("cheap", 1, "fp32")],
)
def test_metrics_and_weights_are_bit_identical_also_after_resume(
    text, tmp_path, preset, grad_accum_steps, precision
):
    config = tiny(text, grad_accum_steps=grad_accum_steps, precision=precision, max_tokens=300)
    config = replace(config, machine=replace(config.machine, checkpoint_every_steps=5))
    alone = train(watched(config, ""), tmp_path / "alone")
    assert alone.probes() == []
    assert not (alone.path / "probes.jsonl").exists()
    whole = train(watched(config, preset), tmp_path / "whole")
    assert whole.path.name == alone.path.name, "observation is no part of the id"
    assert left_by(whole) == left_by(alone)
    assert {row["step"] for row in whole.probes()} == {1, 3, 6, 9, 12}

    error, cut = killed_at(8)
    with pytest.raises(error):
        train(watched(config, preset), tmp_path / "parts", cut)
    parts = RunFolder(tmp_path / "parts" / whole.path.name)
    assert parts.probes()[-1]["step"] == 6, "beyond the checkpoint of step 5"
    train(watched(config, preset), tmp_path / "parts")
    assert left_by(parts) == left_by(whole)
    lines = [sorted((f.path / "probes.jsonl").read_text().splitlines()) for f in (parts, whole)]
    assert lines[0] == lines[1]


def test_only_steps_of_the_cadence_are_hooked_and_only_their_first_micro_batch(text, tmp_path, monkeypatch):
    run, steps = run_of(watched(tiny(text, grad_accum_steps=2), "full"), tmp_path), []
    whole = probing.observe

    def observing(*args):
        steps.append(run.progress.step)
        return whole(*args)

    monkeypatch.setattr(probing, "observe", observing)
    for _ in range(6):
        run.step()
        for module in run.trainer.model.modules():
            assert not module._forward_hooks
            assert not module._forward_pre_hooks
    assert steps == [1, 3, 6]
    run.rows.flush()
    rows = run.folder.probes()
    keys = [tuple(row[c] for c in KEY) for row in rows]
    assert len(keys) == len(set(keys)) > 100


def test_each_preset_measures_more_than_the_one_before(text, tmp_path):
    found = {}
    for preset in PRESETS:
        run = run_of(watched(tiny(text), preset), tmp_path / preset)
        run.step()
        run.rows.flush()
        found[preset] = {probe_of(row) for row in run.folder.probes()}
    assert found["cheap"] < found["standard"] < found["full"]
    stack = "encoder.sublayers"
    assert {(f"{stack}.1", p) for p in ("after.rms", "grad.l2", "update.ratio")} <= found["cheap"]
    assert (f"{stack}.0", "update[query].ratio") in found["standard"] - found["cheap"]
    assert (f"{stack}.0.f", "branch.rms") in found["standard"] - found["cheap"]
    assert (f"{stack}.1.f.activation", "output.fraction_zero") in found["full"] - found["standard"]


def test_what_is_measured_of_parameters_is_what_the_step_did(text, tmp_path):
    run = run_of(watched(tiny(text), "standard"), tmp_path)
    layer = run.trainer.model.get_submodule("decoder.sublayers.0")
    before = [p.detach().clone() for p in layer.parameters()]
    query = layer.f.matrices()["query"].detach().clone()
    seen = []
    run.trainer.optimizer.register_step_pre_hook(
        lambda *_: seen.append(torch.nn.utils.get_total_norm([p.grad for p in layer.parameters()]).item())
    )
    run.step()
    run.rows.flush()
    rows = {probe_of(row): row["value"] for row in run.folder.probes()}
    after = [p.detach() for p in layer.parameters()]
    norm = torch.nn.utils.get_total_norm
    ratio = norm([a - b for a, b in zip(after, before, strict=True)]) / norm(after)
    moved = layer.f.matrices()["query"].detach()
    name = "decoder.sublayers.0"
    assert rows[name, "update.ratio"] == pytest.approx(ratio.item(), rel=1e-4)
    assert rows[name, "update[query].ratio"] == pytest.approx(
        ((moved - query).norm() / moved.norm()).item(), rel=1e-4
    )
    assert rows[name, "grad.l2"] == pytest.approx(seen[0], rel=1e-4)


def test_every_sublayer_of_a_deep_stack_is_measured(text, tmp_path):
    config = tiny(text)
    deep = replace(config, model=replace(config.model, encoder_layers=6))
    run = run_of(watched(deep, "cheap"), tmp_path)
    run.step()
    run.rows.flush()
    rows = [row for row in run.folder.probes() if row["signal"] == "after"]
    measured = {(row["stack"], row["index"]) for row in rows}
    expected = [("encoder.sublayers", i) for i in range(12)] + [("decoder.sublayers", i) for i in range(3)]
    assert measured == set(expected)


def test_the_meter_counts_a_parameter_without_gradient_as_zero():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    process = SingleProcess(model)
    meter = Meter(process.parts, process.norms)
    model[1](torch.ones(1, 2)).sum().backward()
    weight = model[1].weight.grad.norm().item()
    assert meter.gradients().tolist() == pytest.approx([0, 0, weight, 2**0.5])
    meter.before()
    with torch.no_grad():
        model[0].bias += torch.tensor([3.0, 4.0])
    assert meter.after().tolist() == pytest.approx([0, 5, 0, 0])


def test_nothing_is_due_where_nothing_is_asked_for():
    model = torch.nn.Linear(2, 2)
    idle = Probing(model, "", 1, lambda record: pytest.fail("nothing was asked for"))
    assert not idle.due(1)
    with idle.passing(1, 0):
        model(torch.ones(1, 2))
    idle.flush()


def test_probes_that_are_not_finite_are_written_and_read(tmp_path):
    folder = RunFolder(tmp_path)
    folder.append_probes([Record(1, None, None, "a", "output", "rms", float("inf"))._asdict()])
    (line,) = (tmp_path / "probes.jsonl").read_text().splitlines()
    assert json.loads(line, parse_constant=pytest.fail)["value"] == "inf"
    assert folder.probes()[0]["value"] == float("inf")
    folder.cut_rows(0)
    assert folder.probes() == []
