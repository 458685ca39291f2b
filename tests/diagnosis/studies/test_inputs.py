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


@pytest.mark.parametrize(("masked", "warned"), [(0.15, False), (0.85, True)])
def test_a_text_of_one_token_is_a_warning(masked, warned):
    ids = TEXT[:, :-1].clone()
    ids.view(-1)[: round(masked * ids.numel())] = 3
    diagnosis = found(ids)
    (row,) = diagnosis.tables["inputs"]
    assert row["common"] == pytest.approx((ids == 3).float().mean().item())
    assert bool(named(diagnosis, "one_token")) == warned


def test_padding_is_not_what_a_model_reads():
    ids = TEXT[:, :-1].clone().clamp(min=1)
    ids[0, 2:] = ids[1, 4:] = 0
    (row,) = found(ids).tables["inputs"]
    assert row["tokens"] == 6
    assert row["common_id"] != 0


SENTENCE = list(range(10, 10 + TIME - 4))


@pytest.mark.parametrize(
    ("padding_idx", "ids", "warned"),
    [
        (0, [*SENTENCE, 7, 8, 0, 0], False),
        (0, [*SENTENCE, 7, 8, 9, 0], False),
        (0, [0, 0, *SENTENCE, 7, 8], False),
        (0, [*SENTENCE, 6, 7, 8, 9], False),
        (VOCAB - 1, [*SENTENCE, 7, 8, VOCAB - 1, VOCAB - 1], False),
        (None, [*SENTENCE, 7, 8, 0, 0], False),
        pytest.param(5, [*SENTENCE, 7, 8, 0, 0], True, id="another token pads"),
        pytest.param(7, [*SENTENCE, 6, 7, 8, 9], True, id="it is read inside sentences"),
        pytest.param(VOCAB - 1, [*SENTENCE, 6, 7, 8, 9], True, id="-1 stands for the last row"),
    ],
)
def test_the_row_of_a_token_that_is_no_padding_is_named(padding_idx, ids, warned):
    warnings = named(found(torch.tensor([ids, ids]), padding_idx), "padding_row")
    assert len(warnings) == warned
    assert all((f.module, f.numbers["padding_idx"]) == ("gpt.embedding", padding_idx) for f in warnings)
