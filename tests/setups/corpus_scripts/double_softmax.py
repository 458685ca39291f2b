"""A model that is called for logits. --faulty: it returns probabilities."""

import sys

import torch
from torch import nn

from corpus.batches import tokens
from corpus.models.gpt import Gpt
from corpus.training import decay_groups


class Probabilities(Gpt):
    def logits(self, x):
        return super().logits(x).softmax(-1)


torch.manual_seed(0)
model = Probabilities() if "--faulty" in sys.argv else Gpt()
criterion = nn.CrossEntropyLoss()
optimizer = decay_groups(model)
data = tokens(40, 25)
for begin in range(0, 40, 4):
    rows = data[begin : begin + 4]
    logits = model(rows[:, :-1])
    loss = criterion(logits.transpose(1, 2), rows[:, 1:])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
