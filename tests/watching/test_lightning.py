"""A Trainer with and without probes: the same numbers, and rows of the steps that were asked for."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import nn

from normlab.diagnosis import Probe
from normlab.diagnosis.presets import MEASURED
from watching.watching import hooks_of, rows_of, steps_of

pl = pytest.importorskip("lightning.pytorch", reason="the extra normlab[lightning] is not installed")
from normlab.watching.lightning import LightningProbes  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore")  # Lightning's advice about workers and logging
]
STEPS = 4
X = torch.randn(8, 5, 16, generator=torch.Generator().manual_seed(1))


class Body:
    """A Transformer encoder, called through ``forward`` or directly, as a part."""

    def __init__(self, *, through_forward=True):
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.through_forward = through_forward
        self.losses = []

    def forward(self, x):
        return self.body(x)

    def training_step(self, batch, _):
        (x,) = batch
        out = self(x) if self.through_forward else self.body(x)
        loss = (out - x.roll(1, -1)).square().mean()
        self.losses.append(loss.detach())
        return loss

    def validation_step(self, batch, _):
        self.body(batch[0])

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2)


class Tower(Body, pl.LightningModule):
    pass


def data():
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(X), batch_size=2, shuffle=True)


def trained(*callbacks, model=None, trainer=pl.Trainer, validate=False, **choices):
    """Losses and final weights of a short training with dropout."""
    torch.manual_seed(0)
    model = Tower() if model is None else model
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    settings = {"max_steps": STEPS, "accelerator": "cpu", "devices": 1, "enable_model_summary": False}
    torch.manual_seed(2)
    fit = trainer(callbacks=[*callbacks], **quiet | settings | choices)
    fit.fit(model, data(), data() if validate else None)
    assert hooks_of(model) == 0
    return model.losses, [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("through_forward", [True, False])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_losses_and_weights_are_bit_identical(tmp_path, through_forward, precision):
    def model():
        torch.manual_seed(0)
        return Tower(through_forward=through_forward)

    losses, weights = trained(model=model(), precision=precision)
    assert len(losses) == STEPS
    probes = LightningProbes("full", out=tmp_path / "probes.jsonl", every_steps=2)
    watched, same = trained(probes, model=model(), precision=precision)
    assert all(torch.equal(a, b) for a, b in zip(watched, losses, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(same, weights, strict=True))
    rows = rows_of(tmp_path / "probes.jsonl")
    assert steps_of(rows) == [0, 2]
    layers = [row for row in rows if row["stack"] == "body.layers"]
    found = {(row["index"], row["signal"], row["statistic"]) for row in layers}
    assert {(i, *m) for i in range(4) for m in MEASURED["full"] if m[0] != "inside"} <= found
    assert {row["module"] for row in layers if row["signal"] == "output"} >= {"body.layers.1.linear1"}


def test_validation_gives_no_rows():
    rows = []
    probes = LightningProbes([Probe("body.layers.0")], every_steps=1, emit=rows.append)
    trained(probes, validate=True, accumulate_grad_batches=2, val_check_interval=1, max_steps=2)
    assert [r.step for r in rows] == [0, 0, 1, 1]


@pytest.mark.usefixtures("one_rank")
def test_a_call_by_data_parallelism_is_no_forward_pass():
    one, ranked = [], []
    trained(LightningProbes("standard", every_steps=2, emit=one.append))
    alone, _ = trained(strategy="ddp")
    watched, _ = trained(LightningProbes("standard", every_steps=2, emit=ranked.append), strategy="ddp")
    assert [r[:-1] for r in ranked] == [r[:-1] for r in one]
    assert all(torch.equal(a, b) for a, b in zip(watched, alone, strict=True))


def test_the_older_package_calls_it_too():
    other = pytest.importorskip("pytorch_lightning")
    torch.manual_seed(0)
    model, rows = type("Older", (Body, other.LightningModule), {})(), []
    trained(LightningProbes("cheap", every_steps=3, emit=rows.append), model=model, trainer=other.Trainer)
    assert sorted({r.step for r in rows}) == [0, 3]


def test_a_step_that_raises_leaves_no_hook():
    model, rows = Tower(), []

    def fail(*_):
        raise ArithmeticError

    handle = model.body.layers[1].register_forward_hook(fail)
    with pytest.raises(ArithmeticError):
        trained(LightningProbes([Probe("body.layers.0")], emit=rows.append), model=model)
    handle.remove()
    assert hooks_of(model) == 0
    assert [(r.step, r.module) for r in rows] == [(0, "body.layers.0")]


@pytest.mark.slow
def test_compiled_code_is_left_out_with_a_warning():
    model, rows = Tower(), []
    probes = LightningProbes(
        [Probe("body.layers.*"), Probe("*.linear1", "grad")], every_steps=STEPS, emit=rows.append
    )
    with pytest.warns(UserWarning, match="run compiled"):
        trained(probes, model=torch.compile(model, backend="eager"))
    assert {r.signal for r in rows} == {"grad"}


def test_without_the_library_a_sentence_says_what_to_type(monkeypatch):
    monkeypatch.setitem(sys.modules, "lightning.pytorch", None)
    monkeypatch.delitem(sys.modules, "normlab.watching.lightning")
    with pytest.raises(ImportError, match=r"'normlab\[lightning\]'"):
        import normlab.watching.lightning  # noqa: F401


def test_the_loss_of_accumulated_micro_batches_is_their_mean():
    rows = []
    losses, _ = trained(LightningProbes("cheap", every_steps=1, emit=rows.append), accumulate_grad_batches=2)
    means = [(a + b).item() / 2 for a, b in zip(losses[::2], losses[1::2], strict=True)]
    assert [r.value for r in rows if r.signal == "loss"] == pytest.approx(means, rel=1e-5)


def test_a_run_at_a_rate_of_a_half_ends_with_a_report_on_the_page(tmp_path):
    class Fast(Tower):
        """A tower whose last module is no norm, so that its outputs may grow."""

        def __init__(self):
            super().__init__()
            self.head = nn.Linear(16, 16)

        def forward(self, x):
            return self.head(self.body(x))

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters(), lr=0.5)

    torch.manual_seed(0)
    probes = LightningProbes("cheap", out=tmp_path, every_steps=10)
    trained(probes, model=Fast(), max_steps=24)
    assert probes.watch.reports[-1]["trigger"]["kind"] == "diverged"
    page = (tmp_path / "watch.html").read_text()
    assert all(words in page for words in ("Flight recorder", "Update, body", "of layer 1"))
