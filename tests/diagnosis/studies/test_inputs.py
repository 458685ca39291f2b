"""Tokens that a model reads too often, and rows of an embedding that are kept for padding."""

from __future__ import annotations

import pytest
import torch

from diagnosis.studies.test_preflight import TEXT, TIME, VOCAB, Labelled, loss
from normlab.diagnosis import diagnose


def found(ids, padding_idx=None):
    model = Labelled()
    model.gpt.embedding.padding_idx = padding_idx
    batch = {"ids": ids, "labels": TEXT[:, 1:]}
    return diagnose(model, batch, loss=loss, lr=1e-3, preset="preflight")


def named(diagnosis, name):
    return [f for f in diagnosis.findings if f.name == name]


@pytest.mark.parametrize(("masked", "severity"), [(0.15, None), (0.65, "note"), (0.9, "warning")])
def test_a_text_of_one_token_is_a_warning(masked, severity):
    ids = TEXT[:, :-1].clone()
    ids.view(-1)[: round(masked * ids.numel())] = 3
    diagnosis = found(ids)
    (row,) = diagnosis.tables["inputs"]
    assert row["common"] == pytest.approx((ids == 3).float().mean().item())
    assert [f.severity for f in named(diagnosis, "one_token")] == [severity] * bool(severity)


def test_padding_is_not_what_a_model_reads():
    ids = TEXT[:, :-1].clone().clamp(min=1)
    ids[0, 2:] = ids[1, 4:] = 0
    (row,) = found(ids).tables["inputs"]
    assert row["tokens"] == 6
    assert row["common_id"] != 0


SENTENCE = list(range(10, 10 + TIME - 4))


@pytest.mark.parametrize(
    ("padding_idx", "end", "severity"),
    [
        (0, [7, 8, 0, 0], None),
        (0, [7, 8, 9, 0], None),
        (0, [6, 7, 8, 9], None),
        (VOCAB - 1, [7, 8, VOCAB - 1, VOCAB - 1], None),
        (None, [7, 8, 0, 0], None),
        pytest.param(5, [7, 8, 0, 0], "warning", id="another token pads"),
        pytest.param(7, [6, 7, 8, 9], "warning", id="it is read inside sentences"),
        pytest.param(VOCAB - 1, [6, 7, 8, 9], "note", id="-1 stands for the last row"),
    ],
)
def test_the_row_of_a_token_that_is_no_padding_is_named(padding_idx, end, severity):
    ids = torch.tensor([[*SENTENCE, 6, 8, 9, 4], [*SENTENCE, *end]])
    warnings = named(found(ids, padding_idx), "padding_row")
    assert [f.severity for f in warnings] == [severity] * bool(severity)
    assert all((f.module, f.numbers["padding_idx"]) == ("gpt.embedding", padding_idx) for f in warnings)


def test_padding_may_be_on_the_left():
    ids = torch.tensor([[*SENTENCE, 6, 8, 9, 4], [VOCAB - 1, VOCAB - 1, *SENTENCE, 9, 4]])
    assert not named(found(ids, VOCAB - 1), "padding_row")


def test_what_is_not_looked_up_is_no_word():
    class Classes(torch.nn.Module):
        """Reads vectors, and labels of tokens beside them."""

        def __init__(self):
            super().__init__()
            self.table, self.head = torch.nn.Embedding(VOCAB, 8), torch.nn.Linear(8, VOCAB)

        def forward(self, vectors, labels):
            return self.head(vectors)

    batch = {"vectors": torch.randn(2, TIME, 8), "labels": torch.full((2, TIME), 3)}
    diagnosis = diagnose(Classes(), batch, loss=loss, lr=1e-3, preset="preflight")
    assert "inputs" not in diagnosis.tables
    assert not named(diagnosis, "one_token")
