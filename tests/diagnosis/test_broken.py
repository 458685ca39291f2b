"""Models whose numbers are not finite, and what a diagnosis leaves as it was."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from diagnosis.test_diagnose import X, square, tower
from normlab.diagnosis import diagnose, read_structure


def poisoned():
    model = tower()
    with torch.no_grad():
        model.layers[2].branch.weight[0, 0] = float("nan")
    return model


def exploding(model, batch):
    return model(batch).sum() * float("inf")


class Rows(nn.Module):
    """A batch norm over all tokens."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(X.shape[-1] if X.ndim else 1)

    def forward(self, x):
        return self.norm(x.flatten(0, -2)).view_as(x)


def poisoned_buffer():
    model = tower()
    model.layers[1].register_buffer("table", torch.tensor([1.0, float("nan")]))
    model.register_buffer("mask", torch.full((3, 3), -torch.inf).triu(1))
    return model


class Divides(nn.Module):
    """Divides by zero."""

    def forward(self, x):
        return x / x.new_zeros(())


def dividing():
    model = tower()
    model.layers[2].branch = nn.Sequential(model.layers[2].branch, Divides())
    return model


@pytest.mark.parametrize(
    ("model", "loss", "module", "layer", "sentence"),
    [
        (poisoned, square, "layers.2.branch", 2, "1 of the 256 entries of the parameter layers.2.branch"),
        (
            poisoned_buffer,
            lambda m, x: square(m, x) * m.layers[1].table.sum(),
            "layers.1",
            1,
            "1 of the 2 entries of the buffer layers.1.table is infinite or not a number",
        ),
        (dividing, square, "layers.2.branch.1", 2, "layers.2.branch.1 puts out what is infinite"),
        (tower, exploding, "", None, "before any step, though all weights and the outputs of all"),
    ],
)  # fmt: skip
def test_where_numbers_stop_being_finite_is_the_cause(model, loss, module, layer, sentence):
    found = diagnose(model(), X, loss=loss, preset="preflight").cause
    assert found is not None
    assert (found.name, found.module, found.layer) == ("not_finite", module, layer)
    assert sentence in found.sentence
    assert found.do


def test_labels_are_looked_at_where_the_loss_alone_knows_how_the_model_is_called():
    labels = torch.full((4, 6), -100)

    def loss(model, batch):
        return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())

    for model, name in ((tower(), "no_labels"), (dividing(), "not_finite")):
        structure = read_structure(tower(), X)
        found = diagnose(model, (X, labels), loss=loss, structure=structure, preset="preflight").cause
        assert found is not None
        assert found.name == name


def test_weights_that_broke_in_training_are_not_to_be_initialised():
    model = tower()
    adam = torch.optim.Adam(model.parameters())
    square(model, X).backward()
    adam.step()
    with torch.no_grad():
        model.layers[0].branch.weight.fill_(torch.inf)
    found = diagnose(model, X, loss=square, optimiser=adam).cause
    assert found is not None
    assert found.do == "go back to earlier weights"


def test_statistics_of_a_batch_norm_are_as_they_were():
    model = tower()
    model.layers[0].branch = nn.Sequential(model.layers[0].branch, Rows())
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    diagnose(model, X, loss=square, preset="preflight")
    assert before
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())


def test_a_page_may_be_called_after_a_version(tmp_path):
    found = diagnose(tower(), X, loss=square, preset="preflight")
    pages = {found.page(tmp_path / name).name for name in ("v1.2", "v1.3", "v1.html")}
    assert pages == {"v1.2.html", "v1.3.html", "v1.html"}
