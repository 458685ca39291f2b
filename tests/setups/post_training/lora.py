"""Preference optimisation of low-rank adapters; the reference is the model without them.

Mistakes: ``base_trains`` (the matrices that they correct are not frozen), ``base_scaled`` (the scale of the
adapters is that of their matrices too), ``start_random`` (neither factor is zero).
"""

import copy

import torch
import torch.nn.functional as F
from language_model import MISTAKE, LanguageModel, answers, loaded, side_by_side, token_logps
from torch import Tensor, nn

RANK, SCALE, BETA = 8, 2.0, 0.1
# factors of a smaller rank are too few vectors for a check to tell drawn ones from orthogonal ones


class Adapted(nn.Module):
    """A linear layer with a correction of low rank."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer
        self.down = nn.Parameter(torch.randn(RANK, layer.in_features) / RANK)
        self.up = nn.Parameter(torch.zeros(layer.out_features, RANK))
        if MISTAKE == "start_random":
            nn.init.normal_(self.up, std=0.05)

    def forward(self, x: Tensor) -> Tensor:
        correction = F.linear(F.linear(x, self.down), self.up)
        if MISTAKE == "base_scaled":
            return (self.layer(x) + correction) * SCALE
        return self.layer(x) + correction * SCALE


torch.manual_seed(0)
base = LanguageModel()
policy = copy.deepcopy(base)
base.requires_grad_(False)
if MISTAKE != "base_trains":
    policy.requires_grad_(False)
for block in policy.blocks:
    block.query, block.value = Adapted(block.query), Adapted(block.value)
optimizer = torch.optim.AdamW([p for p in policy.parameters() if p.requires_grad], lr=1e-3)


def logps(model: nn.Module, ids: Tensor, mask: Tensor, counted: Tensor) -> Tensor:
    """The log-probability of each row's answer."""
    return (token_logps(model(ids, mask), ids) * counted[:, 1:]).sum(-1)


for batch in loaded(*answers(32, seed=1), *answers(32, seed=2)):
    ids, mask, answer = side_by_side(batch)
    with torch.no_grad():
        before = logps(base, ids, mask, answer)
    chosen, rejected = (logps(policy, ids, mask, answer) - before).chunk(2)
    loss = -F.logsigmoid(BETA * (chosen - rejected)).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
