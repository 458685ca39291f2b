"""Inputs and targets from a loader. --faulty: the target of each token is the token itself."""

import argparse

import torch
from torch.utils.data import DataLoader, TensorDataset

from corpus.batches import tokens
from corpus.models.gpt import Gpt
from corpus.training import decay_groups

parser = argparse.ArgumentParser()
parser.add_argument("--faulty", action="store_true")
args = parser.parse_args()

torch.manual_seed(0)
rows = tokens(40, 25)
inputs = rows[:, :-1]
targets = inputs if args.faulty else rows[:, 1:]
model = Gpt()
optimizer = decay_groups(model)
for x, y in DataLoader(TensorDataset(inputs, targets), batch_size=4):
    logits, loss = model(x, y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
