"""Words that drown in what enters the first layer, and dropouts of the residual stream."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from diagnosis.studies.test_positions import Encoder
from diagnosis.studies.test_preflight import BATCH, TEXT, Labelled, Layer, layer, preflight
from normlab.diagnosis import diagnose


def encoded(deviation):
    """What is found in an encoder whose positions have this deviation, and whose words have 0.05."""
    model = Encoder(positions=True)
    nn.init.normal_(model.position.weight, std=deviation)
    return diagnose(
        model,
        {"ids": TEXT},
        loss=lambda model, batch: model(**batch)[:, 0].square().mean(),
        lr=1e-3,
        preset="preflight",
    )


@pytest.mark.parametrize(("deviation", "drowned"), [(0.05, False), (0.2, False), (2.0, True)])
def test_positions_in_which_words_drown_are_named(deviation, drowned):
    found = encoded(deviation)
    (row,) = found.tables["entrance"]
    share = 1 / (1 + (deviation / 0.05) ** 2)
    assert row["words"] == pytest.approx(share, rel=0.5)
    names = {f.name: f.module for f in found.findings}
    assert names.get("drowned_words") == ("position" if drowned else None)


def test_words_are_all_that_enters_a_model_without_positions():
    (row,) = preflight(Labelled()).tables["entrance"]
    assert row["words"] == pytest.approx(1.0, rel=0.15)
    assert row["module"] == ""


class Dropping(Layer):
    """A layer whose dropout stands behind its sums."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(x + self.attention(self.norm1(x)))
        return self.drop(x + self.down(self.act(self.up(self.norm2(x)))))


def test_dropout_of_the_stream_is_named_and_that_of_branches_is_not():
    assert "stream_dropouts" not in preflight(Labelled()).tables
    model = Labelled()
    for i in (2, 3):
        layer(model, i).__class__ = Dropping
    found = preflight(model)
    assert found.cause is not None
    assert (found.cause.name, found.cause.module) == ("stream_dropout", "gpt.layers.2.drop")
    assert found.cause.numbers["calls"] == 4
    assert found.cause.numbers["kept"] == pytest.approx(0.9**4)


class Adapted(nn.Module):
    """A branch that reads its input through a dropout of its own beside the plain one, as LoRA does."""

    def __init__(self, plain: nn.Module) -> None:
        super().__init__()
        self.plain, self.drop = plain, nn.Dropout(0.1)
        self.low = nn.Linear(plain.qkv.in_features, plain.qkv.in_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.plain(x) + self.low(self.drop(x))


class PostNorm(Layer):
    """A Post-LN layer, whose branches read the stream itself."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm1(x + self.attention(x))
        return self.norm2(x + self.drop(self.down(self.act(self.up(x)))))


def test_a_dropout_at_the_input_of_a_branch_is_not_one_of_the_stream():
    model = Labelled()
    for i in range(6):
        layer(model, i).__class__ = PostNorm
        layer(model, i).attention = Adapted(layer(model, i).attention)
    assert "stream_dropouts" not in preflight(model).tables


def test_a_dropout_behind_the_embeddings_is_not_one_of_the_stream_where_branches_are_zero():
    model = Labelled()
    model.gpt.embedding = nn.Sequential(model.gpt.embedding, nn.Dropout(0.1))
    with torch.no_grad():
        for i in range(6):
            layer(model, i).down.weight.zero_()
            layer(model, i).down.bias.zero_()
            layer(model, i).attention.out.weight.zero_()
            layer(model, i).attention.out.bias.zero_()
    assert "stream_dropouts" not in preflight(model).tables


def test_a_model_without_a_stream_has_no_entrance():
    model = nn.Sequential(nn.Embedding(50, 8), nn.Linear(8, 50))
    found = diagnose(
        model,
        BATCH["ids"],
        loss=lambda model, ids: torch.nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten()),
        lr=1e-3,
        preset="preflight",
    )
    assert "entrance" not in found.tables
