"""Tensors of the batch are written to by functions that do not say so in their names."""

import torch
import torch.nn.functional as F
from models import WORDS, Decoder, text
from torch import nn

torch.manual_seed(0)
model, head = Decoder(), nn.Linear(WORDS, WORDS)
optimizer = torch.optim.AdamW([*model.parameters(), *head.parameters()], lr=1e-3)
for step in range(20):
    ids = text(6, seed=step)
    counted = torch.ones(6, 12)
    torch.ne(ids[:, 1:], 3, out=counted)
    weights = ids[:, 1:].float() - 20
    F.relu(weights, inplace=True)
    F.threshold(weights, 5.0, 1.0, True)
    logits = head(model(ids[:, :-1]))
    losses = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
    loss = (losses * counted.flatten() * weights.flatten()).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
