"""A model called with weights from a dictionary, and losses of single rows by vmap."""

import torch
import torch.nn.functional as F
from models import Decoder, text
from torch.func import functional_call, vmap

torch.manual_seed(0)
model = Decoder()
parameters = dict(model.named_parameters())
optimizer = torch.optim.AdamW(parameters.values(), lr=1e-3)


def row_loss(logits, labels):
    return F.cross_entropy(logits, labels)


for step in range(20):
    ids = text(6, seed=step)
    logits = functional_call(model, parameters, (ids[:, :-1],))
    losses = vmap(row_loss)(logits, ids[:, 1:])
    loss = losses.mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
