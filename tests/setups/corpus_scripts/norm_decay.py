"""Groups made by names. --faulty: by the name "LayerNorm", so that the gains of RMSNorm are decayed."""

import sys

import torch

from corpus.batches import text
from corpus.models.llama import Llama
from corpus.training import next_token

no_decay = ("LayerNorm" if "--faulty" in sys.argv else "norm", "bias")
torch.manual_seed(0)
model = Llama()
named = list(model.named_parameters())
groups = [
    {"params": [p for n, p in named if not any(part in n for part in no_decay)], "weight_decay": 0.1},
    {"params": [p for n, p in named if any(part in n for part in no_decay)], "weight_decay": 0.0},
]
optimizer = torch.optim.AdamW(groups, lr=5e-4)
data = text(64)
for begin in range(0, 64, 8):
    ids = data[begin : begin + 8]
    loss = next_token(model, ids)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
