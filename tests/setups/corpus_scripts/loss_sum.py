"""A loss function of the script's own. --faulty: it is a sum over tokens."""

import sys

import torch
import torch.nn.functional as F

from corpus.batches import tokens
from corpus.models.gpt import Gpt
from corpus.training import decay_groups

reduction = "sum" if "--faulty" in sys.argv else "mean"


def compute_loss(model, ids):
    logits = model(ids[:, :-1])
    return F.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction=reduction)


torch.manual_seed(0)
model = Gpt()
optimizer = decay_groups(model)
data = tokens(40, 25)
for begin in range(0, 40, 4):
    loss = compute_loss(model, data[begin : begin + 4])
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
