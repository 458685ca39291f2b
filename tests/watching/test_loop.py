"""A plain loop and a torchtitan-like trainer under watch: the same numbers, rows, reports, sinks, a page."""

from __future__ import annotations

import re
import warnings
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import nn

import normlab
from normlab.diagnosis import Probe
from normlab.watching.checks import WatchReports
from normlab.watching.meter import StepRecord
from normlab.watching.recorder import Recorder
from normlab.watching.sinks import TensorBoardSink, TrackioSink, WandbSink
from normlab.watching.trainers import watched
from watching.watching import hooks_of, rows_of, steps_of

VOCAB = 50


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.ln_1, self.ln_2, self.attn = nn.LayerNorm(dim), nn.LayerNorm(dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class Small(nn.Module):
    """A model whose layers are a list, as in nanoGPT, or a dict of names "0" …, as in torchtitan."""

    def __init__(self, *, as_dict=False, dim=16, dropout=0.1):
        super().__init__()
        self.tok_embeddings, self.norm = nn.Embedding(VOCAB, dim), nn.LayerNorm(dim)
        blocks = [Block(dim) for _ in range(2)]
        self.layers = (
            nn.ModuleDict({str(i): b for i, b in enumerate(blocks)}) if as_dict else nn.ModuleList(blocks)
        )
        self.output, self.dropout = nn.Linear(dim, VOCAB), nn.Dropout(dropout)

    def forward(self, ids):
        x = self.dropout(self.tok_embeddings(ids))
        for block in self.layers.values() if isinstance(self.layers, nn.ModuleDict) else self.layers:
            x = block(x)
        return self.output(self.norm(x))


def loss_of(model, ids):
    return nn.functional.cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def batches(count):
    source = torch.Generator().manual_seed(1)
    return [torch.randint(0, VOCAB, (4, 8), generator=source) for _ in range(count)]


def looped(folder=None, *, steps=6, lr=1e-2, two=False, watch_loss=True, **choices):
    """Losses and weights of a plain loop, with an evaluation after each step."""
    torch.manual_seed(0)
    model = Small()
    halves = (list(model.layers.parameters()), [p for n, p in model.named_parameters() if "layers" not in n])
    parts = halves if two else (list(model.parameters()),)
    optimizers = [torch.optim.AdamW(part, lr=lr) for part in parts]
    watching = folder and normlab.watch(model, optimizers, out=folder, **choices)
    losses = []
    for ids in batches(steps):
        model.train()
        loss = loss_of(model, ids)
        if watching and watch_loss:
            watching.loss(loss)
        losses.append(loss.item())
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            loss_of(model.eval(), ids)
    if watching:
        watching.close()
    assert hooks_of(model) == 0
    return losses, [p.detach().clone() for p in model.parameters()], watching


@pytest.mark.parametrize("two", [False, True])
def test_a_plain_loop_is_bit_identical_and_ends_with_a_page(tmp_path, two):
    losses, weights, _ = looped(two=two)
    watched_losses, same, watch = looped(tmp_path / "w", two=two, every_steps=2)
    assert watched_losses == losses
    assert all(torch.equal(a, b) for a, b in zip(same, weights, strict=True))
    rows = rows_of(tmp_path / "w" / "watch.jsonl")
    assert steps_of(rows) == [0, 2, 4]
    assert {(r["layer"], r["role"]) for r in rows if r["signal"] == "after"} == {
        (i, role) for i in range(2) for role in ("self_attention", "ffn")
    }
    seen = [r["value"] for r in rows if r["signal"] == "loss"]
    assert seen == pytest.approx(losses[::2], rel=1e-5)
    assert watch.reports == []
    page = watch.page.read_text()
    assert "Update, layers" in page
    assert ">Loss</h3>" in page
    assert "Flight recorder" not in page


def test_an_update_is_that_of_the_step_really_taken(tmp_path):
    torch.manual_seed(0)
    model = Small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = [p.detach().clone() for p in model.layers[1].mlp.parameters()]
    with normlab.watch(model, optimizer, out=tmp_path / "rows.jsonl", every_steps=9) as watch:
        loss = loss_of(model, batches(1)[0])
        watch.loss(loss)
        loss.backward()
        optimizer.step()
    after = [p.detach() for p in model.layers[1].mlp.parameters()]
    moved = sum((a - b).square().sum() for a, b in zip(after, before, strict=True))
    norm = model.layers[1].ln_2
    rows = {(r["index"], r["signal"]): r["value"] for r in rows_of(tmp_path / "rows.jsonl")}
    own = [*after, *norm.parameters()]
    moved = moved + sum((0.1 * p.grad).square().sum() for p in norm.parameters())
    expected = (moved / sum(p.square().sum() for p in own)).sqrt().item()
    assert rows[3, "update"] == pytest.approx(expected, rel=1e-4)
    assert (tmp_path / "rows.html").exists()


class Nested(torch.optim.AdamW):
    """Takes the step of its parent class."""

    def step(self, closure=None):
        return super().step(closure)


@pytest.mark.slow
def test_the_step_of_a_parent_class_is_no_second_step(tmp_path):
    found = {}
    for kind in (torch.optim.AdamW, Nested):
        torch.manual_seed(0)
        model = Small()
        optimizer = kind(model.parameters(), lr=1e-2)
        out = tmp_path / f"{kind.__name__}.jsonl"
        with normlab.watch(model, optimizer, out=out, every_steps=1) as watch:
            for ids in batches(3):
                loss = loss_of(model.train(), ids)
                watch.loss(loss)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        rows = rows_of(tmp_path / f"{kind.__name__}.jsonl")
        found[kind] = [r["value"] for r in rows if r["signal"] == "update"]
    assert len(found[Nested]) > 3
    assert found[Nested] == pytest.approx(found[torch.optim.AdamW], rel=1e-5)


class LossOfEach(nn.Module):
    """Returns a loss for each row, as data parallelism returns one for each replica."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(3, 1)

    def forward(self, x):
        return {"loss": self.linear(x).square().flatten()}


def test_a_loss_of_several_numbers_is_trained_as_without_a_watch(tmp_path):
    def trained(watched):
        model = LossOfEach()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        probes = [Probe("linear", "weight", "l2")]
        watch = normlab.watch(model, optimizer, out=tmp_path, probes=probes) if watched else nullcontext()
        with watch:
            for seed in range(2):
                x = torch.randn(2, 3, generator=torch.Generator().manual_seed(seed))
                model(x)["loss"].mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        return model.linear.weight

    assert torch.equal(trained(watched=True), trained(watched=False))


@pytest.mark.slow
def test_a_rate_that_is_too_high_ends_with_a_report(tmp_path):
    with pytest.warns(UserWarning, match="flight recorder: "):
        *_, watch = looped(tmp_path, steps=40, lr=3.0, every_steps=20)
    assert watch.reports[-1]["verdict"]["evidence"]
    assert "Flight recorder" in watch.page.read_text()


class Trainer:
    """A trainer with the attributes of torchtitan's that the adapter reads."""

    def __init__(self, lr):
        torch.manual_seed(0)
        self.model_parts = [Small(as_dict=True)]
        decayed = [p for p in self.model_parts[0].parameters() if p.ndim > 1]
        rest = [p for p in self.model_parts[0].parameters() if p.ndim < 2]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
        self.optimizers = type("Container", (), {"optimizers": [torch.optim.AdamW(groups, lr=lr)]})()

    def forward_backward_step(self, *, input_dict):
        loss = loss_of(self.model_parts[0], input_dict["input"])
        loss.backward()
        return loss

    def train(self, steps):
        for ids in batches(steps):
            self.forward_backward_step(input_dict={"input": ids})
            self.optimizers.optimizers[0].step()
            self.optimizers.optimizers[0].zero_grad()
        return [p.detach().clone() for p in self.model_parts[0].parameters()]


@pytest.mark.slow
def test_a_torchtitan_like_trainer_ends_with_a_page(tmp_path):
    trainer = Trainer(1e-2)
    with watched(trainer, out=tmp_path, every_steps=2) as watch:
        weights = trainer.train(4)
    assert all(torch.equal(a, b) for a, b in zip(weights, Trainer(1e-2).train(4), strict=True))
    assert {r["layer"] for r in rows_of(watch.path) if r["signal"] == "update" and r["stack"]} == {0, 1}
    assert "Update, layers" in watch.page.read_text()
    trainer = Trainer(3.0)
    with pytest.warns(UserWarning, match="flight recorder"), watched(trainer, out=tmp_path) as watch:
        trainer.train(40)
    assert watch.reports
    with pytest.raises(ValueError, match=r"normlab\.watch\(model, optimizers\)"), watched(object()):
        pass


def test_what_fails_in_the_watch_does_not_fail_in_the_loop(tmp_path):
    def broken(step, values):
        raise OSError("no route")

    (tmp_path / "file").write_text("")
    with pytest.warns(UserWarning, match="normlab: ") as told:
        losses, *_ = looped(tmp_path / "file" / "w", sinks=[broken], every_steps=1)
    assert losses == looped()[0]
    said = [str(one.message) for one in told]
    assert len([s for s in said if "sink" in s and "no route" in s]) == 1
    assert len([s for s in said if "rows" in s]) == 1
    for wrong, sentence in (
        ({"sinks": ["paper"]}, "no sink 'paper'"),
        ({"every_steps": 0}, "every_steps is 0"),
    ):
        with pytest.raises(ValueError, match=sentence):
            normlab.watch(Small(), torch.optim.SGD(Small().parameters()), **wrong)
    with pytest.raises(ValueError, match="object"):
        normlab.watch(Small(), object())


def test_sinks_get_the_numbers_of_watched_steps(tmp_path):
    board = pytest.importorskip("torch.utils.tensorboard")
    reading = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")

    class Run:
        def __init__(self):
            self.logged = []

        def log(self, data, step=None):
            self.logged.append((step, data))

    run, other, writer = Run(), Run(), board.SummaryWriter(str(tmp_path / "board"))
    sinks = [WandbSink(run), TrackioSink(other), TensorBoardSink(writer)]
    looped(tmp_path / "w", sinks=sinks, every_steps=3)
    writer.close()
    assert [step for step, _ in run.logged] == [0, 3]
    assert run.logged == other.logged
    assert {"loss.value", "layers.1.ln_2/update.ratio"} <= set(run.logged[0][1])
    events = reading.EventAccumulator(str(tmp_path / "board")).Reload()
    assert [e.step for e in events.Scalars("loss.value")] == [0, 3]


class Owner:
    def __init__(self, model):
        self.earlier = model.forward


class Cut(Block):
    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp[2](self.mlp[:2](self.ln_2(x)).detach())


def wrapped(model, how):
    owner, earlier = Owner(model), model.forward
    if how == "closure":
        model.forward = lambda ids: earlier(ids)
    elif how == "owner":
        model.forward = lambda ids: owner.earlier(ids)
    return model


@pytest.mark.parametrize("how", ["plain", "closure", "owner"])
@pytest.mark.parametrize("cut", [False, True])
def test_a_first_step_is_judged_by_a_copy_that_runs_its_own_weights(tmp_path, how, cut):
    """Nothing is said where the copy would run the model itself: its own weights would get no gradients."""
    torch.manual_seed(0)
    model = Small()
    if cut:
        model.layers[1] = Cut(16)
    wrapped(model, how)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # a report is also a warning
        with normlab.watch(model, optimizer, out=tmp_path, every_steps=9) as watch:
            for ids in batches(2):
                loss = loss_of(model, ids)
                watch.loss(loss)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
    reports = [report for report in watch.reports if report["trigger"]["kind"] == "gradients"]
    places = ["layers.1.ln_2.weight"] if cut and how != "owner" else []
    assert [report["verdict"]["module"] for report in reports] == places
    assert reports == watch.reports


def recorded(losses, gradients):
    """The recorder's reports on a training of two parameters with these losses and gradient norms."""
    said = []
    kept = WatchReports(said.append)
    recorder = Recorder(kept)
    for step, (loss, norms) in enumerate(zip(losses, gradients, strict=True)):
        values = torch.tensor(norms)
        recorder.add(StepRecord(step, 0.1, torch.tensor(loss), ("a.weight", "b.weight"), values, values))
        if recorder.pending == 16:
            recorder.check_steps(step)
    recorder.close()
    return kept.flights(), said


def test_the_recorder_names_what_left_its_range_first():
    gradients = [[1.0, 1.0]] * 20 + [[1.0, 500.0], [900.0, 900.0], [1.0, float("nan")]]
    losses = [4.0 - 0.01 * i for i in range(22)] + [float("nan")]
    (report,), said = recorded(losses, gradients)
    assert report["trigger"]["kind"] == "not finite"
    assert (report["verdict"]["module"], report["verdict"]["step"]) == ("b", 22)
    assert "b.weight" in said[0]
    (report,), _ = recorded([4.0] * 20 + [9.0] * 12, [[1.0, 1.0]] * 20 + [[1.0, 500.0]] * 12)
    assert (report["verdict"]["module"], report["verdict"]["step"]) == ("b", 20)


def test_a_spike_that_is_over_is_a_note_and_said_to_nobody():
    losses = [4.0] * 12 + [9.0] * 5 + [3.0] * 20
    (report,), said = recorded(losses, [[1.0, 1.0]] * len(losses))
    assert (report["trigger"]["kind"], report["trigger"]["step"]) == ("recovered", 12)
    assert said == []
    falling = [4.0 * 0.97**i for i in range(60)]
    assert all(a > b for a, b in pairwise(falling))
    assert recorded(falling, [[1.0, 1.0]] * 60) == ([], [])


def test_the_examples_of_the_page_about_integrations_run(tmp_path, monkeypatch):
    pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    page = Path(__file__).parents[2] / "docs" / "integrations.md"
    examples = re.findall(
        r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
    )
    assert len(examples) == 4
    for example in examples:
        exec(example, {})  # noqa: S102 (the page's own code)
    assert (tmp_path / "plain" / "watch.html").exists()
