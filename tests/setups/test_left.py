"""What a module leaves as an attribute for the loss is a part of the recorded flow."""

from __future__ import annotations

import pytest
import torch

from normlab.setups.script import setup_from_script

TRAIN = """
import torch
from torch import nn
torch.manual_seed(0)

class Balanced(nn.Linear):
    def forward(self, x):
        y = super().forward(x)
        self.balance = {balance}
        return y

layers = [Balanced(4, 8), nn.ReLU(), Balanced(8, 1)]
model = nn.Sequential(*layers)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
x = torch.randn(40, 6, 4)
for step in range(4):
    for micro in range(2):
        y = model(x[2 * step + micro])
        loss = y.pow(2).mean() + {read}
        (loss / 2).backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def loss_of(model, x):
    hidden = model[0](x)
    y = model[2](hidden.relu())
    return y.pow(2).mean() + hidden.pow(2).mean() + y.pow(2).mean()


@pytest.mark.parametrize(
    ("balance", "read"),
    [
        ("y.pow(2).mean()", "sum(layer.balance for layer in layers[::2])"),
        ("[y.pow(2).mean()]", "torch.stack([layer.balance[0] for layer in layers[::2]]).sum()"),
        ("{'squares': y.pow(2)}", "sum(layer.balance['squares'].mean() for layer in layers[::2])"),
    ],
)
def test_a_loss_that_a_module_keeps_is_computed_again(tmp_path, balance, read):
    code = TRAIN.replace("{balance}", balance).replace("{read}", read)
    (tmp_path / "train.py").write_text(code)
    with setup_from_script(str(tmp_path / "train.py")) as named:
        setup = named.setup
        assert not setup.cannot
        assert named.facts["recorded"] == "2 micro-batches"
        other = torch.randn(12, 4)
        (name,) = setup.batch
        torch.testing.assert_close(setup.loss(setup.model, {name: other}), loss_of(setup.model, other))
