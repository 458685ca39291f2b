"""Where a batch begins among what a script makes of its data."""

from __future__ import annotations

import pytest

from normlab.setups.script import setup_from_script

TRAIN = """
import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
torch.manual_seed(0)
model = nn.Sequential(nn.Embedding(50, 8), nn.Linear(8, 50))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for lengths in {lengths}:
    rows = [torch.randint(1, 50, (length,)) for length in lengths]
    ids = pad_sequence([torch.cat([row, torch.tensor([1])]) for row in rows], True, 0)
    loss = nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


@pytest.mark.parametrize(
    "lengths", [[(3, 6, 5, 7), (6, 5, 2, 7)], [(3, 6, 3, 7), (6, 3, 7, 3)], [(3, 3, 3, 3), (3, 3, 3, 3)]]
)
def test_a_batch_of_padded_rows_begins_with_all_of_them(tmp_path, lengths):
    (tmp_path / "train.py").write_text(TRAIN.format(lengths=lengths))
    with setup_from_script(str(tmp_path / "train.py")) as named:
        assert not named.setup.cannot
        shapes = {name: tuple(x.shape) for name, x in named.setup.batch.items()}
        assert shapes == {"ids": (4, max(lengths[0]) + 1)}


FILLED = """
import torch
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Embedding(50, 8), nn.Linear(8, 50))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(3):
    ids = torch.full((12, 9), 0)
    for i in range(12):
        length = int(torch.randint(3, 8, ()))
        ids[i, 0], ids[i, 1 : length + 1] = 1, torch.randint(2, 50, (length,))
    loss = nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def test_a_batch_begins_after_the_last_row_that_is_written_into_it(tmp_path):
    (tmp_path / "train.py").write_text(FILLED)
    with setup_from_script(str(tmp_path / "train.py")) as named:
        (ids,) = named.setup.batch.values()
        assert ids.shape == (12, 9)
        assert (ids[:, 1] > 1).all()
        assert [call.name for call in named.setup.step.flows[0].calls].count("__setitem__") == 0
